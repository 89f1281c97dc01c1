"""Which classes a classifier gets wrong, and whether its confidence can be trusted: of one pass over a test set.

Precision, recall, F1, the confusion matrix and the calibration error are torchmetrics'.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics.functional import classification as tm

BINS = 15  # of confidence, as calibration errors are usually reported (Guo et al., 2017)
MOST_IN_MATRIX = 20  # classes of a confusion matrix that can still be read
MOST_PAIRS = 20  # confused pairs that are listed
FEWEST_IMAGES = 40  # that a temperature is fitted on
_HOTTEST = 20.0
_ROWS = 8192  # of logits at once


@dataclass(frozen=True)
class ClassReport:
    """Numbers of each class and of all together, in percent; nan where a class has no image or was never said."""

    images: list[int]
    precision: list[float]
    recall: list[float]
    f1: list[float]
    balanced_accuracy: float
    macro_f1: float
    confusions: list[list[int]]  # [class, class it was taken for, images], the most frequent first
    matrix: list[list[int]]  # rows: classes, columns: predicted classes; empty for more than `MOST_IN_MATRIX` classes


def class_report(predictions: Int[Tensor, " images"], labels: Int[Tensor, " images"], classes: int) -> ClassReport:
    """Compare the predicted with the true classes.

    Balanced accuracy is the mean recall over the classes that have images; macro F1 the mean F1 over the classes that
    have images or were predicted.
    """
    images, predicted = (torch.bincount(each, minlength=classes) for each in (labels, predictions))
    each: dict[str, Any] = {"num_classes": classes, "average": "none"}
    precision = 100 * tm.multiclass_precision(predictions, labels, **each).double()
    recall = 100 * tm.multiclass_recall(predictions, labels, **each).double()
    f1 = 100 * tm.multiclass_f1_score(predictions, labels, **each).double()
    precision[predicted == 0] = math.nan
    recall[images == 0] = math.nan
    f1[(images == 0) & (predicted == 0)] = math.nan
    matrix: list[list[int]] = []
    if classes <= MOST_IN_MATRIX:
        matrix = tm.multiclass_confusion_matrix(predictions, labels, num_classes=classes).tolist()
    return ClassReport(
        images=images.tolist(),
        precision=precision.tolist(),
        recall=recall.tolist(),
        f1=f1.tolist(),
        balanced_accuracy=float(recall.nanmean()),
        macro_f1=float(f1.nanmean()),
        confusions=_confusions(predictions, labels, classes),
        matrix=matrix,
    )


def _confusions(predictions: Tensor, labels: Tensor, classes: int) -> list[list[int]]:
    """Of all pairs, not of the matrix: that of thousands of classes would not fit into memory."""
    wrong = predictions != labels
    pairs, counts = (labels[wrong] * classes + predictions[wrong]).unique(return_counts=True)
    first = torch.argsort(-counts, stable=True)[:MOST_PAIRS]
    counted = zip(pairs[first].tolist(), counts[first].tolist(), strict=True)
    return [[pair // classes, pair % classes, count] for pair, count in counted]


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error in percent, and the reliability diagram: [mean confidence, accuracy, images] of bins.

    `scaled`: after temperature scaling, of images the temperature was not fitted on.
    """

    ece: float
    bins: list[list[float]]
    temperature: float | None = None
    fitted_on: str = ""
    ece_scaled: float | None = None
    bins_scaled: list[list[float]] | None = None


def calibration(
    logits: Float[Tensor, "images classes"],
    labels: Int[Tensor, " images"],
    other: tuple[Float[Tensor, "others classes"], Int[Tensor, " others"], str] | None = None,
) -> Calibration:
    """ECE of these images, and with one temperature for all logits (Guo et al., 2017, section 4.2).

    The temperature is never fitted on images that it is reported on: it comes from `other` (logits, labels, the name
    of that set) where that is given. Else the images are cut into halves, every second one, each is scaled by the
    temperature of the other half, and the one to be used later, `temperature`, is that of both.
    """
    confidence, right = _confidence(logits, 1.0), logits.argmax(1) == labels
    ece, bins = expected_error(confidence, right), reliability(confidence, right)
    if len(labels if other is None else other[1]) < FEWEST_IMAGES:
        return Calibration(ece, bins)
    if other is not None:
        temperature, fitted_on = fit_temperature(other[0], other[1]), other[2]
        scaled = _confidence(logits, temperature)
    else:
        temperature, fitted_on, scaled = fit_temperature(logits, labels), "halves", torch.empty_like(confidence)
        for half, others in ((0, 1), (1, 0)):
            scaled[half::2] = _confidence(logits[half::2], fit_temperature(logits[others::2], labels[others::2]))
    return Calibration(ece, bins, temperature, fitted_on, expected_error(scaled, right), reliability(scaled, right))


def expected_error(confidence: Float[Tensor, " images"], right: Tensor) -> float:
    """torchmetrics' calibration error of the highest probability, over `BINS` bins, in percent."""
    return 100 * float(tm.binary_calibration_error(confidence, right.long(), n_bins=BINS, norm="l1"))


def reliability(confidence: Float[Tensor, " images"], right: Tensor) -> list[list[float]]:
    """[mean confidence, accuracy, images] of each bin that is not empty, in percent."""
    place = (confidence.double() * BINS).long().clamp(0, BINS - 1)
    found = []
    for bin_ in place.unique().tolist():
        inside = place == bin_
        mean, accuracy = (100 * float(values[inside].double().mean()) for values in (confidence, right))
        found.append([round(mean, 3), round(accuracy, 3), int(inside.sum())])
    return found


def fit_temperature(logits: Float[Tensor, "images classes"], labels: Int[Tensor, " images"]) -> float:
    """The T that minimises the cross entropy of logits / T, between 1/20 and 20.

    The loss is convex in 1/T: Newton's method, and bisection where a step would leave the interval.
    """
    low, high, beta = 1 / _HOTTEST, _HOTTEST, 1.0
    for _ in range(50):
        slope = curvature = 0.0
        for rows, targets in zip(logits.split(_ROWS), labels.split(_ROWS), strict=True):
            z = rows.float()
            p = (beta * z).softmax(1)
            mean = (p * z).sum(1)
            slope += float((mean - z.gather(1, targets[:, None])[:, 0]).double().sum())
            curvature += float(((p * z.square()).sum(1) - mean.square()).double().sum())
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = beta - slope / curvature if curvature > 0 else math.inf
        following = step if low < step < high else math.sqrt(low * high)
        if abs(following - beta) < 1e-5 * beta:
            break
        beta = following
    return 1 / beta


def _confidence(logits: Float[Tensor, "images classes"], temperature: float) -> Float[Tensor, " images"]:
    parts = [(rows.float() / temperature).softmax(1).amax(1) for rows in logits.split(_ROWS)]
    return torch.cat(parts) if parts else logits.new_zeros(0)


def worst_mistakes(logits: Float[Tensor, "images classes"], labels: Int[Tensor, " images"], count: int) -> list[int]:
    """Numbers of the images that were classified wrongly with the highest confidence.

    At most two with the same true and predicted class: one confusion must not fill the picture.
    """
    confidence, predicted = _confidence(logits, 1.0), logits.argmax(1)
    wrong = torch.nonzero(predicted != labels)[:, 0]
    seen: dict[tuple[int, int], int] = {}
    chosen: list[int] = []
    for image in wrong[torch.argsort(-confidence[wrong], stable=True)].tolist():
        pair = int(labels[image]), int(predicted[image])
        seen[pair] = seen.get(pair, 0) + 1
        if seen[pair] <= 2:
            chosen.append(image)
        if len(chosen) == count:
            break
    return chosen


def rounded(values: Sequence[float]) -> list[float | None]:
    """For a result file: None where there is no number."""
    return [round(value, 2) if math.isfinite(value) else None for value in values]
