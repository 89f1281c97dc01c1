"""The kernels of the layer one by one, with the tiles each could have: what `kernel_tuning.py` compiles and times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchformer.kernels import attention, rows
from batchformer.kernels.launch import RowTiles, Tiles, attention_tiles, padded, row_tiles
from batchformer.kernels.random_bits import Drop, Site
from benchmarks._layer_timing import Shape

DROP = Drop.of(0.5)


class Candidate(NamedTuple):
    operation: str
    tiles: tuple[Any, ...]  # of Tiles or RowTiles
    is_current: bool


class Cost(NamedTuple):
    """What an operation moves and multiplies at the least."""

    bytes: float
    operations: float


LONG = {
    "forward": [(128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 8, 3)],
    "queries": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 3, 160), (64, 64, 4, 2, 128), (64, 64, 4, 3, 128)],
    "keys": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 4, 2)],
}
WIDE = {
    "forward": [(32, 32, 8, 1), (16, 32, 4, 1), (32, 64, 8, 1), (16, 64, 8, 1)],
    "queries": [(32, 32, 8, 1), (16, 32, 8, 1), (16, 64, 8, 1), (16, 32, 4, 1)],
    "keys": [(16, 32, 8, 1), (16, 16, 4, 1), (32, 16, 8, 1), (16, 16, 8, 1)],
}
ONE_TILE_WARPS = {16: (1, 2), 32: (1, 2, 4), 64: (4, 8), 128: (4, 8)}
ROWS_FORWARD = [(1024, 4), (2048, 4), (4096, 8), (2048, 2), (4096, 4)]  # elements of a program, warps
ROWS_BACKWARD = [(1024, 4, 6), (2048, 4, 4), (2048, 8, 4), (512, 2, 12), (256, 1, 24), (256, 1, 32)]  # and programs


def candidates(shape: Shape) -> list[Candidate]:
    return _attention_candidates(shape) + _row_candidates(shape.dim)


def _attention_candidates(shape: Shape) -> list[Candidate]:
    head = shape.dim // shape.heads
    now = attention_tiles(shape.batch, head, 2)
    tile = padded(shape.batch)
    found = []
    if now.single:
        for operation, current in (("forward", now.forward), ("tile", now.backward_keys)):
            for warps in {*ONE_TILE_WARPS[tile], current.warps}:
                found.append((operation, Tiles(tile, tile, warps, 1), current))
    if not now.single or tile >= 128:
        table: dict[str, Any] = LONG if head <= 64 else WIDE
        current_tiles = {"forward": now.forward, "queries": now.backward_queries, "keys": now.backward_keys}
        for operation, sizes in table.items():
            current = current_tiles[operation]
            these = {Tiles(*size) for size in sizes} | (set() if now.single else {current})
            name = operation if operation != "forward" or not now.single else "forward, several blocks"
            found += [(name, tiles, current) for tiles in these]
    order = sorted(found, key=lambda entry: (entry[0], str(entry[1])))
    return [Candidate(operation, tiles, tiles == current) for operation, tiles, current in order]


def _row_candidates(width: int) -> list[Candidate]:
    now, columns = row_tiles(width), padded(width)
    found = []
    for elements, warps in ROWS_FORWARD:
        new = now._replace(rows=max(1, elements // columns), warps=warps)
        found += [(name, new, new[:3] == now[:3]) for name in ("add_norm", "relu")]
    for elements, warps, programs in ROWS_BACKWARD:
        new = now._replace(backward_rows=max(1, elements // columns), backward_warps=warps, programs=programs)
        found += [(name, new, new[3:] == now[3:]) for name in ("add_norm backward", "relu backward")]
    return [Candidate(*entry) for entry in sorted(set(found))]


def cost(shape: Shape, operation: str) -> Cost:
    tokens = shape.batch * shape.positions
    one = tokens * shape.dim * 2.0  # bytes of one activation
    product = 2.0 * tokens * shape.batch * shape.dim  # one matrix product of attention
    passes, products = {
        "forward": (4, 2), "forward, several blocks": (4, 2), "tile": (7, 5), "queries": (6, 3), "keys": (6, 4),
        "add_norm": (4, 0), "relu": (2, 0), "add_norm backward": (4, 0), "relu backward": (3, 0),
    }[operation]  # fmt: skip
    return Cost(passes * one, products * product)


class Bench:
    """The inputs of one shape, and its operations as calls without arguments."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        batch, positions, dim, heads = self.shape = shape
        tokens = batch * positions

        def some(*size: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, device=device, dtype=kind)

        self.qkv, self.grad = some(batch, positions, 3 * dim), some(batch, positions, dim)
        self.rows, self.residual, self.out = some(tokens, dim), some(tokens, dim), some(tokens, dim)
        self.vector, self.statistics = some(dim), some(tokens, 2, kind=torch.float32).abs()
        self.seed = torch.tensor([1234567890123], device=device)
        self.problem = attention.problem_of(*self.qkv.shape, dtype, heads, None, 0.5)
        self.lse = torch.zeros(tokens * heads, device=device, dtype=torch.float32)

    def call(self, candidate: Candidate) -> Callable[[], Any]:
        operation, tiles = candidate.operation, candidate.tiles
        if isinstance(tiles, RowTiles):
            return self._row_call(operation, tiles)
        assert isinstance(tiles, Tiles)
        single = operation == "tile" or (operation == "forward" and self.problem.tiles.single)
        now = self.problem.tiles._replace(single=single)
        if operation.startswith("forward"):
            problem = self.problem._replace(tiles=now._replace(forward=tiles))
            return lambda: attention.forward(problem, self.qkv, None, self.seed)
        # one pass of the two alone
        problem = self.problem._replace(tiles=now._replace(backward_keys=tiles, backward_queries=tiles))
        only = {"tile": None, "queries": "_KEYS", "keys": "_QUERIES"}[operation]
        out = self.out.view(self.grad.shape)

        def backward() -> Any:
            with _without(only):
                return attention.backward(problem, self.grad, self.qkv, out, self.lse, None, self.seed, True)

        return backward

    def _row_call(self, operation: str, tiles: RowTiles) -> Callable[[], Any]:
        piece = rows.whole(self.rows.shape[0])
        v, seed = self.vector, self.seed
        calls: dict[str, Callable[[], Any]] = {
            "add_norm": lambda: rows.add_norm(self.rows, self.residual, v, v, v, 1e-5, DROP, Site.MLP, seed, piece,
                                              self.out, self.statistics),
            "relu": lambda: rows.relu_(self.rows, v, DROP, Site.HIDDEN, seed, piece),
            "add_norm backward": lambda: rows.add_norm_gradients(self.residual, self.rows, self.statistics, v, DROP,
                                                                 Site.MLP, seed, piece, self.out),
            "relu backward": lambda: rows.relu_gradient_(self.out, self.residual, DROP),
        }  # fmt: skip

        def call() -> Any:
            before, rows.row_tiles = rows.row_tiles, lambda width: tiles  # type: ignore[assignment]
            try:
                return calls[operation]()
            finally:
                rows.row_tiles = before

        return call

    def resources(self, candidate: Candidate) -> dict[str, int | None]:
        """Registers and spilled bytes of what was compiled last for this operation."""
        kernel = {
            "forward": attention._FORWARD, "forward, several blocks": attention._FORWARD, "tile": attention._TILE,
            "queries": attention._QUERIES, "keys": attention._KEYS, "add_norm": rows._ADD_NORM, "relu": rows._RELU,
            "add_norm backward": rows._ADD_NORM_BACKWARD, "relu backward": rows._RELU_BACKWARD,
        }[candidate.operation]  # fmt: skip
        compiled = next(reversed(kernel._compiled.values()), (None,))[0]  # the latest
        return {"registers": getattr(compiled, "n_regs", None), "spilled": getattr(compiled, "n_spills", None)}


class _without:
    """One of the kernels does nothing in here."""

    def __init__(self, name: str | None) -> None:
        self.name, self.kernel = name, None if name is None else getattr(attention, name)

    def __enter__(self) -> None:
        if self.name is not None:
            setattr(attention, self.name, lambda *_: None)

    def __exit__(self, *_: Any) -> None:
        if self.name is not None:
            setattr(attention, self.name, self.kernel)


def small(shape: Shape) -> Shape:
    """The same kernels: sizes of a tensor are no part of what is compiled, those of a group and a head are."""
    return shape._replace(positions=min(shape.positions, 2))


def compile_one(task: tuple[Shape, Candidate]) -> str | None:
    """In a process of its own: compiles, runs once on few positions, leaves the binary in Triton's cache."""
    shape, candidate = task
    try:
        call = Bench(small(shape), torch.device("cuda"), torch.bfloat16).call(candidate)
        call()
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"[:200]
    return None
