"""A backbone by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from batchformer.errors import UserError, did_you_mean
from batchformer.models.resnet10 import resnet10
from batchformer.models.resnet_cifar import resnet20, resnet32, resnet44, resnet56

OWN: dict[str, Callable[..., nn.Module]] = {
    "resnet10": resnet10,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet56": resnet56,
}


def create_backbone(name: str, num_classes: int, **arguments: Any) -> nn.Module:
    """The models of this room by their names, every other name from timm (no pretrained weights unless asked for)."""
    import timm

    if name not in OWN and not timm.is_model(name):
        hint = did_you_mean(name, [*OWN, *timm.list_models()], count=3) or " See timm.list_models()."
        raise UserError(f"backbone {name!r} is neither a CIFAR ResNet nor a timm model.{hint}")
    try:
        if name in OWN:
            return OWN[name](num_classes=num_classes, **arguments)
        return timm.create_model(name, **{"pretrained": False, "num_classes": num_classes, **arguments})
    except TypeError as problem:
        if (unknown := re.search(r"unexpected keyword argument '(\w+)'", str(problem))) is None:
            raise
        raise UserError(
            f"backbone {name} does not take {unknown[1]}: leave model.backbone_args.{unknown[1]} out; where a recipe "
            "sets it, give --model.backbone_args {}."
        ) from problem
    # huggingface_hub's and urllib's errors are OSErrors; a file of another kind than timm expects is a ValueError
    except (OSError, RuntimeError, ValueError) as problem:
        if not arguments.get("pretrained"):
            raise
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        raise UserError(
            f"the pretrained weights of {name} cannot be had ({reason}): timm fetches them from the network once; "
            "without one, name a file of timm's weights with model.backbone_args.pretrained_cfg_overlay.file, or leave "
            "model.backbone_args.pretrained out."
        ) from problem
