"""Which parametrised cases `make test` runs: each promise on each mechanism once; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def others_slow(values: Iterable[Any], fast: Collection[Any], key: Callable[[Any], Any] = lambda value: value) -> list:
    """The values as parameters, marked slow unless they are (by `key`) among the fast ones."""
    values = list(values)
    if unknown := set(fast) - {key(value) for value in values}:
        raise ValueError(f"no such case: {', '.join(map(str, unknown))}")
    return [value if key(value) in fast else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
