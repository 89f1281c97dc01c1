"""Modules for domain generalisation and adaptation: MixStyle in a ResNet; bottleneck, heads, gradient reversal."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.attach.insertion import InstanceForward
from batchformer.errors import UserError, did_you_mean

Adversary = Literal["none", "dann", "mdd"]


def mix_style(
    x: Float[Tensor, "batch channels height width"], chance: float, alpha: float
) -> Float[Tensor, "batch channels height width"]:
    """MixStyle of Zhou et al., "Domain Generalization with MixStyle" (ICLR 2021), eq. 4 to 8, with TLL's partners:

        ((x - mu) / sigma) (l sigma + (1 - l) sigma') + l mu + (1 - l) mu',    l ~ Beta(alpha, alpha) for each sample

    with mean and deviation (unbiased, eps 1e-6) over height and width, not differentiated, and mu', sigma' those of a
    sample in the other half of the batch, where other domains are. With probability 1 - `chance`, drawn once for the
    batch, nothing is mixed. Without host synchronisation, so a CUDA graph can capture it.
    """
    batch, device = x.shape[0], x.device
    deviation, mean = torch.var_mean(x.detach().float(), dim=(2, 3), keepdim=True)
    deviation = (deviation + 1e-6).sqrt()
    order = torch.arange(batch - 1, -1, -1, device=device)
    halves = [half[torch.rand(len(half), device=device).argsort()] for half in order.chunk(2)]
    partner = torch.cat(halves)
    # Beta(a, a) on the device, as torch.distributions draws it: every replay of a CUDA graph draws new numbers
    weight = torch._sample_dirichlet(torch.full((batch, 2), alpha, device=device))[:, :1, None, None]
    mixed_deviation = weight * deviation + (1 - weight) * deviation[partner]
    mixed_mean = weight * mean + (1 - weight) * mean[partner]
    mixed = ((x - mean) / deviation * mixed_deviation + mixed_mean).to(x.dtype)
    return torch.where(torch.rand((), device=device) < chance, mixed, x)


class MixStyle(InstanceForward):
    """Instance `forward` of a stage that mixes the styles of its output in training. State dict keys do not change."""

    def __init__(self, layer: nn.Module, chance: float = 0.5, alpha: float = 0.1) -> None:
        super().__init__(layer)
        self.chance, self.alpha = chance, alpha

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.original(*args, **kwargs)
        return mix_style(out, self.chance, self.alpha) if self.layer.training and not self.removed else out


def insert_mix_style(
    net: nn.Module, layers: Sequence[str] = ("layer1", "layer2", "layer3"), chance: float = 0.5, alpha: float = 0.1
) -> list[MixStyle]:
    """Insert MixStyle after these submodules, stages of a timm or torchvision ResNet; `remove()` undoes each."""
    named = dict(net.named_modules())
    for name in layers:
        if name not in named:
            raise UserError(
                f"MixStyle: the network has no {name!r}.{did_you_mean(name, named)} Name stages that give feature "
                f"maps, such as layer1 and layer2 of a ResNet."
            )
    inserted = [MixStyle(named[name], chance, alpha) for name in layers]
    for each in inserted:
        each.put()
    return inserted


@torch.no_grad()
def check_feature_maps(net: nn.Module, layers: Sequence[str], image_size: int) -> None:
    """Refuse layers whose output is no feature map, such as the blocks of a ViT: an image is shown to the network."""
    shapes: dict[str, Any] = {}
    hooks = [
        net.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: shapes.__setitem__(name, tuple(getattr(out, "shape", ())))
        )
        for name in layers
    ]
    training = [module for module in net.modules() if module.training]
    try:
        net.eval()(torch.zeros(1, 3, image_size, image_size, device=next(net.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    for name in layers:
        if len(shapes.get(name, ())) != 4:
            raise UserError(
                f"MixStyle: {name} gives {shapes.get(name, 'nothing')}, not feature maps (batch, channels, height, "
                f"width): name stages that do in model.algorithm.layers, such as layer1 of a ResNet."
            )


class FeatureRecorder(InstanceForward):
    """Instance `forward` that records a layer's input in training: the features of a classifier, of both streams.

    To be put before BatchFormer is attached, so that it runs after it.
    """

    features: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.layer.training:
            self.features = args[0]
        return self.original(*args, **kwargs)

    def take(self) -> Tensor:
        """Return and release the features: a reference would keep the whole graph in memory."""
        features, self.features = self.features, None
        assert features is not None
        return features

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "features": None}


class _ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(coefficient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (coefficient,) = ctx.saved_tensors
        return -coefficient * gradients[0], None


def reversed_gradient(x: Tensor, coefficient: Float[Tensor, ""]) -> Tensor:
    """Gradient reversal: identity forward; the gradient is multiplied by -coefficient (Ganin & Lempitsky, 2015)."""
    return _ReversedGradient.apply(x, coefficient)


class AdaptationNet(nn.Module):
    """A backbone, a bottleneck, a classifier, and an adversary that is used in training only.

    As TLL builds them. MDD: Linear(dim, 1024), BatchNorm, ReLU, Dropout 0.5, then two classifiers of a hidden layer of
    1024, weights N(0, 0.005) and N(0, 0.01). DANN and source only: Linear(dim, 256), BatchNorm, ReLU and a linear
    classifier; DANN's adversary tells the domains apart by three layers. The adversary reads the features through a
    reversed gradient, times `coefficient`.

    With BatchFormer the BatchNorm of the bottleneck keeps the streams apart; that of DANN's adversary, of which nothing
    is left at test time, normalises both together, as published.

    In training it returns (logits, the adversary's outputs), None for the latter where there is no adversary.
    """

    coefficient: Float[Tensor, ""]

    def __init__(self, backbone: nn.Module, num_classes: int, adversary: Adversary, bottleneck_dim: int | None) -> None:
        super().__init__()
        wide = adversary == "mdd"
        dim, width = int(backbone.num_features), bottleneck_dim or (1024 if wide else 256)  # type: ignore[arg-type]
        self.backbone = backbone
        self.bottleneck = nn.Sequential(
            nn.Linear(dim, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5 if wide else 0.0)
        )
        nn.init.normal_(self.bottleneck[0].weight, std=0.005)  # type: ignore[arg-type]
        nn.init.constant_(self.bottleneck[0].bias, 0.1)  # type: ignore[arg-type]
        self.head: nn.Module = _classifier(width, num_classes) if wide else nn.Linear(width, num_classes)
        self.adversary: nn.Module | None = None
        if adversary == "mdd":
            self.adversary = _classifier(width, num_classes)
        elif adversary == "dann":
            hidden = 1024
            self.adversary = nn.Sequential(
                nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1),
            )  # fmt: skip
        self.register_buffer("coefficient", torch.zeros(()), persistent=False)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Any:
        features = self.bottleneck(self.backbone(images))
        logits = self.head(features)
        if not self.training:
            return logits
        if self.adversary is None:
            return logits, None
        return logits, self.adversary(reversed_gradient(features, self.coefficient))


def _classifier(width: int, num_classes: int) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, num_classes))
    for layer in (layers[0], layers[3]):
        nn.init.normal_(layer.weight, std=0.01)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layers
