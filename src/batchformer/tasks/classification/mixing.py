"""Mixing of training batches, with random numbers that are a function of (seed, process, step)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer import mix as bfmix
from batchformer.errors import UserError, did_you_mean
from batchformer.hub import fetching
from batchformer.mix.base import Images, SoftLabels
from batchformer.mix.transmix import TransMixed
from batchformer.models.create import load_file
from batchformer.tasks.classification.options import MixOptions
from batchformer.training.compiling import compile_in_place
from batchformer.training.reseed import seed_from


class LateTargets(NamedTuple):
    """What TransMix computes the targets from after the forward pass, as tensors that a captured graph can take."""

    labels: SoftLabels
    partner: Int[Tensor, " batch"]
    share: Float[Tensor, " batch"]
    mask: Float[Tensor, "#batch 1 height width"]


class Mixing(ABC):
    """Base class: images and label ids to mixed images and soft labels (B, K), with smoothing, or `LateTargets`."""

    @abstractmethod
    def __call__(
        self, images: Images, labels: Int[Tensor, " batch"], *numbers: int
    ) -> tuple[Images, SoftLabels | LateTargets]:
        """Mix a batch; `numbers` seed it."""

    def expect(self, images: Images, late: LateTargets) -> TransMixed:
        """Called right before the forward pass of a batch with late targets; the result has them after it."""
        raise TypeError(f"{type(self).__name__} makes no late targets")

    def compile(self) -> None:  # noqa: B027 (no-op by default)
        """Compile what the mixing runs beside the model in training."""

    def close(self) -> None:  # noqa: B027 (no-op by default)
        """Remove what was inserted into the model."""


class SeededMixup(Mixing):
    """timm's mixup and CutMix, seeded.

    timm draws from numpy's global generator: here it is seeded for the call and restored after it, so that the mixing
    of a batch is a function of the given numbers. And timm mixes in place, while the batch may be a view of the data:
    mixing of whole batches is implemented out of place here, which moves half the bytes of a copy mixed in place.
    """

    def __init__(self, options: MixOptions, label_smoothing: float, num_classes: int) -> None:
        from timm.data import Mixup

        self.mix = Mixup(
            mixup_alpha=options.mixup,
            cutmix_alpha=options.cutmix,
            prob=options.prob,
            switch_prob=options.switch_prob,
            mode=options.mode,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Images, labels: Int[Tensor, " batch"], *numbers: int) -> tuple[Images, SoftLabels]:
        if len(images) % 2:
            raise UserError(
                f"mixup and CutMix mix images in pairs, and this batch has {len(images)}: set an even data.batch_size "
                f"and data.drop_last true, or model.mix.mixup 0 and model.mix.cutmix 0."
            )
        from timm.data.mixup import mixup_target

        before = np.random.get_state()
        np.random.seed(seed_from(*numbers) % 2**32)
        try:
            if self.mix.mode != "batch":
                return self.mix(images.clone(), labels)
            mixed, kept = self._mix_batch(images)
            return mixed, mixup_target(labels, self.mix.num_classes, kept, self.mix.label_smoothing)
        finally:
            np.random.set_state(before)

    def _mix_batch(self, images: Images) -> tuple[Images, float]:
        """Mix the batch with itself in reverse order; returns it and the share of the first image of each pair."""
        from timm.data.mixup import cutmix_bbox_and_lam

        kept, cut = self.mix._params_per_batch()
        if kept == 1.0:
            return images, kept
        if not cut:
            return torch.lerp(images.flip(0), images, kept), kept
        (top, bottom, left, right), kept = cutmix_bbox_and_lam(images.shape, kept, correct_lam=self.mix.correct_lam)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right].flip(0)
        return mixed, kept


class SeededMix(Mixing):
    """A method of `batchformer.mix`, switched with mixup from batch to batch where that is on.

    Whatever a method computes for the mixing itself (the gradient of Puzzle-Mix, the extractor of Attentive CutMix) is
    computed here, before the step, and so outside a captured graph. TransMix's targets belong into the step. With mixup
    too a captured graph must serve both, so the mask of a mixup batch is its share at every pixel: attention sums to
    one, and its part of such a mask is that share again.
    """

    def __init__(self, methods: Sequence[bfmix.Mix], weights: Sequence[float]) -> None:
        self.generator = torch.Generator()
        self.mix = bfmix.MixSwitch(methods, weights, generator=self.generator)
        self.transmix = next((method for method in methods if isinstance(method, bfmix.TransMix)), None)

    def __call__(
        self, images: Images, labels: Int[Tensor, " batch"], *numbers: int
    ) -> tuple[Images, SoftLabels | LateTargets]:
        self.generator.manual_seed(seed_from(*numbers))
        mixed = self.mix(images, labels)
        # Autocast's copies of weights from a forward pass of the mixing: a graph captured next would keep reading them.
        torch.clear_autocast_cache()
        if self.transmix is None:
            return mixed.images, mixed.targets()
        mask = mixed.mask
        if mask is None:
            share = mixed.share if self.transmix.per_sample else mixed.share[:1]
            mask = share[:, None, None, None].expand(-1, 1, *images.shape[-2:])
        return mixed.images, LateTargets(mixed.labels, mixed.partner, mixed.share, mask)

    def expect(self, images: Images, late: LateTargets) -> TransMixed:
        assert self.transmix is not None
        mixed = TransMixed(images, *late, mix=self.transmix)
        self.transmix.expect(mixed)
        return mixed

    def compile(self) -> None:
        for method in self.mix.mixes:
            if isinstance(method, bfmix.AttentiveCutMix):
                method.extractor.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                compile_in_place(method.extractor)

    def close(self) -> None:
        self.mix.close()


def build_mixing(
    options: MixOptions,
    net: nn.Module,
    num_classes: int,
    label_smoothing: float = 0.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Mixing:
    """The mixing that the options select; `net` is the model in training, mean and std normalise its images."""
    if options.method == "mixup-cutmix":
        return SeededMixup(options, label_smoothing, num_classes)
    mixup, cutmix = options.alphas
    # "flip" pairs as timm does, and TransMix's released code. One seed gives all these the same draws, and timm others.
    shared = {"prob": options.prob, "label_smoothing": label_smoothing, "partner": "flip",
              "per_sample": options.mode == "elem"}  # fmt: skip
    methods: list[bfmix.Mix] = []
    weights = []
    if mixup > 0:
        methods.append(bfmix.Mixup(num_classes, alpha=mixup, **shared))  # type: ignore[arg-type]
        weights.append(1 - options.switch_prob if cutmix > 0 else 1.0)
    if cutmix > 0:
        methods.append(_in_cutmix_place(options, net, num_classes, mean, std, {"alpha": cutmix, **shared}))
        weights.append(options.switch_prob if mixup > 0 else 1.0)
    return SeededMix(methods, weights)


def _in_cutmix_place(
    options: MixOptions,
    net: nn.Module,
    num_classes: int,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    shared: dict,
) -> bfmix.Mix:
    if options.method == "transmix":
        return bfmix.TransMix(
            net, num_classes, attention_weight=options.attention_weight, block=options.block, **shared
        )
    if options.method == "attentive-cutmix":
        extractor = load_extractor(options.extractor, options.extractor_checkpoint)
        prepare = None
        if mean is not None and std is not None:
            prepare = bfmix.Renormalize(mean, std, *wanted_normalisation(options.extractor))
        return bfmix.AttentiveCutMix(extractor, num_classes, size=options.extractor_size, prepare=prepare, **shared)
    if options.method == "saliencymix":
        return bfmix.SaliencyMix(num_classes, mean=mean, std=std, **shared)
    if options.method == "puzzlemix":
        moving = {"transport": options.transport, "transport_size": options.transport_size}
        return bfmix.PuzzleMix(net, num_classes, mean=mean, std=std, **moving, **shared)  # type: ignore[arg-type]
    return bfmix.CutMix(num_classes, **shared)


def load_extractor(name: str, checkpoint: str | None = None) -> nn.Module:
    """A timm model, or a torchvision one where timm knows no such name, cut off after its last feature map.

    With `checkpoint` its weights come from that file, without it they are the pretrained ones of the library, which
    may have to be downloaded.
    """
    try:
        with fetching() if checkpoint is None else nullcontext():
            model = _create(name, pretrained=checkpoint is None)
    except (OSError, RuntimeError) as problem:  # huggingface_hub's and urllib's are OSErrors
        if checkpoint is not None:
            raise
        raise UserError(
            f"the pretrained weights of the extractor {name} could not be fetched ({type(problem).__name__}): give a "
            f"file that holds them, --model.mix.extractor_checkpoint FILE."
        ) from problem
    if checkpoint is not None:
        load_file(model, name, checkpoint, "model.mix.extractor_checkpoint", use_ema=False)
    return bfmix.feature_map(model.eval().requires_grad_(False))


def wanted_normalisation(name: str) -> tuple[Sequence[float], ...]:
    """The mean and std a timm model was trained with; nothing for torchvision's, which all have ImageNet's."""
    import timm

    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return () if config is None else (config.mean, config.std)


def _create(name: str, pretrained: bool) -> nn.Module:
    import timm
    import torchvision

    if timm.is_model(name):
        return timm.create_model(name, pretrained=pretrained)
    if name in torchvision.models.list_models():
        return torchvision.models.get_model(name, weights="DEFAULT" if pretrained else None)
    hint = did_you_mean(name, [*timm.list_models(), *torchvision.models.list_models()], count=3)
    raise UserError(
        f"model.mix.extractor {name!r} is known neither to timm nor to torchvision.{hint or ' See timm.list_models().'}"
    )
