"""SGD with an own learning rate for the module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.training.options import OptimizerOptions


def build_sgd(
    options: OptimizerOptions, parameters: Iterable[nn.Parameter], own: Iterable[nn.Parameter], fused: bool
) -> torch.optim.SGD:
    """One group for the network, one for the module (`own`) at `module_lr_factor` times the learning rate.

    Paper, appendix: 0.05 for the network and 0.005 for the module; the weight decay is the same for both, as released.
    """
    own = list(own)
    own_ids = {id(parameter) for parameter in own}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in own_ids], "lr_factor": 1.0},
        {"params": own, "lr_factor": options.module_lr_factor},
    ]
    return torch.optim.SGD(
        [{**group, "lr": options.lr * group["lr_factor"]} for group in groups if group["params"]],
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
        fused=fused or None,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float, fused: bool, tensor_on: torch.device | None = None) -> None:
    """The learning rate of every group; as a tensor that keeps its place, where a CUDA graph reads it (`tensor_on`).

    `fused` and `capturable` are set again too: a loaded optimiser state brings along what suited the device it was
    saved on.
    """
    for group in optimizer.param_groups:
        group["fused"] = fused or None
        if "capturable" in group:
            group["capturable"] = tensor_on is not None and tensor_on.type == "cuda"
        value = lr * group["lr_factor"]
        if tensor_on is None:
            group["lr"] = value
        elif isinstance(group["lr"], Tensor) and group["lr"].device.type == tensor_on.type:
            group["lr"].fill_(value)
        else:
            group["lr"] = torch.tensor(value, dtype=torch.float32, device=tensor_on)
