"""Metadata of a data set: plain values that a task is built from and a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HOLDOUT = "holdout"  # the evaluation set that is cut from the training images of a folder, to choose by
_NAMED = 2  # of the classes that differ
_ASKED = ("class_counts", "image_size", "mean", "std", "category_ids", "is_thing")


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
        values = {name: getattr(data, name) for name in _ASKED if getattr(data, name, None) is not None}
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


def class_differences(before: Sequence[str], now: Sequence[str]) -> str:
    """What differs in the names of classes or their order: missing, new and moved ones, of each kind the first two."""
    at, at_now = ({name: label for label, name in enumerate(names)} for names in (before, now))
    kinds = {
        "missing": [f"{name} ({label})" for name, label in at.items() if name not in at_now],
        "new": [f"{name} ({label})" for name, label in at_now.items() if name not in at],
        "moved": [f"{n} ({at[n]} to {label})" for n, label in at_now.items() if at.get(n, label) != label],
    }
    told = []
    for kind, names in kinds.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        told += [f"{kind}: {', '.join(names[:_NAMED])}{more}"] if names else []
    return "; ".join(told)
