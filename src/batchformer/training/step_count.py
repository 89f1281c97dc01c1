"""Lightning counts the optimiser steps of manual and of automatic optimisation apart; here the two agree."""

from __future__ import annotations

import lightning as L


def count_step(trainer: L.Trainer) -> None:
    """One step was made without Lightning's optimiser wrapper, which would have counted it."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def align_step_counts(trainer: L.Trainer) -> None:
    """Let both counters say the larger number: a run may be resumed with the other kind of optimisation."""
    loop = trainer.fit_loop.epoch_loop
    totals = (
        loop.manual_optimization.optim_step_progress.total,
        loop.automatic_optimization.optim_progress.optimizer.step.total,
    )
    for name in ("ready", "completed"):
        steps = max(getattr(total, name) for total in totals)
        for total in totals:
            setattr(total, name, steps)
