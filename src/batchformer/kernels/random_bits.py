"""Random bits by counting: the dropout masks of the kernels, and the same masks in plain torch.

Whether an element is kept depends on nothing but (seed, site, problem, row, column): not on tile sizes, not on the
order of programs, not on the device. The backward pass draws the mask again instead of reading it; the same seed gives
the same mask. The counter is Philox4x32 with 7 rounds, the fewest that pass every published test of randomness. Its
four words serve as many neighbouring columns as the probability allows: 128 for 0.5, 16 for a multiple of 1/256, else 8
(the probability is then rounded to a multiple of 1/65536).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF


class Site(IntEnum):
    """The four places of a layer where something is dropped; each has bits of its own."""

    ATTENTION = 0
    ATTENDED = 1
    HIDDEN = 2
    MLP = 3


@dataclass(frozen=True)
class Drop:
    """A probability as the kernels see it: an element is dropped when its `bits` random bits are below `threshold`."""

    bits: int  # 0: nothing is dropped, and nothing is drawn
    threshold: int
    scale: float

    @staticmethod
    def of(probability: float) -> Drop:
        if probability <= 0.0:
            return Drop(0, 0, 1.0)
        bits = 1 if probability == 0.5 else 8 if (probability * 256).is_integer() else 16
        threshold = round(probability * 2**bits)
        dropped = threshold / 2**bits
        return Drop(bits, threshold, 0.0 if dropped >= 1.0 else 1.0 / (1.0 - dropped))


def draw_seed(device: torch.device) -> Tensor:
    """A seed of torch's generator of the device, left on the device: nothing waits for it, and a CUDA graph that was
    captured with it draws a new one whenever it is replayed."""
    return torch.randint(1 << 62, (1,), device=device)


def keep_mask(
    seed: Tensor, site: Site, drop: Drop, problems: int, rows: int, columns: int
) -> Bool[Tensor, "problems rows columns"]:
    """What the kernels keep, by torch: slow, for tests and for looking at masks.

    For `Site.ATTENTION` a problem is `position * heads + head`, a row the query's and a column the key's place in the
    batch, the latter counted from the start of its group; elsewhere there is one problem, and a row is one of (B x N).
    """
    per_word = 32 // drop.bits
    column = torch.arange(columns)
    word, row, problem = torch.meshgrid(column // per_word, torch.arange(rows), torch.arange(problems), indexing="ij")
    drawn = _philox(int(seed.item()), word // 4, row, problem, torch.full_like(word, int(site)))
    words = torch.stack(drawn)[column // per_word % 4, torch.arange(columns)]
    value = (words >> ((column % per_word) * drop.bits)[:, None, None]) & (2**drop.bits - 1)
    return (value >= drop.threshold).permute(2, 1, 0).to(seed.device)


def _philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32 (Salmon et al., SC 2011), 32-bit arithmetic inside int64."""
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        high_a, low_a = _multiply(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower word of a product of two words, without leaving int64."""
    low = factor * (x & 0xFFFF)
    middle = factor * (x >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)
