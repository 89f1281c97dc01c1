"""ResNet-10 of the ImageNet-LT tables."""

from __future__ import annotations

from typing import Any

from torch import nn


def resnet10(num_classes: int = 1000, **arguments: Any) -> nn.Module:
    """The ResNet-10 of long-tailed recognition (Liu et al., OLTR): one basic block per stage, 512 features.

    Built from timm's `ResNet`, so its keys are those of timm's resnet18 with fewer blocks. timm's own `resnet10t` has
    a deep stem and average-pooled shortcuts: another network.
    """
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(block=BasicBlock, layers=(1, 1, 1, 1), num_classes=num_classes, **arguments)  # type: ignore[arg-type]
