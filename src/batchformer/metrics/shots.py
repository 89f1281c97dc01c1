"""Many, medium and few: how the tables of long-tailed recognition split the classes by training images."""

from collections.abc import Iterable
from typing import Literal

Shot = Literal["many", "medium", "few"]
SHOTS: tuple[Shot, ...] = ("many", "medium", "few")
MANY_ABOVE, FEW_BELOW = 100, 20


def shot_of(training_images: float) -> Shot:
    """Many: more than 100 training images; medium: 20 to 100, both included; few: less than 20."""
    if training_images > MANY_ABOVE:
        return "many"
    return "medium" if training_images >= FEW_BELOW else "few"


def count_shots(class_counts: Iterable[float]) -> dict[str, int]:
    """How many classes each split has."""
    shots = [shot_of(count) for count in class_counts]
    return {shot: shots.count(shot) for shot in SHOTS}
