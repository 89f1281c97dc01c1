"""Checks of inputs and arguments that several modules share."""

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; never for tensors without data (meta)."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def is_whole(number: Any) -> bool:
    """Whether it is an integer of 1 or more; 2.0 is none, as some functions of torch refuse it and others do not."""
    return isinstance(number, Integral) and not isinstance(number, bool) and number >= 1  # type: ignore[operator]


def as_number(given: Any) -> float:
    """As a float; NaN, which lies in no range, for anything that is not a number."""
    try:
        return math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
