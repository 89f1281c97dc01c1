"""The attention recomputed is the one the module used."""

import math

import pytest
import torch

from batchformer.analysis import attention_weights, on_itself, relative_entropy
from batchformer.nn import BatchAttention


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 3, 8)


@pytest.mark.parametrize("group_size", [None, 2, 5, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_times_values_are_what_the_module_gives(x, group_size, masked):
    attention = BatchAttention(8, heads=2, group_size=group_size)
    valid = torch.rand(5, 3) > 0.4 if masked else None
    weights = attention_weights(attention, x, valid)
    value = (x @ attention.in_proj_weight[16:].T + attention.in_proj_bias[16:]).reshape(5, 3, 2, 4)
    out = torch.einsum("nhij,jnhw->inhw", weights, value).reshape(5, 3, 8)
    torch.testing.assert_close(attention.out_proj(out), attention(x, valid))


def test_entropy_and_own_mass_per_head_by_loops(x):
    attention = BatchAttention(8, heads=2, group_size=3)  # groups of 3 and 2
    weights = attention_weights(attention, x)
    for h in range(2):
        entropies, own = [], []
        for n in range(3):
            for i in range(5):
                seen = range(0, 3) if i < 3 else range(3, 5)
                p = [weights[n, h, i, j].item() for j in seen]
                entropies.append(-sum(v * math.log(v) for v in p) / math.log(len(p)))
                own.append(weights[n, h, i, i].item())
        assert relative_entropy(weights, 3)[h].item() == pytest.approx(sum(entropies) / 15, rel=1e-5)
        assert on_itself(weights)[h].item() == pytest.approx(sum(own) / 15, rel=1e-5)


def test_uniform_attention_has_entropy_one_and_a_fixed_one_has_zero():
    uniform, fixed = torch.full((2, 1, 4, 4), 0.25), torch.eye(4).expand(2, 1, 4, 4)
    assert relative_entropy(uniform).tolist() == pytest.approx([1.0])
    assert relative_entropy(fixed).tolist() == [0.0]
    assert on_itself(uniform).tolist() == [0.25]
    assert relative_entropy(fixed, group_size=1).tolist() == [0.0]
