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
    """The insertions and their paths, in the order the model calls them; the hook at the model's entry; and `supports`,
    put on other submodules: what lets those before the insertions run thin, and keeps the streams apart behind them."""

    paths: list[str]
    insertions: list[After]
    entry: Entry
    example: Example | None = None
    supports: list[InstanceForward] = field(default_factory=list)

    def points(self) -> list[Point]:
        return [Point((path,), one.module, [one], one) for path, one in zip(self.paths, self.insertions, strict=True)]
