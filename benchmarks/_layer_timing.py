"""The layer beside the papers' own, `nn.TransformerEncoderLayer(C, heads, C, p)`, on one device, in one run.

Times are those of a call in training mode: "fwd" a forward that stores what its backward needs, "fwd+bwd" both, with
gradients of the input and of every weight. Memory is the peak of the call above what was there before it: input,
incoming gradient and weights are not counted, the output and the gradients are. The floor is the arithmetic of the
layer at the rate of a large matrix product of this device, or input and output moved once at the rate of a copy,
whichever is longer: neither can be beaten.

`*_ms` is the fastest of several rounds: what else runs on a shared host can only add to it. `*_median_ms` is their
median. `graph_ms` is ours captured in a CUDA graph and replayed, without the time of the host; `speedup` is papers_ms /
ours_ms, both eager in the same run.

Backward passes run on the calling thread (`on_this_thread`), as in `batchformer fit`; `*_threads_ms` is the same with
autograd's own thread of the device, torch's default, where the host pays for waking one thread and then the other.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from batchformer.kernels.backend import MEMORIES, Backend, Memory
from batchformer.nn.encoder import BatchEncoderLayer

Pass = Literal["fwd+bwd", "fwd"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Shape(NamedTuple):
    batch: int
    positions: int
    dim: int
    heads: int


SHAPES = {
    "deformable-detr": Shape(24, 13294, 256, 4),
    "deit-ti": Shape(1024, 197, 192, 3),
    "deit-s": Shape(128, 197, 384, 6),
    "detr": Shape(16, 950, 256, 4),
    "batchformer": Shape(128, 1, 2048, 4),
    "deit-s-256": Shape(256, 197, 384, 6),
    "deformable-detr-4": Shape(4, 13294, 256, 4),
}


class Rates(NamedTuple):
    """What this device reaches: multiplications and additions, and bytes read and written, in a second."""

    arithmetic: float
    copying: float


class Settings(NamedTuple):
    dtype: str = "bf16"
    dropout: float = 0.5
    rounds: int = 9
    seconds: float = 0.05  # of one round
    compile: bool = False
    passes: tuple[Pass, ...] = ("fwd+bwd", "fwd")
    memories: tuple[Memory, ...] = MEMORIES


def machine(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type != "cuda":
        return {"device": "CPU", "versions": versions}
    thread = "the device's" if torch._C._is_multithreading_enabled() else "the caller's"
    return {"device": torch.cuda.get_device_name(device), "versions": versions, "backward_thread": thread}


def on_this_thread(one: bool = True) -> AbstractContextManager[Any]:
    """Inside, backward passes run on the thread that calls them; or, with False, as torch does by default."""
    return torch.autograd.set_multithreading_enabled(not one)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    side = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.empty(2**29 if device.type == "cuda" else 2**16, device=device)
    target = torch.empty_like(source)
    product = median_ms(lambda: a @ b, device, 5, 0.02)
    copy = median_ms(lambda: target.copy_(source), device, 5, 0.02)
    return Rates(2 * side**3 / product * 1e3, 2 * source.numel() * source.element_size() / copy * 1e3)


def floor_ms(shape: Shape, kind: Pass, dtype: torch.dtype, rates: Rates) -> float:
    tokens = shape.batch * shape.positions
    forward = tokens * (12 * shape.dim**2 + 4 * shape.batch * shape.dim)
    arithmetic = forward * (3 if kind == "fwd+bwd" else 1)
    # x in, y out; and the gradient of y in, that of x out
    moved = tokens * shape.dim * dtype.itemsize * (4 if kind == "fwd+bwd" else 2)
    return 1e3 * max(arithmetic / rates.arithmetic, moved / rates.copying)


class Times(NamedTuple):
    fastest: float
    median: float


def times_ms(step: Callable[[], Any], device: torch.device, rounds: int, seconds: float) -> Times:
    """Of several rounds, each of as many calls as fill the time given."""
    for _ in range(3):  # compiles the kernels, and fills the caches of torch's allocator
        step()
    once = _round_ms(step, device, 3)
    repeats = max(1, min(1000, round(seconds * 1e3 / max(once, 1e-3))))
    times = sorted(_round_ms(step, device, repeats) for _ in range(rounds))
    return Times(times[0], times[len(times) // 2])


def median_ms(step: Callable[[], Any], device: torch.device, rounds: int, seconds: float) -> float:
    return times_ms(step, device, rounds, seconds).median


def _round_ms(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - begin) * 1e3 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def peak_gib(step: Callable[[], Any], device: torch.device) -> float:
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def one_call(layer: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, grad: Tensor, kind: Pass) -> Callable:
    """A call to measure; nothing of it is left when it returns."""
    leaves = [x, *module.parameters()]

    def forward() -> None:
        layer(x)

    def both() -> None:
        layer(x).backward(grad)
        for leaf in leaves:
            leaf.grad = None

    return forward if kind == "fwd" else both


def graph_of(step: Callable[[], Any]) -> Callable[[], Any]:
    """The call, captured once; what comes back replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def rows(
    shapes: dict[str, Shape], settings: Settings, device: torch.device, problems: list[str],
    tell: Callable[[str], Any] = lambda _: None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One row after the other, as they are measured. What fails is None in its row and a sentence in `problems`; what
    is being done is told."""
    dtype = DTYPES[settings.dtype]
    rates = measure_rates(device, dtype)
    for name, shape in shapes.items():
        theirs = _Papers(name, shape, settings, device, problems)
        for kind in settings.passes:
            tell(f"{name}, {kind}: the papers' layer" + (", compiled too" if settings.compile else ""))
            papers = theirs.measure(kind)
            for memory in settings.memories:
                tell(f"{name}, {kind}: ours, {memory}")
                ours = _ours(f"{name} {kind} {memory}", shape, kind, memory, settings, device, problems)
                yield {
                    "shape": list(shape[:3]), "heads": shape.heads, "dtype": settings.dtype, "pass": kind,
                    "dropout": settings.dropout, "memory": memory, "ours_ms": ours["ms"], "papers_ms": papers["ms"],
                    "compiled_ms": papers["compiled"], "graph_ms": ours["graph"], "ours_gib": ours["gib"],
                    "papers_gib": papers["gib"], "floor_ms": floor_ms(shape, kind, dtype, rates),
                    "ours_median_ms": ours["median"], "papers_median_ms": papers["median"],
                    "ours_threads_ms": ours["threads"], "papers_threads_ms": papers["threads"],
                    "speedup": papers["ms"] / ours["ms"] if papers["ms"] and ours["ms"] else None,
                }  # fmt: skip


def kernels_on(device: torch.device) -> Backend:
    """The kernels are what is measured, also while "auto" would not take them; on the CPU there are none."""
    return "triton" if device.type == "cuda" else "auto"


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    x, grad = (torch.randn(shape[:3], device=device, dtype=dtype) for _ in range(2))
    return x.requires_grad_(), grad


def _ours(
    label: str, shape: Shape, kind: Pass, memory: Memory, settings: Settings, device: torch.device, problems: list[str]
) -> dict[str, float | None]:
    dtype = DTYPES[settings.dtype]
    module = BatchEncoderLayer(
        shape.dim, shape.heads, dropout=settings.dropout, backend=kernels_on(device), memory=memory
    ).to(device, dtype)
    step = one_call(module, module, *_inputs(shape, dtype, device), kind)
    timed = (device, settings.rounds, settings.seconds)
    found = _eager(f"{label} ours", step, kind, timed, problems)
    if device.type == "cuda":
        found["graph"] = guarded(f"{label} graph_ms", lambda: times_ms(graph_of(step), *timed).fastest, problems)
    return found


def _eager(
    label: str, step: Callable[[], Any], kind: Pass, timed: tuple[torch.device, int, float], problems: list[str]
) -> dict[str, float | None]:
    """Time and memory of the call, and its time with the backward on autograd's own thread."""
    times = guarded(f"{label}_ms", lambda: times_ms(step, *timed), problems)
    found = {"ms": times and times.fastest, "median": times and times.median, "threads": None, "gib": None,
             "graph": None}  # fmt: skip
    if kind != "fwd" and times is not None:
        with on_this_thread(False):
            found["threads"] = guarded(f"{label}_threads_ms", lambda: times_ms(step, *timed).fastest, problems)
    if timed[0].type == "cuda" and times is not None:
        found["gib"] = guarded(f"{label}_gib", lambda: peak_gib(step, timed[0]), problems)
    return found


class _Papers:
    """The papers' layer at one shape; compiled once for both passes."""

    def __init__(self, name: str, shape: Shape, settings: Settings, device: torch.device, problems: list[str]) -> None:
        dtype = DTYPES[settings.dtype]
        self.name, self.settings, self.device, self.problems = name, settings, device, problems
        self.module = nn.TransformerEncoderLayer(shape.dim, shape.heads, shape.dim, settings.dropout).to(device, dtype)
        self.inputs = _inputs(shape, dtype, device)
        self.compiled: Callable[[Tensor], Tensor] | None = None
        if settings.compile:
            torch._dynamo.reset()
            self.compiled = torch.compile(self.module, dynamic=False)

    def measure(self, kind: Pass) -> dict[str, float | None]:
        timed = (self.device, self.settings.rounds, self.settings.seconds)
        step = one_call(self.module, self.module, *self.inputs, kind)
        label = f"{self.name} {kind}"
        found = _eager(f"{label} papers", step, kind, timed, self.problems)
        found["compiled"] = None
        if self.compiled is not None:
            fast = one_call(self.compiled, self.module, *self.inputs, kind)
            found["compiled"] = guarded(f"{label} compiled_ms", lambda: times_ms(fast, *timed).fastest, self.problems)
            _end_compilers()
        return found


def _end_compilers() -> None:
    """The processes that compiled for torch stay: what is measured next is to have the host for itself."""
    from torch._inductor import async_compile

    end = getattr(async_compile, "shutdown_compile_workers", None)  # not a public name
    if end is not None:
        end()


Measured = TypeVar("Measured")


def guarded(label: str, measure: Callable[[], Measured], problems: list[str]) -> Measured | None:
    """The measurement, or None and a line about what went wrong: one failure must not lose the others."""
    try:
        return measure()
    except Exception as problem:
        first = (str(problem).strip().splitlines() or [""])[0]
        problems.append(f"{label}: {type(problem).__name__}: {first}"[:300])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None
