"""Top-1 and top-5 accuracy, and what long-tailed recognition counts where the classes are unequal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.metrics.shot_accuracy import ShotAccuracy

TOP = 5


class TopAccuracy(ShotAccuracy):
    """In percent: `top1`, `top5`, `all` (the same as `top1`: the name every result has), and of each class.

    Where the training set has classes of more than one of the splits many, medium and few, these too (`ShotAccuracy`).
    With five classes or fewer `top5` is 100.
    """

    in_top: Int[Tensor, ""]

    def __init__(self, class_counts: Sequence[int]) -> None:
        super().__init__(class_counts)
        self.add_state("in_top", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @property
    def names(self) -> tuple[str, ...]:
        """What `compute` gives, `per_class` aside."""
        shots = ("many", "medium", "few") if len(set(self.shots)) > 1 else ()
        return ("top1", "top5", "all", *shots)

    def update(self, logits: Float[Tensor, "batch classes"], targets: Int[Tensor, " batch"]) -> None:
        super().update(logits, targets)
        nearest = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
        self.in_top.add_((nearest == targets[:, None]).sum())

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        values = super().compute()
        values["top1"] = values["all"]
        values["top5"] = 100 * self.in_top.double() / self.total.sum()
        return {name: values[name] for name in (*self.names, "per_class")}
