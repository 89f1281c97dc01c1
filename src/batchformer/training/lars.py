"""LARS whose step reads nothing on the host."""

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import Lars as TimmLars
from torch import Tensor


class Lars(TimmLars):
    """timm's LARS (You et al., "Large Batch Training of Convolutional Networks"), for captured steps, in few kernels.

    timm passes the learning rate to `add_(..., alpha=lr)`, which reads a tensor on the host: an error while a CUDA
    graph is captured, and a synchronisation otherwise. Here it is multiplied as a tensor. Options, state and result are
    timm's: for each weight w with gradient g, in groups with weight decay d (or `always_adapt`),

        v <- momentum v + r (g + d w),   r = trust |w| / (|g| + d |w| + eps),   w <- w - lr v

    r is 1 in the other groups, and where |w| or |g| is 0. Nesterov, dampening and clipping are left to timm's.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            if group["weight_decay"] != 0 or group["always_adapt"]:
                gradients = _adapted(weights, gradients, group["weight_decay"], group["trust_coeff"], group["eps"])
            if group["momentum"] != 0:
                gradients = self._averaged(weights, gradients, group["momentum"])
            torch._foreach_sub_(weights, torch._foreach_mul(gradients, group["lr"]))
        return loss

    def _averaged(self, weights: list[Tensor], gradients: list[Tensor], momentum: float) -> list[Tensor]:
        new = [k for k, weight in enumerate(weights) if "momentum_buffer" not in self.state[weight]]
        for k in new:
            self.state[weights[k]]["momentum_buffer"] = torch.zeros_like(weights[k])
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        return buffers


def _adapted(weights: list[Tensor], gradients: list[Tensor], decay: float, trust: float, eps: float) -> list[Tensor]:
    """Decayed gradients, each times the ratio of its layer."""
    of_weights, of_gradients = (torch.stack(torch._foreach_norm(each)) for each in (weights, gradients))
    ratio = trust * of_weights / (of_gradients + of_weights * decay + eps)
    ratio = torch.where((of_weights > 0) & (of_gradients > 0), ratio, 1.0)
    return list(torch._foreach_mul(torch._foreach_add(gradients, weights, alpha=decay), list(ratio.unbind())))
