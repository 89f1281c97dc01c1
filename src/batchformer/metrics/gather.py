"""Gather the host state of metrics from all processes, and convert their inputs to arrays."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor

from batchformer.errors import UserError

T = TypeVar("T")
Rows = TypeVar("Rows", bound=Any)  # a NamedTuple of arrays, one of them `image`


def check_pairs(name: str, predictions: Sequence, targets: Sequence) -> None:
    if len(predictions) != len(targets):
        raise UserError(f"{name} got predictions for {len(predictions)} images and targets for {len(targets)}.")


def refuse_unknown_labels(labels: np.ndarray, classes: int, what: str) -> None:
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"label {wrong} in {what} is not one of the {classes} classes.")


def process_and_count() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)


def gathered(value: T) -> list[T]:
    """All-gather of a Python object: the value of every process, in the order of the ranks."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def joined(parts: Sequence[Rows], starts: np.ndarray) -> Rows:
    """Concatenate the rows of several processes; `starts` are the offsets of their image numbers."""
    moved = [part._replace(image=part.image + start) for part, start in zip(parts, starts, strict=True)]
    return type(parts[0])(*(np.concatenate(field) for field in zip(*moved, strict=True)))


def first_of_each(ids: Int[np.ndarray, " images"]) -> tuple[Int[np.ndarray, " images"], Bool[np.ndarray, " images"]]:
    """The place of each image when sorted by id, and whether it is the first of that id."""
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    keep = np.zeros(len(ids), dtype=bool)
    keep[first] = True
    return place, keep


def as_array(values: Any, dtype: Any) -> np.ndarray:
    """Convert tensors (on any device, of any floating type), arrays and lists to numpy."""
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64 if values.is_floating_point() else values.dtype).numpy()
    return np.asarray(values, dtype=dtype)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
