"""All numbers of V2's Table 5 from one stream of predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from batchformer.metrics import PanopticQuality, ThingsAP
from batchformer.metrics.panoptic_quality import PQ_NAMES

THINGS_NAMES = ("ap", "ap50", "ap75")  # of the masks of things


class PanopticMetrics:
    """PQ, SQ and RQ of all classes, of things and of stuff, and COCO's AP of the things' masks."""

    names = (*PQ_NAMES, *THINGS_NAMES)

    def __init__(self, is_thing: Sequence[bool]) -> None:
        self.quality, self.things = PanopticQuality(is_thing), ThingsAP(is_thing)

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        self.quality.update(predictions, targets)
        self.things.update(predictions, targets)

    def compute(self) -> dict[str, Tensor]:
        """Fractions; `per_class` is the PQ of every class."""
        quality, things = self.quality.compute(), self.things.compute()
        named = {name: quality[name] for name in PQ_NAMES} | {name: things[name] for name in THINGS_NAMES}
        return {**named, "per_class": quality["per_class"][:, 0]}

    def reset(self) -> None:
        self.quality.reset()
        self.things.reset()
