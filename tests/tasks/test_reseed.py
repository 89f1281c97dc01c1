"""Random numbers of a step depend on its numbers alone."""

import torch

from batchformer.tasks.reseed import reseed


def drawn(*numbers: int) -> torch.Tensor:
    reseed(*numbers)
    return torch.rand(4)


def test_the_same_numbers_give_the_same_draws_and_neighbours_others():
    first = drawn(3, 17)
    torch.rand(5)
    assert torch.equal(drawn(3, 17), first)
    assert not torch.equal(drawn(3, 18), first)
    assert not torch.equal(drawn(4, 17), first)
