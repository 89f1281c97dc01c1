"""Checkpoints: when they are written, and that they are written atomically."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint

from batchformer.errors import UserError
from batchformer.files import remove_stale_temporaries, write_atomically
from batchformer.metrics.measures import primary_of
from batchformer.runs.folder import RunFolder
from batchformer.runs.options import RunOptions
from batchformer.training.weights import read_checkpoint


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's checkpoint IO with atomic writes: temporary file in the same folder, fsync, rename."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        remove_stale_temporaries(Path(path).parent)
        return read_checkpoint(Path(path), map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def choosing_callbacks(folder: RunFolder, options: RunOptions, task: Any, data: Any) -> list[Callback]:
    """Lightning's callbacks for `run.best` and `run.early_stop`, both by the set held out of the training data."""
    if not options.best and options.early_stop is None:
        return []
    name = getattr(data, "holdout_set", None)
    if name is None:
        raise UserError(
            "run.best and run.early_stop choose by images held out of the training set, and these data have none: add "
            "--data.holdout 0.1 (folders, lists and detection data have it); the evaluation set chooses nothing."
        )
    primary = primary_of(task.measures)
    monitor = f"val/{name}/{primary.key}"
    mode = "max" if primary.better == "higher" else "min"
    found: list[Callback] = []
    if options.early_stop is not None:
        found.append(
            EarlyStopping(
                monitor, patience=options.early_stop, mode=mode, check_on_train_epoch_end=False, check_finite=False
            )
        )
    if options.best:
        found.append(
            ModelCheckpoint(
                folder.best.parent, folder.best.stem, monitor, mode=mode, save_weights_only=True,
                save_on_train_epoch_end=False, enable_version_counter=False,
            )
        )  # fmt: skip
    return found


class LastCheckpoint(Checkpoint):
    """Keep one checkpoint, the newest: results are those of the last epoch, so nothing else is needed.

    Lightning calls subclasses of ``Checkpoint`` after the task's own ``on_train_epoch_end``, so schedulers stepped
    there, and the check for a loss that is not finite, come before the write.
    """

    def __init__(self, path: Path, every_epochs: int = 1, every_steps: int | None = None) -> None:
        self.path, self.every_epochs, self.every_steps = path, max(1, every_epochs), every_steps
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
        """Write the last state also where steps, time or a callback ended the run."""
        if trainer.current_epoch != trainer.max_epochs or self._saved_step != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step
