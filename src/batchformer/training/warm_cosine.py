"""Warm-up and cosine as a function of the place in the run alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

import lightning as L

from batchformer.errors import UserError
from batchformer.tasks.classification.options import CosineOptions


def warm_cosine(schedule: CosineOptions, lr: float, epoch: float, total_epochs: float) -> float:
    """The learning rate at `epoch`, counted from 0 and with its fraction where it changes with every step:

        warmup_lr + (lr - warmup_lr) e / W                      for e < W
        min_lr + (lr - min_lr) (1 + cos(pi e / T)) / 2          otherwise

    timm's CosineLRScheduler as DeiT calls it; at the end of the warm-up the cosine has gone W / T of its way already.
    """
    if epoch < schedule.warmup_epochs:
        return schedule.warmup_lr + (lr - schedule.warmup_lr) * epoch / schedule.warmup_epochs
    if epoch >= total_epochs:
        return schedule.min_lr
    return schedule.min_lr + (lr - schedule.min_lr) * (1 + math.cos(math.pi * epoch / total_epochs)) / 2


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


def check_has_end(trainer: L.Trainer) -> None:
    if (trainer.max_epochs is None or trainer.max_epochs < 1) and trainer.max_steps < 1:
        raise UserError("the cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps.")
