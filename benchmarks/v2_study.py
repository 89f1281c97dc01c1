"""What BatchFormerV2 gives a ViT on CIFAR-100: readings of the paper, and the stable form.

    python -m benchmarks.v2_study --data-root DIR [--jobs 4] [--seeds 0 1 2] [--only stable split]
    python -m benchmarks.v2_study --data-root DIR --size 224 --jobs 1

Every variant is a recipe with a few fields changed: `vit-cifar100-32` (50 epochs, three seeds), or with `--size 224`
`deit-ti-cifar100-100`, V2's Table 7 (100 epochs, one seed); see `_study.py` for how they are run. "long" is
the baseline trained for as many GPU-seconds as the module after all blocks, "long-block8" as the one after block 8:
`--long-epochs` says how many epochs that is (`vit_step.py` measures the ratio).
"""

from __future__ import annotations

import sys

from benchmarks._study import Study

OPTION = "--model.batchformer."
STABLE = [f"{OPTION}variant", "stable"]
BLOCK_8 = [f"{OPTION}blocks", "[8]"]
STUDY = Study(
    name="vit-cifar100-32",
    recipe="vit-cifar100-32",
    seeds=(0, 1, 2),
    variants={
        "baseline": ["--method", "baseline"],
        "published": [],  # post-LN, dropout 0.5, two streams, after all twelve blocks
        "published-block8": BLOCK_8,
        "stable": STABLE,
        "stable-block8": [*STABLE, *BLOCK_8],
        "stable-split": [*STABLE, f"{OPTION}streams", "split"],
        "stable-single": [*STABLE, f"{OPTION}streams", "single"],
        "published-split": [f"{OPTION}streams", "split"],
        "published-split-block8": [*BLOCK_8, f"{OPTION}streams", "split"],
        "published-single": [f"{OPTION}streams", "single"],
        "published-shared": [f"{OPTION}share", "true"],
        "published-alone": [f"{OPTION}group_size", "1"],  # the control: all of it but the relations
        "published-dropout01": [f"{OPTION}dropout", "0.1"],
        "pre": [f"{OPTION}norm", "pre", f"{OPTION}layer_scale", "0.1"],
        "stable-scale02": [*STABLE, f"{OPTION}layer_scale", "0.2"],
        "stable-dropout01": [*STABLE, f"{OPTION}dropout", "0.1"],
        "stable-scale03-block8": [*STABLE, *BLOCK_8, f"{OPTION}layer_scale", "0.3"],
        "stable-last4": [*STABLE, f"{OPTION}blocks", "[8,9,10,11]"],
        "long": ["--method", "baseline"],
        "long-block8": ["--method", "baseline"],
    },
)
TABLE_7 = Study(
    name="deit-ti-cifar100-100",
    recipe="deit-ti-cifar100-100",
    seeds=(0,),
    variants={name: list(STUDY.variants[name]) for name in ("baseline", "published", "stable")},
    itself=("baseline", "published"),
)


def main() -> int:
    study = TABLE_7 if "224" in sys.argv else STUDY  # decides which variants --only may name
    parser = study.parser(__doc__)
    parser.add_argument("--size", type=int, choices=(32, 224), default=32, help="pixels of the images trained on")
    parser.add_argument(
        "--long-epochs",
        type=int,
        nargs=2,
        default=[115, 68],
        help="epochs of long and long-block8; the default is a guess of the cost",
    )
    parser.add_argument("--epochs", type=int, help="a shorter look: so many epochs, under a name that says so")
    args = parser.parse_args()
    if args.epochs is not None:
        study.name += f"-{args.epochs}epochs"
        study.common += ["--trainer.max_epochs", str(args.epochs)]
    for name, epochs in zip(("long", "long-block8"), args.long_epochs, strict=True):
        if name in study.variants:
            study.variants[name].extend(["--trainer.max_epochs", str(epochs)])
    return 1 if study.train(args) else 0


if __name__ == "__main__":
    raise SystemExit(main())
