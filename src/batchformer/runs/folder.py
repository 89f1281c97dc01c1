"""The run folder: ``config.yaml``, ``metrics.csv``, ``tensorboard/``, ``checkpoints/last.ckpt``, ``result.json``."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.files import read_json, remove_stale_temporaries

LOCK = "run.lock"  # see runs.lock
_STAGES = ".stages"
_INDEX = "pictures.json"  # in each folder of pictures
_EXPORTS = ("safetensors", "onnx", "pt2")
_IN_A_RESULT = ("recipe", "seed", "steps", "metrics")  # keys that the commands need


def is_main_process() -> bool:
    """Whether this is rank 0: under DDP the command runs once per device, and rank 0 alone writes folders.

    torchrun numbers the processes of all machines by RANK. Lightning's own launcher sets NODE_RANK and LOCAL_RANK,
    the latter also where a cluster has set RANK to the number of the machine.
    """
    names = ("RANK", "LOCAL_RANK") if "RANK" in os.environ else ("NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        return self.path / "checkpoints" / "best.ckpt"

    @property
    def weights(self) -> Path:
        """The checkpoint that the result is about: the best one where the run was to choose (`run.best`)."""
        return self.best if self.finished and self.best.is_file() else self.checkpoint

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def classes(self) -> Path:
        """What `failures` of the result says about each class, as CSV."""
        return self.path / "classes.csv"

    @property
    def started(self) -> bool:
        return self.path.is_dir() and any(not inside.name.startswith((_STAGES, LOCK)) for inside in self.path.iterdir())

    def stage(self, number: int, name: str) -> RunFolder:
        """The folder of an earlier stage; the last stage is in this folder itself."""
        return RunFolder(self.path / _STAGES / f"{number}-{name}")

    @property
    def is_run(self) -> bool:
        return self.config.is_file() or self.checkpoint.is_file() or self.result.is_file()

    @property
    def finished(self) -> bool:
        return self.result.is_file()

    def open_new(self, overwrite: bool) -> None:
        """Make the folder; one that holds something already is refused unless it may be overwritten."""
        if self.started:
            if not overwrite:
                raise UserError(
                    f"{self.path} already exists: add --resume to continue, --overwrite to start over, "
                    "or choose another --out."
                )
            self.clear()
        self.make()

    def make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file, not a folder; choose another --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(f"{self.path} cannot be made ({problem.strerror}); choose another --out.") from problem

    def clear(self) -> None:
        """Remove what a run has written, and nothing else: the folder may be somebody's home by mistake."""
        if not self.is_run:
            raise UserError(
                f"{self.path} does not look like a run folder, so it is not overwritten; choose another --out."
            )
        pictures = [index.parent for index in self.path.glob(f"*/{_INDEX}")]
        for part in (*(self.path / name for name in ("checkpoints", "tensorboard", "wandb", "exported")), *pictures):
            shutil.rmtree(part, ignore_errors=True)
        for file in (
            self.result,
            self.metrics,
            self.config,
            self.classes,
            *(self.path / f"model.{kind}" for kind in _EXPORTS),  # of the old weights
            *self.path.glob("*.png"),
            *self.path.glob("*.svg"),
        ):
            file.unlink(missing_ok=True)
        remove_stale_temporaries(self.path)

    def clear_stages(self) -> None:
        """Remove the stages before the last one."""
        shutil.rmtree(self.path / _STAGES, ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove the logs of a run that was stopped before its first checkpoint, so that it can start again."""
        for file in (self.metrics, self.result):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def remove_unstarted(self) -> None:
        """Remove the files of a run that failed before its first checkpoint, and the folder if it is empty then."""
        self.clear_unfinished()
        self.config.unlink(missing_ok=True)
        self.open_existing()
        for folder in (self.checkpoint.parent, self.path):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def open_existing(self) -> None:
        remove_stale_temporaries(self.path)
        remove_stale_temporaries(self.checkpoint.parent)

    def require(self) -> None:
        """Refuse a path that is not the folder of a run."""
        if not self.path.is_dir():
            raise UserError(
                f"There is no run folder {self.path}; train one with: batchformer fit RECIPE --out {self.path}"
            )
        if not self.config.is_file():
            runs = sorted(file.parent for file in self.path.glob("*/config.yaml"))
            advice = f"name one of the runs in it, {runs[0]} for example" if runs else "name the --out of a fit"
            raise UserError(f"{self.path} is not a run folder: it has no config.yaml; {advice}.")

    def read_result(self) -> dict[str, Any] | None:
        if not self.finished:
            return None
        result = read_json(self.result, "is damaged", "run the command again with --overwrite.")
        missing = [name for name in _IN_A_RESULT if not isinstance(result, dict) or name not in result]
        if missing:
            raise UserError(
                f"{self.result} is damaged (it has no {', '.join(missing)}); run the command again with --overwrite."
            )
        return result
