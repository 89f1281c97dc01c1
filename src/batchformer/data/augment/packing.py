"""Many small arrays to the device in one copy."""

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """int64 and float32 arrays laid end to end in one (on CUDA: pinned) buffer, copied once, seen as views of it.

    A copy of its own for each array would cost more than the augmentation; the copy is asynchronous, so the host
    goes on while the device is still busy with earlier steps.
    """
    offsets, total = {}, 0
    for name, array in arrays.items():
        offsets[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host[offsets[name] : offsets[name] + array.nbytes] = flat
    copied = buffer.to(device, non_blocking=True)
    return {
        name: copied[offsets[name] : offsets[name] + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for name, array in arrays.items()
    }
