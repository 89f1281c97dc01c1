"""What BatchFormerV2 gives a small ViT on CIFAR-100 (32 px, 50 epochs): readings of the paper, and the stable form.

    python benchmarks/v2_study.py --data-root DIR [--jobs 4] [--seeds 0 1 2] [--only stable split]

Every variant is the recipe `vit-cifar100-32` with a few fields changed; see `_study.py` for how they are run. "long" is
the baseline trained for as many GPU-seconds as the duplicated run: `--long-epochs` says how many epochs that is.
"""

from __future__ import annotations

from _study import Study

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
        "published-single": [f"{OPTION}streams", "single"],
        "published-shared": [f"{OPTION}share", "true"],
        "published-dropout01": [f"{OPTION}dropout", "0.1"],
        "pre": [f"{OPTION}norm", "pre", f"{OPTION}layer_scale", "0.1"],
        "stable-scale02": [*STABLE, f"{OPTION}layer_scale", "0.2"],
        "stable-dropout01": [*STABLE, f"{OPTION}dropout", "0.1"],
        "stable-scale03-block8": [*STABLE, *BLOCK_8, f"{OPTION}layer_scale", "0.3"],
        "stable-last4": [*STABLE, f"{OPTION}blocks", "[8,9,10,11]"],
        "long": ["--method", "baseline"],
    },
)


def main() -> int:
    parser = STUDY.parser(__doc__)
    parser.add_argument("--long-epochs", type=int, default=100, help="epochs of the variant called long")
    parser.add_argument("--epochs", type=int, help="a shorter look: so many epochs, under a name that says so")
    args = parser.parse_args()
    if args.epochs is not None:
        STUDY.name += f"-{args.epochs}epochs"
        STUDY.common += ["--trainer.max_epochs", str(args.epochs)]
    STUDY.variants["long"].extend(["--trainer.max_epochs", str(args.long_epochs)])
    return 1 if STUDY.train(args) else 0


if __name__ == "__main__":
    raise SystemExit(main())
