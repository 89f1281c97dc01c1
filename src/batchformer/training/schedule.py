"""The learning rate as a function of the epoch alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from bisect import bisect_right

import lightning as L

from batchformer.errors import UserError
from batchformer.training.options import ScheduleOptions


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


def total_epochs_of(trainer: L.Trainer) -> int:
    """The trainer's max_epochs, or the epochs that its max_steps need; 0 where the run has no end."""
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        return trainer.max_epochs
    if trainer.max_steps > 0:
        steps = trainer.num_training_batches / trainer.accumulate_grad_batches
        return math.ceil(trainer.max_steps / steps) if 0 < steps < math.inf else 1
    return 0


def check_schedule(schedule: ScheduleOptions, total_epochs: int) -> None:
    if schedule.name == "cosine" and total_epochs < 1:
        raise UserError(
            "the cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps, or schedule.name=constant."
        )
    if schedule.warmup_epochs < 0:
        raise UserError(f"schedule.warmup_epochs={schedule.warmup_epochs} must be 0 or more.")
