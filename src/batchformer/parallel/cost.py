"""The cost of attending over the batch of all processes: predicted bytes and time, and the bytes really sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from batchformer.errors import UserError, check_choice

Exchange = Literal["positions", "gather", "heads"]
EXCHANGES: tuple[Exchange, ...] = ("positions", "gather", "heads")


@dataclass(frozen=True)
class Links:
    """Bandwidth between processes, in bytes per second and direction.

    The defaults are eight GPUs of a node on NVLink 4 (900 GB/s both ways together) and one 400 Gb/s port for each GPU,
    at their nominal speeds; `latency` is the minimum time of one collective, in seconds.
    """

    node: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    latency: float = 20e-6


@dataclass(frozen=True)
class StepCost:
    """Communication cost of one module in one training step (forward and backward), of the process with most traffic.

    `bytes` is what it sends or receives, whichever is more, in all exchanges together; `network_bytes` the part of it
    that crosses its network port; seconds are those of the links alone, without overlap with computation.
    """

    exchange: Exchange
    processes: int
    bytes: int
    network_bytes: int
    nvlink_seconds: float
    network_seconds: float
    seconds: float


def shares(positions: int, processes: int) -> list[int]:
    """How many positions each process takes: as equal as can be, none for the last ones where there are too few."""
    return [positions // processes + (rank < positions % processes) for rank in range(processes)]


def bytes_sent(
    exchange: Exchange,
    batches: Sequence[int],
    positions: int,
    dim: int,
    *,
    heads: int = 4,
    layers: int = 1,
    itemsize: int = 2,
    masked: bool = False,
    backward: bool = False,
) -> list[int]:
    """Bytes that each process sends to others in one pass of one module, `batches` being the rows of each.

    Forward and backward send the same, except for the mask (one byte per position), which has no gradient.
    """
    total, most, count = sum(batches), max(batches), len(batches)
    mask = masked and not backward
    if exchange == "gather":
        return [(count - 1) * most * positions * (layers * dim * itemsize + mask)] * count
    if exchange == "positions":
        there, back, pieces = dim * itemsize, dim * itemsize, positions
    else:
        width = dim // heads * itemsize
        there, back, pieces = 3 * width * layers, width * layers, positions * heads
    sent = []
    for batch, share in zip(batches, shares(pieces, count), strict=True):
        out, home = batch * (pieces - share), (total - batch) * share
        # Gradients take the same ways in the other direction.
        sent.append(out * back + home * there if backward else out * (there + mask) + home * back)
    return sent


def step_cost(
    exchange: Exchange,
    processes: int,
    batch: int,
    positions: int,
    dim: int,
    *,
    heads: int = 4,
    layers: int = 1,
    itemsize: int = 2,
    links: Links = Links(),
) -> StepCost:
    """Bytes and time of one module and one training step with `batch` rows on each of the processes.

    An all-to-all sends each pair its piece, so that what goes to another node crosses the sender's own port. An
    all-gather (and the reduce-scatter of its gradient) runs in rings, one per port: each row enters a node once, and
    the ports of a node share the rows.
    """
    check_choice("exchange", exchange, EXCHANGES)
    if processes < 1 or positions < 1:
        raise UserError(f"a cost needs one process and one position or more, got {processes} and {positions}.")
    near, far = min(links.node, processes) - 1, max(0, processes - links.node)
    if exchange == "gather":
        piece = batch * positions * dim * itemsize
        pieces, port_share = [piece] * (2 * layers), links.node
    elif exchange == "positions":
        piece = max(shares(positions, processes)) * batch * dim * itemsize
        pieces, port_share = [piece] * 4, 1
    else:
        piece = max(shares(positions * heads, processes)) * batch * (dim // heads) * itemsize
        pieces, port_share = [3 * piece, piece] * (2 * layers), 1
    reached = near + far if exchange == "gather" else near  # a ring passes every row on to the GPU beside it
    inside = [reached * piece / links.nvlink for piece in pieces]
    outside = [far * piece / port_share / links.network for piece in pieces]
    seconds = sum(links.latency + max(pair) for pair in zip(inside, outside, strict=True)) if processes > 1 else 0.0
    return StepCost(
        exchange,
        processes,
        (processes - 1) * sum(pieces),
        far * sum(pieces) // port_share,
        sum(inside),
        sum(outside),
        seconds,
    )


def cheapest_exchange(processes: int, batch: int, positions: int, dim: int, **options: Any) -> Exchange:
    """The exchange with least `StepCost.seconds`: gather or heads for one position, positions or heads for several.

    All processes choose the same, as all have the same inputs (`batch` is the largest). Gathering several positions is
    never considered: it moves and stores N times as much. One position cannot be distributed: one process would do all
    the work. The options are those of `step_cost`.
    """
    candidates: tuple[Exchange, ...] = ("gather", "heads") if positions == 1 else ("positions", "heads")
    return min(candidates, key=lambda each: step_cost(each, processes, batch, positions, dim, **options).seconds)


@dataclass
class Traffic:
    """Counter of the bytes sent to other processes; what stays on a process is not counted.

    `activations` are features, masks and their gradients, `sizes` the few numbers exchanged before them.
    """

    activations: int = 0
    sizes: int = 0


# A plain list and no context variable: backward may run in another thread.
_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that modules with `scope="global"` send inside the context, forward and backward."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def note_sent(activations: int = 0, sizes: int = 0) -> None:
    """Add to the open `count_traffic` counters; called where bytes are passed to torch.distributed."""
    for traffic in _counting:
        traffic.activations += activations
        traffic.sizes += sizes
