"""The exponential long tail of Cui et al. (2019): how many images each class keeps, and which."""

import numpy as np

from batchformer.errors import UserError


def tail_counts(classes: int, largest: int, imbalance: float) -> list[int]:
    """Images per class: int(largest * imbalance ** (-c / (classes - 1))), class 0 the head.

    Evaluated in exactly this form: `imbalance ** -x` and `(1 / imbalance) ** x` differ in the last bit, and `int` cuts.
    """
    if not imbalance >= 1:
        raise UserError(
            f"imbalance must be 1 (balanced) or more, got {imbalance}: it is the largest class / the smallest."
        )
    counts = [int(largest * imbalance ** (-c / max(classes - 1, 1))) for c in range(classes)]
    if counts[-1] < 1:
        raise UserError(
            f"imbalance {imbalance:g} leaves class {counts.index(0)} without a training image "
            f"(the largest class has {largest}): choose {largest} or less."
        )
    return counts


def tail_subset(labels: np.ndarray, names: list[str], largest: int, imbalance: float) -> np.ndarray:
    """The first `tail_counts` images of each class in file order, as ascending positions in the file.

    The papers' code shuffles before it takes them, without a seed, so their subsets cannot be had again; ours is the
    same for everybody.
    """
    chosen = []
    for c, needed in enumerate(tail_counts(len(names), largest, imbalance)):
        members = np.flatnonzero(labels == c)
        if len(members) < needed:
            raise UserError(
                f"class {c} ({names[c]}) needs {needed} training images at imbalance {imbalance:g}, "
                f"but the file has {len(members)}: use the complete official file."
            )
        chosen.append(members[:needed])
    return np.sort(np.concatenate(chosen))
