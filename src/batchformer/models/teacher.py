"""A trained network to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.mix import Renormalize
from batchformer.models.create import create_backbone


class Renormalized(nn.Module):
    """A network that is shown images normalised otherwise than it was trained with."""

    def __init__(self, network: nn.Module, renormalize: Renormalize) -> None:
        super().__init__()
        self.network, self.renormalize = network, renormalize

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Any:
        return self.network(self.renormalize(images))


def load_teacher(
    name: str,
    num_classes: int,
    checkpoint: str | None = None,
    arguments: dict[str, Any] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Module:
    """A timm model with pretrained weights, or with those of a local file; in eval mode and without gradients.

    Weights whose classes are not those of the data are refused: timm would give such a teacher a random classifier.
    With the mean and std of the images, timm's weights see them as they were trained with; those of a file are taken
    to have been trained with these.
    """
    arguments = dict(arguments or {})
    if checkpoint is None:
        teacher = create_backbone(name, num_classes, **{"pretrained": True, **arguments})
        trained_for = getattr(teacher, "pretrained_cfg", {}).get("num_classes")
        if arguments.get("pretrained", True) and trained_for != num_classes:
            raise UserError(
                f"the pretrained weights of the teacher {name} know {trained_for} classes and the data has "
                f"{num_classes}: name a file with a teacher trained on this data in model.distillation.checkpoint."
            )
        teacher = _shown(teacher, mean, std)
    else:
        teacher = create_backbone(name, num_classes, **arguments)
        _load(teacher, name, Path(checkpoint))
    return teacher.eval().requires_grad_(False)


def _shown(teacher: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None) -> nn.Module:
    config = getattr(teacher, "pretrained_cfg", {})
    wanted = config.get("mean"), config.get("std")
    if None in (mean, std, *wanted) or (tuple(mean), tuple(std)) == tuple(map(tuple, wanted)):  # type: ignore[arg-type]
        return teacher
    return Renormalized(teacher, Renormalize(mean, std, *wanted))  # type: ignore[arg-type]


def _load(teacher: nn.Module, name: str, file: Path) -> None:
    from timm.models import load_checkpoint

    if not file.is_file():
        raise UserError(f"model.distillation.checkpoint: there is no file {file}.")
    try:
        load_checkpoint(teacher, str(file), strict=True)
    except Exception as problem:  # a damaged file, keys or shapes of another network
        reason = " ".join(str(problem).split())[:200]
        raise UserError(f"{file} does not hold the weights of a {name} for these classes: {reason}.") from problem
