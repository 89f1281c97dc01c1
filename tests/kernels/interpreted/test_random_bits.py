"""The bits of the kernels are those of the generator they name, and those of the helper that tests rely on."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from batchformer.kernels.random_bits import Drop, Site, draw_seed, keep_narrow_tile, keep_tile

from .. import definition
from ..definition import keep_mask


@triton.jit
def _write(seed, out, narrow, problem, threshold, R: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr):
    row, column = tl.arange(0, R), tl.arange(0, C)
    keep = keep_tile(tl.load(seed), 2, problem, row, 0, threshold, C, BITS)
    tl.store(out + row[:, None] * C + column[None, :], keep.to(tl.int8))
    half: tl.constexpr = C // 2
    column = tl.arange(0, half)
    for first in range(0, C, half):
        keep = keep_narrow_tile(tl.load(seed), 2, problem, row, first, threshold, half, BITS)
        tl.store(narrow + row[:, None] * C + first + column[None, :], keep.to(tl.int8))


@pytest.mark.parametrize("probability", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_kernel_and_helper_keep_the_same(probability: float, columns: int) -> None:
    drop, seed = Drop.of(probability), torch.tensor([2**61 + 12345])
    out, narrow = torch.empty(8, columns, dtype=torch.int8), torch.empty(8, columns, dtype=torch.int8)
    _write[(1,)](seed, out, narrow, 3, drop.threshold, R=8, C=columns, BITS=drop.bits)
    expected = keep_mask(seed, Site.HIDDEN, drop, 4, 8, columns)[3]
    assert torch.equal(out.bool(), expected)
    assert torch.equal(narrow.bool(), expected)


def test_philox_gives_the_published_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known-answer test of Random123 for Philox4x32 with 10 rounds, all counters and keys zero: 6627e8d5."""
    monkeypatch.setattr(definition, "ROUNDS", 10)
    zero = torch.zeros(1, dtype=torch.int64)
    assert definition._philox(0, zero, zero, zero, zero)[0].item() == 0x6627E8D5


@pytest.mark.parametrize("probability", [0.5, 0.25, 0.1])
def test_the_share_that_is_dropped_is_the_probability_and_the_scale_makes_up_for_it(probability: float) -> None:
    drop = Drop.of(probability)
    keep = keep_mask(torch.tensor([7]), Site.MLP, drop, 4, 256, 256).double()
    deviation = (probability * (1 - probability) / keep.numel()) ** 0.5
    assert abs(keep.mean().item() - (1 - probability)) < 5 * deviation
    assert abs(drop.scale * (1 - probability) - 1) < 1e-4


def test_sites_problems_rows_and_seeds_have_masks_of_their_own() -> None:
    drop = Drop.of(0.5)
    mask = keep_mask(torch.tensor([7]), Site.MLP, drop, 2, 2, 64)
    masks = [mask[0, 0], mask[0, 1], mask[1, 0], keep_mask(torch.tensor([7]), Site.HIDDEN, drop, 1, 1, 64)[0, 0],
             keep_mask(torch.tensor([8]), Site.MLP, drop, 1, 1, 64)[0, 0]]  # fmt: skip
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 10 < (one != other).sum() < 54


def test_everything_or_nothing() -> None:
    assert Drop.of(0.0).bits == 0
    assert not keep_mask(torch.tensor([1]), Site.MLP, Drop.of(1.0), 1, 4, 64).any()
    assert Drop.of(1.0).scale == 0.0


def test_seeds_come_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert draw_seed(torch.device("cpu")) == first != second
