"""How time and memory of the layer grow with the batch and with the positions, measured and drawn.

Attention grows with B x B x N, the matrix products with B x N: by arithmetic alone they meet where the batch is three
times the width. "attention_ms" is attention alone, "products_ms" the four matrix products alone, forward and backward.
`python -m benchmarks._layer_growth growth.json` draws the charts of a file again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchformer.kernels.backend import MEMORIES
from batchformer.nn.encoder import BatchEncoderLayer
from batchformer.report.charts import XY, Chart, decade_axis
from benchmarks._chart_files import lines_svg
from benchmarks._layer_timing import DTYPES, guarded, kernels_on, median_ms, one_call, peak_gib

Row = Mapping[str, Any]


class Sweep(NamedTuple):
    batches: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    positions: tuple[int, ...] = (1, 16, 197, 1000, 4000, 13294, 50_000)
    tokens: int = 2**22  # at most
    dim: int = 256
    heads: int = 4
    dtype: str = "bf16"
    dropout: float = 0.5


QUICK = Sweep(batches=(16, 128, 1024, 4096), positions=(1, 197, 1000))


class Products(nn.Module):
    """The four matrix products of the layer and nothing between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(dim, width, bias=False) for width in (3 * dim, dim, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        into, *rest = self.parts
        x = into(x)[..., : x.shape[-1]]
        for part in rest:
            x = part(x)
        return x


def rows(
    sweep: Sweep, device: torch.device, problems: list[str], tell: Callable[[str], Any] = lambda _: None
) -> Iterator[dict[str, Any]]:
    for positions in sweep.positions:
        for batch in sweep.batches:
            if batch * positions <= sweep.tokens:
                tell(f"batch {batch}, {positions} positions")
                yield _row(batch, positions, sweep, device, problems)


def _row(batch: int, positions: int, sweep: Sweep, device: torch.device, problems: list[str]) -> dict[str, Any]:
    dtype, label, timed = DTYPES[sweep.dtype], f"{batch} x {positions}", (device, 3, 0.01)
    x = torch.randn(batch, positions, sweep.dim, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    row: dict[str, Any] = {"shape": list(x.shape), "heads": sweep.heads, "dtype": sweep.dtype, "pass": "fwd+bwd",
                           "dropout": sweep.dropout}  # fmt: skip

    def measure(name: str, step: Callable[[], Any]) -> None:
        row[f"{name}_ms"] = guarded(f"{label} {name}_ms", lambda: median_ms(step, *timed), problems)

    for memory in MEMORIES:
        layer = BatchEncoderLayer(
            sweep.dim, sweep.heads, dropout=sweep.dropout, backend=kernels_on(device), memory=memory
        ).to(device, dtype)
        step = one_call(layer, layer, x, grad, "fwd+bwd")
        measure(memory, step)
        row[f"{memory}_gib"] = None
        if device.type == "cuda":
            row[f"{memory}_gib"] = guarded(f"{label} {memory}_gib", lambda s=step: peak_gib(s, device), problems)  # type: ignore[misc]
    products = Products(sweep.dim).to(device, dtype)
    measure("products", one_call(products, products, x, grad, "fwd+bwd"))
    qkv = torch.randn(batch, positions, 3 * sweep.dim, device=device, dtype=dtype, requires_grad=True)
    measure("attention", one_call(_attention(sweep, device), nn.Module(), qkv, grad, "fwd+bwd"))
    return row


def _attention(sweep: Sweep, device: torch.device) -> Callable[[Tensor], Tensor]:
    if kernels_on(device) == "triton":
        from batchformer.kernels.dispatch import batch_attention

        return lambda qkv: batch_attention(qkv, sweep.heads, sweep.dropout)

    from batchformer.nn.attention import batch_attention as by_torch

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (sweep.heads, -1)) for t in qkv.chunk(3, dim=-1))
        return by_torch(q, k, v, sweep.dropout).flatten(2)

    return attend


def crossings(rows: list[dict[str, Any]]) -> list[dict[str, float | int | None]]:
    """For each number of positions the batch from which attention takes longer than the products: between two measured
    ones on a straight line in logarithms, None where it never does."""
    found: dict[int, float | None] = {}
    before: dict[int, tuple[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["shape"][0]):
        batch, positions, _ = row["shape"]
        if row["attention_ms"] is None or row["products_ms"] is None:
            continue
        ratio = math.log(row["attention_ms"] / row["products_ms"])
        found.setdefault(positions, None)
        if ratio >= 0.0 and found[positions] is None:
            below = before.get(positions)
            share = 1.0 if below is None else below[1] / (below[1] - ratio)
            found[positions] = batch if below is None else below[0] * (batch / below[0]) ** share
        elif ratio < 0.0:
            found[positions] = None  # noise of small sizes: what counts is the last time it is overtaken
        before[positions] = (batch, ratio)
    return [{"positions": positions, "batch": batch} for positions, batch in sorted(found.items())]


def _ratio(row: Row) -> float | None:
    attention, products = row["attention_ms"], row["products_ms"]
    return attention / products if attention and products else None


_CHARTS: dict[str, tuple[str, str, Callable[[Row], float | None]]] = {
    "time": ("Time of the layer, forward and backward", "milliseconds", lambda row: row["fast_ms"]),
    "memory": ("Peak memory of the layer, forward and backward", "GiB", lambda row: row["fast_gib"]),
    "memory-lean": ("Peak memory with memory=lean", "GiB", lambda row: row["lean_gib"]),
    "attention": ("Attention over the matrix products: above 1 it overtakes them", "ratio of times", _ratio),
}


def write_growth_charts(rows: Sequence[Row], source: Path) -> list[Path]:
    """One SVG beside `source` for each quantity that was measured, a line for each number of positions."""
    written = []
    for name, (title, label, value) in _CHARTS.items():
        lines: dict[str, list[XY]] = {}
        for row in sorted(rows, key=lambda row: (row["shape"][1], row["shape"][0])):
            found = value(row)
            if found:  # zero has no place on this axis either
                lines.setdefault(f"{row['shape'][1]:,} positions", []).append((float(row["shape"][0]), float(found)))
        if not lines:
            continue
        points = [point for line in lines.values() for point in line]
        chart = Chart(name, decade_axis([x for x, _ in points], "batch"), decade_axis([y for _, y in points], label))
        ends = "; ".join(f"{which}: {line[-1][1]:.3g} at a batch of {line[-1][0]:.0f}" for which, line in lines.items())
        target = source.with_name(f"{source.stem}-{name}.svg")
        target.write_text(lines_svg(chart, lines, title, ends), encoding="utf-8")
        written.append(target)
    return written


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        write_growth_charts(json.loads(file.read_text(encoding="utf-8"))["rows"], file)
