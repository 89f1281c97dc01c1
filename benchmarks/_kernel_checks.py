"""The layer by kernels against its definition in double precision, on the device, with the very masks that it draws.

In half precision a value near zero may round to the other side of the ReLU, which changes gradients by per cents and is
nobody's fault. So the measure is the error of plain torch in the same precision: ours may be twice that, and a few
values on the other side.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchformer.kernels import dispatch
from batchformer.kernels.backend import MEMORIES, Memory
from batchformer.kernels.random_bits import Drop, Site
from batchformer.nn.encoder import BatchEncoderLayer
from benchmarks._layer_timing import Shape
from tests.kernels.definition import keep_mask

LITTLE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-5}
_SEED = 987654321012345678
NAMES = ("out", "x", "in_weight", "in_bias", "out_weight", "out_bias", "weight1", "bias1", "weight2", "bias2",
         "norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias")  # fmt: skip


def _kept(seed: Tensor, site: Site, problems: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    drop = Drop.of(0.5)
    return keep_mask(seed, site, drop, problems, rows, columns).to(dtype) * drop.scale


def definition(layer: BatchEncoderLayer, x: Tensor, seed: Tensor) -> Tensor:
    """Eq. 1 and 2 with dropout 0.5 at the four places."""
    (batch, positions, dim), inner = x.shape, layer.self_attn
    heads = inner.heads

    def dropped(t: Tensor, site: Site) -> Tensor:
        return t * _kept(seed, site, 1, batch * positions, t.shape[2], t.dtype).reshape(t.shape)

    qkv = F.linear(x, inner.in_proj_weight, inner.in_proj_bias)
    q, k, v = (t.reshape(batch, positions, heads, -1).permute(1, 2, 0, 3) for t in qkv.chunk(3, dim=-1))
    weights = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1)
    weights = weights * _kept(seed, Site.ATTENTION, positions * heads, batch, batch, x.dtype).reshape(weights.shape)
    mixed = (weights @ v).permute(2, 0, 1, 3).reshape(batch, positions, dim)
    x = layer.norm1(x + dropped(inner.out_proj(mixed), Site.ATTENDED))
    hidden = dropped(layer.linear1(x).relu(), Site.HIDDEN)
    return layer.norm2(x + dropped(layer.linear2(hidden), Site.MLP))


def _results(out: Tensor, x: Tensor, layer: BatchEncoderLayer) -> list[Tensor]:
    generator = torch.Generator(out.device).manual_seed(5)
    weight = torch.randn(out.shape, generator=generator, device=out.device)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], weight.to(out.dtype))]


def _make(shape: Shape, dtype: torch.dtype, device: torch.device, memory: Memory, dropout: float) -> BatchEncoderLayer:
    torch.manual_seed(0)
    layer = BatchEncoderLayer(shape.dim, shape.heads, dropout=dropout, backend="triton", memory=memory).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():  # biases start at zero and norms at one: nothing would notice them
            parameter += 0.05 * torch.randn_like(parameter)
    return layer.to(dtype)


def _compare(ours: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> dict[str, Any]:
    """The result whose error is largest, by what it may be."""
    found, few = [], 0.0 if ours[0].dtype == torch.float32 else 3.0 * ours[0].numel() ** -0.5
    for name, one, other, right in zip(NAMES, ours, plain, exact, strict=True):
        error, bound = _error(one, right), 2 * _error(other, right) + LITTLE[one.dtype] + few
        share = error / bound if error == error else float("inf")
        found.append((share, {"worst": name, "error": error, "bound": bound, "passed": share < 1.0}))
    return max(found, key=lambda entry: entry[0])[1]


def _error(one: Tensor, right: Tensor) -> float:
    return ((one.double() - right.double()).norm() / right.double().norm().clamp_min(1e-12)).item()


def with_dropout(shape: Shape, dtype: torch.dtype, device: torch.device, memory: Memory) -> dict[str, Any]:
    """Few positions: the definition holds all weights, and their masks are drawn by the CPU."""
    shape = shape._replace(positions=min(shape.positions, 3 if shape.batch < 512 else 1))
    layer = _make(shape, dtype, device, memory, 0.5)
    x = torch.randn(shape[:3], device=device).to(dtype).requires_grad_()
    seed = torch.tensor([_SEED], device=device)
    draw, dispatch.draw_seed = dispatch.draw_seed, lambda device: seed  # type: ignore[assignment]
    try:
        ours = _results(layer(x), x, layer)
    finally:
        dispatch.draw_seed = draw
    exact, twin = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    plain = _results(definition(layer, x, seed), x, layer)
    return _compare(ours, plain, _results(definition(exact, twin, seed), twin, exact))


def whole(shape: Shape, dtype: torch.dtype, device: torch.device, memory: Memory) -> dict[str, Any]:
    """All positions, nothing dropped, against torch's own kernels in single precision."""
    layer = _make(shape, dtype, device, memory, 0.0)
    x = torch.randn(shape[:3], device=device).to(dtype).requires_grad_()
    ours = _results(layer(x), x, layer)
    exact, twin = copy.deepcopy(layer).float(), x.detach().float().requires_grad_()
    for module in (layer, exact):
        module.self_attn.backend, module.memory = "sdpa", "fast"
    return _compare(ours, _results(layer(x), x, layer), _results(exact(twin), twin, exact))


def all_of(task: tuple[str, Shape, torch.dtype, torch.device]) -> list[dict[str, Any]]:
    """Every check of a shape: with dropout, at full size, and in single precision where the kernels have it."""
    name, shape, dtype, device = task
    kinds: list[tuple[str, Any, torch.dtype]] = [("dropout", with_dropout, dtype), ("full size", whole, dtype)]
    if shape.dim // shape.heads <= 256:
        kinds.append(("dropout, single precision", with_dropout, torch.float32))
    rows = []
    for memory in MEMORIES:
        for what, check, kind in kinds:
            row: dict[str, Any] = {"shape": name, "memory": memory, "what": what}
            try:
                row.update(check(shape, kind, device, memory))
            except Exception as problem:
                text = (str(problem).strip().splitlines() or [""])[0]
                row.update(passed=False, failed=f"{type(problem).__name__}: {text}"[:300])
            rows.append(row)
    return rows
