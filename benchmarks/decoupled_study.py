"""Second stages on the features of Balanced Softmax (and of softmax), CIFAR-100-LT at imbalance 200, 2,000 iterations.

    python -m benchmarks.decoupled_study --data-root DIR [--features balanced softmax] [--jobs 4] [--seeds 0 1 2]

First the networks whose features are used are trained, with and without BatchFormer, one for each seed; then on each of
them, 106 epochs with everything but the classifier frozen: decoupled Balanced Softmax, BALMS, cRT, LWS and tau-norm.
Ren et al. report 47.2 (decoupled) and 48.0 (BALMS) on the features of softmax. See `_study.py` for how they are run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks._study import Study

RECIPE = "cifar100-lt-200"
LOSSES = {"balanced": "balanced_softmax", "softmax": "cross_entropy"}
MODULE = {"": "baseline", "-batchformer": "batchformer"}
METHODS = {
    "decoupled": [],
    "balms": ["--model.balms.frozen", "true"],
    "crt": [],
    "lws": [],
    "tau-norm": ["--trainer.max_epochs", "1"],
}
LENGTH = [
    "--trainer.max_epochs",
    "106",
    "--trainer.check_val_every_n_epoch",
    "106",
    "--model.schedule.warmup_epochs",
    "0",
]


def features(loss: str) -> Study:
    """The networks of the first stage, by seed."""
    variants = {f"features{module}" if module else "baseline": ["--method", name] for module, name in MODULE.items()}
    common = ["--model.loss.name", LOSSES[loss], "--no-analysis"]
    return Study(f"{RECIPE}-{loss}-features", RECIPE, (0, 1, 2), variants, common)


def classifiers(loss: str, runs: Path = Path("runs")) -> Study:
    """The second stages, each on the network of its seed; "baseline" is decoupled Balanced Softmax."""
    first, variants = features(loss), {}
    for module, name in MODULE.items():
        network = first.folder(f"features{module}" if module else "baseline", "{seed}", argparse.Namespace(runs=runs))
        for method, words in METHODS.items():
            variant = f"{method}{module}" if (method, module) != ("decoupled", "") else "baseline"
            chosen = ["--method", name, "--model.algorithm", method.replace("-", "_"), "--init-from", str(network)]
            variants[variant] = [*LENGTH, *chosen, *words]
    return Study(f"{RECIPE}-{loss}-classifiers", RECIPE, (0, 1, 2), variants)


BALANCED, SOFTMAX = (classifiers(loss) for loss in LOSSES)


def main() -> int:
    parser = replace(BALANCED, name=RECIPE).parser(__doc__)
    parser.add_argument("--features", nargs="+", choices=list(LOSSES), default=["balanced"])
    args = parser.parse_args()
    failed = 0
    for loss in args.features:
        first = features(loss)
        failed += first.train(argparse.Namespace(**{**vars(args), "only": list(first.variants), "missing": False}))
        failed += classifiers(loss, args.runs).train(args)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
