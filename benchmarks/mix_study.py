"""The comparison of the TransMix supplement's Table 2, and its Table 1, on CIFAR-100 (32 px, 50 epochs).

    python -m benchmarks.mix_study --network vit --data-root DIR [--jobs 4] [--seeds 0 1 2] [--only transmix cutmix]
    python -m benchmarks.mix_study --network resnet --data-root DIR --extractor mobilenet_v2 --checkpoint FILE

Every variant is a recipe of this package with a few fields changed; see `_study.py` for how they are run. "baseline" is
the training without CutMix: with mixup for the ViT, as the supplement has it for DeiT-S, without any mixing for the
ResNet. The extractor of Attentive CutMix is the timm or torchvision network of that name with the weights of FILE.
"""

from __future__ import annotations

import argparse

from benchmarks._study import Study

METHOD = "--model.mix.method"
TRANSMIX = [METHOD, "transmix"]
MODULE = ["--method", "batchformer"]  # as published, after all blocks: of the readings in v2_study the best here
RIVALS = {name: [METHOD, name] for name in ("attentive-cutmix", "saliencymix")}
PUZZLE = [METHOD, "puzzlemix", "--model.mix.transport_size", "4"]
VIT = Study(
    name="mix-vit-cifar100-32",
    recipe="vit-cifar100-32-cutmix",
    seeds=(0, 1, 2),
    variants={
        "baseline": [METHOD, "mixup"],
        "cutmix": [],
        **RIVALS,
        "puzzlemix": PUZZLE,
        "transmix": TRANSMIX,
        **{f"transmix-d{depth}": [*TRANSMIX, "--model.mix.block", str(depth - 1)] for depth in (6, 8, 10)},
        "transmix-rollout": [*TRANSMIX, "--model.mix.block", "rollout"],
        "cutmix-batchformer": MODULE,
        "transmix-batchformer": [*TRANSMIX, *MODULE],
    },
)
RESNET = Study(
    name="mix-resnet56-cifar100",
    recipe="resnet56-cifar100",
    seeds=(0, 1, 2),
    variants={
        "baseline": [],
        **{
            name: ["--model.mix.cutmix", "1.0", *words]
            for name, words in {"cutmix": [METHOD, "cutmix"], **RIVALS, "puzzlemix": PUZZLE}.items()
        },
    },
)
STUDIES = {"vit": VIT, "resnet": RESNET}


def main() -> int:
    network = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    network.add_argument("--network", choices=list(STUDIES), default="vit")
    study = STUDIES[network.parse_known_args()[0].network]  # decides which variants --only may name
    parser = study.parser(__doc__)
    parser.add_argument("--network", choices=list(STUDIES), default="vit")
    parser.add_argument("--extractor", help="of Attentive CutMix; left out: that of the recipe")
    parser.add_argument("--checkpoint", help="a file with its weights; left out: the library's, if it can fetch them")
    parser.add_argument("--epochs", type=int, help="a shorter look: so many epochs, under a name that says so")
    args = parser.parse_args()
    for field, given in (("extractor", args.extractor), ("extractor_checkpoint", args.checkpoint)):
        if given is not None:
            study.variants["attentive-cutmix"].extend([f"--model.mix.{field}", given])
    if args.epochs is not None:
        study.name += f"-{args.epochs}epochs"
        study.common += ["--trainer.max_epochs", str(args.epochs)]
    return 1 if study.train(args) else 0


if __name__ == "__main__":
    raise SystemExit(main())
