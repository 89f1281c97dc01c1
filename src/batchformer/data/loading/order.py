"""Seeds, the order of an epoch, and the share of a process, all as pure functions.

The same (seed, epoch, purpose) gives the same numbers on every machine. Nothing here has a state that could be lost
when a run is killed: order, augmentation and splits are computed from integers the run already knows, so a resumed run
draws what the uninterrupted one would have drawn.

An order consists of slots. Slot `repeat * count + index` stands for sample `index` in its augmentation number `repeat`;
without repeated augmentation a slot is simply the index.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from batchformer.errors import UserError

#: From an epoch to the slots of all processes in it, the same number in every epoch. One that depends on what was
#: learnt before the epoch has an attribute `learnt = True`: no loader calls it ahead of time.
Sampler = Callable[[int], np.ndarray]


def derived_key(*parts: int | str) -> int:
    """128-bit hash of the parts in their order; equal on every machine and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


def generator(*parts: int | str) -> np.random.Generator:
    """A counter-based generator keyed by the parts."""
    return np.random.Generator(np.random.Philox(key=derived_key(*parts)))


def sample_seed(seed: int, epoch: int, index: int, repeat: int = 0, view: int = 0) -> int:
    """Seed of the global generators for the augmentation of one view of a sample on the host, in its `repeat`.

    The first view has the seed of a sample with a single view.
    """
    further: tuple[int | str, ...] = (repeat, "view", view) if view else (repeat,) if repeat else ()
    return derived_key(seed, epoch, index, "augment", *further) & (2**63 - 1)


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
    position = np.arange(count)
    return order[position // repeats] + count * (position % repeats)


def balanced_order(
    epoch: int, *, counts: Sequence[int], each: int, steps: int, seed: int, draw: Literal["replacement", "shortest"]
) -> np.ndarray:
    """`steps` batches of all processes together, each with `each` samples of every domain, domain by domain.

    The samples lie domain by domain, `counts` of them. "replacement": each domain is drawn from with replacement, as
    in DomainBed. "shortest": each domain in a permutation of its own, and all begin a new one as soon as the smallest
    domain cannot fill another batch, as in the Transfer-Learning-Library; an epoch goes on where the one before ended.
    A sample that comes again in an epoch is its next repeat.
    """
    begins = np.cumsum([0, *counts])
    order = np.empty((steps, len(counts), each), np.int64)
    if draw == "replacement":
        for domain, count in enumerate(counts):
            order[:, domain] = generator(seed, epoch, domain, "replacement").integers(count, size=(steps, each))
    else:
        turn = min(counts) // each  # steps before all begin anew
        number, place = np.divmod(epoch * steps + np.arange(steps), turn)
        for domain, count in enumerate(counts):
            for one in np.unique(number):
                permutation = generator(seed, int(one), domain, "shortest").permutation(count)[: turn * each]
                order[number == one, domain] = permutation.reshape(turn, each)[place[number == one]]
    slots = (order + begins[:-1, None]).reshape(-1)
    return slots + _occurrence(slots) * begins[-1]


def class_order(
    epoch: int,
    *,
    labels: np.ndarray,
    weights: np.ndarray,
    seed: int,
    length: int | None = None,
    among: np.ndarray | None = None,
    purpose: str = "classes",
) -> np.ndarray:
    """`length` slots (as many as there are samples), each of a class drawn with probability weights / sum(weights).

    Kang et al., "Decoupling Representation and Classifier" (ICLR 2020), eq. 1: weights n_c^q for classes of n_c images;
    q = 1 is instance-balanced, 1/2 square-root and 0 class-balanced sampling. In a class the samples come in a
    permutation of the epoch, again from its start when it is through, so all images of a class come equally often; a
    sample that comes again is its next repeat. The released code draws class-balanced in turns through a permutation of
    the classes; here each draw is independent. `among`: draw only from the samples of these numbers.
    """
    random = generator(seed, epoch, purpose)
    shuffled = random.permutation(np.arange(len(labels)) if among is None else among)
    members = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class, shuffled in each
    counts = np.bincount(labels[shuffled], minlength=len(weights))
    shares = np.cumsum(np.where(counts > 0, np.asarray(weights, np.float64), 0.0))
    drawn = random.random(len(labels) if length is None else length)
    classes = np.minimum(np.searchsorted(shares, drawn * shares[-1], side="right"), np.flatnonzero(counts)[-1])
    repeat, place = np.divmod(_occurrence(classes), counts[classes])
    return members[(np.cumsum(counts) - counts)[classes] + place] + repeat * len(labels)


def _occurrence(values: np.ndarray) -> np.ndarray:
    """For each value, the number of equal ones before it."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    before = np.empty_like(values)
    before[order] = np.arange(len(values)) - np.searchsorted(ascending, ascending)
    return before


def training_share(order: np.ndarray, rank: int, world: int, drop_last: bool) -> np.ndarray:
    """A process' share in training: every world-th sample, equally many each, because DDP needs equal numbers of steps.

    Batch k of all processes together is what one process with a batch `world` times as large would take. Where the
    count does not divide, `drop_last` leaves the remainder out, otherwise the first samples are taken twice.
    """
    if drop_last:
        order = order[: len(order) // world * world]
    elif len(order) % world:
        order = np.concatenate([order, np.resize(order, world - len(order) % world)])
    return order[rank::world]


def evaluation_share(count: int, rank: int, world: int) -> np.ndarray:
    """A process' share in evaluation: every world-th sample in file order, so that metrics count each image once."""
    return np.arange(count)[rank::world]


@dataclass(frozen=True)
class EpochShare:
    """The slots that a process takes in an epoch, in order: shuffled in training, as they are stored in evaluation.

    In training a `sampler` gives another order in place of the permutation, for all processes together.
    """

    count: int
    seed: int
    rank: int
    world: int
    training: bool
    drop_last: bool
    repeats: int = 1
    sampler: Sampler | None = None

    def __call__(self, epoch: int) -> np.ndarray:
        if not self.training:
            return evaluation_share(self.count, self.rank, self.world)
        return training_share(self._order(epoch), self.rank, self.world, self.drop_last)

    @cached_property
    def slots_of_an_epoch(self) -> int:
        """Of all processes together."""
        return self.count if self.sampler is None or not self.training else len(self.sampler(0))

    def _order(self, epoch: int) -> np.ndarray:
        if self.sampler is None:
            return epoch_order(self.count, self.seed, epoch, self.repeats)
        order = np.asarray(self.sampler(epoch))
        if order.ndim != 1 or order.dtype.kind not in "iu" or (len(order) and order.min() < 0):
            raise ValueError(f"a task's sampler gives slots, whole numbers from 0 in one row, got {order!r}.")
        if len(order) != self.slots_of_an_epoch:
            raise ValueError(
                f"a task's sampler gave {len(order)} slots in epoch {epoch} and {self.slots_of_an_epoch} in epoch 0: "
                f"every epoch must have as many."
            )
        return order.astype(np.int64)


def check_batches(count: int, batch_size: int, world: int, drop_last: bool) -> None:
    """Refuse a training set that does not fill one batch: an epoch without steps would end silently."""
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}.")
    if drop_last and count // world < batch_size:
        processes = f" in each of {world} processes" if world > 1 else ""
        raise UserError(
            f"the training set has {count} images, fewer than one batch of {batch_size}{processes}: "
            f"lower data.batch_size, or set data.drop_last to false."
        )
