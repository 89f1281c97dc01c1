"""The methods of long-tailed recognition on CIFAR-100-LT, each with and without BatchFormer.

    python -m benchmarks.long_tail_study --study ride --data-root DIR [--jobs 4] [--in-turn] [--missing] [--seeds 0 1 2]
        [--only baseline batchformer] [-- more overrides]

A study is a recipe of this package and its variants; see `_study.py` for how they are run and where results go. RIDE:
the two rows of the recipe; the sum of both streams' losses, as released, in place of their mean; one stream, as
published for ImageNet-LT; no diversity; and the router, trained on the experts of the first two, whose results have
accuracy against experts used.
"""

from __future__ import annotations

import argparse

from benchmarks._study import Study

SEEDS = (0, 1, 2)
PAIR = {"baseline": ["--method", "baseline"], "batchformer": ["--method", "batchformer"]}
# the second stage of cifar100-lt-100-ride-routed
ROUTER = ["--model.ride.train", "router", "--trainer.max_epochs", "5", "--data.batch_size", "512",
          "--model.optimizer.lr", "0.01", "--model.schedule.name", "cosine",
          "--model.schedule.warmup_epochs", "0"]  # fmt: skip
RIDE = Study(
    name="cifar100-lt-100-ride",
    recipe="cifar100-lt-100-ride",
    seeds=SEEDS,
    variants={
        **PAIR,
        "routed": [*PAIR["baseline"], *ROUTER],
        "routed-batchformer": [*PAIR["batchformer"], *ROUTER],
        "sum": [*PAIR["batchformer"], "--model.loss_weight", "2"],
        "one-stream": [*PAIR["batchformer"], "--model.batchformer.streams", "single"],
        "no-diversity": [*PAIR["baseline"], "--model.ride.diversity", "0"],
    },
    itself=tuple(PAIR),
    after={"routed": "baseline", "routed-batchformer": "batchformer"},
)


def _pair(recipe: str, seeds: tuple[int, ...] = SEEDS) -> Study:
    return Study(recipe, recipe, seeds, PAIR, itself=tuple(PAIR))


#: by the value of --study; a further method is a line here
STUDIES = {
    "ride": RIDE,
    "paco": _pair("cifar100-lt-100-paco"),
    "paco-balanced": _pair("cifar100-lt-100-paco-balanced"),
    "paco-200": _pair("cifar100-lt-200-paco", (0,)),
    **{name: _pair(f"cifar100-lt-200-{name}") for name in ("decoupled", "balms", "crt", "lws", "tau-norm")},
}


def main() -> int:
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument("--study", choices=list(STUDIES), default="ride")
    study = STUDIES[chosen.parse_known_args()[0].study]  # decides which variants --only may name
    parser = study.parser(__doc__)
    parser.add_argument("--study", choices=list(STUDIES), default="ride")
    return 1 if study.train(parser.parse_args()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
