"""The ``run:`` section of a recipe: names, initial weights, checkpoints, threads."""

from dataclasses import dataclass, field
from typing import Any, Literal

from batchformer.errors import UserError

#: loggers by name, and the package that each needs
LOGGERS = {"csv": "", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@dataclass
class RunOptions:
    """The ``run:`` section of a recipe.

    Args:
        recipe: Name that goes into result.json; filled in by ``fit`` and ``compare``.
        variant: Name of the variant in result.json; empty means that of ``model.method``.
        reference: The variant that others are compared with.
        code: Folder of the recipe where it names classes outside the package; filled in by ``fit`` and ``compare``.
        init_from: Where weights come from, by part: "network" is all of it. A run folder, a .safetensors, .pth or .pt
            file, or a folder written by save_pretrained; or "pretrained": timm's weights of the backbone, for
            "network" in tasks that classify and "backbone" in detectors. Some tasks know further parts.
        loggers: Where the numbers of training go besides metrics.csv: "tensorboard", "wandb", "mlflow"; "csv": nowhere.
        checkpoint_every_epochs: Write a checkpoint after every so many epochs, and always after the last one.
        checkpoint_every_steps: Besides, write one after every so many training steps, also inside an epoch.
        best: Report the weights of the best epoch instead of those of the last one: best by the primary measure on the
            images held out of the training set (``data.holdout``); the evaluation set chooses nothing.
        early_stop: End a run after so many evaluations without a better one on these images; null: never.
        threads: CPU threads for torch; null leaves the choice to torch. Tiny networks are fastest with one.
        matmul_precision: Of float32 matrix products on a GPU: "highest", "high" (TensorFloat32) or "medium"; null
            leaves the choice to torch, which is exact. No difference where ``trainer.precision`` is half.
    """

    recipe: str = ""
    variant: str = ""
    reference: str = "baseline"
    code: str | None = None
    init_from: dict[str, str | None] = field(default_factory=dict)
    loggers: list[Literal["csv", "tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["tensorboard"])
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    best: bool = False
    early_stop: int | None = None
    threads: int | None = None
    matmul_precision: Literal["highest", "high", "medium"] | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint_every_epochs", "checkpoint_every_steps", "early_stop", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"run.{name} {value}: give 1 or more.")


def dotted(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found.update(dotted(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


_PARTS_OF_0_1 = {"backbone_weights": "backbone", "detector_from": "detector"}  # under model:, now parts of init_from


def current_key(key: str) -> str:
    """A dotted key of version 0.1 under its name of today."""
    head, _, name = key.partition(".")
    return f"run.init_from.{_PARTS_OF_0_1[name]}" if head == "model" and name in _PARTS_OF_0_1 else key


def with_current_keys(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe or config.yaml of version 0.1 with the keys of today; others as they are.

    Recipes of this package have none of the old keys, so an old key was set by the recipe that extends one of them.
    """
    model = content.get("model")
    if not isinstance(model, dict) or not _PARTS_OF_0_1.keys() & model.keys():
        return content
    parts = {_PARTS_OF_0_1[name]: model[name] for name in _PARTS_OF_0_1 if name in model}
    run = dict(content.get("run") or {})
    run["init_from"] = {**(run.get("init_from") or {}), **parts}
    kept = {name: value for name, value in model.items() if name not in _PARTS_OF_0_1}
    return {**content, "model": kept, "run": run}
