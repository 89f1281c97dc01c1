"""What several processes compute, and one process with the whole batch must compute as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import batchformer as bf
from batchformer.parallel import Members, relate_across

DIM = 8
# Rows of each process: unequal, and one process without any.
BATCHES = {2: (3, 5), 3: (3, 5, 2), 4: (4, 0, 1, 6)}


@dataclass(frozen=True)
class Case:
    positions: int
    exchange: str | None = None  # None: the one the module chooses
    heads: int = 2
    layers: int = 1
    norm: str = "post"
    group_size: int | None = None
    masked: bool = False


CASES = {
    "tokens": Case(7),
    "tokens-masked": Case(5, masked=True),
    "tokens-in-groups-of-4": Case(5, group_size=4),
    "fewer-tokens-than-processes": Case(2, exchange="positions", masked=True),
    "tokens-two-relative-layers": Case(5, layers=2, norm="relative"),
    "tokens-by-heads": Case(3, exchange="heads", heads=4, masked=True, group_size=3, layers=2),
    "tokens-by-gather": Case(3, exchange="gather", masked=True, group_size=3, layers=2, norm="pre"),
    "tokens-relative-by-gather": Case(3, exchange="gather", masked=True, norm="relative"),
    "features": Case(1),
    "features-in-groups-of-4": Case(1, group_size=4),
    "features-by-gather": Case(1, exchange="gather", masked=True),
    "features-by-heads": Case(1, exchange="heads"),
    "features-two-layers-by-heads": Case(1, exchange="heads", heads=4, layers=2, masked=True),
}


def make_module(case: Case, scope: str) -> bf.BatchFormer:
    torch.manual_seed(0)
    module = bf.BatchFormer(DIM, case.heads, 12, 0.0, case.layers, case.norm, case.group_size, scope=scope)
    return module.double()


def make_rows(total: int, case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """All rows, their mask, and the weights of the loss: seen by every process, which takes its part."""
    generator = torch.Generator().manual_seed(total)
    shape = (total, case.positions, DIM)
    x, weights = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    valid = torch.rand(shape[:2], generator=generator) < 0.7 if case.masked else None
    return x, valid, weights


def outcome(case: Case, scope: str, rows: slice, total: int) -> dict[str, Tensor]:
    """Output, gradient of the input, and gradient of each parameter for some of the rows."""
    module = make_module(case, scope)
    x, valid, weights = make_rows(total, case)
    x = x[rows].requires_grad_()
    valid = None if valid is None else valid[rows]
    if scope == "global" and case.exchange is not None:
        out = relate_across(module.layers, x, valid, Members(), case.exchange)
    elif scope == "global":
        out = module.relate(x, valid)
    else:
        out = x
        for layer in module.layers:
            out = layer(out, valid)
        if valid is not None and case.exchange is None:  # what relate does beyond the layers
            out = module.relate(x, valid)
    (out * weights[rows]).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


def own_rows(rank: int, batches: tuple[int, ...]) -> slice:
    start = sum(batches[:rank])
    return slice(start, start + batches[rank])
