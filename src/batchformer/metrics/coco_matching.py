"""COCO's matching of detections with objects, and the twelve numbers that follow from it.

Vectorised over images, categories, thresholds and sizes, in a few hundred calls of numpy.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
#: names of the size ranges, and the areas in pixels they reach from and to (both included)
SIZES = ("all", "small", "medium", "large")
_AREAS = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]], dtype=np.float64)
MAX_DETECTIONS = 100  # per image and category
_ALMOST_ONE = 1 - 1e-10
_CELLS = 1 << 22  # elements of overlaps and of matching in memory at once
_RECALLS = np.linspace(0.0, 1.0, 101)
_LIMITS = (1, 10, 100)


class Detections(NamedTuple):
    """Detections of one image, or of many."""

    image: Int[np.ndarray, " detections"]
    label: Int[np.ndarray, " detections"]
    score: Float[np.ndarray, " detections"]
    area: Float[np.ndarray, " detections"]


class Objects(NamedTuple):
    """Annotated objects. A crowd may be matched any number of times, an `ignore` object (VOC's difficult) once."""

    image: Int[np.ndarray, " objects"]
    label: Int[np.ndarray, " objects"]
    area: Float[np.ndarray, " objects"]
    crowd: Bool[np.ndarray, " objects"]
    ignore: Bool[np.ndarray, " objects"]


#: from indices into `Detections` and `Objects`, which broadcast, to the overlap of detection and object
Overlaps = Callable[[Int[np.ndarray, "*pairs"], Int[np.ndarray, "*pairs"]], Float[np.ndarray, "*pairs"]]


class MatchedDetections(NamedTuple):
    """Detections sorted by image, label and falling score, at most `MAX_DETECTIONS` of each image and label.

    A `hit` found an object; one that is `passed` counts neither as right nor as wrong, because it found an object that
    is to be ignored, or found none and is itself out of the range of sizes.
    """

    image: Int[np.ndarray, " detections"]
    label: Int[np.ndarray, " detections"]
    score: Float[np.ndarray, " detections"]
    rank: Int[np.ndarray, " detections"]
    hit: Bool[np.ndarray, "detections thresholds sizes"]
    passed: Bool[np.ndarray, "detections thresholds sizes"]


class CountedObjects(NamedTuple):
    """Objects, and in which ranges of sizes they count."""

    image: Int[np.ndarray, " objects"]
    label: Int[np.ndarray, " objects"]
    counts: Bool[np.ndarray, "objects sizes"]


def match(found: Detections, objects: Objects, overlaps: Overlaps) -> MatchedDetections:
    """Greedy matching in the order of scores: each detection gets the free object of largest overlap, if large enough.

    Objects that count come before those that are ignored (crowds, marked ones, those out of the range of sizes); of
    two with the same overlap the later is taken, as pycocotools does.

    Instead of a loop over images and categories, all pairs of them with similar numbers of objects are padded to one
    array, and its detections are matched rank by rank.
    """
    classes = 1 + max((int(labels.max()) for labels in (found.label, objects.label) if len(labels)), default=0)
    order = np.lexsort((-found.score, found.image * classes + found.label))
    group = (found.image * classes + found.label)[order]
    first = np.searchsorted(group, group)
    rank = np.arange(len(group)) - first
    order, rank = order[rank < MAX_DETECTIONS], rank[rank < MAX_DETECTIONS]
    found = Detections(*(field[order] for field in found))
    group = found.image * classes + found.label

    object_order = np.argsort(objects.image * classes + objects.label, kind="stable")
    objects = Objects(*(field[object_order] for field in objects))
    object_group = objects.image * classes + objects.label

    hit = np.zeros((len(group), len(IOU_THRESHOLDS), len(SIZES)), dtype=bool)
    passed = np.repeat(_outside(found.area)[:, None], len(IOU_THRESHOLDS), axis=1)
    for chunk in _chunks(group, object_group):
        _match_chunk(chunk, objects, lambda rows, at: overlaps(order[rows], object_order[at]), hit, passed)
    return MatchedDetections(found.image, found.label, found.score, rank, hit, passed)


def totals(objects: Objects) -> CountedObjects:
    return CountedObjects(objects.image, objects.label, ~_ignored(objects))


def _outside(area: Float[np.ndarray, " n"]) -> Bool[np.ndarray, "n sizes"]:
    return (area[:, None] < _AREAS[:, 0]) | (area[:, None] > _AREAS[:, 1])


def _ignored(objects: Objects) -> Bool[np.ndarray, "objects sizes"]:
    return (objects.crowd | objects.ignore)[:, None] | _outside(objects.area)


class _Chunk(NamedTuple):
    """Groups (pairs of image and label) by falling number of detections: where each begins, and how many it has."""

    detection: Int[np.ndarray, " groups"]
    detections: Int[np.ndarray, " groups"]
    object: Int[np.ndarray, " groups"]
    objects: Int[np.ndarray, " groups"]


def _chunks(group: np.ndarray, object_group: np.ndarray) -> list[_Chunk]:
    """All groups with detections and objects, batched by number of objects (between the same powers of two)."""
    both = np.intersect1d(group, object_group)
    begin, object_begin = np.searchsorted(group, both), np.searchsorted(object_group, both)
    size = np.searchsorted(group, both, side="right") - begin
    object_size = np.searchsorted(object_group, both, side="right") - object_begin
    power = np.ceil(np.log2(object_size)).astype(int)
    chunks = []
    for value in np.unique(power):
        rows = np.flatnonzero(power == value)
        rows = rows[np.argsort(-size[rows], kind="stable")]
        while len(rows):
            cells = (len(IOU_THRESHOLDS) * len(SIZES) + size[rows[0]]) * 2**value
            take = max(1, int(_CELLS // cells))
            part, rows = rows[:take], rows[take:]
            chunks.append(_Chunk(begin[part], size[part], object_begin[part], object_size[part]))
    return chunks


def _match_chunk(chunk: _Chunk, objects: Objects, overlaps: Overlaps, hit: np.ndarray, passed: np.ndarray) -> None:
    place = np.arange(chunk.objects.max())
    real = place < chunk.objects[:, None]  # (groups, objects)
    at = np.where(real, chunk.object[:, None] + place, 0)
    crowd = objects.crowd[at] & real
    ignored = _ignored(objects)[at].transpose(0, 2, 1)[:, None]  # (groups, 1, sizes, objects)
    free = np.broadcast_to(real[:, None, None], (len(at), len(IOU_THRESHOLDS), len(SIZES), len(place))).copy()
    enough = np.minimum(IOU_THRESHOLDS, _ALMOST_ONE)[:, None, None]
    for rank in range(chunk.detections[0]):
        groups = int(np.searchsorted(-chunk.detections, -rank))  # those with more than `rank` detections
        rows = chunk.detection[:groups] + rank
        iou = overlaps(rows[:, None], at[:groups])[:, None, None]
        possible = (free[:groups] | crowd[:groups, None, None]) & (iou >= enough) & real[:groups, None, None]
        counting = possible & ~ignored[:groups]
        possible = np.where(counting.any(-1, keepdims=True), counting, possible)
        # the last of the largest
        best = len(place) - 1 - np.where(possible, iou, -1.0)[..., ::-1].argmax(-1, keepdims=True)
        hits = possible.any(-1)  # (groups, thresholds, sizes)
        hit[rows] = hits
        of_ignored = np.take_along_axis(np.broadcast_to(ignored[:groups], possible.shape), best, -1)[..., 0]
        passed[rows] = np.where(hits, of_ignored, passed[rows])
        np.put_along_axis(
            free[:groups], best, np.take_along_axis(free[:groups], best, -1) & ~np.expand_dims(hits, -1), -1
        )


def average(matches: MatchedDetections, counts: Int[np.ndarray, "classes sizes"]) -> dict[str, Float[np.ndarray, ""]]:
    """COCO's summary and the AP of each class (`per_class`, `ap50_per_class`); nan where there is nothing to find.

    AP is the mean, over the classes with objects, ten thresholds from .50 to .95 and 101 recalls, of the largest
    precision at that recall or above; AR the mean of the recall reached with so many detections of each image and
    class.
    """
    precision = np.full((len(counts), len(SIZES), len(IOU_THRESHOLDS), len(_RECALLS)), np.nan)
    recall = np.full((len(counts), len(SIZES), len(_LIMITS), len(IOU_THRESHOLDS)), np.nan)
    order = np.lexsort((matches.rank, matches.image, -matches.score, matches.label))
    label = matches.label[order]
    for c in np.flatnonzero(counts.any(1)):
        rows = order[np.searchsorted(label, c) : np.searchsorted(label, c, side="right")]
        for size in np.flatnonzero(counts[c]):
            counting = ~matches.passed[rows, :, size]
            right = matches.hit[rows, :, size] & counting
            for place, limit in enumerate(_LIMITS):
                within = right[matches.rank[rows] < limit]
                recall[c, size, place] = within.sum(0) / counts[c, size]
            precision[c, size] = _precision_at(right, counting & ~right, counts[c, size])
    return _summary(precision, recall)


def found_and_false(
    matches: MatchedDetections, objects: Int[np.ndarray, " classes"]
) -> tuple[float, Int[np.ndarray, " classes"], Int[np.ndarray, " classes"]]:
    """The score with the best F1 over all classes, at the first overlap; objects found and false alarms from it on."""
    counting = ~matches.passed[:, 0, 0]
    right = matches.hit[:, 0, 0] & counting
    order = np.lexsort((matches.rank, matches.image, -matches.score))
    order = order[counting[order]]
    hits = right[order].cumsum()
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + max(1, objects.sum()))
    # equal scores are taken together
    last = np.append(np.diff(matches.score[order]) != 0, True) if len(order) else np.zeros(0, dtype=bool)
    limit = float(matches.score[order][last][f1[last].argmax()]) if len(order) else 0.0
    sure = matches.score >= limit
    found, false = (
        np.bincount(matches.label[sure & rows], minlength=len(objects)) for rows in (right, counting & ~right)
    )
    return limit, found, false


def _precision_at(right: np.ndarray, wrong: np.ndarray, total: int) -> Float[np.ndarray, "thresholds recalls"]:
    """Interpolated precision at each of `_RECALLS`, 0 where that recall is never reached."""
    at = np.zeros((len(IOU_THRESHOLDS), len(_RECALLS)))
    if not len(right):
        return at
    right, wrong = right.cumsum(0).astype(float), wrong.cumsum(0).astype(float)
    recall, precision = right / total, right / (right + wrong + np.spacing(1))
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    for threshold in range(len(at)):
        place = np.searchsorted(recall[:, threshold], _RECALLS)
        reached = place < len(recall)
        at[threshold, reached] = precision[place[reached], threshold]
    return at


def _summary(precision: np.ndarray, recall: np.ndarray) -> dict[str, Float[np.ndarray, ""]]:
    per_class = precision.mean((2, 3))  # (classes, sizes)
    values = {
        "ap": _mean(per_class[:, 0]),
        "ap50": _mean(precision[:, 0, 0].mean(-1)),
        "ap75": _mean(precision[:, 0, 5].mean(-1)),
    }
    values |= {f"ap_{name}": _mean(per_class[:, place]) for place, name in enumerate(SIZES) if place}
    values |= {f"ar{limit}": _mean(recall[:, 0, place].mean(-1)) for place, limit in enumerate(_LIMITS)}
    values |= {f"ar_{name}": _mean(recall[:, place, -1].mean(-1)) for place, name in enumerate(SIZES) if place}
    return values | {"per_class": per_class[:, 0], "ap50_per_class": precision[:, 0, 0].mean(-1)}


def _mean(values: Float[np.ndarray, " classes"]) -> Float[np.ndarray, ""]:
    there = values[~np.isnan(values)]
    return np.asarray(there.mean() if len(there) else np.nan)
