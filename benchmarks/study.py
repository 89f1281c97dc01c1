"""Train a study: every variant, every target, several seeds.

    python -m benchmarks.study pacs-128 --data-root DIR --weights resnet50.pth [--jobs 4 --in-turn] [--missing]
        [--minutes 8] [--seeds 0 1 2] [--only erm irm+batchformer] [--targets sketch] [-- more overrides]

`studies.py` says which studies there are, and what they train. `--jobs` processes train one run after the other; with
`--in-turn` they train one at a time on the card, and read data and capture steps meanwhile. With NVIDIA's MPS small
networks train side by side. A run that begins with the weights of another one waits for it. A result file is copied to
`results/` as soon as its run has ended: with `--missing` what is there is not trained again, on another machine either.
After `--minutes` no further run is begun, and a run that was stopped goes on from its last checkpoint, so a study may
be cut into slices of any length. At the end, what `results/` holds of these runs: means, and differences to the first
variant over matched seeds.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from batchformer.report.comparison import compare_runs, format_difference, format_summary
from benchmarks._common import write_json
from benchmarks.studies import STUDIES, WEIGHTS, Run, Study

STOPPED = 130  # the exit code of a run that was interrupted, which ends the study too


def fit(study: Study, run: Run, args: argparse.Namespace) -> int:
    """Train a run in this process, or finish it, and keep its result."""
    from batchformer.cli import main as batchformer

    out, kept = args.runs / run.name, args.results / study.file(run)
    analysis = [] if study.analysis else ["--no-analysis"]
    if not finished(run, args):
        words = ["fit", *(word.replace(WEIGHTS, args.weights or "") for word in study.words(run.variant))]
        words += ["--data.target", run.target] if run.target else []
        words += ["--seed", str(run.seed), "--out", str(out), "--resume", *analysis]
        words += ["--data-root", args.data_root] if args.data_root else []
        if first := study.first(run):
            words += ["--init-from", str(args.runs / first.name)]
        elif args.weights and not study.names_weights(list(study.variants)):
            words += ["--init-from", args.weights]
        if args.in_turn:
            turn = {"class_path": "benchmarks._turn.InTurn", "init_args": {"lock": str(args.runs / "turn")}}
            words += ["--trainer.callbacks", json.dumps([turn])]
        if code := batchformer([*words, *args.extra]):
            return code
    for protocol in study.probes:
        probed = args.runs / f"{run.name}-{protocol}"
        if not (probed / "result.json").is_file():
            words = ["probe", str(out), "--protocol", protocol, "--out", str(probed), *analysis]
            if code := batchformer([*words, *(["--resume"] if probed.exists() else [])]):
                return code
        keep_result(probed, args.results / f"{study.name}-{protocol}" / kept.name)
    keep_result(out, kept)  # last: with it the run is whole
    return 0


def finished(run: Run, args: argparse.Namespace) -> bool:
    return (args.runs / run.name / "result.json").is_file()


def keep_result(run: Path, kept: Path) -> None:
    """Copy the result of a run to where results are kept; of absolute paths, which are one machine's, the end."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_paths(each) for key, each in value.items()}
        if isinstance(value, list):
            return [without_paths(each) for each in value]
        return Path(value).name if isinstance(value, str) and value.startswith("/") else value

    result = without_paths(json.loads((run / "result.json").read_text()))
    if command := result.get("command"):
        result["command"] = re.sub(r"(?<=[ =])/\S*/", "", command)
    write_json(kept, result)


def fit_in_worker(study: Study, run: Run, args: argparse.Namespace) -> int:
    """As several processes write, and as this one trains other runs afterwards."""
    if args.jobs > 1:
        write_to(args.runs / f"{run.name}.log")
    try:
        return fit(study, run, args)
    finally:
        sys.stdout.flush()
        gc.collect()  # a captured step holds its network in a cycle
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def write_to(log: Path) -> None:
    """Whatever this process and its own ones print."""
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def needed(study: Study, args: argparse.Namespace) -> list[Run]:
    """The runs to train, each after the one it begins with: of that the run folder must be there."""
    runs = study.runs(args.seeds, args.only, args.targets)
    if args.missing:
        runs = [run for run in runs if not (args.results / study.file(run)).is_file()]
    firsts = {run: study.first(run) for run in runs}
    found = [(first, run) if first and not finished(first, args) else (run,) for run, first in firsts.items()]
    return list(dict.fromkeys(run for each in found for run in each))


def train(study: Study, args: argparse.Namespace) -> int:
    """Train what is needed in `--jobs` processes; the number of runs that failed."""
    waiting, codes = needed(study, args), dict[Run | None, int]()
    training: dict[Future[int], tuple[Run, ProcessPoolExecutor, float]] = {}
    idle = [_worker() for _ in range(args.jobs)]
    late = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
    while True:
        if time.monotonic() > late:
            waiting = []
        unfinished = {*waiting, *(run for run, *_ in training.values())}
        for run in [run for run in waiting if study.first(run) not in unfinished]:
            if codes.get(study.first(run)):
                codes[run] = 1
                tell(f"{run.name}: not trained, as the run that it begins with failed")
            elif idle:
                worker = idle.pop()
                training[worker.submit(fit_in_worker, study, run, args)] = run, worker, time.perf_counter()
            else:
                break
            waiting.remove(run)
        if not training and not waiting:
            return sum(code != 0 for code in codes.values())
        for job in wait(training, return_when=FIRST_COMPLETED).done:
            run, worker, began = training.pop(job)
            problem = job.exception()
            codes[run] = job.result() if problem is None else 1
            if codes[run] == STOPPED:
                waiting = []
            idle.append(_worker() if isinstance(problem, BrokenProcessPool) else worker)  # one that was killed
            said = "done" if codes[run] == 0 else f"failed {problem or ''}".strip()
            tell(f"{run.name}: {said} after {time.perf_counter() - began:.0f} s")


def _worker() -> ProcessPoolExecutor:
    """A process of its own, so that one that is killed ends no other. Interrupts come from this process."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(study: Study, args: argparse.Namespace) -> str:
    """A line for each variant, of the results that there are."""
    first, found = next(iter(study.variants)), []
    for run in study.runs(args.seeds, args.only, args.targets):
        if (file := args.results / study.file(run)).is_file():
            one = {"recipe": study.name, "variant": run.variant, "target": run.target or None, "seed": run.seed}
            found.append({**json.loads(file.read_text()), **one, "reference": first})
    if not found:
        return ""
    compared, lines = compare_runs(found), []
    for variant in compared.shown:
        measure, seeds = compared.primary, len(compared.by_seed(compared.primary, variant))
        mean = format_summary(compared.cell(measure, variant), compared.digits(measure))
        difference = compared.difference(measure, variant)
        held = "" if difference is None else f"   {format_difference(difference, compared.digits(measure))}"
        lines += [f"{variant:24} {mean} ({seeds} seed{'s' * (seeds > 1)}){held}"] if seeds else []
    return "\n".join([f"{compared.primary.title}; difference to {compared.reference}", *lines])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("study", choices=list(STUDIES))
    made.add_argument("--data-root")
    made.add_argument("--weights", help="what runs begin with that begin with no other run: [PART=]FILE")
    made.add_argument("--runs", type=Path, help="default: runs/<study>-study")
    made.add_argument("--results", type=Path, default=Path("results"))
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--in-turn", action="store_true", help="start side by side, train one at a time")
    made.add_argument("--missing", action="store_true", help="train only what --results does not hold yet")
    made.add_argument("--minutes", type=float, help="begin no run after that time")
    made.add_argument("--seeds", type=int, nargs="+", help="default: those of the study")
    made.add_argument("--only", nargs="+", help="variants; default: all")
    made.add_argument("--targets", nargs="+", help="default: all")
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
    if args.jobs > 1:  # torch starts as many threads as there are cores in every process
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = train(study, args)
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()  # the run that it trains ends at its last checkpoint
        return STOPPED
    print(table(study, args))
    return min(1, failed)


if __name__ == "__main__":
    raise SystemExit(main())
