"""``batchformer bench``: the speed and memory of the layer on this machine, beside the papers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchformer._cli.arguments import Option, read_arguments
from batchformer._cli.nearest import did_you_mean
from batchformer.errors import UserError

HELP = """
batchformer bench [SHAPE ...]          time and memory of the layer on this GPU, beside the papers' own layer

SHAPE is one or more of: deformable-detr deit-ti deit-s detr batchformer deit-s-256 deformable-detr-4 (default: all)
--dtype bf16|fp16|fp32   (bf16)        --dropout P   (0.5)         --out FOLDER   (benchmarks/results)
--name NAME   the file is FOLDER/NAME.json (layer)
--compile     the papers' layer by torch.compile as well (about a minute for each shape and pass)
--quick       fewer rounds, forward and backward together only
Each row is printed as soon as it is measured, and the file is whole after each.
"""
_OPTIONS = [Option("dtype"), Option("dropout"), Option("out"), Option("name"), Option("compile", "nothing"),
            Option("quick", "nothing")]  # fmt: skip


def run(args: list[str]) -> int:
    given = read_arguments(args, _OPTIONS)
    dropout = _probability(given.value("dropout", "0.5") or "")
    import torch

    from batchformer.kernels import bench

    dtype = given.value("dtype", "bf16") or ""
    if dtype not in bench.DTYPES:
        raise UserError(f"--dtype {dtype} must be one of {', '.join(bench.DTYPES)}.")
    shapes = {name: _shape(name, bench.SHAPES) for name in given.positional} or bench.SHAPES
    if not torch.cuda.is_available():
        raise UserError("bench measures a GPU, and torch finds no CUDA device here; run it on a machine that has one.")
    settings = bench.Settings(dtype, dropout, compile=given.flag("compile"))
    if given.flag("quick"):
        settings = settings._replace(rounds=3, seconds=0.02, passes=("fwd+bwd",))
    path = Path(given.value("out", "benchmarks/results") or "", f"{given.value('name', 'layer')}.json")
    return write_rows(path, shapes, settings, torch.device("cuda"))


def write_rows(path: Path, shapes: Any, settings: Any, device: Any) -> int:
    """Measure, print and write; 1 where something could not be measured."""
    from batchformer.kernels import bench
    from batchformer.running.atomic import write_json

    problems: list[str] = []
    result: dict[str, Any] = {**bench.machine(device), "rows": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    print(_line(dict.fromkeys(_COLUMNS, None), header=True), flush=True)
    for row in bench.rows(shapes, settings, device, problems):
        result["rows"].append(row)
        if problems:
            result["problems"] = problems
        write_json(path, result)
        print(_line(row), flush=True)
    for problem in problems:
        print(f"not measured: {problem}")
    print(path)
    return 1 if problems else 0


_COLUMNS = ("shape", "heads", "pass", "memory", "ours_ms", "papers_ms", "compiled_ms", "graph_ms", "floor_ms",
            "ours_gib", "papers_gib")  # fmt: skip


def _line(row: dict[str, Any], header: bool = False) -> str:
    cells = []
    for name in _COLUMNS:
        value = row[name]
        if header:
            text = name
        elif value is None:
            text = "-"
        elif isinstance(value, float):
            text = f"{value:.3f}"
        else:
            text = " x ".join(map(str, value)) if name == "shape" else str(value)
        cells.append(f"{text:<18}" if name == "shape" else f"{text:>{max(8, len(name))}}")
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
