"""Annotated shapes, checked at every call of the library; other annotations are for mypy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def only_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """For jaxtyping's import hook: checks arrays alone, and their arguments after the call.

    The hook asks for two functions: one that checks arguments before a call (it returns Any), and one that checks them
    again together with what came out. The first is left out, so that a call that is refused in a sentence of ours is
    refused in that sentence: what must not happen is a wrong shape that goes through.
    """
    hints = function.__annotations__
    kept = {name: hint for name, hint in hints.items() if _has_shape(hint)}
    if hints.get("return") is Any or not kept:
        return function
    function.__annotations__ = kept
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))
