"""A study: one recipe, several variants of it, several seeds, trained side by side; what every study script shares.

Each run is `batchformer fit` in a process of its own, `--jobs` at a time: small networks leave a large card idle. With
NVIDIA's MPS they run side by side, with one thread each unless OMP_NUM_THREADS is set. With `--in-turn` they start side
by side and train one at a time, for networks that fill the card. Finished runs are kept, stopped ones go on. Result
files are copied to `results/<name>-<variant>/` as they come, and with `--missing` what is there already is not trained
again, on another machine either; at the end the table of paired differences to the baseline is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchformer.metrics.measures import measures_of, primary_of, with_current_names
from batchformer.recipes import find_recipe, read_recipe
from batchformer.report.statistics import paired_difference, summarise
from benchmarks._common import keep_result


def environment(jobs: int) -> dict[str, str]:
    """For a process of several side by side: one thread each, unless the caller says otherwise.

    torch starts as many threads as there are cores in every process, and those of all of them would fight for these.
    """
    root = str(Path(__file__).parents[1])  # for callbacks
    here = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**({"OMP_NUM_THREADS": "1"} if jobs > 1 else {}), **os.environ, "PYTHONPATH": here}


def trained_on(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The machine of the runs, which need not be the one that makes the table: moved out of the rows if one for all."""
    machines = [{name: row[name] for name in ("device", "versions")} for row in rows]
    if not machines or any(found != machines[0] for found in machines):
        return {}
    for row in rows:
        del row["device"], row["versions"]
    return machines[0]


@dataclass
class Study:
    """`variants` maps a name to the arguments that make it; the others are held to the one called "baseline".

    `itself`: variants that are the recipe as it stands, with a method each; their results carry the study's own name.
    `after`: for a variant that begins with the weights of another one's run of the same seed, that variant.
    """

    name: str
    recipe: str
    seeds: Sequence[int]
    variants: Mapping[str, list[str]]
    common: list[str] = field(default_factory=list)
    itself: Sequence[str] = ()
    after: Mapping[str, str] = field(default_factory=dict)

    def run_name(self, variant: str) -> str:
        return self.name if variant in self.itself else f"{self.name}-{variant}"

    def method(self, variant: str) -> str:
        """As the arguments say, the last of them where several do; else that of the recipe."""
        words = [*self.common, *self.variants[variant]]
        given = [value for word, value in pairwise(words) if word == "--method"]
        return given[-1] if given else read_recipe(find_recipe(self.recipe)[1])["model"].get("method", "batchformer")

    def folder(self, variant: str, seed: int, args: argparse.Namespace) -> Path:
        return args.runs / f"{self.name}-{variant}" / f"seed{seed}"

    def parser(self, description: str | None) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--data-root", default="data")
        parser.add_argument("--runs", type=Path, default=Path("runs") / self.name)
        parser.add_argument("--results", type=Path, default=Path("results"))
        parser.add_argument("--jobs", type=int, default=4)
        parser.add_argument("--in-turn", action="store_true", help="start side by side, train one at a time")
        parser.add_argument("--missing", action="store_true", help="train only what --results does not hold yet")
        parser.add_argument("--seeds", type=int, nargs="+", default=list(self.seeds))
        parser.add_argument("--only", nargs="+", choices=list(self.variants), default=list(self.variants))
        parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
        return parser

    def train(self, args: argparse.Namespace) -> int:
        """All runs, seed by seed so that a study cut short is balanced; then the table. The number that failed."""
        pending: dict[tuple[str, int], Future[int]] = {}
        with ThreadPoolExecutor(args.jobs) as pool:
            for seed in args.seeds:
                for variant in self._needed(seed, args):
                    first = pending.get((self.after.get(variant, ""), seed))  # submitted before, so it comes to its end
                    pending[variant, seed] = pool.submit(self._fit, variant, seed, args, first)
        failed = sum(job.result() != 0 for job in pending.values())
        self._print_table({variant: self._collect(variant, args) for variant in args.only}, args.seeds)
        return failed

    def _needed(self, seed: int, args: argparse.Namespace) -> list[str]:
        """The variants to train, those that others begin with first: of these the run folder must be there."""
        missing = [
            variant
            for variant in args.only
            if not self._trained(variant, seed, args)
            and not (args.missing and self._kept(variant, seed, args).is_file())
        ]
        sources = [self.after[variant] for variant in missing if variant in self.after]
        return list(dict.fromkeys([*(v for v in sources if not self._trained(v, seed, args)), *missing]))

    def _trained(self, variant: str, seed: int, args: argparse.Namespace) -> bool:
        return (self.folder(variant, seed, args) / "result.json").is_file()

    def _fit(self, variant: str, seed: int, args: argparse.Namespace, first: Future[int] | None) -> int:
        out = self.folder(variant, seed, args)
        if first is not None and first.result() != 0:
            print(f"{variant} seed {seed}: not trained, as {self.after[variant]} failed", flush=True)
            return 1
        command = [sys.executable, "-m", "batchformer.cli", "fit", self.recipe, "--name", self.run_name(variant)]
        command += ["--data-root", args.data_root, "--seed", str(seed), "--out", str(out), "--resume"]
        command += [*self.common, *self.variants[variant], *args.extra]
        if variant in self.after:
            command += ["--init-from", str(self.folder(self.after[variant], seed, args))]
        if args.in_turn:
            turn = {"class_path": "benchmarks._turn.InTurn", "init_args": {"lock": str(args.runs / "turn")}}
            command += ["--trainer.callbacks", json.dumps([turn])]
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out.parent / f"seed{seed}.log", "w") as log:
            code = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT, env=environment(args.jobs))
        print(f"{variant} seed {seed}: {'done' if code == 0 else f'failed, see {log.name}'}", flush=True)
        self._accuracy(variant, seed, args)
        return code

    def _accuracy(self, variant: str, seed: int, args: argparse.Namespace) -> float | None:
        """Of a finished run, whose result is copied: at once, as the study may be stopped before its end."""
        file, kept = self.folder(variant, seed, args) / "result.json", self._kept(variant, seed, args)
        if file.is_file():
            keep_result(file.parent, kept)
        elif not (args.missing and kept.is_file()):
            return None
        result = with_current_names(json.loads(kept.read_text()))
        return float(result["metrics"][primary_of(measures_of(result)).key])

    def _kept(self, variant: str, seed: int, args: argparse.Namespace) -> Path:
        """Where the result of a run is kept among the results; its name begins with the method."""
        return args.results / self.run_name(variant) / f"{self.method(variant)}-seed{seed}.json"

    def _collect(self, variant: str, args: argparse.Namespace) -> dict[int, float]:
        accuracies = {seed: self._accuracy(variant, seed, args) for seed in args.seeds}
        return {seed: found for seed, found in accuracies.items() if found is not None}

    def _print_table(self, table: Mapping[str, dict[int, float]], seeds: Sequence[int]) -> None:
        base = table.get("baseline", {})
        for variant, found in table.items():
            if not found:
                continue
            mean, sd = summarise(list(found.values()))
            line = f"{variant:16} {mean:6.2f} ± {0.0 if sd is None else sd:.2f} ({len(found)} seeds)"
            both = [seed for seed in seeds if seed in found and seed in base]
            if variant != "baseline" and len(both) > 1:
                gain = paired_difference([base[s] for s in both], [found[s] for s in both])
                line += f"   {gain.mean:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"
            print(line)
