"""Records what result.json needs during training (history, results per class, time) and keeps it in checkpoints."""

import time
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from batchformer.data.loading.epoch_loader import samples_in
from batchformer.metrics.measures import with_current_names
from batchformer.runs.loggers import logger_ids

STREAMS = ("plain", "related")


class RunRecorder(Checkpoint):
    """Callback that collects the history of a run, also across resumes.

    It writes no checkpoint, yet is a ``Checkpoint`` to Lightning: those callbacks come after the task's own
    ``on_train_epoch_end``, where the training loss of the epoch may be logged. It must come before the one that
    writes, so that its state of the epoch is in the file.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self.per_class: list[float] = []
        self.streams: dict[str, list[float]] = {}
        self.validated_step = -1
        self.ended = False
        self.measures: list[dict[str, Any]] = []
        self.lengthened: list[int] = []  # epochs at which the run had ended before it was given more
        self.logger_ids: dict[str, str] = {}
        self._limits: list[int | None] | None = None  # epochs and steps of the run
        self._wall_before = 0.0
        self._train_s = 0.0
        self._images = 0
        self._born = time.perf_counter()
        self._segment: float | None = None
        self._segment_images = 0
        self._epochs_here = 0
        self._staged: dict[str, float] | None = None
        self._train_loss: float | None = None

    # -- what the result needs -------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, float]:
        """The measures of the last validation, by key."""
        last = self.history[-1] if self.history else {}
        return {name: value for name, value in last.items() if name not in ("epoch", "train_loss")}

    @property
    def wall_s(self) -> float:
        return self._wall_before + time.perf_counter() - self._born

    @property
    def images_per_s(self) -> float:
        """Training only, validation left out, and without the first epoch of a process (compiling, warming up)."""
        return self._images / self._train_s if self._train_s > 0 else float("nan")

    # -- the state in checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history,
            "per_class": self.per_class,
            "streams": self.streams,
            "validated_step": self.validated_step,
            "ended": self.ended,
            "measures": self.measures,
            "wall_s": self.wall_s,
            "train_s": self._train_s,
            "images": self._images,
            "lengthened": self.lengthened,
            "limits": self._limits,
            "logger_ids": self.logger_ids,
            "staged": self._staged,  # of a validation inside the epoch, which is added to the history at its end
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        current = state_dict
        if "measures" not in state_dict:  # of version 0.1
            current = with_current_names({"metrics": (state_dict["history"] or [{}])[-1], **state_dict})
        self.history, self.measures = list(current["history"]), list(current["measures"])
        self.per_class = list(state_dict["per_class"])
        self.streams = {name: list(losses) for name, losses in state_dict.get("streams", {}).items()}
        self.validated_step = state_dict.get("validated_step", -1)
        self.ended = state_dict.get("ended", False)
        self._wall_before = state_dict["wall_s"]
        self._train_s = state_dict["train_s"]
        self._images = state_dict["images"]
        self.lengthened = list(state_dict.get("lengthened", []))
        self._limits = state_dict.get("limits")
        self._staged = state_dict.get("staged")

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._validate_after_the_last_epoch(trainer)
        self.logger_ids = logger_ids(trainer.loggers)
        before, self._limits = self._limits, [trainer.max_epochs, trainer.max_steps]
        if before not in (None, self._limits):
            self.lengthened.append(epochs_done(trainer))
            self.ended = False
        if self.ended:  # killed between the last checkpoint and result.json
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._validate_after_the_last_epoch(trainer)
        only_one = trainer.max_epochs == 1
        if self._segment is None and (self._epochs_here > 0 or only_one):
            _wait_for_the_device()
            self._segment, self._segment_images = time.perf_counter(), 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._segment_images += samples_in(batch) * trainer.world_size

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._close_segment()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        seen = trainer.callback_metrics
        measured = [measure for measure in pl_module.all_measures if f"val/{measure.key}" in seen]
        self.measures = [measure.as_dict() for measure in measured]
        self._staged = {measure.key: float(seen[f"val/{measure.key}"]) for measure in measured}
        self.per_class = [float(value) for value in pl_module.per_class]
        self.validated_step = trainer.global_step
        if trainer.state.fn != "fit":
            if self._train_loss is not None:
                self._staged["train_loss"] = self._train_loss
            self._add(max(1, epochs_done(trainer)))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._epochs_here += 1
        self._record_streams(trainer)
        if self._staged is not None:
            # Read only in epochs that validated: reading a value synchronises with the device.
            if (loss := trainer.callback_metrics.get("train/loss")) is not None:
                self._staged["train_loss"] = float(loss)
            self._add(epochs_done(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._close_segment()
        self.ended = True
        if (loss := trainer.callback_metrics.get("train/loss")) is not None:
            self._train_loss = float(loss)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _record_streams(self, trainer: L.Trainer) -> None:
        """The mean training loss of each stream in every epoch, where the task measures them."""
        seen, epoch = trainer.callback_metrics, epochs_done(trainer) - 1
        if any(f"train/loss_{stream}" in seen for stream in STREAMS):
            for stream in STREAMS:
                losses = self.streams.setdefault(f"{stream}_loss", [])
                if (loss := seen.get(f"train/loss_{stream}")) is not None:
                    losses[epoch:] = [float(loss)]

    def _add(self, epochs: int) -> None:
        assert self._staged is not None
        entry = {"epoch": epochs - 1, **self._staged}
        if self.history and self.history[-1]["epoch"] == entry["epoch"]:
            entry = {**self.history.pop(), **entry}
        self.history.append(entry)
        self._staged = None

    def _close_segment(self) -> None:
        if self._segment is not None:
            _wait_for_the_device()
            self._train_s += time.perf_counter() - self._segment
            self._images += self._segment_images
            self._segment = None

    @staticmethod
    def _validate_after_the_last_epoch(trainer: L.Trainer) -> None:
        """Results are those of the last epoch, also where its number is no multiple of ``check_val_every_n_epoch``."""
        if trainer.max_epochs is not None and trainer.current_epoch == trainer.max_epochs - 1:
            trainer.check_val_every_n_epoch = 1


def epochs_done(trainer: L.Trainer) -> int:
    """Epochs trained, the last one perhaps in part; unlike ``current_epoch`` the same in ``on_train_epoch_end``,
    after it, and after resuming."""
    return trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]


def _wait_for_the_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
