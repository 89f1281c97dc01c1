"""The kernels on this GPU: are they right, how far from the device's limits is each, and which tiles suit it best.

    python -m benchmarks.kernel_tuning [SHAPE ...] [--out kernel_tuning.json] [--seconds 220]

In this order, each line printed and written as soon as it is known; what fails is a line, not an end:
  1. compile   every candidate, in processes side by side, into Triton's cache
  2. check     the layer against its definition, with the masks it draws; and at full size against torch
  3. kernels   every kernel alone, with every candidate: ms, GB/s, share of the floor ("*": as in kernels/launch.py)
  4. products  the matrix products of the layer by cuBLAS; weight gradients whole and in parts
  5. layer     forward and backward: eager, in a CUDA graph, time the host needs, and where the device's time goes
The best candidates, in the form `kernels/launch.py` has them, come last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from batchformer.files import write_json
from batchformer.kernels.backend import MEMORIES
from batchformer.nn.encoder import BatchEncoderLayer
from benchmarks import _kernel_checks as checks
from benchmarks._common import machine
from benchmarks._kernel_candidates import Bench, Candidate, candidates, compile_one, cost
from benchmarks._layer_timing import SHAPES, Rates, Shape, graph_of, measure_rates, median_ms, one_call

FIVE = ("deformable-detr", "deit-ti", "deit-s", "detr", "batchformer")


class Log:
    """Prints and writes as it goes; `guard` turns an error into a line; nothing begins after the time is up."""

    def __init__(self, path: Path, seconds: float, device: torch.device) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.begun = time.monotonic()
        self.result: dict[str, Any] = {**machine(), "sections": {}}
        self.device = device

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.result["sections"].setdefault(section, []).append(row)
        self.result["seconds"] = round(time.monotonic() - self.begun, 1)
        write_json(self.path, self.result)
        cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(f"[{self.result['seconds']:6.1f}s] {section}: " + " ".join(cells), flush=True)

    def guard(self, section: str, label: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if time.monotonic() > self.end:
            return {}
        try:
            row = {**label, **measure()}
        except Exception as problem:
            text = (str(problem).strip().splitlines() or [""])[0]
            row = {**label, "failed": f"{type(problem).__name__}: {text}"[:300]}
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.add(section, row)
        return row


def compile_all(log: Log, shapes: dict[str, Shape], workers: int) -> set[tuple[int, Candidate]]:
    """Those that failed, by width and candidate."""
    # the slowest first, so that none of them is left to the end; sizes of equal kernels once
    tasks = list({(s._replace(positions=2), c): None for s in shapes.values() for c in candidates(s)})
    tasks.sort(key=lambda task: task[1].operation in ("tile", "queries", "keys", "forward"), reverse=True)
    begun, failed = time.monotonic(), set()
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for (shape, candidate), problem in zip(tasks, pool.map(compile_one, tasks), strict=True):
                if problem is not None:
                    failed.add((shape.dim, candidate))
                    log.add("compile", {"shape": list(shape), **named(candidate), "failed": problem})
    except BrokenExecutor as problem:  # a worker died; the rest compiles when it is used
        log.add("compile", {"failed": str(problem)[:300]})
    log.add("compile", {"kernels": len(tasks), "took": round(time.monotonic() - begun, 1)})
    return failed


def named(candidate: Candidate) -> dict[str, Any]:
    return {"operation": candidate.operation + ("*" if candidate.is_current else ""), "tiles": list(candidate.tiles)}


def check_all(log: Log, shapes: dict[str, Shape], dtype: torch.dtype, workers: int) -> None:
    """Each shape in a process of its own: an error on the device would spoil all that comes after it there."""
    tasks = [(name, shape, dtype, log.device) for name, shape in shapes.items()]
    if not workers:
        found = map(checks.all_of, tasks)
        for row in (row for rows in found for row in rows):
            log.add("check", row)
        return
    try:
        with ProcessPoolExecutor(len(tasks), mp_context=multiprocessing.get_context("spawn")) as pool:
            for done in as_completed([pool.submit(checks.all_of, task) for task in tasks]):
                for row in done.result():
                    log.add("check" if row.get("passed") else "check WRONG", row)
    except BrokenExecutor as problem:
        log.add("check WRONG", {"failed": str(problem)[:300]})


def timed(call: Callable[[], Any], device: torch.device, in_graph: int = 10) -> float:
    """Of one call, without the time the host takes: several in a CUDA graph."""
    if device.type != "cuda":
        return median_ms(call, device, 1, 0.0)

    def several() -> None:
        for _ in range(in_graph):
            call()

    call()
    torch.cuda.synchronize()
    return median_ms(graph_of(several), device, 5, 0.004) / in_graph


def time_kernels(
    log: Log, shapes: dict[str, Shape], rates: Rates, dtype: torch.dtype, failed: set[tuple[int, Candidate]]
) -> dict[tuple[str, str], Candidate]:
    best: dict[tuple[str, str], tuple[float, Candidate]] = {}
    for name, shape in shapes.items():
        bench = Bench(shape, log.device, dtype)
        for candidate in candidates(shape):
            if (shape.dim, candidate) in failed:
                continue
            need = cost(shape, candidate.operation)
            floor = 1e3 * max(need.bytes / rates.copying, need.operations / rates.arithmetic)

            def measure(
                c: Candidate = candidate, floor: float = floor, moved: float = need.bytes, bench: Bench = bench
            ) -> dict[str, Any]:
                ms = timed(bench.call(c), log.device)
                return {"ms": ms, "GB/s": moved / ms / 1e6, "MB": moved / 1e6, "floor_ms": floor,
                        "of_floor": floor / ms, **bench.resources(c)}  # fmt: skip

            row = log.guard("kernels", {"shape": name, **named(candidate)}, measure)
            key = (name, candidate.operation)
            if "ms" in row and row["ms"] < best.get(key, (float("inf"),))[0]:
                best[key] = (row["ms"], candidate)
        del bench
    return {key: candidate for key, (_, candidate) in best.items()}


def time_products(log: Log, shapes: dict[str, Shape], rates: Rates, dtype: torch.dtype) -> None:
    for name, shape in shapes.items():
        tokens, dim = shape.batch * shape.positions, shape.dim
        for what, (call, passes, widths) in products(tokens, dim, log.device, dtype).items():
            moved, work = passes * tokens * dim * 2.0 + widths * dim * dim * 2.0, 2.0 * widths * tokens * dim * dim
            floor = 1e3 * max(moved / rates.copying, work / rates.arithmetic)

            def measure(c: Callable[[], Any] = call, moved: float = moved, floor: float = floor) -> dict[str, Any]:
                ms = timed(c, log.device)
                return {"ms": ms, "GB/s": moved / ms / 1e6, "floor_ms": floor, "of_floor": floor / ms}

            log.guard("products", {"shape": name, "what": what}, measure)


def products(
    tokens: int, dim: int, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Any], int, int]]:
    """Calls, and how many activations they move and widths they multiply."""
    x, y = (torch.randn(tokens, dim, device=device, dtype=dtype) for _ in range(2))
    z, total = torch.randn(tokens, 3 * dim, device=device, dtype=dtype), torch.zeros_like(x)
    wide, square = (torch.randn(n, dim, device=device, dtype=dtype) for n in (3 * dim, dim))
    bias = torch.randn(3 * dim, device=device, dtype=dtype)
    calls: dict[str, tuple[Callable[[], Any], int, int]] = {
        "qkv": (lambda: torch.addmm(bias, x, wide.t()), 4, 3),
        "square": (lambda: torch.mm(x, square.t()), 2, 1),
        "gradient of rows": (lambda: total.addmm_(y, square), 3, 1),
        "gradient of x": (lambda: total.addmm_(z, wide), 5, 3),
        "weight gradient": (lambda: torch.mm(y.t(), x), 2, 1),
        "weight gradient, qkv": (lambda: torch.mm(z.t(), x), 4, 3),
    }
    for parts in (8, 16, 48):
        if tokens % parts == 0 and tokens >= 2**14:
            calls[f"weight gradient, {parts} parts"] = (lambda p=parts: in_parts(y, x, p), 2, 1)
            calls[f"weight gradient, qkv, {parts} parts"] = (lambda p=parts: in_parts(z, x, p), 4, 3)
    return calls


def in_parts(grad: torch.Tensor, rows: torch.Tensor, parts: int) -> torch.Tensor:
    """In that many parts side by side, summed afterwards: measured no better than the whole, which the layer takes."""
    return torch.bmm(
        grad.view(parts, -1, grad.shape[1]).transpose(1, 2), rows.view(parts, -1, rows.shape[1])
    ).sum(0)  # fmt: skip


def time_layer(log: Log, shapes: dict[str, Shape], dtype: torch.dtype) -> None:
    for name, shape in shapes.items():
        for memory in MEMORIES:
            layer = BatchEncoderLayer(shape.dim, shape.heads, backend="triton", memory=memory).to(log.device, dtype)
            x, grad = (torch.randn(shape[:3], device=log.device, dtype=dtype) for _ in range(2))
            for kind in ("fwd", "fwd+bwd"):
                step = one_call(layer, layer, x.requires_grad_(), grad, kind)  # type: ignore[arg-type]
                label = {"shape": name, "memory": memory, "pass": kind}
                log.guard("layer", label, lambda step=step, both=kind == "fwd+bwd": of_layer(step, log.device, both))


def of_layer(step: Callable[[], Any], device: torch.device, with_kernels: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"eager_ms": median_ms(step, device, 5, 0.03)}
    if device.type != "cuda":
        return found
    found["graph_ms"] = median_ms(graph_of(step), device, 5, 0.03)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):  # few enough for the device's queue: the host never waits
        step()
    found["host_ms"] = (time.perf_counter() - begun) * 100
    torch.cuda.synchronize()
    if with_kernels:
        found["device_us"] = device_time(step)
    return found


def device_time(step: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of one call by kernel, products together, largest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        name = event.key
        if any(part in name for part in ("gemm", "nvjet", "cutlass", "cublas", "splitK", "xmma")):
            name = "products"
        taken = getattr(event, "self_device_time_total", 0.0) or getattr(event, "self_cuda_time_total", 0.0)
        found[name[:60]] = found.get(name[:60], 0.0) + taken / 3
    return {name: round(us, 1) for name, us in sorted(found.items(), key=lambda item: -item[1])[:12]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(FIVE), metavar="SHAPE")
    parser.add_argument("--out", type=Path, default=Path("kernel_tuning.json"))
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    tune({name: SHAPES[name] for name in args.shapes}, args.out, args.seconds, args.workers, torch.device("cuda"))


def tune(
    shapes: dict[str, Shape], out: Path, seconds: float, workers: int, device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    log = Log(out, seconds, device)
    failed = compile_all(log, shapes, workers) if workers else set()
    check_all(log, shapes, dtype, workers)
    rates = measure_rates(device, dtype)
    log.add("rates", {"TFLOP/s": rates.arithmetic / 1e12, "GB/s": rates.copying / 1e9})
    time_layer(log, shapes, dtype)
    best = time_kernels(log, shapes, rates, dtype, failed)
    time_products(log, shapes, rates, dtype)
    for (shape, operation), candidate in best.items():
        kind = type(candidate.tiles).__name__
        log.add("best", {"shape": shape, "operation": operation, "is_current": candidate.is_current,
                         "tiles": f"{kind}{tuple(candidate.tiles)}"})  # fmt: skip
    return log.result


if __name__ == "__main__":
    main()
