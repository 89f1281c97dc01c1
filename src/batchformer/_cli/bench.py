"""``batchformer bench``: the speed and memory of the layer on this machine, beside the papers' own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from batchformer._cli.arguments import Option, read_arguments
from batchformer.errors import UserError, did_you_mean

HELP = """
batchformer bench [SHAPE ...]          time and memory of the layer on this GPU, beside the papers' own layer

SHAPE is one or more of: deformable-detr deit-ti deit-s detr batchformer deit-s-256 deformable-detr-4 (default: all)
--dtype bf16|fp16|fp32   (bf16)        --dropout P   (0.5)         --out FOLDER   (benchmarks/results)
--name NAME     the file is FOLDER/NAME.json (layer)
--no-compile    leave out the papers' layer by torch.compile (about 15 seconds for each shape)
--quick         fewer rounds, forward and backward together only, nothing compiled
--growth        instead: how cost grows with batch and positions, FOLDER/growth.json and growth-*.svg
--end-to-end    instead: training steps of DeiT-S, ResNet-50 and Deformable DETR, FOLDER/end_to_end.json
--all           all three, one after the other
Each row is printed as soon as it is measured, and the file is whole after each.
"""
_OPTIONS = [Option("dtype"), Option("dropout"), Option("out"), Option("name"), Option("no-compile", "nothing"),
            Option("quick", "nothing"), Option("growth", "nothing"), Option("end-to-end", "nothing"),
            Option("all", "nothing")]  # fmt: skip


def run(args: list[str]) -> int:
    given = read_arguments(args, _OPTIONS)
    dropout = _probability(given.value("dropout", "0.5") or "")
    import torch

    from batchformer._cli import bench_steps
    from batchformer.kernels import bench, growth

    dtype = given.value("dtype", "bf16") or ""
    if dtype not in bench.DTYPES:
        raise UserError(f"--dtype {dtype} must be one of {', '.join(bench.DTYPES)}.")
    shapes = {name: _shape(name, bench.SHAPES) for name in given.positional} or bench.SHAPES
    if not torch.cuda.is_available():
        raise UserError("bench measures a GPU, and torch finds no CUDA device here; run it on a machine that has one.")
    device, is_quick, is_all = torch.device("cuda"), given.flag("quick"), given.flag("all")
    settings = bench.Settings(dtype, dropout, compile=not given.flag("no-compile"))
    if is_quick:
        settings = settings._replace(rounds=3, seconds=0.02, passes=("fwd+bwd",), compile=False)
    folder = Path(given.value("out", "benchmarks/results") or "")
    failed = 0
    with bench.on_this_thread():
        if is_all or not (given.flag("growth") or given.flag("end-to-end")):
            failed |= write_rows(folder / f"{given.value('name', 'layer')}.json", shapes, settings, device)
        if is_all or given.flag("growth"):
            sweep = (growth.QUICK if is_quick else growth.Sweep())._replace(dtype=dtype, dropout=dropout)
            failed |= write_growth(folder / "growth.json", sweep, device)
        if is_all or given.flag("end-to-end"):
            failed |= write_steps(folder / "end_to_end.json", bench_steps.BATCHES, device, 0.1 if is_quick else 0.3)
    return failed


def write_rows(path: Path, shapes: Any, settings: Any, device: Any) -> int:
    """Measure, print and write; 1 where something could not be measured."""
    from batchformer.kernels import bench

    problems: list[str] = []
    return _write(path, bench.rows(shapes, settings, device, problems, _tell), _COLUMNS, device, problems)


def write_growth(path: Path, sweep: Any, device: Any) -> int:
    from batchformer.kernels import growth
    from batchformer.report.growth_charts import write_growth_charts

    problems: list[str] = []

    def finish(rows: list[dict[str, Any]]) -> dict[str, Any]:
        for chart in write_growth_charts(rows, path):
            print(chart)
        return {"crossings": growth.crossings(rows)}

    rows = growth.rows(sweep, device, problems, _tell)
    return _write(path, rows, _GROWTH_COLUMNS, device, problems, finish)


def write_steps(path: Path, batches: dict[str, int], device: Any, seconds: float) -> int:
    from batchformer._cli import bench_steps

    problems: list[str] = []
    rows = bench_steps.rows(batches, device, problems, _tell, seconds=seconds)
    return _write(path, rows, _STEP_COLUMNS, device, problems)


def _write(
    path: Path, rows: Iterable[dict[str, Any]], columns: tuple[str, ...], device: Any, problems: list[str],
    finish: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda rows: {},
) -> int:  # fmt: skip
    from batchformer.kernels import bench
    from batchformer.running.atomic import write_json

    result: dict[str, Any] = {**bench.machine(device), "rows": []}
    path.parent.mkdir(parents=True, exist_ok=True)
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
            "ours_gib", "papers_gib", "ours_threads_ms", "papers_threads_ms")  # fmt: skip
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


def _shape(name: str, shapes: dict[str, Any]) -> Any:
    if name not in shapes:
        hint = did_you_mean(name, shapes) or f" There are: {', '.join(shapes)}."
        raise UserError(f"There is no shape {name}.{hint}")
    return shapes[name]


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise UserError(f"--dropout {text} must be a number from 0 to below 1.")
    return value
