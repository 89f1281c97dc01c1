"""Attributes that have other values for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(values: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """For each object: attributes and the values they have inside the context, then the ones they had before."""
    before = {one: {name: getattr(one, name) for name in given} for one, given in values.items()}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[Any, Mapping[str, Any]]) -> None:
    for one, given in values.items():
        for name, value in given.items():
            setattr(one, name, value)
