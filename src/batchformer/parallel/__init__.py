"""Attention over the batch of several processes, exactly, gradients included (`scope="global"`)."""

from typing import TYPE_CHECKING

import torch.distributed

from batchformer.lazy import lazy_names
from batchformer.parallel.cost import Links, StepCost, Traffic, bytes_sent, cheapest_exchange, count_traffic, step_cost
from batchformer.parallel.members import Members, mean_loss_weight
from batchformer.parallel.peer_errors import PeerLost

if torch.distributed.is_available():
    # Its functions take the group of all processes as a default argument, read when the module is first imported. Torch
    # imports it with the first DistributedDataParallel: then they reference the group for ever, destroy_process_group()
    # leaves gloo's threads running, and sometimes a process aborts on exit. Imported earlier, the default is None.
    import torch.distributed.nn.functional

if TYPE_CHECKING:
    from batchformer.parallel.relate import relate_across

__all__ = ["Links", "Members", "PeerLost", "StepCost", "Traffic", "bytes_sent", "cheapest_exchange", "count_traffic",
           "mean_loss_weight", "relate_across", "step_cost"]  # fmt: skip
# imported when first used: `torch.compiler.disable` in it loads torch's compiler, which takes seconds
__getattr__ = lazy_names(__name__)
