"""Questions about what a module is given, asked in more than one place."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where x is; tensors without data (meta), for which torch cannot say, have none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def is_whole(number: Any) -> bool:
    """A whole number of 1 or more: 2.0 would be taken by some of the places it goes to, and not by others."""
    return isinstance(number, Integral) and not isinstance(number, bool) and number >= 1  # type: ignore[operator]


def as_number(given: Any) -> float:
    """NaN, which lies in no range, for what is no number."""
    try:
        return math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
