"""Features of images with attributes of their classes, for generalized zero-shot learning: xlsa17's files, or npz."""

import hashlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchformer.data.augment.options import check_at_least
from batchformer.data.loading.order import generator
from batchformer.data.sets.arrays import FeatureData, Split
from batchformer.data.sets.feature_files import (
    attributes_of,
    class_names,
    has_features,
    read_attributes,
    read_mat,
    read_npz,
    require,
    whole,
)
from batchformer.data.sets.miniature import write_mat
from batchformer.errors import UserError

LAYOUT = {
    "xlsa17": "DIR/{CUB,AWA1,AWA2,SUN,FLO}/{res101,att_splits}.mat\n"
    "CUB's sentence embeddings, if wanted: DIR/CUB/sent_splits.mat",
    "features": "DIR/*.npz with features, labels, att, allclasses, trainval_loc, test_seen_loc, test_unseen_loc\n"
    "(batchformer features IMAGES writes one); other attributes, if wanted: DIR/*.csv or DIR/*.npz",
}
FEATURES, ATTRIBUTES = "res101.mat", "att_splits.mat"
PARTS = ("trainval_loc", "test_seen_loc", "test_unseen_loc")


class AttributeTable(NamedTuple):
    """Features and labels of all samples, attributes and names of all classes, and the positions of the three parts."""

    features: np.ndarray
    labels: np.ndarray
    attributes: np.ndarray
    classes: list[str]
    train: np.ndarray
    test_seen: np.ndarray
    test_unseen: np.ndarray
    source: str  # for messages

    def check(self) -> None:
        """Raise a UserError for arrays that do not fit together or cannot be trained on."""
        where = self.source
        for name, values in (("features", self.features), ("attributes", self.attributes)):
            if values.dtype.kind not in "iuf":
                raise UserError(f"the {name} in {where} are no real numbers but {values.dtype}: write them as float32.")
        if self.features.ndim != 2 or not self.features.size:
            raise UserError(f"the features in {where} have the shape {self.features.shape}: expected (samples, width).")
        count = len(self.features)
        if self.labels.shape != (count,):
            raise UserError(f"{where} has {count} features and {self.labels.size} labels: give one label per feature.")
        if (bad := ~np.isfinite(self.features).all(1)).any():
            raise UserError(
                f"the feature of sample {bad.argmax()} in {where} holds NaN or infinity ({bad.sum()} such samples): "
                "extract it again, or leave it out."
            )
        self._check_classes()
        parts = {"trainval_loc": self.train, "test_seen_loc": self.test_seen, "test_unseen_loc": self.test_unseen}
        for name, part in parts.items():
            if not len(part) or part.min() < 0 or part.max() >= count:
                found = "is empty" if not len(part) else f"names sample {part.max() if part.max() >= count else -1}"
                raise UserError(f"{name} in {where} {found}: expected positions of the {count} samples.")
            if len(np.unique(part)) < len(part):
                raise UserError(f"{name} in {where} names a sample twice: each belongs to one part once.")
        self._check_split(parts)

    def _check_classes(self) -> None:
        where, known = self.source, len(self.attributes)
        if self.attributes.ndim != 2 or known != len(self.classes):
            raise UserError(
                f"{where} has attributes of the shape {self.attributes.shape} and {len(self.classes)} class names: "
                "expected one row of attributes per class."
            )
        if (wrong := ~np.isfinite(self.attributes).all(1)).any():
            raise UserError(f"class {self.classes[int(wrong.argmax())]} has no attributes, or NaN in them, in {where}.")
        if len({*self.classes}) < known:
            raise UserError(f"{where} names a class twice: give every class its own name.")
        if self.labels.min() < 0 or self.labels.max() >= known:
            label = int(self.labels.min() if self.labels.min() < 0 else self.labels.max())
            raise UserError(f"label {label} in {where} is of a class without attributes: there are {known} classes.")

    def _check_split(self, parts: dict[str, np.ndarray]) -> None:
        where, names = self.source, list(parts)
        for k, name in enumerate(names):
            for other in names[k + 1 :]:
                if shared := len(np.intersect1d(parts[name], parts[other])):
                    raise UserError(f"{name} and {other} in {where} share {shared} samples: they must not overlap.")
        trained, seen, unseen = ({*self.labels[part].tolist()} for part in parts.values())
        if both := sorted(trained & unseen):
            raise UserError(
                f"class {self.classes[both[0]]} is in trainval_loc and in test_unseen_loc of {where}: a class that is "
                "trained on is not unseen."
            )
        if missing := sorted(seen - trained):
            raise UserError(f"class {self.classes[missing[0]]} of test_seen_loc in {where} has no training sample.")
        if untested := sorted(trained - seen):
            raise UserError(f"class {self.classes[untested[0]]} of trainval_loc in {where} has no sample to test on.")
        if len(trained) < 2:
            raise UserError(f"{where} has one seen class only: there is nothing to tell apart.")
        if idle := sorted({*range(len(self.classes))} - trained - unseen):
            raise UserError(
                f"class {self.classes[idle[0]]} in {where} has no sample in any part: leave its attributes out."
            )


def hold_out(table: AttributeTable, count: int) -> AttributeTable:
    """The training samples alone, with so many of their classes as unseen ones, and a fifth of the others to test on.

    To choose settings without the test set. Always the same classes and samples.
    """
    labels = table.labels[table.train]
    seen = np.unique(labels)
    if count > len(seen) - 2:
        raise UserError(f"data.held_out {count} leaves less than two of the {len(seen)} seen classes: choose fewer.")
    hidden = generator(0, "held out").permutation(seen)[:count]
    turn = np.empty(len(labels), np.int64)
    for label in seen:
        members = np.flatnonzero(labels == label)
        turn[members] = generator(0, int(label), "held out").permutation(len(members))
    unseen, tested = np.isin(labels, hidden), turn < np.maximum(1, np.bincount(labels) // 5)[labels]
    train, test_seen, test_unseen = map(np.flatnonzero, (~unseen & ~tested, ~unseen & tested, unseen))
    kept = [table.classes[label] for label in seen]
    source = f"{table.source}, with data.held_out {count}"
    features, attributes, renumbered = (
        table.features[table.train],
        table.attributes[seen],
        np.searchsorted(seen, labels),
    )
    return AttributeTable(features, renumbered, attributes, kept, train, test_seen, test_unseen, source)


class AttributeData(FeatureData):
    """Base class: features, attributes of their classes, and classes that training never sees.

    The training set holds seen classes only; the evaluation set holds test samples of seen and unseen ones, so the
    class of a sample tells which of both it is. Features are as read: a task scales them by the range of the training
    set, which `declare` gives (`feature_low`, `feature_high`), beside `attributes` and `seen`.

    Args:
        normalise_attributes: divide the attributes of a class by their length. xlsa17's `att` is so already; CE-GZSL
            takes CUB's sentence embeddings as they are.
        held_out: to choose settings on the training set alone: so many of its classes are the unseen ones (`hold_out`),
            and the test set is not used. 0: the official split.
        batch_size: samples of a critic's step.
    """

    allow_empty_classes = True

    def __init__(
        self,
        root: str | None = None,
        *,
        normalise_attributes: bool = False,
        held_out: int = 0,
        batch_size: int = 2048,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        check_at_least(0, held_out=held_out)
        self.normalise_attributes, self.held_out = normalise_attributes, held_out

    @abstractmethod
    def read_table(self) -> AttributeTable:
        """Everything there is; checked afterwards."""

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        table = self.read_table()
        table.check()
        if self.held_out:
            table = hold_out(table, self.held_out)
            table.check()
        features, labels = table.features.astype(np.float32, copy=False), table.labels.astype(np.int64)
        self.attributes = table.attributes.astype(np.float32)
        if self.normalise_attributes:
            self.attributes /= np.linalg.norm(self.attributes, axis=1, keepdims=True).clip(1e-12)
        self.seen = np.isin(np.arange(len(table.classes)), labels[table.train])
        tested = np.concatenate([table.test_seen, table.test_unseen])
        parts = {"train": table.train, "val": tested}
        return {name: Split(features[part], labels[part]) for name, part in parts.items()}, table.classes

    def _read(self) -> None:
        super()._read()
        digest = hashlib.sha256(self.fingerprint.encode())  # of training features and labels
        digest.update(np.ascontiguousarray(self.attributes).tobytes() + self.seen.tobytes())
        self.fingerprint = digest.hexdigest()

    def declare(self) -> dict[str, Any]:
        train = self._splits["train"].images
        return {
            **super().declare(),
            "attributes": self.attributes.tolist(),
            "seen": self.seen.tolist(),
            "feature_low": train.min(0).tolist(),
            "feature_high": train.max(0).tolist(),
        }

    def describe(self) -> dict[str, Any]:
        about, seen = super().describe(), int(self.seen.sum())
        sizes = (
            f"{seen} seen and {len(self.seen) - seen} unseen classes; {self._splits['train'].images.shape[1]} features "
            f"of a sample, {self.attributes.shape[1]} attributes of a class"
        )
        return {**about, "details": [sizes]}


class AttributeFiles(AttributeData):
    """Features and attributes in xlsa17's two `.mat` files (Xian et al., 2017), or the same arrays in one npz file.

    In npz files features are (samples, width), attributes (classes, width), and labels and positions count from 0; in
    `.mat` files features and attributes are transposed, and MATLAB counts from 1.

    Args:
        root: the folder of the files, or one with a folder of the name `dataset` in it; or an npz file.
        dataset: CUB, AWA1, AWA2, SUN or FLO.
        attributes: another file of attributes: `.mat` or npz with `att`, or CSV with a class and its numbers in each
            line. Relative to the folder of the features. Classes are found by their names, where the file has names.
    """

    def __init__(
        self, root: str | None = None, *, dataset: str | None = None, attributes: str | None = None, **options: Any
    ) -> None:
        super().__init__(root, **options)
        self.dataset, self.attributes_file = dataset, attributes

    def read_table(self) -> AttributeTable:
        features, folder = self._find()
        if features.suffix == ".mat":
            content = {**read_mat(folder / ATTRIBUTES), **read_mat(features)}
            source = f"{features} and {folder / ATTRIBUTES}"
            require(content, source, "features", "labels", "att", *PARTS)
            values, attributes = content["features"].T, content["att"].T
            labels, *parts = (whole(content[name], name, source) - 1 for name in ("labels", *PARTS))
            numbered = np.array([f"class {k + 1}" for k in range(len(attributes))])  # FLO is distributed without names
            classes = class_names(content.get("allclasses_names", numbered))
        else:
            content, source = read_npz(features), str(features)
            require(content, source, "features", "labels", "att", "allclasses", *PARTS)
            values, attributes = content["features"], content["att"]
            labels, *parts = (whole(content[name], name, source) for name in ("labels", *PARTS))
            classes = class_names(content["allclasses"])
        if self.attributes_file is not None:
            file = folder / Path(self.attributes_file).expanduser()
            attributes = attributes_of(classes, *read_attributes(file), file)
        train, seen, unseen = parts
        return AttributeTable(values, labels, attributes, classes, train, seen, unseen, source)

    def _find(self) -> tuple[Path, Path]:
        """The file of the features, and its folder."""
        if self.root is None:
            raise UserError("data.root is not set: name the folder of the features (--data-root DIR).")
        root = Path(self.root).expanduser()
        if root.is_file():
            return root, root.parent
        inside = [root / part / self.dataset for part in ("", "data", "xlsa17/data")] if self.dataset else []
        for folder in (*inside, root):
            if (folder / FEATURES).is_file():
                return folder / FEATURES, folder
            found = [file for file in sorted(folder.glob("*.npz")) if has_features(file)]
            if len(found) > 1:
                raise UserError(f"{folder} holds several files of features: name one, --data-root {found[0]}.")
            if found:
                return found[0], folder
        named = f" nor in its folder {self.dataset}" if self.dataset else ""
        raise UserError(
            f"there is neither {FEATURES} nor an npz file with features in {root}{named}: `batchformer data` shows the "
            "layout, `batchformer features` makes features of images."
        )


def miniature(root: Path, name: str) -> None:
    """Eight seen and three unseen classes, whose features are a fixed map of their attributes, under noise."""
    draw = generator(0, "attributes")
    attributes = draw.random((11, 6), dtype=np.float32)
    labels = np.repeat(np.arange(11), 8)
    means = np.maximum(attributes @ draw.normal(size=(6, 16)), 0)
    features = np.maximum(means[labels] + 0.1 * draw.normal(size=(88, 16)), 0).astype(np.float32)
    turn = np.arange(88) % 8
    parts = [np.flatnonzero(chosen) for chosen in ((labels < 8) & (turn < 6), (labels < 8) & (turn > 5), labels > 7)]
    names = np.array([f"{label + 1:03}.class" for label in range(11)])
    if name == "features":
        arrays: Any = dict(zip(PARTS, parts, strict=True))
        np.savez(root / "features.npz", features=features, labels=labels, att=attributes, allclasses=names, **arrays)
        np.savez(root / "sentences.npz", att=attributes[:, :4], allclasses=names)
        return
    split = {part: positions[:, None] + 1 for part, positions in zip(PARTS, parts, strict=True)}
    split["allclasses_names"] = names.astype(object)[:, None]
    for dataset in ("CUB", "AWA1", "AWA2", "SUN", "FLO"):
        (root / dataset).mkdir(parents=True)
        write_mat(root / dataset / FEATURES, {"features": features.T, "labels": labels[:, None] + 1})
        write_mat(root / dataset / ATTRIBUTES, {"att": attributes.T, **split})
    write_mat(root / "CUB" / "sent_splits.mat", {"att": attributes[:, :4].T, **split})
