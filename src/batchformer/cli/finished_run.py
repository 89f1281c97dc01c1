"""A trained network from its run folder, without the data it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from batchformer.errors import UserError
from batchformer.runs.folder import RunFolder


@dataclass
class FinishedRun:
    """What ``test``, ``predict`` and ``export`` start from; the task carries the weights of the last checkpoint."""

    folder: RunFolder
    config: dict[str, Any]
    task: Any
    data: Any
    trainer_keywords: dict[str, Any]
    class_names: list[str]
    epochs_done: int

    def note(self) -> str:
        """What to say before using the weights of a run that was stopped; nothing of one that is finished."""
        if self.folder.finished:
            return ""
        last = self.config["trainer"].get("max_epochs")
        how_far = f"epoch {self.epochs_done}" + (f" of {last}" if last and last > 0 else "")
        return f"Note: {self.folder.path} is not finished ({how_far}); these are the weights of its last checkpoint."


def load_run(path: str, overrides: list[tuple[str, str]] | None = None) -> FinishedRun:
    """Read config.yaml and checkpoints/last.ckpt of a run folder."""
    folder = RunFolder(Path(path))
    folder.require()

    from batchformer.cli.recipe_cli import RecipeCLI
    from batchformer.runs.checkpoint_io import read_checkpoint

    checkpoint = read_checkpoint(folder.checkpoint)
    result = folder.read_result()
    if result is not None and checkpoint["global_step"] != result["steps"]:
        raise UserError(
            f"{folder.checkpoint} is of step {checkpoint['global_step']}, {folder.result} of step {result['steps']}: "
            "they are not the same network; restore the one that belongs to the other, or train again with --overwrite."
        )
    cli = RecipeCLI()
    # Weights come from the checkpoint: nothing is to be fetched, compiled or captured.
    plain = [("model.compile", "false"), ("model.cuda_graph", "false"), ("trainer.logger", "false")]
    config = cli.load(folder.config, [*plain, *(overrides or [])])
    task, data, trainer_keywords, _ = cli.build()
    for name in ("pretrained", "pretrained_cfg_overlay"):
        task.backbone_args.pop(name, None)
    try:
        task.on_load_checkpoint(checkpoint)
        task.load_state_dict(checkpoint["state_dict"])
    except (KeyError, RuntimeError) as problem:
        raise UserError(
            f"{folder.checkpoint} does not fit {folder.config} ({_first_reason(problem)}): was one of them changed?"
        ) from problem
    task.eval()
    states: dict[str, dict[str, Any]] = checkpoint["callbacks"]
    recorder = next((state for key, state in states.items() if "RunRecorder" in key), {})
    names = recorder.get("class_names") or [str(label) for label in range(len(task.class_counts))]
    return FinishedRun(folder, config, task, data, trainer_keywords, names, int(checkpoint["epoch"]) + 1)


def best_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _first_reason(problem: Exception) -> str:
    """torch begins with a headline that names the class, and lists every key that is missing."""
    lines = [line.strip() for line in str(problem).splitlines() if not line.startswith("Error(s) in loading")]
    return shorten((lines or [type(problem).__name__])[0].rstrip(". "), 120, placeholder=" ...")
