"""When a checkpoint is written: at the end of chosen epochs, after chosen steps, and when training ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint

from batchformer.runs.options import RunOptions


class LastCheckpoint(Checkpoint):
    """Keep one checkpoint, the newest: results are those of the last epoch, so nothing else is needed.

    Lightning calls subclasses of ``Checkpoint`` after the task's own ``on_train_epoch_end``, so schedulers stepped
    there, and the check for a loss that is not finite, come before the write.
    """

    def __init__(self, path: Path, options: RunOptions) -> None:
        self.path = path
        self.every_epochs = max(1, options.checkpoint_every_epochs)
        self.every_steps = options.checkpoint_every_steps
        self._saved_step: int | None = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.every_steps is None or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        # The last step of an epoch is left to the end of the epoch: a checkpoint between the two would lack the
        # validation that belongs to it.
        if trainer.global_step % self.every_steps == 0 and batch_idx + 1 < trainer.num_training_batches:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        done = trainer.current_epoch + 1
        if done % self.every_epochs == 0 or done == trainer.max_epochs:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Steps, time or a callback may end a run too; the file must then say that it is over."""
        if trainer.current_epoch != trainer.max_epochs or self._saved_step != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step
