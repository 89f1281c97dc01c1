"""What `attach(after=...)` puts on a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchformer.attach.after import After
from batchformer.attach.dry_run import Example
from batchformer.attach.entry import Entry
from batchformer.attach.insertion import InstanceForward
from batchformer.attach.point import Point


@dataclass
class Plan:
    """Insertions in the order of the calls; the door of the model; what runs thin before or apart behind them."""

    paths: list[str]
    insertions: list[After]
    entry: Entry
    example: Example | None = None
    supports: list[InstanceForward] = field(default_factory=list)

    def points(self) -> list[Point]:
        return [Point((path,), one.module, [one], one) for path, one in zip(self.paths, self.insertions, strict=True)]
