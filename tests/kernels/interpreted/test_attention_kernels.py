"""Attention by the kernels, interpreted, against the definition in double precision: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchformer.kernels import attention
from batchformer.kernels.dispatch import batch_attention
from batchformer.kernels.launch import AttentionTiles, Tiles

from .. import definition

SEED = torch.tensor([987654321012345678])


def results(function, qkv: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    qkv = qkv.clone().requires_grad_()
    out = function(qkv)
    return out, torch.autograd.grad((out * weight).sum(), qkv)[0]


def agree(qkv: Tensor, heads: int, dropout: float, group: int | None, valid: Tensor | None, tolerance: float) -> None:
    weight = torch.randn(*qkv.shape[:2], qkv.shape[2] // 3, dtype=torch.float64)
    ours = results(lambda t: batch_attention(t, heads, dropout, group, valid, SEED), qkv, weight.to(qkv.dtype))
    exact = results(
        lambda t: definition.attention(t, heads, SEED, dropout, group, valid), qkv.double(), weight.to(qkv.dtype)
    )
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 20),
    positions=st.integers(1, 2),
    heads=st.integers(1, 2),
    width=st.sampled_from([16, 20, 48]),
    group=st.one_of(st.none(), st.integers(7, 24)),
    masked=st.booleans(),
    dropout=st.sampled_from([0.0, 0.5, 0.25, 0.1]),
    half=st.booleans(),
)
def test_outputs_and_gradients_agree_with_the_definition(
    batch: int, positions: int, heads: int, width: int, group: int | None, masked: bool, dropout: float, half: bool
) -> None:
    generator = torch.Generator().manual_seed(batch)
    qkv = torch.randn(batch, positions, 3 * heads * width, generator=generator)
    valid = torch.rand(batch, positions, generator=generator) < 0.6 if masked else None
    agree(qkv.half() if half else qkv, heads, dropout, group, valid, 8e-3 if half else 3e-6)


# Blocks far smaller than any real one, so that a handful of samples fills several, unequal ones.
SMALL = AttentionTiles(16, False, Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))


@pytest.mark.parametrize(
    ("batch", "group", "masked", "dropout"),
    [(37, None, False, 0.0), (37, None, True, 0.5), (50, 34, True, 0.25), (33, None, False, 0.1)],
)
def test_groups_of_several_blocks_agree_too(
    monkeypatch: pytest.MonkeyPatch, batch: int, group: int | None, masked: bool, dropout: float
) -> None:
    monkeypatch.setattr(attention, "attention_tiles", lambda *_: SMALL)
    torch.manual_seed(0)
    valid = torch.rand(batch, 1) < 0.6 if masked else None
    agree(torch.randn(batch, 1, 3 * 16), 1, dropout, group, valid, 3e-6)


@pytest.mark.parametrize(("keys", "batch"), [(16, 40), (64, 90), (128, 150)])
def test_passes_with_blocks_of_other_sizes_drop_the_same(
    monkeypatch: pytest.MonkeyPatch, keys: int, batch: int
) -> None:
    one, other = Tiles(16, keys, 4, 1), Tiles(16, 128 // keys * 16, 4, 1)
    monkeypatch.setattr(attention, "attention_tiles", lambda *_: AttentionTiles(16, False, one, one, other))
    torch.manual_seed(0)
    agree(torch.randn(batch, 1, 3 * 16), 1, 0.5, None, None, 3e-6)


def test_a_batch_beyond_the_largest_tile() -> None:
    torch.manual_seed(0)
    agree(torch.randn(130, 1, 3 * 16), 1, 0.5, None, None, 3e-6)


def test_a_position_that_is_valid_nowhere_gives_each_sample_its_own_value() -> None:
    qkv, valid = torch.randn(5, 2, 3 * 16), torch.ones(5, 2, dtype=torch.bool)
    valid[:, 1] = False
    out, grad = results(lambda t: batch_attention(t, 1, valid=valid), qkv, torch.ones(5, 2, 16))
    torch.testing.assert_close(out[:, 1], qkv[:, 1, 32:])
    assert not grad.isnan().any()
    assert not grad[:, 1, :32].any()  # nothing to choose between: no gradient to queries and keys


@pytest.mark.parametrize("size", [1e4, 1e18])
def test_large_scores_do_not_overflow(size: float) -> None:
    qkv = torch.randn(6, 1, 3 * 16)
    qkv[..., :32] *= size**0.5
    out, grad = results(lambda t: batch_attention(t, 1), qkv, torch.ones(6, 1, 16))
    assert out.isfinite().all()
    assert grad.isfinite().all()


def test_the_same_seed_gives_the_same_mask_and_another_a_different_one() -> None:
    qkv = torch.randn(6, 2, 3 * 16)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(batch_attention(qkv, 1, 0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_only_the_rows_of_the_group_are_read_and_written() -> None:
    """A NaN in one group, and one at one position, stay there."""
    qkv = torch.randn(7, 3, 3 * 16)
    qkv[5, 1] = float("nan")
    out = batch_attention(qkv, 1, group_size=4)
    assert out[4:, 1].isnan().all()
    out[4:, 1] = 0.0
    assert out.isfinite().all()
