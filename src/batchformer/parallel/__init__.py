"""Attention over the batch of several processes, exactly, gradients included (`scope="global"`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed

if torch.distributed.is_available():
    # Its functions take the group of all processes as a default argument, read when the module is first imported. Torch
    # imports it with the first DistributedDataParallel: then they hold the group for ever, destroy_process_group()
    # leaves gloo's threads running, and now and then a process aborts as it ends. Imported before, they hold nothing.
    import torch.distributed.nn.functional

if TYPE_CHECKING:
    from batchformer.parallel.cost import (
        Links,
        StepCost,
        Traffic,
        bytes_sent,
        cheapest_exchange,
        count_traffic,
        step_cost,
    )
    from batchformer.parallel.loss_weight import mean_loss_weight
    from batchformer.parallel.members import Members
    from batchformer.parallel.peer_errors import PeerLost
    from batchformer.parallel.relate import relate_across

_HOME = {
    "Links": "cost",
    "StepCost": "cost",
    "bytes_sent": "cost",
    "cheapest_exchange": "cost",
    "step_cost": "cost",
    "PeerLost": "peer_errors",
    "Members": "members",
    "relate_across": "relate",
    "Traffic": "cost",
    "count_traffic": "cost",
    "mean_loss_weight": "loss_weight",
}

__all__ = [
    "Links",
    "Members",
    "PeerLost",
    "StepCost",
    "Traffic",
    "bytes_sent",
    "cheapest_exchange",
    "count_traffic",
    "mean_loss_weight",
    "relate_across",
    "step_cost",
]


def __getattr__(name: str) -> Any:
    """Imported when first used: `torch.compiler.disable` in `relate` loads torch's compiler, which takes seconds."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
