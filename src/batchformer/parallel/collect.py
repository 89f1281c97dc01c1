"""The rows of all processes on every process, and the gradient that brings them home summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from batchformer.parallel.lost import naming_the_lost
from batchformer.parallel.peers import Peers
from batchformer.parallel.traffic import note_sent

# torch 2.13 renames both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collect_rows(x: Shaped[Tensor, "rows ..."], peers: Peers) -> Shaped[Tensor, "total ..."]:
    """Every process' rows, in the order of the ranks.

    Rows are padded to the longest batch, as an all-gather of unequal pieces is not to be had: gloo aborts the process,
    NCCL falls back to one broadcast per process.
    """
    return _Collect.apply(x, peers)  # type: ignore[no-any-return]


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers, most = peers, max(peers.rows)
        sent = _padded(x, most)
        heard = sent.new_empty(peers.count * most, *x.shape[1:])
        if sent.numel():
            with naming_the_lost(peers.group, f"{tuple(x.shape)} {x.dtype}"):
                _all_gather(_bytes(heard), _bytes(sent), group=peers.group)
            note_sent(activations=(peers.count - 1) * sent.numel() * sent.element_size())
        return torch.cat([heard[rank * most : rank * most + rows] for rank, rows in enumerate(peers.rows)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _SumHome.apply(gradient, ctx.peers), None  # type: ignore[return-value]


class _SumHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers, most = peers, max(peers.rows)
        sent = torch.cat([_padded(piece, most) for piece in x.split(list(peers.rows))])
        heard = sent.new_empty(most, *x.shape[1:])
        if sent.numel():
            with naming_the_lost(peers.group, f"the gradient of {tuple(x.shape)} {x.dtype}"):
                _reduce_scatter(heard, sent, group=peers.group)
            note_sent(activations=(peers.count - 1) * heard.numel() * heard.element_size())
        return heard[: peers.rows[peers.rank]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _Collect.apply(gradient, ctx.peers), None  # type: ignore[return-value]


def _padded(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
