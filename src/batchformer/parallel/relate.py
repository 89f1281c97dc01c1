"""Run the layers of a module over the batch of all processes, exactly, by the cheapest exchange.

"positions": each process gets all rows at its share of the positions, runs whole layers there and sends the result
back. "gather" and "heads" exchange inside of the attention only (`GatherRows`, `ExchangeHeads`), for features without
many positions: `nn.BatchAttention` calls them in place of its own forward, (attention, x) -> the residual branch, of
the shape of x. The rest of the layer runs on each process' own rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from batchformer.errors import warn_once
from batchformer.parallel.cost import Exchange, cheapest_exchange, note_sent, shares
from batchformer.parallel.members import Members, Peers, exchange_sizes
from batchformer.parallel.peer_errors import report_lost_peers

# torch 2.13 renames both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
APART = (
    'scope="global" with group_size={size} relates nothing across processes: every group of {size} lies inside the '
    "batch of one process. Take group_size=None (in a recipe --model.batchformer.group_size null) to relate all "
    'samples, or scope="local" for the same result without the exchange.'
)


@torch.compiler.disable(recursive=False)  # sizes come from other processes; the layers themselves are compiled
def relate_across(
    layers: Sequence[Any],
    rows: Float[Tensor, "batch position dim"],
    valid: Bool[Tensor, "batch position"] | None,
    members: Members,
    exchange: Exchange | None = None,
    grid: tuple[int, int] | None = None,
) -> Float[Tensor, "batch position dim"]:
    """This process' rows, related to the rows of all members as if all were one batch, in the order of the ranks.

    Backward gives the gradient of the sum of the losses of all processes: summed over the processes, gradients are
    those of one process with the whole batch. Random numbers differ: each process draws dropout for what it computes.
    Every member must call it, with any number of rows, also 0, and the same `grid` (`members.exchange_sizes`).
    """
    group = members.group()
    if group is None:
        return _run_layers(layers, rows, valid)
    attention = layers[0].self_attn
    peers = exchange_sizes(rows, valid, group, attention.heads, len(layers), attention.group_size, grid)
    if not peers.total or not rows.shape[1]:
        return rows
    if peers.rank == 0 and peers.has_no_shared_group(attention.group_size):
        warn_once(APART.format(size=attention.group_size))
    exchange = exchange or cheapest_exchange(
        peers.count,
        max(peers.rows),
        rows.shape[1],
        rows.shape[2],
        heads=attention.heads,
        layers=len(layers),
        itemsize=rows.element_size(),
    )
    if exchange == "positions":
        return _by_positions(layers, rows, valid, peers)
    across = GatherRows if exchange == "gather" else ExchangeHeads
    return _run_layers(layers, rows, valid, across(peers, valid, attention.heads))


def _by_positions(layers: Sequence[Any], rows: Tensor, valid: Tensor | None, peers: Peers) -> Tensor:
    """Run whole layers on this process' share of the positions, which are independent: one all-to-all each way."""
    positions = rows.shape[1]
    share = to_positions(rows, peers)
    share_valid = None if valid is None else to_positions(valid[..., None], peers)[..., 0]
    if share.shape[1]:
        related = _run_layers(layers, share, share_valid)
    else:
        # No position here. The layers still run, on one row of zeros with an unused result: DDP waits for a gradient of
        # every weight (they are zeros), FSDP for this process to join the all-gather of the weights. The row depends on
        # the share, so that backward runs layers and collectives in the same order as on the other processes.
        blank = share.sum() + share.new_zeros(1, 1, rows.shape[2])
        related = _run_layers(layers, blank, None)[:0].reshape(share.shape)
    return to_rows(related.to(rows.dtype), positions, peers)


def _run_layers(layers: Sequence[Any], rows: Tensor, valid: Tensor | None, across: Any = None) -> Tensor:
    for layer in layers:
        rows = layer(rows, valid) if across is None else layer(rows, valid, across)
    return rows


class GatherRows:
    """All-gather the input x of all rows and compute keys and values of them; queries are the process' own rows.

    Gathers x and not keys and values: half the bytes, for one more matrix product.
    """

    def __init__(self, peers: Peers, valid: Bool[Tensor, "batch position"] | None, heads: int) -> None:
        self.peers = peers
        self.valid = None if valid is None else gather_rows(valid, peers)

    def __call__(self, attention: Any, x: Float[Tensor, "batch position dim"]) -> Float[Tensor, "batch position dim"]:
        heads, dim = attention.heads, attention.dim
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        query = F.linear(x, weight[:dim], bias[:dim]).unflatten(-1, (heads, -1))
        both = F.linear(gather_rows(x, self.peers), weight[dim:], bias[dim:])
        key, value = (t.unflatten(-1, (heads, -1)) for t in both.chunk(2, dim=-1))
        if x.shape[0]:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            dropout = attention.dropout if attention.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, self._allowed(attention.group_size, x.device), dropout)
            out = out.permute(2, 0, 1, 3)
        else:  # no row, no query; but the other processes wait for this backward, with a gradient of zero
            out = query + value[:0]
        return attention.out_proj(out.flatten(2))

    def _allowed(self, group_size: int | None, device: torch.device) -> Bool[Tensor, "position 1 batch total"] | None:
        """Attention mask: own rows attend to every valid row in their group of the global batch, and to themselves."""
        if self.valid is None and group_size is None:
            return None
        numbers = torch.arange(self.peers.total, device=device)
        own = numbers[self.peers.own, None]
        group = group_size or self.peers.total
        together = own // group == numbers // group
        if self.valid is None:
            return together[None, None]
        return ((self.valid.T[:, None, :] & together) | (own == numbers))[:, None]


class ExchangeHeads:
    """Attention over all rows, with the (position, head) pairs distributed over the processes.

    All-to-all of queries, keys and values, and of the result back: four activations instead of one per process, but
    each process receives only its share of them.
    """

    def __init__(self, peers: Peers, valid: Bool[Tensor, "batch position"] | None, heads: int) -> None:
        self.peers = peers
        self.valid = (
            None if valid is None else to_positions(valid.repeat_interleave(heads, 1)[..., None], peers)[..., 0]
        )

    def __call__(self, attention: Any, x: Float[Tensor, "batch position dim"]) -> Float[Tensor, "batch position dim"]:
        rows, positions, dim = x.shape
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        # (rows, positions, 3, heads, width) -> one (query, key, value) per (position, head)
        pairs = qkv.unflatten(-1, (3, attention.heads, -1)).transpose(2, 3).flatten(3).flatten(1, 2)
        query, key, value = to_positions(pairs, self.peers).unsqueeze(2).chunk(3, dim=-1)
        out = attention.attend(query, key, value, self.valid) if value.numel() else value
        out = to_rows(out.flatten(2), positions * attention.heads, self.peers)
        return attention.out_proj(out.reshape(rows, positions, dim))


def to_positions(x: Shaped[Tensor, "rows position width"], peers: Peers) -> Shaped[Tensor, "total share width"]:
    """All-to-all: from this process' rows to all processes' rows at this process' share of the positions.

    Memory is laid out so that only the row-sharded side copies: all rows at some positions arrive as one contiguous
    tensor. The backward of either direction is the other direction, so every process gets the gradient of the sum of
    all processes' losses.
    """
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
        width, own, own_rows = x.shape[2], share[peers.rank], peers.rows[peers.rank]
        received = _exchange(
            x.reshape(-1),
            [rows * own * width for rows in peers.rows],
            [own_rows * positions * width for positions in share],
            peers,
            x,
        )
        pieces = received.split([own_rows * positions * width for positions in share])
        return torch.cat([p.view(own_rows, n, width) for p, n in zip(pieces, share, strict=True)], dim=1)

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


def gather_rows(x: Shaped[Tensor, "rows ..."], peers: Peers) -> Shaped[Tensor, "total ..."]:
    """All-gather of rows, in the order of the ranks; the backward sums gradients (reduce-scatter).

    Rows are padded to the longest batch: an all-gather of unequal pieces aborts the process with gloo, and is one
    broadcast per process with NCCL.
    """
    return _AllGather.apply(x, peers)  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers, most = peers, max(peers.rows)
        sent = _padded(x, most)
        received = sent.new_empty(peers.count * most, *x.shape[1:])
        if sent.numel():
            with report_lost_peers(peers.group, f"{tuple(x.shape)} {x.dtype}"):
                _all_gather(_bytes(received), _bytes(sent), group=peers.group)
            note_sent(activations=(peers.count - 1) * sent.numel() * sent.element_size())
        return torch.cat([received[rank * most : rank * most + rows] for rank, rows in enumerate(peers.rows)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _ReduceScatter.apply(gradient, ctx.peers), None  # type: ignore[return-value]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:  # type: ignore[override]
        ctx.peers, most = peers, max(peers.rows)
        sent = torch.cat([_padded(piece, most) for piece in x.split(list(peers.rows))])
        received = sent.new_empty(most, *x.shape[1:])
        if sent.numel():
            with report_lost_peers(peers.group, f"the gradient of {tuple(x.shape)} {x.dtype}"):
                _reduce_scatter(received, sent, group=peers.group)
            note_sent(activations=(peers.count - 1) * received.numel() * received.element_size())
        return received[: peers.rows[peers.rank]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _AllGather.apply(gradient, ctx.peers), None  # type: ignore[return-value]


def _padded(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
