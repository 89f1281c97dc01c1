"""RIDE's networks: experts that share the early stages of a ResNet, and a router for early exit."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.models.create import create_backbone
from batchformer.models.resnets import CifarResNet, NormedLinear

_LATE = 2  # stages that each expert has of its own
_HIDDEN = 16  # of the router, as released
_PRETRAINED = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay")

Images = Float[Tensor, "batch channels height width"]


class ExpertNetwork(nn.Module):
    """A ResNet with several experts: in eval mode the mean of their logits, in training the logits of each.

    Wang et al., "Long-tailed Recognition by Routing Diverse Distribution-Aware Experts" (ICLR 2021), section 3: the
    experts share the early stages; each has the late ones for itself, narrower than in the plain network, and a cosine
    classifier. The released code has the same, with the factor 30 of the cosines in the network.

    Args:
        shared: stem and early stages.
        experts: the late stages of each expert and the pooling: from shared features to (batch, dim).
        dim: width of the pooled features.
        num_classes: classes.
        scale: factor of the cosines.
    """

    def __init__(
        self, shared: nn.Module, experts: Sequence[nn.Module], dim: int, num_classes: int, scale: float
    ) -> None:
        super().__init__()
        self.shared, self.experts = shared, nn.ModuleList(experts)
        self.classifiers = nn.ModuleList(_unit_classifier(dim, num_classes, scale) for _ in experts)
        self.dim, self.num_classes = dim, num_classes

    def forward(self, images: Images) -> Float[Tensor, "batch experts classes"] | Float[Tensor, "batch classes"]:
        hidden = self.shared(images)
        pairs = zip(self.experts, self.classifiers, strict=True)
        logits = torch.stack([classifier(expert(hidden)) for expert, classifier in pairs], 1)
        return logits if self.training else logits.mean(1)

    def get_classifier(self) -> list[nn.Module]:
        """The classifiers of all experts: where `attach` puts its module."""
        return list(self.classifiers)

    @torch.no_grad()
    def giga_multiply_adds(self, image: Float[Tensor, "1 channels height width"]) -> list[float]:
        """Multiply-adds of an image that leaves after one expert, after two, and so on, in 10^9.

        What papers call GFLOPs: of convolutions and matrix products alone, a multiplication with its addition once.
        Those of a router, some thousands, are left out.
        """
        from torch.utils.flop_counter import FlopCounterMode

        found = []
        with FlopCounterMode(display=False) as counter:
            hidden = self.shared(image)
            for expert, classifier in zip(self.experts, self.classifiers, strict=True):
                classifier(expert(hidden))
                found.append(counter.get_total_flops() / 2e9)
        return found


class Router(nn.Module):
    """Whether an image needs a further expert: one logit from a feature and the largest logits so far.

    RIDE, section 3 and appendix, as released: for each expert but the last a linear layer of its own (to 16, ReLU) on
    the normalised feature, beside it the `top` largest logits of the mean so far, sorted, and one linear layer that
    all experts share.
    """

    def __init__(self, experts: int, dim: int, top: int) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Linear(dim, _HIDDEN) for _ in range(experts - 1))
        self.score = nn.Linear(_HIDDEN + top, 1)
        self.top = top

    def forward(
        self, expert: int, features: Float[Tensor, "batch dim"], mean: Float[Tensor, "batch classes"]
    ) -> Float[Tensor, " batch"]:
        hidden = F.relu(self.features[expert](F.normalize(features.float(), dim=1)))
        largest = mean.topk(self.top, dim=1).values
        return self.score(torch.cat([largest, hidden], 1)).squeeze(1).float()


class RoutedExperts(ExpertNetwork):
    """Experts with a router that decides how many of them an image passes; everything but the router is frozen.

    In eval mode an image leaves after the first expert whose router score is at most `threshold`, with the mean of the
    experts it passed; experts are computed for the images that go on. In training it returns the logits of all experts
    and the router's scores. BatchNorm stays in eval mode.

    Args:
        top: how many of the largest logits the router reads (30 for CIFAR-100, 50 for ImageNet; at most the classes).
        threshold: an image is passed on while the router's probability is above this; with 0 none exits early.
    """

    def __init__(
        self,
        shared: nn.Module,
        experts: Sequence[nn.Module],
        dim: int,
        num_classes: int,
        scale: float,
        top: int = 30,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(shared, experts, dim, num_classes, scale)
        self.threshold = threshold
        self.requires_grad_(False)
        self.router = Router(len(self.experts), dim, min(top, num_classes))
        self.train()

    def train(self, mode: bool = True) -> "RoutedExperts":
        super().train(mode)
        for part in (self.shared, self.experts, self.classifiers):
            part.eval()
        return self

    def forward(self, images: Images) -> Any:
        return self.with_all_experts(images) if self.training else self.routed(images)[0]

    def with_all_experts(
        self, images: Images
    ) -> tuple[Float[Tensor, "batch experts classes"], Float[Tensor, "batch experts-1"]]:
        """The logits of every expert, and the router's score after each but the last."""
        hidden = self.shared(images)
        logits, scores = [], []
        for k, (expert, classifier) in enumerate(zip(self.experts, self.classifiers, strict=True)):
            features = expert(hidden)
            logits.append(classifier(features))
            if k + 1 < len(self.experts):
                scores.append(self.router(k, features, torch.stack(logits).mean(0)))
        return torch.stack(logits, 1), torch.stack(scores, 1)

    def routed(self, images: Images) -> tuple[Float[Tensor, "batch classes"], Int[Tensor, " batch"]]:
        """Logits, and how many experts each image passed."""
        hidden = self.shared(images)
        rows = torch.arange(len(images), device=images.device)  # of the images that go on
        used = torch.zeros_like(rows)
        total = torch.zeros(len(images), self.num_classes, dtype=self.router.score.weight.dtype, device=images.device)
        for k, (expert, classifier) in enumerate(zip(self.experts, self.classifiers, strict=True)):
            features = expert(hidden)
            so_far = total[rows] + classifier(features)
            total[rows], used[rows] = so_far, k + 1
            if k + 1 == len(self.experts):
                break
            on = self.router(k, features, so_far / (k + 1)) > logit(self.threshold)
            rows, hidden = rows[on], hidden[on]
            if not len(rows):
                break
        return total / used[:, None], used


def experts_used(scores: Float[Tensor, "batch experts-1"], threshold: float) -> Int[Tensor, " batch"]:
    """How many experts an image passes, from the router's scores after all of them."""
    return 1 + (scores > logit(threshold)).long().cumprod(1).sum(1)


def means_so_far(logits: Float[Tensor, "batch experts classes"]) -> Float[Tensor, "batch experts classes"]:
    """The mean logits of the first expert, of the first two, and so on."""
    count = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    return logits.float().cumsum(1) / count[:, None]


def logit(probability: float) -> float:
    if not 0 < probability < 1:
        return -math.inf if probability <= 0 else math.inf
    return math.log(probability / (1 - probability))


def expert_network(
    backbone: str,
    num_classes: int,
    experts: int = 3,
    width: float = 0.75,
    scale: float = 30.0,
    top: int | None = None,
    threshold: float = 0.5,
    **arguments: Any,
) -> ExpertNetwork:
    """The experts of a ResNet by name: those of this package, or any of timm's.

    Of the stages the last two (of two stages the last one) are each expert's own, at `width` times their channels: 24
    and 48 of a CIFAR ResNet, 192 and 384 of an ImageNet ResNet. Pretrained weights (timm's `pretrained`) go into the
    shared stages, and into the experts where width is 1.

    Args:
        top: with this number the network has a router (`RoutedExperts`).
        threshold: of the router.
        arguments: passed on to the backbone.
    """
    from timm.models.resnet import ResNet

    whole = create_backbone(backbone, num_classes, **arguments)
    if not isinstance(whole, CifarResNet | ResNet):
        raise UserError(
            f"RIDE's experts are the late stages of a ResNet, and {backbone} is {type(whole).__name__}: choose a "
            "ResNet of this package (resnet32, resnet10, ...) or of timm (resnet18, resnext50_32x4d, ...)."
        )
    small, net = isinstance(whole, CifarResNet), cast(Any, whole)
    stages = [name for name, _ in net.named_children() if name.startswith("layer")]
    if len(stages) < _LATE:
        raise UserError(f"RIDE needs a ResNet of two stages or more, and this {backbone} has {len(stages)}.")
    late = stages[-_LATE:] if len(stages) > _LATE else stages[-1:]
    if small:
        channels = list(net.widths)
    else:
        blocks = [net.get_submodule(name)[0] for name in stages]
        channels = [info["num_chs"] // b.expansion for info, b in zip(net.feature_info[1:], blocks, strict=True)]
    narrow = [round(width * count) if name in late else count for count, name in zip(channels, stages, strict=True)]
    _refuse_too_narrow(experts, width, dict(zip(stages, narrow, strict=True)), late, grows=small)
    if width != 1:
        arguments = {name: value for name, value in arguments.items() if name not in _PRETRAINED}
        arguments["widths" if small else "channels"] = narrow
    made: list[Any] = [create_backbone(backbone, num_classes, **arguments) for _ in range(experts)]
    own = [_late_stages(each, late) for each in made]
    parts = _early_stages(net, late), own, made[0].fc.in_features, num_classes, scale
    split: Any = ExpertNetwork(*parts) if top is None else RoutedExperts(*parts, top, threshold)
    # what dry runs of attach try first
    split.default_cfg = {"input_size": (net.conv1.in_channels, 32, 32)} if small else getattr(net, "default_cfg", None)
    return split


def _refuse_too_narrow(experts: int, width: float, channels: dict[str, int], late: Sequence[str], grows: bool) -> None:
    """`grows`: shortcuts without parameters, which cannot go to fewer channels."""
    narrowest = min(late, key=lambda name: channels[name])
    if channels[narrowest] < experts:
        raise UserError(
            f"{experts} experts are more than the width allows: at model.ride.width {width:g} {narrowest} of an expert "
            f"has {channels[narrowest]} channels. Take fewer experts, or a wider network."
        )
    stages = list(channels)
    for before, stage in pairwise(stages[stages.index(late[0]) - 1 :]):
        if grows and channels[stage] < channels[before]:
            raise UserError(
                f"at model.ride.width {width:g} {stage} of an expert has {channels[stage]} channels and {before} "
                f"{channels[before]}, which shortcuts of CIFAR ResNets cannot reduce: take a larger width."
            )


def _early_stages(net: Any, late: Sequence[str]) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in net.named_children():
        if name == late[0]:
            break
        parts[name] = part
        if isinstance(net, CifarResNet) and name == "bn1":
            parts["act1"] = nn.ReLU()  # a function there
    return nn.Sequential(parts)


def _late_stages(net: Any, late: Sequence[str]) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict((name, net.get_submodule(name)) for name in late)
    if isinstance(net, CifarResNet):
        parts["global_pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    else:
        parts["global_pool"] = net.global_pool
        if net.drop_rate:
            parts["dropout"] = nn.Dropout(net.drop_rate)
    return nn.Sequential(parts)


def _unit_classifier(dim: int, num_classes: int, scale: float) -> NormedLinear:
    """Weights of length one, in directions as released: the length decides how fast the direction is learnt."""
    classifier = NormedLinear(dim, num_classes, scale)
    with torch.no_grad():
        classifier.weight.uniform_(-1, 1)
        classifier.weight.copy_(F.normalize(classifier.weight, dim=1))
    return classifier
