"""Trading rows for positions: from "my rows at all positions" to "all rows at my positions", and back.

One all-to-all each way. What comes first in memory is chosen so that only the side of the rows copies: all rows at some
positions arrive as one contiguous tensor. The gradient of either way is the other way, so every process gets the
gradient of the sum of all processes' losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from batchformer.parallel.lost import naming_the_lost
from batchformer.parallel.peers import Peers
from batchformer.parallel.traffic import note_sent


def shares(positions: int, processes: int) -> list[int]:
    """How many positions each process takes: as equal as can be, none for the last ones where there are too few."""
    return [positions // processes + (rank < positions % processes) for rank in range(processes)]


def to_positions(x: Shaped[Tensor, "rows position width"], peers: Peers) -> Shaped[Tensor, "total share width"]:
    """All processes' rows at this process' share of the positions."""
    return _ToPositions.apply(x, peers)  # type: ignore[no-any-return]


def to_rows(
    x: Shaped[Tensor, "total share width"], positions: int, peers: Peers
) -> Shaped[Tensor, "rows position width"]:
    """This process' rows at all positions again."""
    return _ToRows.apply(x, positions, peers)  # type: ignore[no-any-return]


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.positions, ctx.peers = x.shape[1], peers
        share = shares(x.shape[1], peers.count)
        sent = torch.cat([piece.reshape(-1) for piece in x.split(share, dim=1)])
        width, own = x.shape[2], share[peers.rank]
        heard = _exchange(
            sent,
            [x.shape[0] * positions * width for positions in share],
            [rows * own * width for rows in peers.rows],
            peers,
            x,
        )
        return heard.view(peers.total, own, width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ToRows.apply(gradient, ctx.positions, ctx.peers), None  # type: ignore[return-value]


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: int, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers = peers
        share = shares(positions, peers.count)
        width, own, mine = x.shape[2], share[peers.rank], peers.rows[peers.rank]
        heard = _exchange(
            x.reshape(-1),
            [rows * own * width for rows in peers.rows],
            [mine * positions * width for positions in share],
            peers,
            x,
        )
        pieces = heard.split([mine * positions * width for positions in share])
        return torch.cat([p.view(mine, n, width) for p, n in zip(pieces, share, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ToPositions.apply(gradient, ctx.peers), None, None  # type: ignore[return-value]


def _exchange(sent: Tensor, out_sizes: list[int], in_sizes: list[int], peers: Peers, x: Tensor) -> Tensor:
    """One all-to-all of unequal pieces, as bytes: backends differ in the types they know, never in bytes."""
    heard = sent.new_empty(sum(in_sizes))
    size = sent.element_size()
    with naming_the_lost(peers.group, f"{tuple(x.shape)} {x.dtype}"):
        dist.all_to_all_single(
            heard.view(torch.uint8),
            sent.contiguous().view(torch.uint8),
            [n * size for n in in_sizes],
            [n * size for n in out_sizes],
            group=peers.group,
        )
    note_sent(activations=(sum(out_sizes) - out_sizes[peers.rank]) * size)
    return heard
