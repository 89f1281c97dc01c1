"""The first thing processes tell each other: the shape each one brings, so that a disagreement is an error, no hang."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup

from batchformer.errors import UserError
from batchformer.parallel.lost import naming_the_lost
from batchformer.parallel.traffic import note_sent

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# What a process says of itself; only the rows may differ.
_FIELDS = (
    "rows", "positions", "dim", "grid_height", "grid_width", "dtype", "valid", "gradients", "heads", "layers",
    "group_size",
)  # fmt: skip
SIZES_BYTES = 8 * len(_FIELDS)


@dataclass(frozen=True)
class Peers:
    """The processes of a group, and how many rows each one has in this call."""

    group: ProcessGroup
    rank: int
    rows: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def own(self) -> slice:
        """This process' rows among those of all, which lie in the order of the ranks."""
        start = sum(self.rows[: self.rank])
        return slice(start, start + self.rows[self.rank])

    def are_apart(self, group_size: int | None) -> bool:
        """Whether every group of so many samples lies inside one process: then nothing is related across."""
        starts = [sum(self.rows[:rank]) for rank, rows in enumerate(self.rows) if rows]
        return group_size is not None and len(starts) > 1 and all(start % group_size == 0 for start in starts)


def meet(
    rows: Float[Tensor, "batch position dim"],
    valid: Bool[Tensor, "batch position"] | None,
    group: ProcessGroup,
    heads: int,
    layers: int,
    group_size: int | None,
    grid: tuple[int, int] | None = None,
) -> Peers:
    """Tells the others what this process brings, hears what they bring, and refuses what does not fit together.

    `grid` is the height and width of the map the positions are of: as many positions may be other places elsewhere.
    The host waits for the answer. On every process the same error is raised, as each one sees the same numbers.
    """
    if rows.dtype not in _DTYPES:
        raise UserError(f'scope="global" exchanges floating point features, got {rows.dtype}.')
    gradients = int(torch.is_grad_enabled()) + 2 * int(rows.requires_grad)
    said = [
        *rows.shape, *(grid or (0, 0)), _DTYPES.index(rows.dtype), int(valid is not None), gradients, heads, layers,
        group_size or 0,
    ]  # fmt: skip
    count = dist.get_world_size(group)
    # To everyone directly: then everyone notices at once when one is gone, not only its neighbours in a ring.
    mine = torch.tensor(said, device=rows.device).repeat(count, 1)
    heard = torch.empty_like(mine)
    with naming_the_lost(group, f"the sizes of {_describe(said)}"):
        dist.all_to_all_single(heard, mine, group=group)
        told = heard.tolist()
    note_sent(sizes=(count - 1) * SIZES_BYTES)
    _check(told, dist.get_process_group_ranks(group))
    return Peers(group, dist.get_rank(group), tuple(line[0] for line in told))


def _check(told: list[list[int]], ranks: list[int]) -> None:
    for rank, line in zip(ranks[1:], told[1:], strict=True):
        for field, theirs, first in zip(_FIELDS[1:], line[1:], told[0][1:], strict=True):
            if theirs != first:
                raise UserError(
                    f'scope="global" needs the same {_in_words(field)} on every process: rank {ranks[0]} has '
                    f"{_describe(told[0])}, rank {rank} has {_describe(line)}; {_way_out(field)}."
                )


def _describe(line: list[int]) -> str:
    said = dict(zip(_FIELDS, line, strict=True))
    shape = f"{tuple(line[:3])} {str(_DTYPES[said['dtype']]).removeprefix('torch.')}"
    grid = f", a grid of {said['grid_height']} x {said['grid_width']}" if said["grid_height"] else ""
    groups = f", group_size={said['group_size']}" if said["group_size"] else ""
    tracked = ("no gradients", "gradients of the weights", "no gradients", "gradients")[said["gradients"]]
    mask = "with" if said["valid"] else "without"
    return f"{shape} {mask} a mask ({tracked}, {said['heads']} heads, {said['layers']} layers{groups}{grid})"


def _in_words(field: str) -> str:
    words = {"dim": "width", "valid": "kind of mask", "gradients": "kind of gradient"}
    return "height and width of maps" if field.startswith("grid") else words.get(field, field)


def _way_out(field: str) -> str:
    if field == "positions" or field.startswith("grid"):
        return "pad or resize images to one size, the same on all processes"
    if field == "valid":
        return "give valid= everywhere or nowhere"
    if field == "gradients":
        return "run the same step on all of them"
    return "build the same model, in the same precision, on all of them"
