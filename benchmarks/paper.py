"""The numbers of the papers beside ours in docs/results.md (V2: BatchFormerV2), the only ones typed in by hand.

And the studies of our own there: which variant is held to which, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.paper_detection import DETECTION, PaperResult, Row


def _row(accuracy: float, many: float, medium: float, few: float) -> Row:
    return {"accuracy": accuracy, "many": many, "medium": medium, "few": few}


def _top_row(top1: float, many: float, medium: float, few: float) -> Row:
    """Of image classification on a long tail, whose accuracy over all classes is its top-1."""
    return {"top1": top1, "many": many, "medium": medium, "few": few}


def _top(top1: float, top5: float | None = None) -> Row:
    return {"top1": top1} if top5 is None else {"top1": top1, "top5": top5}


MAIN = {
    "cifar100-lt-100": PaperResult(
        "Table 1",
        "CIFAR-100-LT, imbalance 100, ResNet-32, Balanced Softmax",
        _row(50.7, 68.0, 49.7, 31.9),
        _row(51.7, 68.4, 49.3, 34.3),
    ),
    "cifar100-lt-200": PaperResult(
        "Table 1",
        "CIFAR-100-LT, imbalance 200, ResNet-32, Balanced Softmax",
        _row(46.4, 70.0, 51.5, 24.3),
        _row(47.5, 70.2, 53.3, 25.5),
    ),
    "imagenet-lt-r10": PaperResult(
        "Table 2",
        "ImageNet-LT, ResNet-10, Balanced Softmax",
        _row(41.0, 52.6, 38.3, 18.0),
        _row(43.2, 52.8, 40.7, 24.9),
    ),
    "imagenet-lt-r50": PaperResult(
        "Table 2",
        "ImageNet-LT, ResNet-50, Balanced Softmax",
        _row(50.1, 61.1, 47.5, 27.6),
        _row(51.1, 61.4, 47.8, 33.6),
    ),
    "places-lt": PaperResult(
        "Table 4",
        "Places-LT, ResNet-152, BALMS (Balanced Softmax with its meta sampler)",
        _row(37.8, 41.4, 38.8, 29.1),
        _row(38.2, 39.5, 38.3, 35.7),
    ),
    "deit-ti-cifar100-100": PaperResult(
        "V2, Table 7",
        "CIFAR-100 at 224 px, DeiT-Ti from scratch, 100 epochs",
        _top(49.2),
        _top(58.7),
    ),
    "deit-ti-cifar100-300": PaperResult(
        "V2, Table 7",
        "CIFAR-100 at 224 px, DeiT-Ti from scratch, 300 epochs",
        _top(69.2),
        _top(73.4),
    ),
    "deit-ti-imagenet": PaperResult(
        "V2, Table 6",
        "ImageNet, DeiT-Ti, 300 epochs",
        _top(72.2, 91.1),
        _top(72.7, 91.5),
    ),
    "deit-s-cifar100-100": PaperResult(
        "V2, Table 7",
        "CIFAR-100 at 224 px, DeiT-S from scratch, 100 epochs",
        _top(57.5),
        _top(68.5),
    ),
    "deit-s-cifar100-300": PaperResult(
        "V2, Table 7",
        "CIFAR-100 at 224 px, DeiT-S from scratch, 300 epochs",
        _top(72.5),
        _top(75.2),
    ),
    "deit-s-imagenet": PaperResult(
        "V2, Table 6",
        "ImageNet, DeiT-S, 300 epochs",
        _top(79.8, 95.0),
        _top(80.4, 95.2),
    ),
    "deit-b-cifar100-100": PaperResult(
        "V2, Table 7",
        "CIFAR-100 at 224 px, DeiT-B from scratch, 100 epochs",
        _top(52.2),
        _top(66.6),
    ),
    "deit-b-cifar100-300": PaperResult(
        "V2, Table 7",
        "CIFAR-100 at 224 px, DeiT-B from scratch, 300 epochs",
        _top(71.8),
        _top(74.8),
    ),
    "deit-b-imagenet": PaperResult(
        "V2, Table 6",
        "ImageNet, DeiT-B, 300 epochs",
        _top(81.7, 95.5),
        _top(82.2, 95.8),
    ),
    "deit-s-tiny-imagenet": PaperResult(
        "V2, Table 13",
        "Tiny-ImageNet, DeiT-S, mixup and CutMix",
        _top(81.8, 94.1),
        _top(82.9, 94.3),
    ),
    "deit-s-tiny-imagenet-no-mix": PaperResult(
        "V2, Table 13",
        "Tiny-ImageNet, DeiT-S, without mixup and CutMix",
        _top(75.8, 89.6),
        _top(78.2, 95.6),
    ),
    "deit-s-tiny-imagenet-no-cutmix": PaperResult(
        "V2, Table 13",
        "Tiny-ImageNet, DeiT-S, without CutMix",
        _top(79.8, 92.5),
        _top(81.1, 92.3),
    ),
    "deit-s-imagenet-lt-1-12": PaperResult(
        "V2, Table 8",
        "ImageNet-LT, DeiT-S, one module after all blocks",
        _top_row(32.8, 52.5, 24.3, 7.0),
        _top_row(35.5, 55.4, 27.2, 8.6),
    ),
    "deit-s-imagenet-lt-8-12": PaperResult(
        "V2, Table 8",
        "ImageNet-LT, DeiT-S, one module after blocks 8 to 12, as the paper counts",
        _top_row(32.8, 52.5, 24.3, 7.0),
        _top_row(34.7, 54.7, 26.3, 7.2),
    ),
    "deit-s-imagenet-lt-4-12": PaperResult(
        "V2, Table 8",
        "ImageNet-LT, DeiT-S, one module after blocks 4 to 12, as the paper counts",
        _top_row(32.8, 52.5, 24.3, 7.0),
        _top_row(35.5, 55.3, 26.8, 8.4),
    ),
    "deit-s-imagenet-lt-not-shared": PaperResult(
        "V2, Table 8",
        "ImageNet-LT, DeiT-S, a module after each block",
        _top_row(32.8, 52.5, 24.3, 7.0),
        _top_row(35.2, 55.3, 26.7, 8.3),
    ),
    "resnet50-imagenet": PaperResult(
        "appendix, Table 3",
        "ImageNet, ResNet-50, 200 epochs, BatchFormer before the classifier",
        _top(78.9),
        _top(78.9),
    ),
    **DETECTION,
}


@dataclass(frozen=True)
class OwnStudy:
    """Variants of `recipe` under names of their own, none of them a row of a paper.

    `held_to`: for a variant the one it is compared with beside the study's baseline, and why, in words.
    """

    recipe: str
    setting: str
    held_to: Mapping[str, str] = field(default_factory=dict)
    held_to_words: str = ""


_RIVALS = ("attentive-cutmix", "saliencymix", "puzzlemix")
_TRANSMIX = ("transmix", "transmix-d6", "transmix-d8", "transmix-d10", "transmix-rollout")
STUDIES = {
    "vit-cifar100-32": OwnStudy(
        "vit-cifar100-32",
        "CIFAR-100 at 32 px, DeiT-Ti's width and depth with patches of 4, from scratch, 50 epochs",
        # by the steps of benchmarks/results/vit_step.json
        {
            "published": "long",
            "stable": "long",
            "published-block8": "long-block8",
            "stable-block8": "long-block8",
            "stable-split": "long-block8",
        },
        "Held to a baseline that was trained for nearly as many GPU-seconds as the published form in that place: 2.28 "
        "times the epochs after all blocks, 1.24 times after block 8, where a step takes 2.35 and 1.25 times the "
        "baseline's (`vit_step`). The stable form costs more, 2.72 and 1.29 times, and `stable-split` 1.59 times: they "
        "are held to less than they took.",
    ),
    "mix-vit-cifar100-32": OwnStudy(
        "vit-cifar100-32-cutmix",
        "CIFAR-100 at 32 px, DeiT-Ti's width and depth with patches of 4, 50 epochs: the methods of TransMix's Table "
        "2, each in turn with mixup, batch by batch, as DeiT is trained (`baseline`: mixup alone)",
        {
            **dict.fromkeys((*_RIVALS, *_TRANSMIX, "cutmix-batchformer"), "cutmix"),
            "transmix-batchformer": "cutmix-batchformer",
        },
        "Held to CutMix: what these methods choose otherwise than it is the box, the mask or the label. With "
        "BatchFormerV2 TransMix is held to CutMix with BatchFormerV2. Runs of one seed begin with the same weights and "
        "see the same images in the same order; `cutmix` and `cutmix-batchformer` are mixed by timm, which draws other "
        "boxes and shares than the methods here do. The extractor of Attentive CutMix was trained on ImageNet. One "
        "seed trained twice ends half a point apart.",
    ),
    "mix-resnet56-cifar100": OwnStudy(
        "resnet56-cifar100",
        "CIFAR-100, ResNet-56, 50 epochs: the methods of TransMix's Table 2 that need no attention",
        dict.fromkeys(_RIVALS, "cutmix"),
        "Held to CutMix. The extractor of Attentive CutMix was trained on ImageNet.",
    ),
    "cifar100-lt-50-tuning": OwnStudy(
        "cifar100-lt-100", "CIFAR-100-LT, imbalance 50, ResNet-32, Balanced Softmax: where settings were chosen"
    ),
    "cifar100-lt-100-short": OwnStudy(
        "cifar100-lt-100", "CIFAR-100-LT, imbalance 100, a shorter schedule: what the ablations vary"
    ),
}


@dataclass(frozen=True)
class Ablation:
    """A table of the paper that varies one thing; `suffix` begins what our recipe names carry after the main name."""

    title: str
    suffix: str
    reference: str
    paper: dict[str, Row]


ABLATIONS = (
    Ablation(
        "Without the shared classifier",
        "single",
        "Table 10 (ImageNet-LT, ResNet-50, Balanced Softmax)",
        {
            "shared classifier": _row(50.9, 60.7, 47.7, 34.1),
            "without shared classifier": _row(42.4, 41.3, 43.3, 42.2),
        },
    ),
    Ablation(
        "Number of layers",
        "layers",
        "appendix, Table 19 (ImageNet-LT, ResNet-10, Balanced Softmax)",
        {
            "1 layer": _row(43.2, 52.8, 40.4, 25.6),
            "2 layers": _row(43.2, 52.8, 40.3, 26.0),
            "4 layers": _row(42.7, 52.1, 40.1, 25.4),
            "8 layers": _row(43.3, 53.3, 40.2, 26.1),
            "16 layers": _row(43.1, 52.9, 40.0, 26.6),
        },
    ),
    Ablation(
        "Batch size",
        "batch",
        "Table 9 (ImageNet-LT, ResNet-10, Balanced Softmax, learning rate scaled with the batch)",
        {
            "batch 16": _row(43.2, 53.8, 40.2, 23.9),
            "batch 32": _row(43.6, 53.7, 40.7, 24.9),
            "batch 64": _row(43.3, 52.9, 40.8, 25.3),
            "batch 128": _row(43.2, 52.8, 40.7, 24.9),
            "batch 256": _row(42.4, 52.2, 39.5, 25.2),
            "batch 512": _row(42.5, 52.0, 39.6, 25.8),
        },
    ),
)
