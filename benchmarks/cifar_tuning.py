"""Which settings of BatchFormer help on CIFAR-LT: tuned at imbalance 50 and seeds 10 to 12, which no result reports.

    python -m benchmarks.cifar_tuning --data-root DIR [--epochs 260] [--jobs 4] [--only mean lr1]

Every variant is the recipe `cifar100-lt-100` with a few fields changed; see `_study.py` for how they are run.
"""

from __future__ import annotations

from benchmarks._study import Study

MEAN = ["--model.stream_loss", "mean"]
LR = "--model.optimizer.module_lr_factor"
STUDY = Study(
    name="cifar100-lt-50-tuning",
    recipe="cifar100-lt-100",
    seeds=(10, 11, 12),
    variants={
        "baseline": ["--method", "baseline"],
        "released": [],  # the recipe as it is: stream_loss released, a tenth of the learning rate for the module
        "mean": MEAN,
        "released-lr1": [LR, "1.0"],
        "mean-lr1": [*MEAN, LR, "1.0"],
        "group128": ["--model.batchformer.group_size", "128"],
        "group32": ["--model.batchformer.group_size", "32"],
        "baseline-x3": ["--method", "baseline", "--model.loss_weight", "3"],  # the loss scale of "released", without us
        "released-x2": ["--model.loss_weight", "2"],
        "dropout01": ["--model.batchformer.dropout", "0.1"],
        "pre": ["--model.batchformer.norm", "pre"],
    },
    common=["--data.imbalance", "50", "--no-analysis"],
)


def main() -> int:
    parser = STUDY.parser(__doc__)
    parser.add_argument("--epochs", type=int, default=260, help="half of the full schedule at imbalance 50")
    args = parser.parse_args()
    warmup = str(args.epochs // 16)
    STUDY.common += ["--trainer.max_epochs", str(args.epochs), "--model.schedule.warmup_epochs", warmup]
    return 1 if STUDY.train(args) else 0


if __name__ == "__main__":
    raise SystemExit(main())
