"""Create a backbone by name, read files of weights, and load the pretrained teacher of a distillation."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError, did_you_mean, reason_of
from batchformer.hub import OWN_BACKBONES, fetching, no_weights_of
from batchformer.mix import Renormalize
from batchformer.models import resnets

OWN: dict[str, Callable[..., nn.Module]] = {name: getattr(resnets, name) for name in OWN_BACKBONES}
#: networks with the same keys as another one, which would load their weights and compute something else
NOT_STOCK = {
    "resnet50_stride_in_1x1": "it has the keys of torchvision's and timm's resnet50, which halve their maps in the 3 x "
    "3 convolution: the weights would load there without a word and lose accuracy"
}


OTHER_WEIGHTS = (
    "give a file with --init-from FILE (or model.backbone_args.pretrained_cfg_overlay.file), or begin with random "
    "weights, --init-from scratch"
)


def create_backbone(name: str, num_classes: int, **arguments: Any) -> nn.Module:
    """Create a model of this package by name, else one of timm (no pretrained weights unless requested)."""
    import timm

    if name not in OWN and not timm.is_model(name):
        hint = did_you_mean(name, [*OWN, *timm.list_models()], count=3) or " See timm.list_models()."
        raise UserError(f"backbone {name!r} is neither a CIFAR ResNet nor a timm model.{hint}")
    try:
        if name in OWN:
            return OWN[name](num_classes=num_classes, **arguments)
        with fetching() if arguments.get("pretrained") else nullcontext():
            return timm.create_model(name, **{"pretrained": False, "num_classes": num_classes, **arguments})
    except TypeError as problem:
        if (unknown := re.search(r"unexpected keyword argument '(\w+)'", str(problem))) is None:
            raise
        if unknown[1] == "pretrained":
            raise no_weights_of(name) from problem
        raise UserError(
            f"backbone {name} does not take {unknown[1]}: leave model.backbone_args.{unknown[1]} out; where a recipe "
            "sets it, give --model.backbone_args {}."
        ) from problem
    # huggingface_hub's and urllib's errors are OSErrors; a file of another kind than timm expects is a ValueError
    except (OSError, RuntimeError, ValueError) as problem:
        if isinstance(problem, UserError) or not arguments.get("pretrained"):
            raise
        raise UserError(
            f"the pretrained weights of {name} could not be loaded ({reason_of(problem)}): timm downloads them once; "
            f"without a network, {OTHER_WEIGHTS}."
        ) from problem


def creation_code(name: str, num_classes: int, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """(expression, imports) that make the same network outside of this package's training."""
    if name in NOT_STOCK:
        raise UserError(f"{name} is not exported: {NOT_STOCK[name]}.")
    given = "".join(f", {key}={value!r}" for key, value in arguments.items())
    if name in OWN:
        return f"{name}(num_classes={num_classes}{given})", f"from batchformer.models import {name}"
    return f"timm.create_model({name!r}, num_classes={num_classes}{given})", "import timm"


def read_tensors(file: Path, advice: str = "give a .pth, .pt or .safetensors file") -> dict[str, Tensor]:
    """Tensors by name, from a state dict or from a checkpoint that holds one; nothing in the file is executed."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # the type depends on what is wrong with the file
        raise UserError(  # the first sentence only: torch then recommends an unsafe load
            f"{file} is no file of weights that torch can read ({reason_of(problem)}): {advice}."
        ) from problem
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{file} holds no weights by name: give a state dict.")
    return dict(content)


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
    With the mean and std of the images, these are renormalised for timm's weights; weights of a file are assumed to
    have been trained with the given ones.
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
        load_file(teacher, f"{name} for these classes", checkpoint, "model.distillation.checkpoint")
    return teacher.eval().requires_grad_(False)


def _shown(teacher: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None) -> nn.Module:
    config = getattr(teacher, "pretrained_cfg", {})
    wanted = config.get("mean"), config.get("std")
    if None in (mean, std, *wanted) or (tuple(mean), tuple(std)) == tuple(map(tuple, wanted)):  # type: ignore[arg-type]
        return teacher
    return Renormalized(teacher, Renormalize(mean, std, *wanted))  # type: ignore[arg-type]


def load_file(model: nn.Module, name: str, file: str, option: str, use_ema: bool = True) -> None:
    """Load all weights from a file that timm can read; `option` names the setting in error messages."""
    from timm.models import load_checkpoint

    if not Path(file).is_file():
        raise UserError(f"{option}: there is no file {file}.")
    try:
        load_checkpoint(model, file, use_ema, strict=True)
    except Exception as problem:  # a damaged file, keys or shapes of another network
        reason = " ".join(str(problem).split())[:200]
        raise UserError(f"{file} does not hold the weights of a {name}: {reason}.") from problem


class Renormalized(nn.Module):
    """Wrapper of a network that was trained with another normalisation than that of the images it gets."""

    def __init__(self, network: nn.Module, renormalize: Renormalize) -> None:
        super().__init__()
        self.network, self.renormalize = network, renormalize

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Any:
        return self.network(self.renormalize(images))
