"""The order of an epoch, and which part of it a process takes. Both are pure functions.

An order consists of slots. Slot `repeat * count + index` stands for sample `index` in its augmentation number `repeat`;
without repeated augmentation a slot is simply the index.
"""

from dataclasses import dataclass

import numpy as np

from batchformer.data.seeds import generator
from batchformer.errors import UserError


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """`count` slots that depend on (seed, epoch) only: a permutation of the samples where `repeats` is 1.

    More repeats are the repeated augmentation of Hoffer et al. (2020) as DeiT has it: the permutation's first samples,
    each `repeats` times in succession and each time another augmentation, until the epoch has its `count` slots; every
    epoch begins another permutation. In succession, so that processes, which take every world-th slot, share the
    repeats of an image between them as DeiT's sampler does. (That one also rounds the epoch down to a multiple of 256
    samples; here `drop_last` decides.)
    """
    order = generator(seed, epoch, "order").permutation(count)
    if repeats == 1:
        return order
    place = np.arange(count)
    return order[place // repeats] + count * (place % repeats)


def training_share(order: np.ndarray, rank: int, world: int, drop_last: bool) -> np.ndarray:
    """Every world-th sample, the same number for every process, because DDP needs equal numbers of steps.

    Batch k of all processes together is what one process with a batch `world` times as large would take. Where the
    count does not divide, `drop_last` leaves the remainder out, otherwise the first samples are taken twice.
    """
    if drop_last:
        order = order[: len(order) // world * world]
    elif len(order) % world:
        order = np.concatenate([order, np.resize(order, world - len(order) % world)])
    return order[rank::world]


def evaluation_share(count: int, rank: int, world: int) -> np.ndarray:
    """Every world-th sample in file order, none twice: metrics over all processes count each image exactly once."""
    return np.arange(count)[rank::world]


@dataclass(frozen=True)
class EpochShare:
    """The slots that a process takes in an epoch, in order: shuffled in training, as they are stored in evaluation."""

    count: int
    seed: int
    rank: int
    world: int
    training: bool
    drop_last: bool
    repeats: int = 1

    def __call__(self, epoch: int) -> np.ndarray:
        if not self.training:
            return evaluation_share(self.count, self.rank, self.world)
        order = epoch_order(self.count, self.seed, epoch, self.repeats)
        return training_share(order, self.rank, self.world, self.drop_last)


def batch_count(samples: int, batch_size: int, drop_last: bool) -> int:
    return samples // batch_size if drop_last else -(-samples // batch_size)


def check_batches(count: int, batch_size: int, world: int, drop_last: bool) -> None:
    """Refuse a training set that does not fill one batch: an epoch without steps would end without a word."""
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}.")
    if drop_last and count // world < batch_size:
        processes = f" in each of {world} processes" if world > 1 else ""
        raise UserError(
            f"the training set has {count} images, fewer than one batch of {batch_size}{processes}: "
            f"lower data.batch_size, or set data.drop_last to false."
        )
