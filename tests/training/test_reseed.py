"""Random numbers of a step depend on its numbers alone."""

import pytest
import torch

from batchformer.training.reseed import reseed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_same_numbers_give_the_same_draws_and_neighbours_others(device):
    torch.rand(1, device=device)  # a device in use

    def drawn(*numbers: int) -> torch.Tensor:
        reseed(*numbers)
        return torch.rand(4, device=device)

    first = drawn(3, 17)
    torch.rand(5, device=device)
    assert torch.equal(drawn(3, 17), first)
    assert not torch.equal(drawn(3, 18), first)
    assert not torch.equal(drawn(4, 17), first)
