"""Generalized zero-shot learning on CUB: linear map, f-CLSWGAN, CE-GZSL with and without BatchFormer.

    python -m benchmarks.generalized_zero_shot_study --data-root DIR [--classes sentences] [--jobs 3] [--seeds 0 1 2]
    python -m benchmarks.generalized_zero_shot_study --data-root DIR --classes attributes
    python -m benchmarks.generalized_zero_shot_study --data-root DIR --small --jobs 1

DIR holds the features in an npz file and, for sentences, cub-sentences.npz. Every variant is the recipe `cub-gzsl` or
`cub-gzsl-sentences` with a few fields changed; see `_study.py` for how they are run. By default those of the tables are
trained; `--only both` also relates generated rows, `accumulated` and `accumulated-batchformer` sum the gradient of the
comparator over an epoch as the released code does.

`--small` is what one core can do, under a name that says so: networks of 1024, batches of 256, bfloat16, 7 epochs, and
settings that need few steps: a higher learning rate, a stronger contrast of generated features, a shorter training of
the final classifier. These were chosen on 30 of the training classes (`--data.held_out 30`), for the baseline, and so
were the penalties of the linear map.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks._study import Study

BASELINE, ACCUMULATED = ["--method", "baseline"], ["--model.contrast.accumulate_comparator", "true"]
VARIANTS = {
    "linear": [*BASELINE, "--model.algorithm", "linear", "--trainer.max_epochs", "1"],
    "f-clswgan": [*BASELINE, "--model.algorithm", "f_clswgan"],
    "baseline": BASELINE,
    "batchformer": [],
    "both": ["--model.batchformer.rows", "both"],
    "accumulated": [*BASELINE, *ACCUMULATED],
    "accumulated-batchformer": ACCUMULATED,
}
TABLES = ("linear", "f-clswgan", "baseline", "batchformer")
WIDTHS = ("generator.width", "generator.critic_width", "contrast.embedding_dim", "contrast.comparator_width")
SMALL = [word for name in WIDTHS for word in (f"--model.{name}", "1024")]
SMALL += ["--data.batch_size", "256", "--trainer.precision", "bf16-mixed", "--run.threads", "1"]
SMALL += ["--trainer.max_epochs", "7", "--trainer.check_val_every_n_epoch", "1", "--model.optimizer.lr", "3e-4"]
SMALL += ["--model.contrast.instance_weight", "0.1", "--model.contrast.class_weight", "0.1"]
SMALL += ["--model.generator.classification_weight", "0.1"]
SMALL += ["--model.softmax.lr", "3e-4", "--model.softmax.epochs", "10"]
ATTRIBUTES, SENTENCES = (
    Study(name=name, recipe=name, seeds=(0, 1, 2), variants=VARIANTS, itself=("baseline", "batchformer"))
    for name in ("cub-gzsl", "cub-gzsl-sentences")
)
STUDIES = {"attributes": ATTRIBUTES, "sentences": SENTENCES}


def main() -> int:
    parser = SENTENCES.parser(__doc__)
    parser.set_defaults(only=list(TABLES), runs=None)
    parser.add_argument("--classes", choices=list(STUDIES), default="sentences", help="what classes are described by")
    parser.add_argument("--small", action="store_true", help="what one core can do")
    args = parser.parse_args()
    study = STUDIES[args.classes]
    if args.small:
        study.name += "-small"
        study.common += SMALL
    args.runs = args.runs or Path("runs") / study.name
    return 1 if study.train(args) else 0


if __name__ == "__main__":
    raise SystemExit(main())
