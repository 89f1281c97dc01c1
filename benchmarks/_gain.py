"""What one side of a comparison has over the other, as numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchformer.metrics.measures import Measure
from batchformer.report.comparison import format_difference, format_summary
from batchformer.report.statistics import PairedDifference, paired_difference, summarise

READ_AS = {-1: "worse", 0: "no clear difference", 1: "better"}
HEADER = ("without", "with BatchFormer", "difference, 95 % interval", "seeds", "read as")


@dataclass(frozen=True)
class Gain:
    """The values of both sides by seed."""

    measure: Measure
    before: Mapping[int, float]
    after: Mapping[int, float]

    @property
    def seeds(self) -> list[int]:
        """Those that both sides have."""
        return [seed for seed in self.before if seed in self.after]

    @property
    def each_seed(self) -> list[float]:
        return [self.after[seed] - self.before[seed] for seed in self.seeds]

    @property
    def difference(self) -> PairedDifference | None:
        """Over matched seeds."""
        seeds = self.seeds
        return paired_difference([self.before[s] for s in seeds], [self.after[s] for s in seeds]) if seeds else None

    @property
    def reading(self) -> str:
        """Better or worse where the interval leaves out zero."""
        gain = self.difference
        if gain is None:
            return "no seed in common"
        if gain.low is None or gain.high is None:
            return "one seed: may be chance"
        return READ_AS[int(self.measure.gain((gain.low > 0) - (gain.high < 0)))]

    @property
    def cells(self) -> list[str]:
        """In the columns of `HEADER`, but for the reading."""
        return [mean_of(self.before), mean_of(self.after), format_difference(self.difference), str(len(self.seeds))]


def mean_of(values: Mapping[int, float]) -> str:
    """Mean ± deviation over the seeds."""
    return format_summary(summarise(list(values.values())) if values else None)
