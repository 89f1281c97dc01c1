"""The weight of a process' mean loss where batches are unequal and gradients are averaged over processes."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from batchformer.errors import UserError
from batchformer.parallel.peer_errors import report_lost_peers


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
