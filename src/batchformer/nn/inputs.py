"""Checks of inputs and arguments that several modules share."""

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; never for tensors without data (meta)."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module itself has to be called: it has hooks, or a forward of its own."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def is_whole(number: Any) -> bool:
    """Whether it is an integer of 1 or more; 2.0 is none, as some functions of torch refuse it and others do not."""
    return isinstance(number, Integral) and not isinstance(number, bool) and number >= 1  # type: ignore[operator]


def as_number(given: Any) -> float:
    """As a float; NaN, which lies in no range, for anything that is not a number."""
    try:
        return math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
