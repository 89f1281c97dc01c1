"""A trained network from its run folder, without the data it was trained on."""

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.runs.folder import RunFolder


@dataclass
class FinishedRun:
    """A run loaded for ``test``, ``predict`` or ``export``; `task` has the weights of the last checkpoint."""

    folder: RunFolder
    config: dict[str, Any]
    task: Any
    data: Any
    trainer_keywords: dict[str, Any]
    epochs_done: int

    def note(self) -> str:
        """A note that the run was stopped before its end; empty if it is finished."""
        if self.folder.finished:
            return ""
        last = self.config["trainer"].get("max_epochs")
        how_far = f"epoch {self.epochs_done}" + (f" of {last}" if last and last > 0 else "")
        return f"Note: {self.folder.path} is not finished ({how_far}); these are the weights of its last checkpoint."

    def temperature(self) -> float:
        """The temperature that was fitted after the training, for calibrated probabilities."""
        result = self.folder.read_result() or {}
        failures = result.get("failures") or {}
        found = (failures.get("calibration") or {}).get("temperature")
        if isinstance(found, int | float) and found > 0:
            return float(found)
        raise UserError(
            f"--calibrated: {self.folder.result} has no temperature. It is fitted after the training of a classifier "
            "that is evaluated on 40 images or more, not with --no-analysis: train again, or leave it out."
        )


def load_run(path: str, overrides: list[tuple[str, str]] | None = None, trust: bool = False) -> FinishedRun:
    """Read config.yaml and checkpoints/last.ckpt of a run folder; `trust`: import code that it names."""
    folder = RunFolder(Path(path))
    folder.require()

    from batchformer.cli.recipe_cli import RecipeCLI
    from batchformer.training.weights import read_checkpoint

    checkpoint = read_checkpoint(folder.weights)
    result = folder.read_result()
    step = None if result is None else result.get("chosen", {}).get("step", result["steps"])
    if result is not None and checkpoint["global_step"] != step:
        raise UserError(
            f"{folder.weights} is of step {checkpoint['global_step']}, {folder.result} of step {step}: "
            "they are not the same network; restore the one that belongs to the other, or train again with --overwrite."
        )
    cli = RecipeCLI(trust)
    config = cli.load(folder.config, [("trainer.logger", "false"), *(overrides or [])])
    task, data, trainer_keywords, _ = cli.build()
    task.expect_checkpoint()
    try:
        task.on_load_checkpoint(checkpoint)
        task.load_state_dict(checkpoint["state_dict"])
    except (KeyError, RuntimeError) as problem:
        raise UserError(
            f"{folder.weights} does not fit {folder.config} ({_first_reason(problem)}): was one of them changed?"
        ) from problem
    task.eval()
    _name_classes_of_0_1(task, checkpoint)
    return FinishedRun(folder, config, task, data, trainer_keywords, int(checkpoint["epoch"]) + 1)


def _name_classes_of_0_1(task: Any, checkpoint: dict[str, Any]) -> None:
    """Version 0.1 kept the names of the classes in another part of the checkpoint."""
    states: dict[str, dict[str, Any]] = checkpoint.get("callbacks", {})
    names = next((state["class_names"] for state in states.values() if state.get("class_names")), None)
    if names is not None:
        task.data_info = DataInfo(**{**task.data_info.as_dict(), "classes": list(names)})


def best_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _first_reason(problem: Exception) -> str:
    """The first line of torch's error after its headline, shortened: it may list every missing key."""
    lines = [line.strip() for line in str(problem).splitlines() if not line.startswith("Error(s) in loading")]
    return shorten((lines or [type(problem).__name__])[0].rstrip(". "), 120, placeholder=" ...")
