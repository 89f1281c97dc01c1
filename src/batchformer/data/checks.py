"""What every training set must fulfil before anything is trained on it."""

import numpy as np

from batchformer.errors import UserError


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Labels are the whole numbers 0 .. classes - 1."""
    if not len(labels):
        raise UserError(f"no images in {where}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise UserError(f"label {wrong} in {where} is not one of the {classes} classes 0 to {classes - 1}.")


def class_counts(labels: np.ndarray, names: list[str], where: str) -> list[int]:
    """Training images per class; a class without any is refused: Balanced Softmax takes the log of the count."""
    check_labels(labels, len(names), where)
    if len(names) < 2:
        raise UserError(f"{where} has one class only ({names[0]}): there is nothing to tell apart; add another class.")
    counts = np.bincount(labels, minlength=len(names)).tolist()
    if 0 in counts:
        empty = counts.index(0)
        others = counts.count(0) - 1
        more = f" (and {others} more)" if others else ""
        raise UserError(
            f"class {empty} ({names[empty]}){more} has no training image in {where}: "
            f"add some, or remove the class and number the labels 0, 1, 2, ... without gaps."
        )
    return counts
