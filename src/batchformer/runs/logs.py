"""``metrics.csv`` and TensorBoard events of a run, continued without gaps or doubles when it resumes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


class RunCSVLogger(CSVLogger):
    """Lightning's CSV logger, straight into the run folder, keeping the rows before the step it resumes from."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        super().__init__(folder, name="", version="")
        self._kept = rows_before(folder / "metrics.csv", resume_step)

    @property
    def experiment(self) -> Any:
        fresh = self._experiment is None
        writer = super().experiment
        if fresh and self._kept:
            writer.metrics.extend(self._kept)
            self._kept = []
            writer.save()
        return writer

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """config.yaml has them already."""


def rows_before(path: Path, step: int) -> list[dict[str, Any]]:
    if step == 0 or not path.is_file():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and int(row["step"]) < step]


def loggers(folder: Path, resume_step: int) -> list[Logger]:
    purge: dict[str, Any] = {"purge_step": resume_step} if resume_step else {}
    return [
        RunCSVLogger(folder, resume_step),
        TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False, **purge),
    ]
