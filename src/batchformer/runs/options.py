"""The ``run:`` part of a recipe: what a run keeps while it trains."""

from dataclasses import dataclass
from typing import Literal

from batchformer.errors import UserError


@dataclass
class RunOptions:
    """What a run keeps while it trains.

    Args:
        recipe: Name that goes into result.json; filled in by ``fit`` and ``compare``.
        checkpoint_every_epochs: Write a checkpoint after every so many epochs, and always after the last one.
        checkpoint_every_steps: Besides, write one after every so many training steps, also inside an epoch.
        threads: CPU threads for torch; null leaves the choice to torch. Tiny networks are fastest with one.
        matmul_precision: Of float32 matrix products on a GPU: "highest", "high" (TensorFloat32) or "medium"; null
            leaves the choice to torch, which is exact. No difference where ``trainer.precision`` is half.
    """

    recipe: str = ""
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    threads: int | None = None
    matmul_precision: Literal["highest", "high", "medium"] | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint_every_epochs", "checkpoint_every_steps", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"run.{name} {value}: give 1 or more.")
