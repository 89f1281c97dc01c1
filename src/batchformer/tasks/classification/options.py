"""The options of image classification: DeiT's recipe field by field, and where BatchFormer goes in it."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from batchformer.attach.locate import block_paths
from batchformer.errors import UserError
from batchformer.training.options import InnerModuleOptions

_HEADS = 4


@dataclass
class InsertionOptions(InnerModuleOptions):
    """How and where the module is attached.

    Without blocks, after and before: BatchFormer before the classifier. With blocks or after: BatchFormerV2 after the
    named submodules. null: the default of the variant.

    Args:
        blocks: numbers of the blocks to insert the module after, counted from 0, or "all". The papers count from 1.
        after: the same by dotted names.
        before: dotted name of the submodule to insert the module before.
        heads: attention heads; null: the backbone's number there (as in the paper; the released code has 4), or 4 if it
            has none.
        layer_scale: initial value of a learnt factor on both branches.
        batch_norm: BatchNorm after the insertion sees each stream alone ("separate") or both ("joint", as published).
    """

    blocks: list[int] | Literal["all"] | None = None
    after: list[str] | None = None
    before: str | None = None
    heads: int | None = None  # type: ignore[assignment]
    layer_scale: float | None = None
    batch_norm: Literal["separate", "joint"] = "separate"

    @property
    def inside(self) -> bool:
        """Whether it is BatchFormerV2 inside the network, not BatchFormer in front of its classifier."""
        return self.blocks is not None or self.after is not None


@dataclass
class MixOptions:
    """Mixing images and labels; with mixup and cutmix at 0 nothing is mixed.

    Args:
        method: "mixup-cutmix" (DeiT's, by timm's Mixup); "mixup" or "cutmix" alone; or a replacement for CutMix
            ("transmix", "attentive-cutmix", "saliencymix", "puzzlemix"; see `batchformer.mix`), with mixup beside it
            unless that is 0.
        mixup: alpha of mixup; 0 turns it off.
        cutmix: alpha of CutMix or its replacement; 0 turns it off.
        prob: probability of mixing a batch.
        switch_prob: if both are on, the probability of CutMix or its replacement.
        mode: one draw for the "batch" (DeiT), for each "pair" ("mixup-cutmix" only) or for each "elem".
        attention_weight: transmix: weight of the attention in the label, against that of the area.
        block: transmix: block whose attention is used, from 0 (the supplement's Table 1 counts from 1), or "rollout";
            null: the last block.
        extractor: attentive-cutmix: the frozen network, by its name in timm or else in torchvision; images are
            normalised for it.
        extractor_checkpoint: a local file with its weights (.pth, .safetensors); null takes the pretrained ones.
        extractor_size: side of its input images; null: not resized.
        transport: puzzlemix: move salient blocks to visible positions.
        transport_size: puzzlemix: side of the moved blocks in pixels, if smaller than those of the mask.
    """

    method: Literal["mixup-cutmix", "mixup", "cutmix", "transmix", "attentive-cutmix", "saliencymix", "puzzlemix"] = (
        "mixup-cutmix"
    )
    mixup: float = 0.8
    cutmix: float = 1.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"
    attention_weight: float = 0.5
    block: int | Literal["rollout"] | None = None
    extractor: str = "resnet50"
    extractor_checkpoint: str | None = None
    extractor_size: int | None = 224
    transport: bool = True
    transport_size: int | None = None

    @property
    def alphas(self) -> tuple[float, float]:
        """Of mixup, and of CutMix or what takes its place; 0 where the method has none."""
        return (0.0 if self.method == "cutmix" else self.mixup), (0.0 if self.method == "mixup" else self.cutmix)

    @property
    def on(self) -> bool:
        return max(self.alphas) > 0 and self.prob > 0

    def check(self) -> None:
        for name, value in {"mixup": self.mixup, "cutmix": self.cutmix}.items():
            if not 0 <= value < math.inf:  # below 0 timm takes it for 0, and at infinity there is nothing to draw
                raise UserError(f"model.mix.{name}={value} must be 0, which switches it off, or above, and finite.")
        if self.method != "mixup-cutmix":  # selected by name: must not be off silently
            alpha = "mixup" if self.method == "mixup" else "cutmix"
            if getattr(self, alpha) == 0:
                raise UserError(
                    f"model.mix.method {self.method} mixes nothing while its alpha is 0: add --model.mix.{alpha} 1."
                )
        if self.mode == "pair" and self.method != "mixup-cutmix":
            raise UserError(f'model.mix.mode "pair" is for mixup-cutmix: with {self.method} take "batch" or "elem".')
        for name, chance in {"prob": self.prob, "switch_prob": self.switch_prob}.items():
            if not 0 <= chance <= 1:
                raise UserError(f"model.mix.{name}={chance} must lie between 0 and 1.")


@dataclass
class DistillationOptions:
    """DeiT's distillation: the class head learns the labels, the head of the distillation token the teacher.

    Args:
        kind: "hard" (the teacher's decision), "soft" (its distribution), or "none".
        teacher: any name timm knows.
        teacher_args: passed on to the teacher.
        checkpoint: a local file with the teacher's weights (.pth, .safetensors); null takes timm's pretrained ones.
        alpha: weight of the distillation; 1 - alpha is that of the labels.
        tau: soft: temperature.
    """

    kind: Literal["none", "hard", "soft"] = "none"
    teacher: str = "regnety_160"
    teacher_args: dict[str, Any] | None = None
    checkpoint: str | None = None
    alpha: float = 0.5
    tau: float = 1.0

    def check(self) -> None:
        """Warn where a teacher is set but not used: a recipe with one may be run without it on purpose."""
        for name in ("teacher", "teacher_args", "checkpoint"):
            if self.kind == "none" and getattr(self, name) != getattr(DistillationOptions, name):
                warnings.warn(
                    f"model.distillation.{name} {getattr(self, name)} has no effect while model.distillation.kind is "
                    f"none: add --model.distillation.kind hard (or soft) to be taught.",
                    stacklevel=2,
                )


def heads_at(net: nn.Module, options: InsertionOptions) -> int:
    """The number the options give, else the backbone's own at the places, else 4.

    V2: "the same number of heads with the corresponding baseline model" for classification; the released code and the
    papers' other tasks have 4 (F13). A CNN, and the feature in front of the classifier, have no heads of their own.
    """
    if options.heads is not None:
        return options.heads
    if not options.inside:
        return _HEADS
    places: Sequence[str] = block_paths(net, options.blocks) if options.blocks is not None else options.after or ()
    inner = (part for place in places for part in net.get_submodule(place).modules())
    numbers_found = (getattr(part, "num_heads", None) for part in inner)
    found = {number for number in numbers_found if isinstance(number, int)}
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)))
        raise UserError(f"the backbone has {numbers} heads at the places: say model.batchformer.heads.")
    return found.pop() if found else _HEADS
