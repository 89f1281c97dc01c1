"""Time and memory of the layer on this GPU, beside the papers' own layer.

    python -m benchmarks.layer [SHAPE ...] [--quick] [--no-compile] [--out FOLDER] [--name NAME]
    python -m benchmarks.layer --growth | --end-to-end | --all

One run without options writes FOLDER/layer.json: for every shape, pass and memory setting the eager time of ours and of
the papers' layer with the backward on the calling thread, their ratio (`speedup`), the time of ours in a CUDA graph and
peak memory (`_layer_timing.py` says what each is). With --no-compile it takes about two minutes. Each row is printed as
soon as it is measured, and the file is whole after each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _layer_growth as growth
from benchmarks import _layer_steps as steps
from benchmarks import _layer_timing as timing
from benchmarks._common import RESULTS, write_json


def main(args: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(args)
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds no CUDA device here; run it on a machine that has one.")
    shapes = {name: timing.SHAPES[name] for name in given.shapes} or timing.SHAPES
    device = torch.device("cuda")
    settings = timing.Settings(given.dtype, given.dropout, compile=not given.no_compile)
    if given.quick:
        settings = settings._replace(rounds=3, seconds=0.02, passes=("fwd+bwd",), compile=False)
    failed = 0
    with timing.on_this_thread():
        if given.all or not (given.growth or given.end_to_end):
            failed |= write_rows(given.out / f"{given.name}.json", shapes, settings, device)
        if given.all or given.growth:
            sweep = (growth.QUICK if given.quick else growth.Sweep())._replace(dtype=given.dtype, dropout=given.dropout)
            failed |= write_growth(given.out / "growth.json", sweep, device)
        if given.all or given.end_to_end:
            failed |= write_steps(given.out / "end_to_end.json", steps.BATCHES, device, 0.1 if given.quick else 0.3)
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", type=_shape, help=f"of {', '.join(timing.SHAPES)} (all)")
    parser.add_argument("--dtype", choices=list(timing.DTYPES), default="bf16")
    parser.add_argument("--dropout", type=_probability, default=0.5)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--name", default="layer", help="the file is FOLDER/NAME.json")
    parser.add_argument("--no-compile", action="store_true", help="leave out the papers' layer by torch.compile")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fwd+bwd only, nothing compiled")
    parser.add_argument("--growth", action="store_true", help="instead: growth.json and growth-*.svg")
    parser.add_argument("--end-to-end", action="store_true", help="instead: training steps, end_to_end.json")
    parser.add_argument("--all", action="store_true", help="all three")
    return parser


def _shape(name: str) -> str:
    if name not in timing.SHAPES:
        raise argparse.ArgumentTypeError(f"there is no shape {name}; there are: {', '.join(timing.SHAPES)}.")
    return name


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0 to below 1.")
    return value


def write_rows(path: Path, shapes: Any, settings: Any, device: Any) -> int:
    """Measure, print and write; 1 where something could not be measured."""
    problems: list[str] = []
    return _write(path, timing.rows(shapes, settings, device, problems, _tell), _COLUMNS, device, problems)


def write_growth(path: Path, sweep: Any, device: Any) -> int:
    problems: list[str] = []

    def finish(rows: list[dict[str, Any]]) -> dict[str, Any]:
        for chart in growth.write_growth_charts(rows, path):
            print(chart)
        return {"crossings": growth.crossings(rows)}

    rows = growth.rows(sweep, device, problems, _tell)
    return _write(path, rows, _GROWTH_COLUMNS, device, problems, finish)


def write_steps(path: Path, batches: dict[str, int], device: Any, seconds: float) -> int:
    problems: list[str] = []
    rows = steps.rows(batches, device, problems, _tell, seconds=seconds)
    return _write(path, rows, _STEP_COLUMNS, device, problems)


def _write(
    path: Path, rows: Iterable[dict[str, Any]], columns: tuple[str, ...], device: Any, problems: list[str],
    finish: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda rows: {},
) -> int:  # fmt: skip
    result: dict[str, Any] = {**timing.machine(device), "rows": []}
    print(_line(columns, None), flush=True)
    for row in rows:
        result["rows"].append(row)
        if problems:
            result["problems"] = problems
        write_json(path, result)
        print(_line(columns, row), flush=True)
    result.update(finish(result["rows"]))
    write_json(path, result)
    for crossing in result.get("crossings", []):
        where = "never, up to here" if crossing["batch"] is None else f"from a batch of {crossing['batch']:.0f}"
        print(f"attention takes longer than the matrix products at {crossing['positions']} positions: {where}")
    for problem in problems:
        print(f"not measured: {problem}")
    print(path)
    return 1 if problems else 0


def _tell(what: str) -> None:
    """What is being measured, beside the table: on a terminal it is overwritten by what comes next."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"... {what:<60}", end=end, file=sys.stderr, flush=True)


_COLUMNS = ("shape", "heads", "pass", "memory", "ours_ms", "papers_ms", "compiled_ms", "graph_ms", "floor_ms",
            "ours_gib", "papers_gib", "ours_threads_ms", "papers_threads_ms", "speedup")  # fmt: skip
_GROWTH_COLUMNS = ("shape", "fast_ms", "lean_ms", "attention_ms", "products_ms", "fast_gib", "lean_gib")
_STEP_COLUMNS = ("model", "batch", "plain_ms", "ours_ms", "papers_ms", "plain_gib", "ours_gib", "papers_gib")


def _line(columns: tuple[str, ...], row: dict[str, Any] | None) -> str:
    """A line of the table; without a row its head."""
    cells = []
    for name in columns:
        value = name if row is None else row[name]
        if value is None:
            text = "-"
        elif isinstance(value, float):
            text = f"{value:.3f}"
        else:
            text = " x ".join(map(str, value)) if isinstance(value, list) else str(value)
        cells.append(f"{text:<18}" if name in ("shape", "model") else f"{text:>{max(8, len(name))}}")
    return " ".join(cells)


if __name__ == "__main__":
    raise SystemExit(main())
