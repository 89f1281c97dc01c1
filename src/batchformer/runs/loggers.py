"""Where the numbers of a run go while it trains: metrics.csv always, and TensorBoard, W&B or MLflow by name."""

import csv
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from batchformer.errors import UserError
from batchformer.runs.options import LOGGERS

_PROJECT = "batchformer"


def make_loggers(
    names: Sequence[str], folder: Path, resume_step: int = 0, recipe: str = "", ids: Mapping[str, str] | None = None
) -> list[Logger]:
    """The loggers of a run, metrics.csv first; `ids` are those of `logger_ids` in the checkpoint it resumes from."""
    for name in names:
        if LOGGERS[name] and find_spec(LOGGERS[name]) is None:
            extra = "train" if name == "tensorboard" else name
            raise UserError(
                f'--logger {name} needs {LOGGERS[name]}; install it with: pip install "batchformer[{extra}]"'
            )
    ids, run = ids or {}, folder.absolute().name
    made: list[Logger] = [RunCSVLogger(folder, resume_step)]
    if "tensorboard" in names:
        from lightning.pytorch.loggers import TensorBoardLogger

        purge: dict[str, Any] = {"purge_step": resume_step} if resume_step else {}
        made.append(TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False, **purge))
    if "wandb" in names:
        from lightning.pytorch.loggers import WandbLogger

        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        options: dict[str, Any] = {
            "save_dir": folder,
            "project": project,
            "group": recipe or None,
            "version": ids.get("wandb"),
        }
        made.append(_named("wandb", WandbLogger(name=run, **options)))
    if "mlflow" in names:
        made.append(_named("mlflow", _mlflow(recipe or _PROJECT, run, ids.get("mlflow"))))
    return made


def _mlflow(experiment: str, run: str, run_id: str | None) -> Logger:
    from lightning.pytorch.loggers import MLFlowLogger

    place = os.environ.get("MLFLOW_TRACKING_URI", "file:./mlruns")
    if place.startswith(("file:", ".", "/")):  # needs no database, and MLflow refuses it by default
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        return MLFlowLogger(experiment, run, place, run_id=run_id)
    except Exception as problem:  # of its own kinds, which importing would cost seconds
        reason = " ".join(str(problem).split()).partition(". ")[0].rstrip(".")
        raise UserError(f"--logger mlflow: {place} (MLFLOW_TRACKING_URI) cannot be used: {reason}.") from problem


def _named(name: str, logger: Any) -> Logger:
    logger.batchformer_name = name
    return logger


def logger_ids(loggers: Sequence[Any]) -> dict[str, str]:
    """What W&B and MLflow call this run, so that a resumed one goes on under the same name."""
    named = {each.batchformer_name: each.version for each in loggers if hasattr(each, "batchformer_name")}
    return {name: str(version) for name, version in named.items() if version}


def close_loggers(loggers: Sequence[Any]) -> None:
    """End the run of W&B, of which there is one in a process: the next run would be logged into it."""
    for logger in loggers:
        if getattr(logger, "batchformer_name", "") == "wandb" and logger._experiment is not None:
            logger.experiment.finish()


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
        """No-op: config.yaml has them already."""


def rows_before(path: Path, step: int) -> list[dict[str, Any]]:
    if step == 0 or not path.is_file():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and int(row["step"]) < step]
