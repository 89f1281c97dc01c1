"""Every model the promises are tested on: how to build it, and what it eats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 7


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    size: int = 224
    channels: int = 3

    def model(self) -> nn.Module:
        """The same weights each time, so that a model and its twin agree."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build()
            for module in model.modules():
                if isinstance(module, nn.Linear) and not module.weight.any():  # some classifiers start at zero
                    nn.init.normal_(module.weight, std=0.1)
            return model

    def images(self, count: int = 3) -> Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randn(count, self.channels, self.size, self.size, generator=generator)


def _timm(name: str, size: int = 224, **arguments: Any) -> Case:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **arguments)

    return Case(f"timm-{name}", build, size)


def _torchvision(name: str, size: int = 224, **arguments: Any) -> Case:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=CLASSES, **arguments)

    return Case(f"torchvision-{name}", build, size)


def _resnet32() -> nn.Module:
    from batchformer.models import resnet32

    return resnet32(num_classes=CLASSES)


def _sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


# Small pictures where the architecture takes any size; the real one where it does not.
CASES = [
    _timm("resnet18", 64),
    _timm("resnet50", 64),
    _timm("convnext_atto", 64),
    _timm("efficientnet_b0", 64),
    _timm("mobilenetv3_small_050", 64),
    _timm("regnetx_002", 64),
    _timm("densenet121", 64),
    _timm("vit_tiny_patch16_224", 64, img_size=64),
    _timm("deit_tiny_distilled_patch16_224", 64, img_size=64),
    _timm("swin_tiny_patch4_window7_224", 112, img_size=112),
    _timm("cait_xxs24_224", 64, img_size=64),
    _timm("xcit_nano_12_p16_224", 64, img_size=64),
    _timm("pvt_v2_b0", 64),
    _timm("mixer_s32_224", 64, img_size=64),
    _timm("levit_128s"),
    _timm("efficientformer_l1"),
    _timm("repvit_m1", 64),
    _torchvision("resnet18", 64),
    _torchvision("mobilenet_v2", 64),
    _torchvision("vit_b_16", 64, image_size=64),
    Case("resnet32-cifar", _resnet32, 32),
    Case("sequential", _sequential, 16),
]


def without_randomness(model: nn.Module) -> nn.Module:
    """Dropout and drop-path at zero, batch statistics as in training."""
    for module in model.modules():
        for attribute in ("p", "drop_prob", "drop_rate", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model
