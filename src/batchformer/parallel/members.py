"""Which processes share one batch (`Members`), how many rows each has (`Peers`), what its loss counts."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup

from batchformer.errors import UserError, warn_once
from batchformer.parallel.cost import note_sent
from batchformer.parallel.peer_errors import report_lost_peers

Scope = Literal["local", "global"]
SCOPES: tuple[Scope, ...] = ("local", "global")
ALONE = (
    'scope="global" attends over the batches of all processes, but torch.distributed is not initialised, so the batch '
    'of this process is all there is: start several with torchrun or Lightning\'s strategy="ddp".'
)
# Cache of created groups, from their ranks to (default group, group): modules of one model share their groups. Weak
# references, so that destroy_process_group() frees them.
_made_groups: dict[tuple[int, ...], tuple[weakref.ref[ProcessGroup], weakref.ref[ProcessGroup]]] = {}
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# What processes compare before an exchange; only the rows may differ.
_FIELDS = (
    "rows", "positions", "dim", "grid_height", "grid_width", "dtype", "valid", "gradients", "heads", "layers",
    "group_size",
)  # fmt: skip
SIZES_BYTES = 8 * len(_FIELDS)
_WORDS = {"dim": "width", "valid": "kind of mask", "gradients": "kind of gradient"}
_WORDS |= dict.fromkeys(("grid_height", "grid_width"), "height and width of maps")
_WAYS_OUT = {"valid": "give valid= everywhere or nowhere", "gradients": "run the same step on all of them"}
_WAYS_OUT |= dict.fromkeys(
    ("positions", "grid_height", "grid_width"), "pad or resize images to one size, the same on all processes"
)
_SAME_MODEL = "build the same model, in the same precision, on all of them"


class Members:
    """The processes whose batches one module attends over.

    `process_group=None` is every process, an integer k groups of k consecutive ranks (the GPUs of a node, for example),
    made at the first use; a `ProcessGroup` is taken as it is. Copies of the module use the same group; a pickled one
    cannot carry a `ProcessGroup`, which exists in one process only, and raises at the first use.
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
        """The group to exchange with; None where there is no other process."""
        if self.forgotten:
            raise UserError(
                "the process group of this module did not travel with the pickled copy: build the module again, or "
                "give process_group= as a number of consecutive processes, which does."
            )
        if not (dist.is_available() and dist.is_initialized()):
            warn_once(ALONE)
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
    of_world, group = (reference() for reference in _made_groups[ranks]) if ranks in _made_groups else (None, None)
    if of_world is not world or group is None:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert group is not None
        _made_groups[ranks] = (weakref.ref(world), weakref.ref(group))
    return group


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
        """Slice of this process' rows in the rows of all processes, which are in the order of the ranks."""
        start = sum(self.rows[: self.rank])
        return slice(start, start + self.rows[self.rank])

    def has_no_shared_group(self, group_size: int | None) -> bool:
        """Whether every group of `group_size` samples lies inside one process: then nothing is related across."""
        starts = [sum(self.rows[:rank]) for rank, rows in enumerate(self.rows) if rows]
        return group_size is not None and len(starts) > 1 and all(start % group_size == 0 for start in starts)


def exchange_sizes(
    rows: Float[Tensor, "batch position dim"],
    valid: Bool[Tensor, "batch position"] | None,
    group: ProcessGroup,
    heads: int,
    layers: int,
    group_size: int | None,
    grid: tuple[int, int] | None = None,
) -> Peers:
    """Exchange shapes and settings before any features, so that a disagreement is an error and not a hang.

    `grid` is the height and width of the map that the positions cover: another map may have as many positions.
    Synchronises the host. Every process raises the same error, as each one gets the same numbers.
    """
    if rows.dtype not in _DTYPES:
        raise UserError(f'scope="global" exchanges floating point features, got {rows.dtype}.')
    gradients = int(torch.is_grad_enabled()) + 2 * int(rows.requires_grad)
    own = [
        *rows.shape, *(grid or (0, 0)), _DTYPES.index(rows.dtype), int(valid is not None), gradients, heads, layers,
        group_size or 0,
    ]  # fmt: skip
    count = dist.get_world_size(group)
    # An all-to-all, not a ring: every process then detects a lost one at once, not only its neighbours.
    sent = torch.tensor(own, device=rows.device).repeat(count, 1)
    received = torch.empty_like(sent)
    with report_lost_peers(group, f"the sizes of {_describe(own)}"):
        dist.all_to_all_single(received, sent, group=group)
        lines = received.tolist()
    note_sent(sizes=(count - 1) * SIZES_BYTES)
    _check(lines, dist.get_process_group_ranks(group))
    return Peers(group, dist.get_rank(group), tuple(line[0] for line in lines))


def _check(lines: list[list[int]], ranks: list[int]) -> None:
    for rank, line in zip(ranks[1:], lines[1:], strict=True):
        for field, value, first in zip(_FIELDS[1:], line[1:], lines[0][1:], strict=True):
            if value != first:
                raise UserError(
                    f'scope="global" needs the same {_WORDS.get(field, field)} on every process: rank {ranks[0]} has '
                    f"{_describe(lines[0])}, rank {rank} has {_describe(line)}; {_WAYS_OUT.get(field, _SAME_MODEL)}."
                )


def _describe(line: list[int]) -> str:
    values = dict(zip(_FIELDS, line, strict=True))
    shape = f"{tuple(line[:3])} {str(_DTYPES[values['dtype']]).removeprefix('torch.')}"
    grid = f", a grid of {values['grid_height']} x {values['grid_width']}" if values["grid_height"] else ""
    groups = f", group_size={values['group_size']}" if values["group_size"] else ""
    tracked = ("no gradients", "gradients of the weights", "no gradients", "gradients")[values["gradients"]]
    mask = "with" if values["valid"] else "without"
    return f"{shape} {mask} a mask ({tracked}, {values['heads']} heads, {values['layers']} layers{groups}{grid})"


def mean_loss_weight(batch: int, process_group: ProcessGroup | None = None) -> float:
    """W B_r / (B_1 + ... + B_W): what to multiply the mean loss of this process' B_r samples by.

    DDP and FSDP average gradients over their W processes. With this weight that average is the gradient of the mean
    loss over the samples of all processes; without it, a sample of a small batch counts for more. With equal batches,
    or one process, it is 1.

    Args:
        batch: samples of this process in this step.
        process_group: the one DDP or FSDP averages over (all processes unless you said otherwise), which need not be
            the one that is attended over.
    """
    if batch < 0:
        raise UserError(f"batch={batch} must be the number of samples of this process in this step.")
    if not (dist.is_available() and dist.is_initialized()):
        return 1.0
    group = process_group or dist.group.WORLD
    assert group is not None
    # On the device of the group's backend: NCCL supports CUDA tensors only.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor([batch], device=device)
    with report_lost_peers(group, f"the batch size {batch}"):
        dist.all_reduce(total, group=group)
        samples = int(total)
    return dist.get_world_size(group) * batch / samples if samples else 1.0
