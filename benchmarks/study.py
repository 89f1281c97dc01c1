"""Studies of recipes: every variant, every target, several seeds, and what the representation of a run is worth.

    python -m benchmarks.study pacs-128 --data-root DIR --weights resnet50.pth [--jobs 4 --in-turn] [--missing]
        [--minutes 8] [--seeds 0 1 2] [--only erm irm+batchformer] [--targets sketch] [-- more overrides]
    python -m benchmarks.study plantvillage-czsl-trained --data-root DIR --weights backbone=resnet50.pth
    python -m benchmarks.study moco-v3-cifar100 --data-root DIR
    python -m benchmarks.study voc-faster-rcnn-r18 --data-root VOC2007 --weights resnet50.pth

A study is a recipe and its variants, and of some also `extra` ones: of `pacs-128` what the released code does, the
module frozen at its random start (`erm+batchformer-frozen`) and the domains of IRM mixed (`irm+batchformer-mixed`); of
pairs random vectors in place of words (`*-random`: the control) and label embedding; of MoCo-v3 the frozen module and
the plain pairing alone; of hands the baseline trained as long as the module takes (`baseline-long`: a guess by the
number of operations, 1.41 times as many). SWAD is measured in every run of `pacs-128`. Runs of pre-training are probed
after it. `voc-faster-rcnn-r18` begins from random weights, from the two runs of the study `moco-v2-imagenette`, which
comes first, and with a ResNet-50 from the file of ImageNet weights.

`--jobs` processes train one run after the other; with `--in-turn` they train one at a time on the card, and read data
and capture steps meanwhile. A result file is copied to `results/<study>/` as soon as its run has ended: with
`--missing` what is there is not trained again, on another machine either. After `--minutes` no further run is begun,
and a run that was stopped goes on from its last checkpoint, so the study may be cut into slices of any length.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from batchformer.recipes import find_recipe, read_recipe
from benchmarks._common import keep_result
from benchmarks._study import environment

METHODS = ("baseline", "batchformer")
WEIGHTS = "{weights}"  # in the keys of a variant: the file of --weights, which the others do not begin with


@dataclass(frozen=True)
class RecipeStudy:
    """The variants of a recipe, or where it names none these `methods`, and `extra` ones: the keys that make them.

    `more_seeds` are trained of `most` alone, seed 0 alone of `once`. Data without targets have the target "" alone.
    `probes`: the protocols of `batchformer probe` for each run.
    """

    recipe: str
    targets: Sequence[str] = ("",)
    extra: Mapping[str, str] = field(default_factory=dict)
    methods: Sequence[str] = METHODS
    seeds: Sequence[int] = (0, 1, 2)
    more_seeds: Sequence[int] = ()
    most: Sequence[str] = ()
    once: Sequence[str] = ()
    probes: Sequence[str] = ()

    @property
    def variants(self) -> dict[str, str]:
        """Name -> what `fit --variant` is given."""
        own = read_recipe(find_recipe(self.recipe)[1]).get("variants")
        named = {name: name for name in own} if own else {name: f"{name}:model.method={name}" for name in self.methods}
        return named | {name: f"{name}:{keys}" for name, keys in self.extra.items()}

    def names_weights(self, variants: Iterable[str]) -> bool:
        """Whether one of these begins with the file of --weights by itself."""
        return any(WEIGHTS in self.extra.get(name, "") for name in variants)

    def runs(self, seeds: Sequence[int] | None, only: Sequence[str], targets: Sequence[str]) -> list[Run]:
        """Seed by seed, so that a study cut short is balanced."""
        first, *others = self.seeds if seeds is None else seeds
        several = [name for name in only if name not in self.once]
        everything = [
            *product([first], targets, only),
            *product(others, targets, several),
            *product(self.more_seeds if seeds is None else (), targets, [name for name in only if name in self.most]),
        ]
        return [Run(variant, target, seed) for seed, target, variant in everything]


@dataclass(frozen=True)
class Run:
    variant: str
    target: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.variant, self.target, f"seed{self.seed}") if part)


STOPPED = 130  # the exit code of a run that was interrupted, which ends the study too
_PACS = ("art_painting", "cartoon", "photo", "sketch")
_RANDOM = "model.method=baseline,data.words=[random],model.pairs.name"
_OF_PAIRS = {
    "label-embedding": "model.method=baseline,model.pairs.name=label_embedding",
    "compcos-random": f"{_RANDOM}=compcos",
    "cge-random": f"{_RANDOM}=cge",
}
_MODULE = "model.method=batchformer,model.contrast"
_FROM_MOCO = "run.init_from.backbone=runs/moco-v2-imagenette-study"
STUDIES = {
    study.recipe: study
    for study in (
        RecipeStudy(
            "pacs-128",
            _PACS,
            {
                "erm+batchformer-frozen": "model.method=batchformer,model.optimizer.module_lr_factor=0.0",
                "irm+batchformer-mixed": "model.method=batchformer,model.algorithm.name=irm,"
                "model.algorithm.mixed_domains=true",
            },
            more_seeds=(3, 4),
            most=("erm", "erm+batchformer"),
        ),
        RecipeStudy("pacs-mobilenetv2", _PACS),
        RecipeStudy("imagenette-lt", seeds=range(5)),
        RecipeStudy("pacs-128-adapt", ("sketch",)),
        RecipeStudy("mnist-usps", ("usps", "mnist")),
        RecipeStudy("digits-domains", tuple(f"{angle}-degrees" for angle in range(0, 90, 15))),
        *(RecipeStudy(name, seeds=range(5)) for name in ("digits-lt", "mae-digits")),
        RecipeStudy(  # why the module lowers k-NN there, and what k-NN says: `untrained` has random weights
            "moco-digits",
            extra={
                "untrained": "model.method=baseline,model.optimizer.lr=0.0,trainer.limit_train_batches=1",
                "batchformer-separate": f"{_MODULE}.batch_norm=separate",
                "batchformer-no-dropout": "model.method=batchformer,model.batchformer.dropout=0.0",
            },
            seeds=range(5),
        ),
        *(RecipeStudy(name) for name in ("vit-digits", "digits-gzsl", "hands-tiny")),
        RecipeStudy("plantvillage-czsl", extra=_OF_PAIRS),
        RecipeStudy("plantvillage-czsl-trained", extra=_OF_PAIRS),
        RecipeStudy("digits-states", seeds=range(5)),
        RecipeStudy("cub-gzsl"),
        RecipeStudy("cub-gzsl-sentences"),
        RecipeStudy(
            "moco-v3-cifar100",
            extra={
                "batchformer-frozen": f"{_MODULE}.frozen_module=true",
                "batchformer-plain": f"{_MODULE}.pairs=plain",
            },
            once=("batchformer-frozen", "batchformer-plain"),
            probes=("moco-v3",),
        ),
        RecipeStudy("moco-v2-cifar100", seeds=(0,), probes=("moco-v3",)),
        RecipeStudy("mae-cifar100", probes=("mae", "finetune")),
        RecipeStudy("moco-v2-imagenette", seeds=(0,)),
        RecipeStudy(
            "voc-faster-rcnn-r18",
            extra={
                "scratch": "run.init_from={}",
                "moco": f"{_FROM_MOCO}/baseline-seed0",
                "moco+batchformer": f"{_FROM_MOCO}/batchformer-seed0",
                "imagenet-resnet50": f"model.backbone=resnet50_stride_in_1x1,run.init_from.backbone={WEIGHTS}",
            },
            methods=(),
            seeds=(0,),
        ),
        RecipeStudy(
            "hands-rendered",
            extra={
                "baseline-long": "model.method=baseline,trainer.max_epochs=42,model.schedule.milestones=[31,39]",
            },
        ),
    )
}


def fit(study: RecipeStudy, run: Run, args: argparse.Namespace) -> int:
    """Train a run in this process, or finish it, and keep its result."""
    from batchformer.cli import main as batchformer

    out, kept = args.runs / run.name, kept_at(study, run, args)
    if not (out / "result.json").is_file():
        words = ["fit", study.recipe, "--variant", study.variants[run.variant].replace(WEIGHTS, args.weights or "")]
        words += ["--data.target", run.target] if run.target else []
        words += ["--seed", str(run.seed), "--out", str(out), "--resume", "--no-analysis"]
        words += ["--data-root", args.data_root] if args.data_root else []
        words += ["--init-from", args.weights] if args.weights and not study.names_weights(study.extra) else []
        if args.in_turn:
            turn = {"class_path": "benchmarks._turn.InTurn", "init_args": {"lock": str(args.runs / "turn")}}
            words += ["--trainer.callbacks", json.dumps([turn])]
        if code := batchformer([*words, *args.extra]):
            return code
    for protocol in study.probes:
        probed = args.runs / f"{run.name}-{protocol}"
        if not (probed / "result.json").is_file():
            words = ["probe", str(out), "--protocol", protocol, "--out", str(probed), "--no-analysis"]
            if code := batchformer([*words, *(["--resume"] if probed.exists() else [])]):
                return code
        keep_result(probed, args.results / f"{study.recipe}-{protocol}" / kept.name)
    keep_result(out, kept)  # last: with it the run is whole
    return 0


def kept_at(study: RecipeStudy, run: Run, args: argparse.Namespace) -> Path:
    return args.results / study.recipe / f"{run.name}.json"


def work(study: RecipeStudy, runs: Sequence[Run], args: argparse.Namespace) -> int:
    """Train these runs one after the other; the number that failed."""
    import torch

    failed = 0
    for run in runs:
        if args.minutes is not None and time.time() > args.began + 60 * args.minutes:
            break
        began = time.perf_counter()
        code = fit(study, run, args)
        failed += code != 0
        if code == STOPPED:
            break
        said = "done" if code == 0 else "failed"
        print(f"{run.name}: {said} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        gc.collect()  # a captured step holds its network in a cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return failed


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("study", choices=list(STUDIES))
    made.add_argument("--data-root")
    made.add_argument("--weights", help="a file of weights that the backbone begins with")
    made.add_argument("--runs", type=Path, help="default: runs/<study>-study")
    made.add_argument("--results", type=Path, default=Path("results"))
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--in-turn", action="store_true", help="start side by side, train one at a time")
    made.add_argument("--missing", action="store_true", help="train only what --results does not hold yet")
    made.add_argument("--minutes", type=float, help="begin no run after that time")
    made.add_argument("--seeds", type=int, nargs="+", help="default: those of the study")
    made.add_argument("--only", nargs="+", help="variants; default: all")
    made.add_argument("--targets", nargs="+", help="default: all")
    made.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # one of --jobs processes
    made.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    made.epilog = "after --: more overrides for every run"
    return made


def main() -> int:
    made = parser()
    words, extra = sys.argv[1:], []
    if "--" in words:  # argparse takes no second list of words here
        words, extra = words[: words.index("--")], words[words.index("--") + 1 :]
    args = made.parse_args(words, argparse.Namespace(extra=extra))
    study = STUDIES[args.study]
    args.runs = args.runs or Path("runs") / f"{args.study}-study"
    for name, known in (("only", list(study.variants)), ("targets", list(study.targets))):
        given = getattr(args, name) or known
        if unknown := [each for each in given if each not in known]:
            made.error(f"--{name} {unknown[0]}: choose from {', '.join(known)}")
        setattr(args, name, given)
    if study.names_weights(args.only) and not args.weights:
        made.error("--weights is missing: the file that one of the variants begins with (--only leaves variants out)")
    args.runs.mkdir(parents=True, exist_ok=True)
    if args.worker is not None or args.jobs == 1:
        runs = study.runs(args.seeds, args.only, args.targets)[args.worker or 0 :: args.jobs]
        if args.missing:  # of its own share: another process may have ended a run before this one looks
            runs = [run for run in runs if not kept_at(study, run, args).is_file()]
        return min(1, work(study, runs, args))
    itself, workers = [sys.executable, "-m", "benchmarks.study", "--began", str(args.began)], []
    for number in range(args.jobs):
        with open(args.runs / f"worker{number}.log", "w") as log:  # what the runs print; a line a run goes to stderr
            command = [*itself, "--worker", str(number), *sys.argv[1:]]
            workers.append(subprocess.Popen(command, stdout=log, env=environment(args.jobs)))
    return min(1, sum(worker.wait() for worker in workers))


if __name__ == "__main__":
    raise SystemExit(main())
