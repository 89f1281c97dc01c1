"""The layers of a module over the batch of all processes, exactly, by the exchange that is cheapest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.nn.encoder import run_layers
from batchformer.parallel.across import ExchangeHeads, GatherRows
from batchformer.parallel.cost import Exchange, cheapest_exchange
from batchformer.parallel.members import Members
from batchformer.parallel.peers import Peers, meet
from batchformer.parallel.trade import to_positions, to_rows

_ACROSS: dict[str, Callable[..., Any]] = {"gather": GatherRows, "heads": ExchangeHeads}
APART = (
    'scope="global" with group_size={size} relates nothing across processes: every group of {size} lies inside the '
    "batch of one process. Take group_size=None (in a recipe --model.batchformer.group_size null) to relate all "
    'samples, or scope="local" for the same result without the exchange.'
)
_warned = False


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
    those of one process with the whole batch. Random numbers differ: dropout draws where the work is done.
    Every member must call, with any number of rows, none included, and with the same `grid` (see `peers.meet`).
    """
    group = members.group()
    if group is None:
        return run_layers(layers, rows, valid)
    attention = layers[0].self_attn
    peers = meet(rows, valid, group, attention.heads, len(layers), attention.group_size, grid)
    if not peers.total or not rows.shape[1]:
        return rows
    if peers.rank == 0 and peers.are_apart(attention.group_size):
        _warn_once(attention.group_size)
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
    return run_layers(layers, rows, valid, _ACROSS[exchange](peers, valid, attention.heads))


def _by_positions(layers: Sequence[Any], rows: Tensor, valid: Tensor | None, peers: Peers) -> Tensor:
    """A layer acts on each position by itself, so all of it runs where the position is: one trip there, one back."""
    positions = rows.shape[1]
    share = to_positions(rows, peers)
    share_valid = None if valid is None else to_positions(valid[..., None], peers)[..., 0]
    if share.shape[1]:
        related = run_layers(layers, share, share_valid)
    else:
        # No position here. Still the layers run, on one blank row that nothing is read from: DDP waits for a gradient
        # of every weight (they are zeros), FSDP for this process to take part in gathering them. The blank hangs on
        # the share, so that backward passes layers and exchanges in the order it does on the other processes.
        blank = share.sum() + share.new_zeros(1, 1, rows.shape[2])
        related = run_layers(layers, blank, None)[:0].reshape(share.shape)
    return to_rows(related.to(rows.dtype), positions, peers)


def _warn_once(group_size: int) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(APART.format(size=group_size), UserWarning, stacklevel=1)
