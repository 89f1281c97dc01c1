"""Arrays of features and attributes in MATLAB, npz and CSV files, with errors that name the file."""

import csv
from collections.abc import Sequence
from pathlib import Path
from zipfile import is_zipfile

import numpy as np

from batchformer.errors import UserError, did_you_mean, reason_of

_WANTED = "features, labels, att, allclasses, trainval_loc, test_seen_loc and test_unseen_loc"


def read_attributes(file: Path) -> tuple[np.ndarray, list[str] | None]:
    """Attributes (classes, width) of a `.mat`, npz or CSV file, and the names of the classes if it has them."""
    if file.suffix == ".csv":
        return _read_csv(file)
    content = read_mat(file) if file.suffix == ".mat" else read_npz(file)
    require(content, str(file), "att")
    names = content.get("allclasses_names", content.get("allclasses"))
    values = content["att"].T if file.suffix == ".mat" else content["att"]
    if names is not None and len(class_names(names)) != len(values):
        raise UserError(f"{file} has {len(values)} rows of attributes and {len(class_names(names))} names of classes.")
    return values, None if names is None else class_names(names)


def attributes_of(classes: Sequence[str], values: np.ndarray, names: list[str] | None, file: Path) -> np.ndarray:
    """The rows of these classes."""
    if names is None:
        if len(values) != len(classes):
            raise UserError(f"{file} has {len(values)} rows of attributes without names, for {len(classes)} classes.")
        return values
    rows = {name: k for k, name in enumerate(names)}
    for name in classes:
        if name not in rows:
            raise UserError(f"class {name} has no attributes in {file}.{did_you_mean(name, rows)}")
    return values[[rows[name] for name in classes]]


def _read_csv(file: Path) -> tuple[np.ndarray, list[str]]:
    """A header, then the name of a class and its attributes in each line."""
    try:
        with open(file, newline="", encoding="utf-8") as opened:
            header, *rows = [row for row in csv.reader(opened) if row]
    except (OSError, UnicodeDecodeError, ValueError) as problem:
        raise UserError(f"{file} cannot be read as CSV ({problem}): expected a header, then class,number,...") from None
    for row in rows:
        if len(row) != len(header):
            raise UserError(f"{file}: class {row[0]} has {len(row) - 1} attributes, the header {len(header) - 1}.")
    try:
        return np.array([[float(cell) for cell in row[1:]] for row in rows], np.float32), [row[0] for row in rows]
    except ValueError as problem:
        raise UserError(f"{file}: an attribute is no number ({problem}).") from None


def read_mat(file: Path) -> dict[str, np.ndarray]:
    from scipy.io import loadmat

    if not file.is_file():
        raise UserError(f"there is no file {file}: `batchformer data` shows the layout.")
    try:
        return dict(loadmat(file))
    except NotImplementedError as problem:
        raise UserError(
            f"{file} is a MATLAB file of version 7.3 (HDF5), which is not read: save it in MATLAB with "
            f"save(..., '-v7'), or as npz with {_WANTED}."
        ) from problem
    except Exception as problem:  # of other bytes its reader raises whatever it comes across
        raise UserError(f"{file} cannot be read as a MATLAB file ({' '.join(str(problem).split())}).") from problem


def read_npz(file: Path) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise UserError(f"there is no file {file}: `batchformer data` shows the layout.")
    try:
        with np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except Exception as problem:  # not a zip file, cut off, pickled objects in it
        why = reason_of(problem) if is_zipfile(file) else "it is none, or cut off; a table of text is named .csv"
        raise UserError(f"{file} cannot be read as npz ({why}).") from problem


def has_features(file: Path) -> bool:
    try:
        with np.load(file, allow_pickle=False) as content:
            return "features" in content.files
    except Exception:  # said when it is read
        return True


def require(content: dict[str, np.ndarray], source: str, *names: str) -> None:
    for name in names:
        if name not in content:
            raise UserError(f"{source} has no array {name}: it needs {', '.join(names)}.")


def whole(values: np.ndarray, name: str, source: str) -> np.ndarray:
    values = np.asarray(values).reshape(-1)
    if values.dtype.kind not in "iuf" or not np.array_equal(values, np.round(values)):
        raise UserError(f"{name} in {source} are no whole numbers.")
    return values.astype(np.int64)


def class_names(values: np.ndarray) -> list[str]:
    """Strings, also of MATLAB's cells."""
    return [str(np.asarray(value).reshape(-1)[0]) for value in np.asarray(values).reshape(-1)]
