"""Whose batches are attended over together: all processes, or some of them."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from batchformer.errors import UserError

Scope = Literal["local", "global"]
SCOPES: tuple[Scope, ...] = ("local", "global")
ALONE = (
    'scope="global" attends over the batches of all processes, but torch.distributed is not initialised, so the batch '
    'of this process is all there is: start several with torchrun or Lightning\'s strategy="ddp".'
)
_warned = False
# By the ranks of a group, the world they belong to and the group: modules of one model share their groups. Held weakly,
# so that destroy_process_group() ends them.
_made: dict[tuple[int, ...], tuple[weakref.ref[ProcessGroup], weakref.ref[ProcessGroup]]] = {}


class Members:
    """The processes of one module's global batch.

    `process_group=None` is every process, an integer k groups of k consecutive ranks (the GPUs of a node, say), made at
    the first use; a `ProcessGroup` is taken as it is. Copies of the module attend with the same group; in a pickled one
    a `ProcessGroup`, which lives in one process only, is missed at the first use, not silently replaced.
    """

    def __init__(self, process_group: ProcessGroup | int | None = None) -> None:
        if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise UserError("process_group= is a group this process does not belong to: give each process its own.")
        if isinstance(process_group, int) and process_group < 1:
            raise UserError(f"process_group={process_group} must be 1 or more consecutive processes.")
        if not isinstance(process_group, ProcessGroup | int | None):
            raise UserError(
                f"process_group={process_group!r} must be a torch.distributed group this process belongs to, a number "
                f"of consecutive processes, or None for all."
            )
        self.process_group = process_group
        self.forgotten = False

    def group(self) -> ProcessGroup | None:
        """The group to exchange with; None where this process attends alone."""
        if self.forgotten:
            raise UserError(
                "the process group of this module did not travel with the pickled copy: build the module again, or "
                "give process_group= as a number of consecutive processes, which does."
            )
        if not (dist.is_available() and dist.is_initialized()):
            _warn_once()
            return None
        if isinstance(self.process_group, int):
            found = _consecutive(self.process_group)
        else:
            found = self.process_group or dist.group.WORLD
        return found if found is not None and dist.get_world_size(found) > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Members:
        return self  # it is never changed, and a ProcessGroup cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        travels = not isinstance(self.process_group, ProcessGroup)
        return {"process_group": self.process_group if travels else None, "forgotten": self.forgotten or not travels}

    def __repr__(self) -> str:
        if isinstance(self.process_group, ProcessGroup):
            return f"ranks {dist.get_process_group_ranks(self.process_group)}"
        return "all processes" if self.process_group is None else f"{self.process_group} consecutive processes"


def _consecutive(size: int) -> ProcessGroup | None:
    world = dist.group.WORLD
    assert world is not None
    count, rank = dist.get_world_size(), dist.get_rank()
    if size >= count:
        return world
    start = rank - rank % size
    ranks = tuple(range(start, min(start + size, count)))
    if len(ranks) == 1:
        return None
    of_world, group = (made() for made in _made[ranks]) if ranks in _made else (None, None)
    if of_world is not world or group is None:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert group is not None
        _made[ranks] = (weakref.ref(world), weakref.ref(group))
    return group


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(ALONE, UserWarning, stacklevel=1)
