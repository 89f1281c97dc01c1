"""What a data set declares about itself: plain values that a task is built from and a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ASKED = ("class_counts", "image_size", "mean", "std", "category_ids", "is_thing")


class DataInfo(Mapping[str, Any]):
    """Read-only; entries are attributes too: `info.classes`, `info.class_counts`, `info.domains`.

    Common entries: `classes` (names), `class_counts` (training images of each), `image_size`, `mean`, `std`,
    `evaluation_sets`. A data set adds what it knows besides: domains, pairs, category ids.
    """

    def __init__(self, **values: Any) -> None:
        self._values = values

    @classmethod
    def of(cls, data: Any) -> DataInfo:
        """Of a data module, one of another library too: from `declare()`, else from the attributes it has."""
        if isinstance(data, DataInfo):
            return data
        if hasattr(data, "declare"):
            return cls(**data.declare())
        values = {name: getattr(data, name) for name in _ASKED if getattr(data, name, None) is not None}
        names = getattr(data, "class_names", None) or getattr(data, "classes", None)
        if names is None and (number := getattr(data, "num_classes", None)) is not None:
            names = [str(label) for label in range(number)]
        if names is not None:
            values["classes"] = [str(name) for name in names]
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the data set declares no {name}; it has: {', '.join(self._values)}") from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"DataInfo({', '.join(self._values)})"
