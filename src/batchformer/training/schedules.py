"""Learning rates as functions of the position in the run alone, so that a resumed run needs no scheduler state."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

import lightning as L

from batchformer.errors import UserError
from batchformer.training.options import refuse_below


@dataclass
class ScheduleOptions:
    """Learning rate per epoch.

    Args:
        name: cosine falls to 0 over the epochs after the warm-up; step multiplies by gamma at each milestone.
        warmup_epochs: epochs of linear warm-up.
        warmup_start: learning rate of the first warm-up epoch, as a factor of lr.
        milestones: step: epochs at which the learning rate falls.
        gamma: step: by which factor.
    """

    name: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: int = 0
    warmup_start: float = 0.5
    milestones: list[int] = field(default_factory=list)
    gamma: float = 0.1
    per = "epoch"  # as in CosineOptions; no field

    def check(self) -> None:
        refuse_below("schedule", self, 0, "warmup_epochs")

    def check_end(self, trainer: L.Trainer) -> None:
        if self.name == "cosine":
            check_has_end(trainer, ", or schedule.name=constant")

    def rate(self, lr: float, trainer: L.Trainer) -> float:
        """The learning rate now, where `lr` is the highest."""
        return lr * lr_factor(self, trainer.current_epoch, total_epochs_of(trainer))


@dataclass
class CosineOptions:
    """Warm-up, then cosine, as timm's scheduler that DeiT uses: the cosine runs over all epochs, the warm-up included.

    Args:
        warmup_epochs: epochs of linear warm-up, from warmup_lr to lr; may be a fraction.
        warmup_lr: learning rate the warm-up starts from (not scaled by the batch, as in DeiT).
        min_lr: learning rate the cosine ends at (not scaled either).
        per: the learning rate changes with every "step", or with every "epoch" as in DeiT.
    """

    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    per: Literal["step", "epoch"] = "step"
    begins_after_warmup = False  # the cosine; no field

    def check(self) -> None:
        refuse_below("schedule", self, 0, "warmup_epochs", "warmup_lr", "min_lr")

    def check_end(self, trainer: L.Trainer) -> None:
        check_has_end(trainer)

    def rate(self, lr: float, trainer: L.Trainer) -> float:
        """The learning rate now, where `lr` is the highest."""
        return warm_cosine(self, lr, *place_in_run(trainer, self.per))


@dataclass
class CosineAfterWarmupOptions(CosineOptions):
    """Warm-up, then cosine over the epochs that are left, as MoCo-v3 and MAE have it: without a jump between them."""

    begins_after_warmup = True


def lr_factor(schedule: ScheduleOptions, epoch: int, total_epochs: int) -> float:
    """What the highest learning rate is multiplied by in this epoch (counted from 0).

    As released for the CIFAR recipe (per epoch, not per step): W warm-up epochs rise linearly, from `warmup_start` in
    epoch 0 towards 1 in epoch W; then with T epochs in all the cosine falls from 1 in epoch W towards 0 in epoch T:

        f(e) = s + (1 - s) e / W              for e < W
        f(e) = (1 + cos(pi (e - W) / (T - W))) / 2   otherwise
    """
    warmup = schedule.warmup_epochs
    if epoch < warmup:
        return schedule.warmup_start + (1 - schedule.warmup_start) * epoch / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "step":
        return schedule.gamma ** bisect_right(sorted(schedule.milestones), epoch)
    if epoch >= total_epochs:
        return 0.0
    return (1 + math.cos(math.pi * (epoch - warmup) / (total_epochs - warmup))) / 2


def warm_cosine(schedule: CosineOptions, lr: float, epoch: float, total_epochs: float) -> float:
    """The learning rate at `epoch`, counted from 0 and with its fraction where it changes with every step:

        warmup_lr + (lr - warmup_lr) e / W                      for e < W
        min_lr + (lr - min_lr) (1 + cos(pi e / T)) / 2          otherwise

    timm's CosineLRScheduler as DeiT calls it; at the end of the warm-up the cosine has gone W / T of its way already.
    With `CosineAfterWarmupOptions` it begins there, with (e - W) / (T - W) in place of e / T.
    """
    if epoch < schedule.warmup_epochs:
        return schedule.warmup_lr + (lr - schedule.warmup_lr) * epoch / schedule.warmup_epochs
    if epoch >= total_epochs:
        return schedule.min_lr
    begin = schedule.warmup_epochs if schedule.begins_after_warmup else 0.0
    way = (epoch - begin) / (total_epochs - begin)
    return schedule.min_lr + (lr - schedule.min_lr) * half_cosine(way)


def half_cosine(share: float) -> float:
    """(1 + cos(pi share)) / 2: from 1 at the start of a schedule to 0 at its end, and 0 behind it."""
    return (1 + math.cos(math.pi * min(share, 1.0))) / 2


def total_epochs_of(trainer: L.Trainer) -> int:
    """The trainer's max_epochs, or the epochs that its max_steps need; 0 where the run has no end."""
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        return trainer.max_epochs
    if trainer.max_steps > 0:
        known = 0 < trainer.num_training_batches < math.inf
        return math.ceil(trainer.max_steps / steps_per_epoch(trainer)) if known else 1
    return 0


def place_in_run(trainer: L.Trainer, per: str) -> tuple[float, float]:
    """(epoch now, epochs in all): whole epochs, or with the fraction of the steps done."""
    steps = steps_per_epoch(trainer)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        total = float(trainer.max_epochs)
    else:
        total = trainer.max_steps / steps
    return (float(trainer.current_epoch) if per == "epoch" else trainer.global_step / steps), total


def steps_per_epoch(trainer: L.Trainer) -> float:
    batches = trainer.num_training_batches
    if not 0 < batches < math.inf:
        raise UserError("the schedule needs epochs of known length: give a loader with a length.")
    return max(1.0, math.ceil(batches / trainer.accumulate_grad_batches))


def check_has_end(trainer: L.Trainer, other_way: str = "") -> None:
    if total_epochs_of(trainer) < 1:
        raise UserError(f"the cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps{other_way}.")
