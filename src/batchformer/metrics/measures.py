"""Registry of evaluation measures: key, label, unit and which direction is better.

Tables, verdicts, the progress line, the page, result files and the docs read these entries; nothing else in the package
knows a unit or a direction. No torch here: commands that only read result files start without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from batchformer.errors import UserError

# How the tables of long-tailed recognition split the classes by their training images.
Shot = Literal["many", "medium", "few"]
SHOTS: tuple[Shot, ...] = ("many", "medium", "few")
MANY_ABOVE, FEW_BELOW = 100, 20


@dataclass(frozen=True)
class Measure:
    """One number of an evaluation.

    Args:
        key: its name in result files and logs.
        label: in tables.
        unit: "%", "mm", ..., or "" for none.
        better: which direction is better.
        primary: whether it decides a comparison; one measure of a task does.
        name: in a sentence ("the ... is 0.3 mm lower"); the label in lower case unless given.
        note: beside the label where there is room.
        bounds: smallest and largest possible value, None where there is none.
        in_progress: whether the progress line shows it, as it always shows the primary measure.
        detail: only result files have it, tables do not.
        reading_of: key of the measure that this one is with other weights of the same run (averaged ones, or those of
            another step); tables show the difference to it.
        of_class: what `per_class` of a result holds beside this primary measure, where a class has no value of it.
    """

    key: str
    label: str
    unit: str = "%"
    better: Literal["higher", "lower"] = "higher"
    primary: bool = False
    name: str = ""
    note: str = ""
    bounds: tuple[float | None, float | None] = (0.0, 100.0)
    in_progress: bool = False
    detail: bool = False
    reading_of: str = ""
    of_class: str = ""

    def __post_init__(self) -> None:
        if self.primary:
            object.__setattr__(self, "in_progress", True)
        if self.better not in ("higher", "lower"):
            raise UserError(f'measure {self.key}: better={self.better!r} must be "higher" or "lower".')

    @property
    def title(self) -> str:
        """For axes and headings: label and unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def words(self) -> str:
        return self.name or self.label.lower()

    @property
    def points(self) -> str:
        """The unit of a difference: a difference of percentages is in points."""
        return "points" if self.unit == "%" else self.unit

    def gain(self, difference: float) -> float:
        """The difference with the sign of an improvement: above zero is better."""
        return difference if self.better == "higher" else -difference

    def of(self, evaluation_set: str) -> Measure:
        """The same measure on another evaluation set than the first: it decides nothing."""
        return replace(
            self,
            key=f"{evaluation_set}/{self.key}",
            reading_of=self.reading_of and f"{evaluation_set}/{self.reading_of}",
            label=f"{self.label} ({evaluation_set})",
            name=f"{self.words} on {evaluation_set}",
            primary=False,
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bounds": list(self.bounds)}


_RECALLS = ("1", "10", "100", "_small", "_medium", "_large")
_PARTS_OF_QUALITY = ("sq_things", "rq_things", "sq_stuff", "rq_stuff")
_QUALITY = ("pq", "sq", "rq", "pq_things", "pq_stuff", *_PARTS_OF_QUALITY)


def _with_the_module(*named: tuple[str, str], detail: bool = False) -> Iterator[Measure]:
    """These measures for an evaluation with the module active over the test batch (V2's Table 12)."""
    for key, label in named:
        yield Measure(f"{key}_batch", f"{label}, module on", note="module at test time", detail=detail)


LONG_TAILED = (
    Measure("accuracy", "All", primary=True, name="accuracy over all classes"),
    Measure("many", "Many", note=f"> {MANY_ABOVE} images"),
    Measure("medium", "Medium", note=f"{FEW_BELOW} to {MANY_ABOVE}"),
    Measure("few", "Few", note=f"< {FEW_BELOW}", in_progress=True),
)
CLASSIFICATION = (
    Measure("top1", "Top-1", primary=True, name="top-1 accuracy"),
    Measure("top5", "Top-5", name="top-5 accuracy"),
    Measure(
        "top1_ema", "Top-1, EMA", name="top-1 accuracy of the averaged weights", in_progress=True, reading_of="top1"
    ),
    Measure("top5_ema", "Top-5, EMA", name="top-5 accuracy of the averaged weights", reading_of="top5"),
    *LONG_TAILED[1:],
)
CLASS_SCORES = (  # of the analysis of failures: one pass after the training, not in every evaluation
    Measure("balanced_accuracy", "Balanced accuracy", name="mean recall of the classes", detail=True),
    Measure("macro_f1", "Macro F1", name="mean F1 of the classes", detail=True),
    Measure("ece", "ECE", better="lower", name="expected calibration error", detail=True),
    Measure(
        "ece_scaled",
        "ECE, temperature",
        better="lower",
        name="expected calibration error after temperature scaling",
        note="fitted on other images",
        detail=True,
    ),
)
DOMAINS = (
    Measure("accuracy", "Accuracy", primary=True),
    Measure("accuracy_classes", "Mean of classes", name="mean accuracy of the classes"),
    Measure(
        "accuracy_selected",
        "Best on source",
        name="accuracy at the step best on source validation",
        reading_of="accuracy",
    ),
    Measure(
        "accuracy_oracle",
        "Oracle",
        note="chosen on the target",
        name="accuracy at the step best on the target",
        reading_of="accuracy",
    ),
)
SELF_SUPERVISED = (
    Measure("linear", "Linear", primary=True, name="accuracy of a linear classifier", note="on frozen features"),
    Measure("knn", "k-NN", name="accuracy of nearest neighbours", in_progress=True),
)
_SEEN_AND_UNSEEN = (
    Measure("auc", "AUC", primary=True, name="area under seen against unseen accuracy", of_class="accuracy"),
    Measure("hm", "HM", name="best harmonic mean of seen and unseen accuracy", in_progress=True),
    Measure("seen", "Seen", name="best accuracy on seen pairs"),
    Measure("unseen", "Unseen", name="best accuracy on unseen pairs"),
    Measure("attribute", "Attribute", name="accuracy of attributes"),
    Measure("object", "Object", name="accuracy of objects"),
)
COMPOSITIONAL = (
    *_SEEN_AND_UNSEEN,
    *(
        replace(
            measure,
            key=f"{measure.key}_selected",
            label=f"{measure.label}, best on val",
            name=f"{measure.words} at the epoch best on validation",
            primary=False,
            in_progress=False,
            detail=measure.key != "auc",
        )
        for measure in _SEEN_AND_UNSEEN
    ),
    Measure("auc_released", "AUC, 20 biases", note="as the released code measures it", detail=True),
    Measure("hm_released", "HM, 20 biases", note="as the released code measures it", detail=True),
    Measure("attribute_released", "Attribute, biased", note="unseen pairs only", detail=True),
    Measure("object_released", "Object, biased", note="unseen pairs only", detail=True),
    *(Measure(f"auc_top{k}", f"AUC, top {k}", detail=True) for k in (2, 3)),
)
GENERALIZED = (  # in the order of BatchFormer's appendix, Table 1
    Measure("unseen", "Unseen", name="accuracy over unseen classes", in_progress=True),
    Measure("seen", "Seen", name="accuracy over seen classes", in_progress=True),
    Measure("harmonic", "Harmonic mean", primary=True, of_class="accuracy"),
    Measure("zero_shot", "Unseen alone", name="accuracy over unseen classes where no seen one can be chosen"),
    *(
        Measure(
            f"{key}_oracle",
            f"{label}, oracle",
            note="at the epoch best on the test set",
            name=f"{words} at the epoch best on the test set",
        )
        for key, label, words in (
            ("unseen", "Unseen", "accuracy over unseen classes"),
            ("seen", "Seen", "accuracy over seen classes"),
            ("harmonic", "Harmonic mean", "harmonic mean"),
        )
    ),
)
DETECTION = (
    Measure("ap", "AP", primary=True, name="average precision of boxes"),
    Measure("ap50", "AP50", in_progress=True),
    Measure("ap75", "AP75"),
    Measure("ap_small", "AP small"),
    Measure("ap_medium", "AP medium"),
    Measure("ap_large", "AP large"),
    *(Measure(f"ar{size}", f"AR {size.strip('_')}", detail=True) for size in _RECALLS),
    *_with_the_module(("ap", "AP"), ("ap50", "AP50")),
    *_with_the_module(*((f"ap{size}", f"AP {size}") for size in ("75", "_small", "_medium", "_large")), detail=True),
    *_with_the_module(*((f"ar{size}", f"AR {size}") for size in _RECALLS), detail=True),
)
VOC = (
    Measure("voc_ap", "AP, VOC 07", primary=True, name="average precision of VOC 2007 over ten overlaps"),
    Measure("voc_ap50", "AP50, VOC 07", in_progress=True),
    Measure("voc_ap75", "AP75, VOC 07"),
    *(
        replace(measure, primary=False, in_progress=False)
        for measure in DETECTION
        if not measure.key.endswith("_batch")
    ),
)
HANDS = (
    Measure("pa_mpvpe", "PA-MPVPE", "mm", "lower", True, "error of the vertices", "aligned", (0.0, None)),
    Measure("pa_mpjpe", "PA-MPJPE", "mm", "lower", name="error of the joints", note="aligned", bounds=(0.0, None)),
    Measure("f5", "F@5 mm"),
    Measure("f15", "F@15 mm"),
    Measure("auc_vertices", "AUC vertices", detail=True),
    Measure("auc_joints", "AUC joints", detail=True),
    Measure(
        "pa_mpvpe_mean_pose",
        "PA-MPVPE, mean pose",
        "mm",
        "lower",
        name="error of the mean pose of the test set",
        detail=True,
        bounds=(0.0, None),
    ),
)
PANOPTIC = (
    Measure("pq", "PQ", primary=True, name="panoptic quality"),
    Measure("sq", "SQ"),
    Measure("rq", "RQ"),
    Measure("pq_things", "PQ things", in_progress=True),
    Measure("pq_stuff", "PQ stuff"),
    *(Measure(key, key.upper().replace("_", " "), detail=True) for key in _PARTS_OF_QUALITY),
    Measure("ap", "AP things"),
    Measure("ap50", "AP50 things", detail=True),
    Measure("ap75", "AP75 things", detail=True),
    *_with_the_module(("pq", "PQ")),
    *_with_the_module(*((key, key) for key in (*_QUALITY[1:], "ap", "ap50", "ap75")), detail=True),
)


def primary_of(measures: Sequence[Measure]) -> Measure:
    """The measure that decides a comparison: the one marked `primary`, else the first."""
    return next((measure for measure in measures if measure.primary), measures[0])


def measures_of(result: Mapping[str, Any]) -> list[Measure]:
    """The measures of a result file: its own, or, for a file of version 0.1, those of the task inferred from it."""
    if "measures" in result:
        given = result["measures"]
        return [Measure(**{**entry, "bounds": tuple(entry.get("bounds", (None, None)))}) for entry in given]
    keys = result.get("metrics", {})
    for key, measures in {"pq": PANOPTIC, "ap": DETECTION, "top1": CLASSIFICATION}.items():
        if key in keys:
            return list(measures)
    return list(LONG_TAILED)


def with_current_names(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result file of version 0.1 with the current names: `method` is the variant, `all` the primary measure."""
    if "variant" in result and "measures" in result:
        return dict(result)
    measures = measures_of(result)
    primary = primary_of(measures).key

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        if "all" not in values:
            return dict(values)
        rest = {key: value for key, value in values.items() if key not in ("all", "all_batch")}
        return rest if primary in rest else {primary: values["all"], **rest}

    changed = {
        "variant": result.get("variant", result.get("method")),
        "target": result.get("target"),
        "reference": result.get("reference", "baseline"),
        "measures": [measure.as_dict() for measure in measures],
        "metrics": renamed(result.get("metrics", {})),
        "history": [renamed(entry) for entry in result.get("history", [])],
    }
    return {**result, **changed}


def known(values: Iterable[Any]) -> list[float]:
    """Those of the values that are finite numbers."""
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]


def shot_of(training_images: float) -> Shot:
    """Many: more than 100 training images; medium: 20 to 100, both included; few: less than 20."""
    if training_images > MANY_ABOVE:
        return "many"
    return "medium" if training_images >= FEW_BELOW else "few"


def count_shots(class_counts: Iterable[float]) -> dict[str, int]:
    """How many classes each split has."""
    shots = [shot_of(count) for count in class_counts]
    return {shot: shots.count(shot) for shot in SHOTS}
