"""Sections of the page: the curve of seen against unseen accuracy, a grid of all pairs, and confusions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchformer.data.info import DataInfo
from batchformer.metrics.compositional import Outcome

CURVE = "Seen against unseen pairs"
PICTURES = "mistakes"  # folder in the run folder
_UNSEEN = np.linspace(0, 100, 51)  # unseen accuracies that the curve is drawn at
_CONFUSIONS = 12


def summary_of(outcome: Outcome, bias: float) -> dict[str, Any]:
    """What the sections need of an evaluation, as plain values for a checkpoint."""
    curve, predicted = outcome.curve(), outcome.predicted(bias)
    wrong = np.flatnonzero(predicted != outcome.labels)
    kinds, first, counts = np.unique(
        np.stack([outcome.labels[wrong], predicted[wrong]], 1), axis=0, return_index=True, return_counts=True
    )
    images = np.bincount(outcome.labels, minlength=len(outcome.pairs))
    confusions = [
        {
            "image": int(wrong[first[k]]),
            "true": outcome.pairs[kinds[k, 0]].tolist(),
            "said": outcome.pairs[kinds[k, 1]].tolist(),
            "seen": bool(outcome.seen[kinds[k, 0]]),
            "count": int(counts[k]),
            "of": int(images[kinds[k, 0]]),
        }
        for k in np.argsort(-counts, kind="stable")[:_CONFUSIONS]
    ]
    seen = (100 * curve.seen_at(_UNSEEN / 100)).tolist()
    return {"bias": bias, "curve": seen, "confusions": confusions}


def pair_name(data: DataInfo, pair: Sequence[int]) -> str:
    return f"{data.attributes[pair[0]]} {data.objects[pair[1]]}"


def sections_of(data: DataInfo, shown: Mapping[str, Any], accuracies: Sequence[float]) -> list[dict[str, Any]]:
    return [_curve(shown), _grid(data, shown, accuracies), _confusions(data, shown)]


def _curve(shown: Mapping[str, Any]) -> dict[str, Any]:
    text = (
        "A bias on the scores of unseen pairs trades accuracy on seen pairs for accuracy on unseen ones; the area "
        "under the curve is the AUC."
    )
    line = [None if math.isnan(value) else value for value in shown["curve"]]
    series = {
        "x": _UNSEEN.tolist(),
        "lines": {"accuracy": line},
        "xlabel": "accuracy on unseen pairs, %",
        "ylabel": "accuracy on seen pairs, %",
        "together": True,
    }
    return {"title": CURVE, "text": text, "series": series}


def _grid(data: DataInfo, shown: Mapping[str, Any], accuracies: Sequence[float]) -> dict[str, Any]:
    values: list[list[float | None]] = [[None] * len(data.objects) for _ in data.attributes]
    for (attribute, object_), accuracy in zip(data.pairs, accuracies, strict=True):
        values[attribute][object_] = None if math.isnan(accuracy) else accuracy
    marked = [pair for pair, seen in zip(data.pairs, data.seen, strict=True) if not seen]
    text = (
        f"Accuracy on the test images of each pair, in percent; framed pairs are unseen in training. With a bias of "
        f"{shown['bias']:.3g} on unseen pairs, the one with the best harmonic mean on the validation set."
    )
    grid = {"rows": data.attributes, "columns": data.objects, "values": values, "marked": marked}
    return {"title": "Accuracy of every pair", "text": text, "grid": grid}


def _confusions(data: DataInfo, shown: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        [
            pair_name(data, each["true"]),
            "yes" if each["seen"] else "no",
            pair_name(data, each["said"]),
            f"{each['count']} of {each['of']}",
        ]
        for each in shown["confusions"]
    ]
    table = {"header": ["pair", "seen in training", "predicted as", "images"], "rows": rows}
    return {"title": "Most frequent confusions", "table": table, "pictures": PICTURES}
