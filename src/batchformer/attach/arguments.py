"""The tensors a submodule is called with, each under its place: args[0] is (0,), kwargs["mask"] is ("mask",), and what
a list holds goes on from there: args[0][2] is (0, 2) (a dense block hands on the outputs of all its layers so far)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from batchformer.nn.streams import alike

Place = tuple[int | str, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def given_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Place, Tensor]]:
    """All that have a first axis."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [found for key, value in given for found in _tensors_in(value, (key,))]


def _tensors_in(value: Any, place: Place) -> list[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        return [(place, value)] if value.ndim else []
    items = value if isinstance(value, tuple | list) else ()
    return [found for number, item in enumerate(items) for found in _tensors_in(item, (*place, number))]


def change_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: frozenset[Place], change: Callable[[Tensor], Tensor]
) -> Arguments:
    """The arguments with the tensors of these places changed."""
    return (
        tuple(_changed(value, (key,), places, change) for key, value in enumerate(args)),
        {key: _changed(value, (key,), places, change) for key, value in kwargs.items()},
    )


def _changed(value: Any, place: Place, places: frozenset[Place], change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if place in places else value  # a mask that is not needed is None
    if isinstance(value, tuple | list) and any(inner[: len(place)] == place for inner in places):
        return alike(value, [_changed(item, (*place, number), places, change) for number, item in enumerate(value)])
    return value
