"""Metadata of a data set: plain values that a task is built from and a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchformer.errors import UserError

HOLDOUT = "holdout"  # the evaluation set that is cut from the training images of a folder, to choose by
_NAMED = 2  # of the classes that differ
_ATTRIBUTES = ("class_counts", "image_size", "mean", "std", "category_ids", "is_thing")


class DataInfo(dict[str, Any]):
    """Metadata of a data set as a dict of plain values: `info.classes` is `info["classes"]`.

    Common entries: `classes` (names), `class_counts` (training images of each), `image_size`, `mean`, `std`,
    `evaluation_sets`. A data set adds what it knows besides: domains, pairs, category ids.
    """

    @classmethod
    def of(cls, data: Any) -> DataInfo:
        """The info of any data module, also of another library: from `declare()`, else from its attributes."""
        if isinstance(data, DataInfo):
            return data
        if hasattr(data, "declare"):
            return cls(data.declare())
        values = {name: getattr(data, name) for name in _ATTRIBUTES if getattr(data, name, None) is not None}
        names = getattr(data, "class_names", None) or getattr(data, "classes", None)
        if names is None and (number := getattr(data, "num_classes", None)) is not None:
            names = [str(label) for label in range(number)]
        if names is not None:
            values["classes"] = [str(name) for name in names]
        return cls(values)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the data declare no {name!r}; they declare {', '.join(self) or 'nothing'}.")
        return self[name]

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


def _class_differences(before: Sequence[str], now: Sequence[str]) -> str:
    """What differs in the names of classes or their order: missing, new and moved ones, of each kind the first two."""
    at, at_now = ({name: label for label, name in enumerate(names)} for names in (before, now))
    kinds = {
        "missing": [f"{name} ({label})" for name, label in at.items() if name not in at_now],
        "new": [f"{name} ({label})" for name, label in at_now.items() if name not in at],
        "moved": [f"{n} ({at[n]} to {label})" for n, label in at_now.items() if at.get(n, label) != label],
    }
    parts = []
    for kind, names in kinds.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        parts += [f"{kind}: {', '.join(names[:_NAMED])}{more}"] if names else []
    return "; ".join(parts)


def refuse_other_classes(now: DataInfo, trained: DataInfo) -> None:
    """Refuse data with other classes than in training, or in another order: labels would mean other classes."""
    before, after = ([str(name) for name in info.get("classes", ())] for info in (trained, now))
    if before == after:
        return
    if any(names == [str(label) for label in range(len(names))] for names in (before, after)):  # without names
        if len(before) == len(after):
            return
        raise UserError(
            f"this task was built for {len(before)} classes and cannot take {len(after)}: use the data it was "
            "trained on, or a new task."
        )
    raise UserError(
        f"the classes of the data are not those of the training ({_class_differences(before, after)}), so labels "
        "would mean other classes: name and order them as in the training, or train on these data."
    )
