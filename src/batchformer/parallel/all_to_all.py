"""All-to-all with gradients: from "own rows at all positions" to "all rows at own positions", and back.

One collective each way. Memory is laid out so that only the row-sharded side copies: all rows at some positions arrive
as one contiguous tensor. The backward of either direction is the other direction, so every process gets the gradient
of the sum of all processes' losses.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from batchformer.parallel.cost import note_sent, shares
from batchformer.parallel.members import Peers
from batchformer.parallel.peer_errors import report_lost_peers


def to_positions(x: Shaped[Tensor, "rows position width"], peers: Peers) -> Shaped[Tensor, "total share width"]:
    """All-to-all: from this process' rows to all processes' rows at this process' share of the positions."""
    return _ToPositions.apply(x, peers)  # type: ignore[no-any-return]


def to_rows(
    x: Shaped[Tensor, "total share width"], positions: int, peers: Peers
) -> Shaped[Tensor, "rows position width"]:
    """The inverse of `to_positions`: this process' rows at all positions."""
    return _ToRows.apply(x, positions, peers)  # type: ignore[no-any-return]


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.positions, ctx.peers = x.shape[1], peers
        share = shares(x.shape[1], peers.count)
        sent = torch.cat([piece.reshape(-1) for piece in x.split(share, dim=1)])
        width, own = x.shape[2], share[peers.rank]
        received = _exchange(
            sent,
            [x.shape[0] * positions * width for positions in share],
            [rows * own * width for rows in peers.rows],
            peers,
            x,
        )
        return received.view(peers.total, own, width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ToRows.apply(gradient, ctx.positions, ctx.peers), None  # type: ignore[return-value]


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: int, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers = peers
        share = shares(positions, peers.count)
        width, own, mine = x.shape[2], share[peers.rank], peers.rows[peers.rank]
        received = _exchange(
            x.reshape(-1),
            [rows * own * width for rows in peers.rows],
            [mine * positions * width for positions in share],
            peers,
            x,
        )
        pieces = received.split([mine * positions * width for positions in share])
        return torch.cat([p.view(mine, n, width) for p, n in zip(pieces, share, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ToPositions.apply(gradient, ctx.peers), None, None  # type: ignore[return-value]


def _exchange(sent: Tensor, out_sizes: list[int], in_sizes: list[int], peers: Peers, x: Tensor) -> Tensor:
    """One all-to-all of unequal pieces, as bytes, which all backends support."""
    received = sent.new_empty(sum(in_sizes))
    size = sent.element_size()
    with report_lost_peers(peers.group, f"{tuple(x.shape)} {x.dtype}"):
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.contiguous().view(torch.uint8),
            [n * size for n in in_sizes],
            [n * size for n in out_sizes],
            group=peers.group,
        )
    note_sent(activations=(sum(out_sizes) - out_sizes[peers.rank]) * size)
    return received
