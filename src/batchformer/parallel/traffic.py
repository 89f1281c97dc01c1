"""How many bytes leave this process: counted where they are handed to torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A plain list and no context variable: backward may run in another thread.
_counting: list[Traffic] = []


@dataclass
class Traffic:
    """Bytes sent to other processes; what a process keeps for itself is not among them.

    `activations` are features, masks and their gradients, `sizes` the few numbers exchanged before them.
    """

    activations: int = 0
    sizes: int = 0


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts what modules with `scope="global"` send, forward and backward, inside the context."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def note_sent(activations: int = 0, sizes: int = 0) -> None:
    for traffic in _counting:
        traffic.activations += activations
        traffic.sizes += sizes
