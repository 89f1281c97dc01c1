"""Trainer settings that cannot work, told in one sentence and before a run folder is made."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator

from batchformer.errors import UserError

_NEEDS_OTHER_HARDWARE = ("backend found", "not available", "can not run on your system", "torch_xla")
_PROCESSES_PER_CORE = 4  # room for tests of several processes on a small machine
_RETURN_NOTHING = ("_spawn", "_fork", "_notebook")


def trainer_or_sentence(keywords: dict[str, Any]) -> L.Trainer:
    """``L.Trainer(**keywords)``; what it refuses is a :class:`UserError` that names the setting."""
    strategy = keywords.get("strategy")
    if isinstance(strategy, str) and strategy.endswith(_RETURN_NOTHING):
        # Lightning copies into such processes what cannot be copied, and brings back the weights but no history.
        raise UserError(f"trainer.strategy {strategy} keeps the numbers of a run in its processes: use ddp.")
    try:
        trainer = L.Trainer(**keywords)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ModuleNotFoundError) as problem:
        reason = " ".join(str(problem).split()).rstrip(".!")
        accelerator = keywords.get("accelerator")
        if isinstance(accelerator, str) and any(words in reason for words in _NEEDS_OTHER_HARDWARE):
            raise UserError(
                f"trainer.accelerator {accelerator}: this machine has none that torch can use; "
                "leave it out, or give cpu."
            ) from problem
        raise UserError(f"Lightning refuses the trainer settings: {reason}.") from problem
    _refuse_a_crowd(trainer)
    if keywords.get("sync_batchnorm") and trainer.world_size > 1 and isinstance(trainer.accelerator, CPUAccelerator):
        raise UserError("trainer.sync_batchnorm is for GPUs alone, as torch has it: leave it out on the CPU.")
    return trainer


def _refuse_a_crowd(trainer: L.Trainer) -> None:
    """On the CPU a device is one more process with its own torch: Lightning would start any number of them."""
    most = _PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > most:
        raise UserError(
            f"trainer.devices {trainer.num_devices} would start so many processes on the {os.cpu_count() or 1} cores "
            f"of this machine: give {most} or fewer."
        )


def refuse_to_train_nothing(trainer: L.Trainer) -> None:
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise UserError(f"trainer.{name} 0 trains nothing: give 1 or more.")
    if trainer.check_val_every_n_epoch == 0:  # Lightning divides by it
        raise UserError(
            "trainer.check_val_every_n_epoch 0: give 1 or more; to leave validation out, trainer.limit_val_batches 0."
        )
