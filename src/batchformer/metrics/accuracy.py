"""Top-1 and top-5 accuracy, over all classes and over those with many, some and few training images."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric

from batchformer.errors import UserError
from batchformer.metrics.measures import SHOTS, shot_of

TOP = 5


class ShotAccuracy(Metric):
    """Top-1 accuracy in percent: `accuracy`, `many`, `medium`, `few`, and of each class.

    As the tables of long-tailed recognition count (Liu et al., OLTR, and the released code of the papers): `accuracy`
    is the share of right test images; each of the others is the mean, over the classes of that split, of the accuracy
    per class. A split without tested classes is nan, so is a class without test images. Counts are summed over
    processes.
    """

    full_state_update = False
    correct: Int[Tensor, " classes"]
    total: Int[Tensor, " classes"]

    def __init__(self, class_counts: Sequence[int]) -> None:
        super().__init__()
        if len(class_counts) == 0:
            raise UserError("ShotAccuracy needs class_counts: the number of training images of each class.")
        self.shots = [shot_of(int(count)) for count in class_counts]
        self.add_state("correct", torch.zeros(len(self.shots), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(len(self.shots), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Float[Tensor, "batch classes"], targets: Int[Tensor, " batch"]) -> None:
        hits = (logits.argmax(1) == targets).long()
        # bincount would read its size back from the device
        self.correct.index_add_(0, targets, hits)
        self.total.index_add_(0, targets, torch.ones_like(hits))

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        per_class = self.per_class()
        values = {"accuracy": 100 * self.correct.sum().double() / self.total.sum()}
        for shot in SHOTS:
            rows = [row for row, of in enumerate(self.shots) if of == shot]
            values[shot] = per_class[rows].nanmean() if rows else per_class.new_tensor(float("nan"))
        return values | {"per_class": per_class}

    def per_class(self) -> Float[Tensor, " classes"]:
        """Accuracy of each class over the images this process has counted."""
        return 100 * self.correct.double() / self.total


class TopAccuracy(ShotAccuracy):
    """In percent: `top1`, `top5`, and of each class.

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
        shots = SHOTS if len(set(self.shots)) > 1 else ()
        return ("top1", "top5", *shots)

    def update(self, logits: Float[Tensor, "batch classes"], targets: Int[Tensor, " batch"]) -> None:
        super().update(logits, targets)
        nearest = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
        self.in_top.add_((nearest == targets[:, None]).sum())

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        values = super().compute()
        values["top1"] = values.pop("accuracy")
        values["top5"] = 100 * self.in_top.double() / self.total.sum()
        return {name: values[name] for name in (*self.names, "per_class")}


class DomainScores(Metric):
    """Accuracy in percent and mean loss of each domain; `compute` gives their means over the domains that were seen."""

    full_state_update = False
    correct: Int[Tensor, " domains"]
    total: Int[Tensor, " domains"]
    loss: Float[Tensor, " domains"]

    def __init__(self, domains: int) -> None:
        super().__init__()
        self.add_state("correct", torch.zeros(domains, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(domains, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("loss", torch.zeros(domains, dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self, logits: Float[Tensor, "batch classes"], targets: Int[Tensor, " batch"], domains: Int[Tensor, " batch"]
    ) -> None:
        hits = (logits.argmax(1) == targets).long()
        self.correct.index_add_(0, domains, hits)
        self.total.index_add_(0, domains, torch.ones_like(hits))
        losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        self.loss.index_add_(0, domains, losses.to(self.loss.dtype))

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        accuracy = 100 * self.correct.double() / self.total
        return {"accuracy": accuracy.nanmean(), "loss": (self.loss / self.total).nanmean()}
