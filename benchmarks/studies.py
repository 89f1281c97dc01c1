"""The studies: recipes whose variants are trained over targets and seeds by `python -m benchmarks.study NAME`.

A further study is an entry of `STUDIES`; the pages of docs/ that show its results read the same entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from batchformer.recipes import find_recipe, read_recipe

WEIGHTS = "{weights}"  # in the settings of a variant: the file of --weights
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    variant: str
    target: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.variant, self.target, f"seed{self.seed}") if part)


@dataclass(frozen=True)
class Study:
    """Variants of a recipe, over targets and seeds; the first variant is the one that the others are held to.

    Results are `results/<study>/<variant>-<target>-seedN.json`. With `folders` each variant has a folder of its own,
    `results/<study>-<variant>/<method>-seedN.json`, except those that are `itself`, one for each method:
    `results/<study>/<method>-seedN.json`.
    """

    name: str
    recipe: str
    # name -> "key=value key=value"; nothing: the recipe as it is, or its own variant of that name
    variants: Mapping[str, str]
    seeds: Sequence[int] = SEEDS
    targets: Sequence[str] = ("",)
    seeds_of: Mapping[str, Sequence[int]] = field(default_factory=dict)  # variants that have other seeds
    after: Mapping[str, str] = field(default_factory=dict)  # variant -> the one whose run of that seed it begins with
    probes: Sequence[str] = ()  # the protocols of `batchformer probe` for each run
    analysis: bool = False  # at the end of each run
    folders: bool = False
    itself: Sequence[str] = ()
    setting: str = ""  # what is trained, in words: with them a study with `folders` has a section in docs/results.md
    held_to: Mapping[str, str] = field(default_factory=dict)  # variant -> what it is compared with beside the first
    held_to_words: str = ""

    def settings(self, variant: str) -> list[tuple[str, str]]:
        """The keys that make the variant, and their values."""
        return [(key, value) for key, _, value in (each.partition("=") for each in self.variants[variant].split())]

    def words(self, variant: str) -> list[str]:
        """The arguments of `batchformer fit` that make the variant."""
        settings = self.settings(variant)
        if not self.folders:
            keys = ",".join(f"{key}={value}" for key, value in settings)
            return [self.recipe, "--variant", f"{variant}:{keys}" if keys else variant]
        given = [("--method" if key == "model.method" else f"--{key}", value) for key, value in settings]
        return [self.recipe, "--name", self.folder(variant), *(word for pair in given for word in pair)]

    def folder(self, variant: str) -> str:
        """Where among the results those of the variant are."""
        return self.name if not self.folders or variant in self.itself else f"{self.name}-{variant}"

    def file(self, run: Run) -> str:
        """The result file of a run."""
        name = f"{self.method(run.variant)}-seed{run.seed}" if self.folders else run.name
        return f"{self.folder(run.variant)}/{name}.json"

    def method(self, variant: str) -> str:
        given = dict(self.settings(variant)).get("model.method")
        return given or read_recipe(find_recipe(self.recipe)[1])["model"].get("method", "batchformer")

    def first(self, run: Run) -> Run | None:
        """The run whose weights this one begins with."""
        return Run(self.after[run.variant], run.target, run.seed) if run.variant in self.after else None

    def names_weights(self, variants: Sequence[str]) -> bool:
        """Whether one of these begins with the file of --weights by itself."""
        return any(WEIGHTS in self.variants[variant] for variant in variants)

    def runs(self, seeds: Sequence[int] | None, only: Sequence[str], targets: Sequence[str]) -> list[Run]:
        """Seed by seed, so that a study cut short is balanced."""
        wanted = {name: self.seeds_of.get(name, self.seeds) if seeds is None else seeds for name in only}
        every = dict.fromkeys(seed for each in wanted.values() for seed in each)
        return [Run(name, target, seed) for seed, target, name in product(every, targets, only) if seed in wanted[name]]


def _with(common: str, variants: Mapping[str, str]) -> dict[str, str]:
    """The variants with these settings, before their own."""
    return {name: f"{common} {settings}" for name, settings in variants.items()}


def _under(section: str, variants: Mapping[str, str]) -> dict[str, str]:
    """The variants, whose settings are all of this section of the recipe."""
    return {name: " ".join(f"{section}.{each}" for each in settings.split()) for name, settings in variants.items()}


BASELINE, BATCHFORMER = "model.method=baseline", "model.method=batchformer"
PAIR = {"baseline": BASELINE, "batchformer": BATCHFORMER}


def _of_recipe(recipe: str, extra: Mapping[str, str] | None = None, **more: object) -> Study:
    """The variants that the recipe names, or with and without the module, and the extra ones."""
    own = read_recipe(find_recipe(recipe)[1]).get("variants")
    return Study(recipe, recipe, {**(dict.fromkeys(own, "") if own else PAIR), **(extra or {})}, **more)  # type: ignore[arg-type]


_PACS = ("art_painting", "cartoon", "photo", "sketch")
_RANDOM = f"{BASELINE} data.words=[random] model.pairs.name"  # vectors in place of words: the control
_OF_PAIRS = {
    "label-embedding": f"{BASELINE} model.pairs.name=label_embedding",
    "compcos-random": f"{_RANDOM}=compcos",
    "cge-random": f"{_RANDOM}=cge",
}
_FROM_MOCO = "run.init_from.backbone=runs/moco-v2-imagenette-study"  # the study of that name comes first

_OF_RECIPES = (
    _of_recipe(
        "pacs-128",
        {  # what the released code does, the module frozen at its random start; and the domains of IRM mixed
            "erm+batchformer-frozen": f"{BATCHFORMER} model.optimizer.module_lr_factor=0.0",
            "irm+batchformer-mixed": f"{BATCHFORMER} model.algorithm.name=irm model.algorithm.mixed_domains=true",
        },
        targets=_PACS,
        seeds_of=dict.fromkeys(("erm", "erm+batchformer"), range(5)),
    ),
    _of_recipe("pacs-mobilenetv2", targets=_PACS),
    _of_recipe("imagenette-lt", seeds=range(5)),
    _of_recipe("pacs-128-adapt", targets=("sketch",)),
    _of_recipe("mnist-usps", targets=("usps", "mnist")),
    _of_recipe("digits-domains", targets=tuple(f"{angle}-degrees" for angle in range(0, 90, 15))),
    *(_of_recipe(name, seeds=range(5)) for name in ("digits-lt", "mae-digits", "digits-states")),
    _of_recipe(
        "moco-digits",
        {  # why the module lowers k-NN there, and what k-NN says: `untrained` has random weights
            "untrained": f"{BASELINE} model.optimizer.lr=0.0 trainer.limit_train_batches=1",
            "batchformer-separate": f"{BATCHFORMER} model.contrast.batch_norm=separate",
            "batchformer-no-dropout": f"{BATCHFORMER} model.batchformer.dropout=0.0",
        },
        seeds=range(5),
    ),
    *(_of_recipe(name) for name in ("vit-digits", "digits-gzsl", "hands-tiny", "cub-gzsl", "cub-gzsl-sentences")),
    _of_recipe("plantvillage-czsl", _OF_PAIRS),
    _of_recipe("plantvillage-czsl-trained", _OF_PAIRS),
    _of_recipe(
        "moco-v3-cifar100",
        {  # the module frozen, and the plain pairing alone
            "batchformer-frozen": f"{BATCHFORMER} model.contrast.frozen_module=true",
            "batchformer-plain": f"{BATCHFORMER} model.contrast.pairs=plain",
        },
        seeds_of=dict.fromkeys(("batchformer-frozen", "batchformer-plain"), (0,)),
        probes=("moco-v3",),
    ),
    _of_recipe("moco-v2-cifar100", seeds=(0,), probes=("moco-v3",)),
    _of_recipe("mae-cifar100", probes=("mae", "finetune")),
    _of_recipe("moco-v2-imagenette", seeds=(0,)),
    Study(
        "voc-faster-rcnn-r18",
        "voc-faster-rcnn-r18",
        {  # --weights: ImageNet weights of a ResNet-50
            "scratch": "run.init_from={}",
            "moco": f"{_FROM_MOCO}/baseline-seed0",
            "moco+batchformer": f"{_FROM_MOCO}/batchformer-seed0",
            "imagenet-resnet50": f"model.backbone=resnet50_stride_in_1x1 run.init_from.backbone={WEIGHTS}",
        },
        seeds=(0,),
    ),
    _of_recipe(
        "hands-rendered",
        # the baseline trained as long as the module takes: a guess by the number of operations, 1.41 times as many
        {"baseline-long": f"{BASELINE} trainer.max_epochs=42 model.schedule.milestones=[31,39]"},
    ),
)

# long-tailed recognition: methods with and without BatchFormer
_LONG_TAILED = (
    "cifar100-lt-100-paco",
    "cifar100-lt-100-paco-balanced",
    *(f"cifar100-lt-200-{stage}" for stage in ("decoupled", "balms", "crt", "lws", "tau-norm")),
)
# the second stage of cifar100-lt-100-ride-routed; its results have accuracy against experts used
_ROUTER = (
    "model.ride.train=router trainer.max_epochs=5 data.batch_size=512 model.optimizer.lr=0.01 "
    "model.schedule.name=cosine model.schedule.warmup_epochs=0"
)
_RIDE = Study(
    "cifar100-lt-100-ride",
    "cifar100-lt-100-ride",
    {
        **PAIR,
        "routed": f"{BASELINE} {_ROUTER}",
        "routed-batchformer": f"{BATCHFORMER} {_ROUTER}",
        "sum": f"{BATCHFORMER} model.loss_weight=2",  # of the losses of both streams, as released, not their mean
        "one-stream": f"{BATCHFORMER} model.batchformer.streams=single",  # as published for ImageNet-LT
        "no-diversity": f"{BASELINE} model.ride.diversity=0",
    },
    after={"routed": "baseline", "routed-batchformer": "batchformer"},
    analysis=True,
    folders=True,
    itself=tuple(PAIR),
)
# the second stages of the recipes cifar100-lt-200-*
_SECOND = {
    "decoupled": "model.algorithm=decoupled",
    "balms": "model.algorithm=balms model.balms.frozen=true",
    "crt": "model.algorithm=crt",
    "lws": "model.algorithm=lws",
    "tau-norm": "model.algorithm=tau_norm trainer.max_epochs=1 trainer.check_val_every_n_epoch=1",
}


def _classifiers(name: str, recipe: str, first: str, second: str, setting: str) -> Study:
    """Networks trained with the settings `first`, and on the features of each the second stages."""
    suffixes = {"": "baseline", "-batchformer": "batchformer"}
    stages = {(stage, suffix): method for suffix, method in suffixes.items() for stage in _SECOND}
    return Study(
        f"{recipe}-{name}",
        recipe,
        {method: f"{words} {first}" for method, words in PAIR.items()}
        | {
            f"{stage}{suffix}": f"{PAIR[method]} {second} {_SECOND[stage]}"
            for (stage, suffix), method in stages.items()
        },
        after={f"{stage}{suffix}": method for (stage, suffix), method in stages.items()},
        analysis=True,
        folders=True,
        setting=setting,
        held_to={f"{stage}-batchformer": stage for stage in _SECOND},
        held_to_words="With BatchFormer, in both stages, each is held to the same without it.",
    )


_OF_CLASSIFIERS = (
    *(
        _classifiers(
            name,
            "cifar100-lt-200",
            f"model.loss.name={loss}",
            "trainer.max_epochs=106 trainer.check_val_every_n_epoch=106 model.schedule.warmup_epochs=0",
            f"CIFAR-100-LT, imbalance 200, ResNet-32: networks trained with {words} (`baseline`, `batchformer`), and "
            "classifiers trained for 2,000 iterations on their frozen features; on those of softmax Ren et al. report "
            "47.2 for decoupled Balanced Softmax and 48.0 for BALMS",
        )
        for name, loss, words in (
            ("on-balanced", "balanced_softmax", "Balanced Softmax"),
            ("on-softmax", "cross_entropy", "softmax"),
        )
    ),
    _classifiers(
        "on-softmax",
        "imagenette-lt",
        "model.loss.name=cross_entropy trainer.check_val_every_n_epoch=20",
        "trainer.max_epochs=60 trainer.check_val_every_n_epoch=60 model.schedule.warmup_epochs=0 "
        "model.decoupled.features=cached model.optimizer.lr=0.0125",  # 0.1 for 512 images, as published
        "Imagenette at 64 px made long-tailed (imbalance 100), MobileNetV2 from ImageNet weights: networks trained "
        "with softmax (`baseline`, `batchformer`), and classifiers trained for 60 epochs on their frozen features",
    ),
)

# BatchFormerV2 in a ViT: readings of the paper, and the stable form
_V2 = _under(
    "model.batchformer",
    {
        "published": "",  # post-LN, dropout 0.5, two streams, after all twelve blocks
        "published-block8": "blocks=[8]",
        "stable": "variant=stable",
        "stable-block8": "variant=stable blocks=[8]",
        "stable-split": "variant=stable streams=split",
        "stable-single": "variant=stable streams=single",
        "published-split": "streams=split",
        "published-split-block8": "blocks=[8] streams=split",
        "published-single": "streams=single",
        "published-shared": "share=true",
        "published-alone": "group_size=1",  # the control: all of it but the relations
        "published-dropout01": "dropout=0.1",
        "pre": "norm=pre layer_scale=0.1",
        "stable-scale02": "variant=stable layer_scale=0.2",
        "stable-dropout01": "variant=stable dropout=0.1",
        "stable-scale03-block8": "variant=stable blocks=[8] layer_scale=0.3",
        "stable-last4": "variant=stable blocks=[8,9,10,11]",
    },
)
VIT = Study(
    "vit-cifar100-32",
    "vit-cifar100-32",
    {
        "baseline": BASELINE,
        **_V2,
        # nearly as many GPU-seconds as the published form after all blocks and after block 8, by `vit_step`
        "long": f"{BASELINE} trainer.max_epochs=114",
        "long-block8": f"{BASELINE} trainer.max_epochs=62",
    },
    analysis=True,
    folders=True,
    setting="CIFAR-100 at 32 px, DeiT-Ti's width and depth with patches of 4, from scratch, 50 epochs",
    held_to={
        "published": "long",
        "stable": "long",
        "published-block8": "long-block8",
        "stable-block8": "long-block8",
        "stable-split": "long-block8",
    },
    held_to_words="Held to a baseline that was trained for nearly as many GPU-seconds as the published form in that "
    "place: 2.28 times the epochs after all blocks, 1.24 times after block 8, where a step takes 2.35 and 1.25 times "
    "the baseline's (`vit_step`). The stable form costs more, 2.72 and 1.29 times, and `stable-split` 1.59 times: they "
    "are held to less than they took.",
)
_TABLE_7 = Study(  # of V2, at 224 px
    "deit-ti-cifar100-100",
    "deit-ti-cifar100-100",
    {name: VIT.variants[name] for name in ("baseline", "published", "stable")},
    seeds=(0,),
    analysis=True,
    folders=True,
    itself=("baseline", "published"),
)

# TransMix's Table 2 of the supplement, and its Table 1. The extractor of Attentive CutMix, where it is another one:
# --only attentive-cutmix -- --model.mix.extractor mobilenet_v2 --model.mix.extractor_checkpoint FILE
_RIVALS = _under(
    "model.mix",
    {
        "attentive-cutmix": "method=attentive-cutmix",
        "saliencymix": "method=saliencymix",
        "puzzlemix": "method=puzzlemix transport_size=4",
    },
)
_TRANSMIX = _under(
    "model.mix",
    {
        "transmix": "method=transmix",
        **{f"transmix-d{depth}": f"method=transmix block={depth - 1}" for depth in (6, 8, 10)},
        "transmix-rollout": "method=transmix block=rollout",
    },
)
_MIX = (
    Study(
        "mix-vit-cifar100-32",
        "vit-cifar100-32-cutmix",
        {
            "baseline": "model.mix.method=mixup",  # as the supplement has it for DeiT-S
            "cutmix": "",
            **_RIVALS,
            **_TRANSMIX,
            # as published, after all blocks: of the readings of `vit-cifar100-32` the best here
            "cutmix-batchformer": BATCHFORMER,
            "transmix-batchformer": f"{_TRANSMIX['transmix']} {BATCHFORMER}",
        },
        analysis=True,
        folders=True,
        setting="CIFAR-100 at 32 px, DeiT-Ti's width and depth with patches of 4, 50 epochs: the methods of TransMix's "
        "Table 2, each in turn with mixup, batch by batch, as DeiT is trained (`baseline`: mixup alone)",
        held_to={
            **dict.fromkeys((*_RIVALS, *_TRANSMIX, "cutmix-batchformer"), "cutmix"),
            "transmix-batchformer": "cutmix-batchformer",
        },
        held_to_words="Held to CutMix: what these methods choose otherwise than it is the box, the mask or the label. "
        "With BatchFormerV2 TransMix is held to CutMix with BatchFormerV2. Runs of one seed begin with the same "
        "weights and see the same images in the same order; `cutmix` and `cutmix-batchformer` are mixed by timm, which "
        "draws other boxes and shares than the methods here do. The extractor of Attentive CutMix was trained on "
        "ImageNet. One seed trained twice ends half a point apart.",
    ),
    Study(
        "mix-resnet56-cifar100",
        "resnet56-cifar100",
        {
            "baseline": "",
            **_with("model.mix.cutmix=1.0", {"cutmix": "model.mix.method=cutmix", **_RIVALS}),
        },
        analysis=True,
        folders=True,
        setting="CIFAR-100, ResNet-56, 50 epochs: the methods of TransMix's Table 2 that need no attention",
        held_to=dict.fromkeys(_RIVALS, "cutmix"),
        held_to_words="Held to CutMix. The extractor of Attentive CutMix was trained on ImageNet.",
    ),
)

# settings of BatchFormer on CIFAR-LT: tuned at imbalance 50, half of its schedule, and seeds that no other result has
_TUNING = Study(
    "cifar100-lt-50-tuning",
    "cifar100-lt-100",
    _with(
        "data.imbalance=50 trainer.max_epochs=260 model.schedule.warmup_epochs=16",
        {
            "baseline": BASELINE,
            "released": "",  # stream_loss released, a tenth of the learning rate for the module
            "mean": "model.stream_loss=mean",
            "released-lr1": "model.optimizer.module_lr_factor=1.0",
            "mean-lr1": "model.stream_loss=mean model.optimizer.module_lr_factor=1.0",
            "group128": "model.batchformer.group_size=128",
            "group32": "model.batchformer.group_size=32",
            "baseline-x3": f"{BASELINE} model.loss_weight=3",  # the loss scale of "released", without us
            "released-x2": "model.loss_weight=2",
            "dropout01": "model.batchformer.dropout=0.1",
            "pre": "model.batchformer.norm=pre",
        },
    ),
    seeds=(10, 11, 12),
    folders=True,
    setting="CIFAR-100-LT, imbalance 50, ResNet-32, Balanced Softmax: where settings were chosen",
)
_SHORT = Study(
    "cifar100-lt-100-short",
    "cifar100-lt-100",
    _with(
        "trainer.max_epochs=74 model.schedule.warmup_epochs=5 model.compile=false",
        {
            **PAIR,
            "single": "model.batchformer.streams=single",
            "layers2": "model.batchformer.layers=2",
            "layers4": "model.batchformer.layers=4",
            "batch256": "data.batch_size=256 model.optimizer.lr=0.05",
        },
    ),
    folders=True,
    itself=tuple(PAIR),
    setting="CIFAR-100-LT, imbalance 100, a shorter schedule: what the ablations vary",
)

# detectors trained for minutes on 32 images, and one stream alone: V2's Table 11, the failure of ports of the method.
# All rows go through the module, and the detector is tested without the module (and, beside it, with it).
# --weights backbone=FILE: ImageNet weights of MobileNetV2. Tables of these studies: `coco128.py`
DETECTORS = ("detr", "conditional-detr", "smca-detr", "deformable-detr", "deformable-detr-refine")
_SINGLE = "model.batchformer.streams=single model.evaluate_with_batch=true"
_EACH_LAYER = "model.batchformer.encoder_layers=[0,1,2]"  # not the first alone; the recipes' detectors have three
_SINGLES = {
    "single": _SINGLE,
    "all": f"{_EACH_LAYER} model.evaluate_with_batch=true",
    "single-all": f"{_EACH_LAYER} {_SINGLE}",
}
_COCO128 = (
    *(
        Study(
            f"coco128-{detector}",
            f"coco128-{detector}",
            _with("trainer.max_time=00:00:03:00", PAIR | (_SINGLES if detector in ("detr", "deformable-detr") else {})),
            seeds=(0,),
            analysis=True,
            folders=True,
            itself=tuple(PAIR),
        )
        for detector in DETECTORS
    ),
    _of_recipe("coco128-panoptic-boxes", seeds=(0,), analysis=True),
    Study(  # the mask head on the detectors of the study before
        "coco128-panoptic",
        "coco128-panoptic",
        {name: f"{PAIR[name]} run.init_from.detector=runs/coco128-panoptic-boxes-study/{name}-seed0" for name in PAIR},
        seeds=(0,),
        analysis=True,
    ),
)

STUDIES = {
    study.name: study
    for study in (
        *_OF_RECIPES,
        VIT,
        _TABLE_7,
        *_MIX,
        _TUNING,
        _SHORT,
        _RIDE,
        *(_of_recipe(name, analysis=True) for name in _LONG_TAILED),
        _of_recipe("cifar100-lt-200-paco", analysis=True, seeds=(0,)),
        *_OF_CLASSIFIERS,
        *_COCO128,
    )
}
