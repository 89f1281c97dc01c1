"""One row pair of a table of the papers."""

from __future__ import annotations

from dataclasses import dataclass

Row = dict[str, float]  # by the names of metrics in result files


@dataclass(frozen=True)
class PaperResult:
    """Without and with BatchFormer."""

    table: str
    setting: str
    baseline: Row | None
    batchformer: Row | None
