"""Find and check result files: run folders, folders of `compare`, or the files of `results/`."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.files import read_json
from batchformer.metrics.measures import Measure, measures_of, primary_of, with_current_names
from batchformer.report.health import read_health

_NO_RESULTS = ("compare.json", "pictures.json", "data-check.json")
_REQUIRED = ("recipe", "variant", "seed", "metrics")
_FORMER_TITLES = {"What is taken for what": "Most frequent confusions"}  # of sections in older files


@dataclass(frozen=True)
class Run:
    """One `result.json`, checked. Numbers that are not finite are None; parts that a run may lack are empty.

    `raw` is the whole file in the names of this version, also where it is of version 0.1.
    """

    source: Path
    recipe: str
    variant: str
    target: str | None
    seed: int
    measures: tuple[Measure, ...]
    metrics: dict[str, float | None]
    per_class: list[float | None] = field(default_factory=list)
    class_counts: list[int] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    history: list[dict[str, float | None]] = field(default_factory=list)
    influence: list[float | None] = field(default_factory=list)
    influence_wrt: str = "features"
    streams: dict[str, list[float | None]] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict, repr=False)
    sections: list[dict[str, Any]] = field(default_factory=list, repr=False)
    failures: dict[str, Any] = field(default_factory=dict, repr=False)
    main_picture: dict[str, Any] = field(default_factory=dict, repr=False)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def primary(self) -> Measure:
        return primary_of(self.measures)

    @property
    def name(self) -> str:
        """Which of the runs of its recipe it is."""
        return ", ".join(filter(None, [self.variant, self.target, f"seed {self.seed}"]))

    def text(self, key: str) -> str | None:
        """A top-level entry as text, None when absent."""
        value = self.raw.get(key)
        return None if value is None else str(value)


def load_runs(paths: Iterable[Path | str]) -> list[Run]:
    """All runs under the files and folders, by recipe, variant, target and seed; one found twice counts once.

    Variants and targets are in the order of their comparison where that has one, else sorted.
    """
    places = [Path(path) for path in paths]
    runs: dict[tuple[str, str, str, int], Run] = {}
    for file, named in _result_files(places):
        # the file may be unrelated, or named by mistake: do not suggest to delete it
        remedy = "run that recipe again, or name the runs without it"
        data = read_json(file, "is damaged or no result file", remedy)
        keys = data if isinstance(data, dict) else {}
        if not named and sum(key in keys for key in (*_REQUIRED, "method")) < 2:
            continue  # not a result file
        run = _checked(data, file)
        key = (run.recipe, run.variant, run.target or "", run.seed)
        twin = runs.setdefault(key, run)
        if twin is not run and twin.raw != run.raw:
            raise UserError(_twins(twin, run))
    if not runs:
        for place in places:
            if (place / "config.yaml").is_file():
                raise UserError(
                    f"{place} is a run that is not finished, it has no result.json: go on with its command and --resume"
                )
        where = ", ".join(str(path) for path in places) or "nothing"
        raise UserError(f"no result.json found in {where}: give a run folder, a folder of `compare`, or a result file")
    declared = {folder: _declared_order(folder) for folder in {run.source.parent.parent for run in runs.values()}}

    def in_order(run: Run) -> tuple[Any, ...]:
        order = declared[run.source.parent.parent]
        names = [(order.index(name) if name in order else len(order), name) for name in (run.variant, run.target or "")]
        return (run.recipe, *names, run.seed)

    return sorted(runs.values(), key=in_order)


def _twins(one: Run, other: Run) -> str:
    from batchformer.report.provenance import as_variants, differing  # which imports this file

    text = (
        f"{one.source} and {other.source} are different runs of the same recipe, variant, target and seed "
        f"({one.recipe}, {one.name}): pass only one of them"
    )
    keys = differing([one, other])
    return f"{text} (they differ in {', '.join(keys)}{as_variants([one, other], keys)})" if keys else text


def _declared_order(folder: Path) -> list[str]:
    """Variants and targets as the `compare.json` in the folder has them; empty where there is none that can be read."""
    try:
        declared = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        return [*declared["variants"], *declared["targets"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def by_recipe(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Recipe name -> its runs, in the order of the runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.recipe, []).append(run)
    return groups


def _result_files(paths: Iterable[Path]) -> list[tuple[Path, bool]]:
    """Files to read; the flag: given by the user or named like a result, so that other content is an error."""
    found: dict[Path, tuple[Path, bool]] = {}
    for path in paths:
        if path.is_file():
            found[path.resolve()] = (path, True)
        elif path.is_dir():
            for file in sorted(path.rglob("*.json")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and file.name not in _NO_RESULTS and not hidden:
                    found.setdefault(file.resolve(), (file, file.name == "result.json"))
        else:
            raise UserError(f"{path} does not exist: give a run folder, a folder of `compare`, or a result file")
    return list(found.values())


def _checked(data: Any, file: Path) -> Run:
    if not isinstance(data, dict):
        raise UserError(f"{file} is not a result file: its content is not a JSON object")
    given = {**data, "variant": data.get("variant", data.get("method"))}
    missing = [key for key in _REQUIRED if given.get(key) is None]
    if missing:
        raise UserError(f"{file} has no {', '.join(repr(key) for key in missing)}: it is not a complete result file")
    for key in ("variant", "target", "reference"):
        if not isinstance(given.get(key, ""), str | None):
            raise UserError(f"{file} has {key} {given[key]!r}, expected a name")
    if not isinstance(data["seed"], int) or isinstance(data["seed"], bool):
        raise UserError(f"{file} has seed {data['seed']!r}, expected a whole number")
    _mapping(data["metrics"], "metrics", file)
    history = _list(data.get("history"), "history", file)
    if not all(isinstance(entry, dict) and "epoch" in entry for entry in history):
        raise UserError(f"{file} has an entry without 'epoch' in its 'history'")
    try:
        measures = tuple(measures_of(data))
    except (TypeError, AttributeError, UserError) as error:
        raise UserError(f"{file} has 'measures' that cannot be read: {error}") from None
    if not measures:
        raise UserError(f"{file} has no 'measures': it is not a complete result file")
    data = with_current_names({**data, "history": history})
    primary = primary_of(measures).key
    if primary not in data["metrics"]:
        raise UserError(f"{file} has no {primary!r} in its 'metrics': it is not a complete result file")
    influence = _mapping(data.get("gradient_influence"), "gradient_influence", file)
    streams = _mapping(data.get("streams"), "streams", file)
    counts = _list(data.get("class_counts"), "class_counts", file)
    for value in counts:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{file} has {value!r} in 'class_counts', expected a count of images")
    run = Run(
        source=file,
        recipe=str(data["recipe"]),
        variant=data["variant"],
        target=data.get("target"),
        seed=data["seed"],
        measures=measures,
        metrics={str(k): _number(v, f"metrics.{k}", file) for k, v in data["metrics"].items()},
        per_class=_numbers(data.get("per_class"), "per_class", file),
        class_counts=counts,
        class_names=[str(name) for name in _list(data.get("class_names"), "class_names", file)],
        history=[{str(k): _number(v, f"history.{k}", file) for k, v in entry.items()} for entry in data["history"]],
        influence=_numbers(influence.get("per_class"), "gradient_influence.per_class", file),
        influence_wrt=str(influence.get("wrt", "features")),
        streams={str(name): _numbers(losses, f"streams.{name}", file) for name, losses in streams.items()},
        health=read_health(data, file),
        sections=_sections(data.get("sections"), file),
        failures=_failures(data, file),
        main_picture=_main_picture(data.get("main_picture"), file),
        raw=data,
    )
    parts: dict[str, Sequence[Any]] = {
        "per_class": run.per_class,
        "class_names": run.class_names,
        "gradient_influence": run.influence,
    }
    for name, part in parts.items():
        if part and counts and len(part) != len(counts):
            raise UserError(f"{file} has {len(part)} entries in {name!r} but {len(counts)} in 'class_counts'")
    return run


def _sections(value: Any, file: Path) -> list[dict[str, Any]]:
    """A task's own sections of the page: a title, and any of a text, a table, lines over a common axis, and points."""
    sections = _list(value, "sections", file)
    for section in sections:
        if not isinstance(section, dict) or not isinstance(section.get("title"), str):
            raise UserError(f"{file} has an entry without 'title' in its 'sections'")
        where = f"section {section['title']!r}"
        table, series = (_mapping(section.get(part), f"{where}: {part}", file) for part in ("table", "series"))
        for row in _list(table.get("rows"), f"{where}: rows", file):
            if len(_list(row, f"{where}: rows", file)) != len(_list(table.get("header"), f"{where}: header", file)):
                raise UserError(f"{file} has a {where} with a row that is not as long as its header")
        lines = _mapping(series.get("lines"), f"{where}: lines", file)
        across = _numbers(series.get("x"), f"{where}: x", file)
        for name, values in lines.items():
            if len(_numbers(values, f"{where}: {name}", file)) != len(across):
                raise UserError(f"{file} has a {where} with a line {name!r} that is not as long as its 'x'")
        _check_grid(_mapping(section.get("grid"), f"{where}: grid", file), where, file)
        pictures = section.get("pictures", "")
        if not isinstance(pictures, str) or Path(pictures).name != pictures:
            raise UserError(f"{file} has a {where} whose 'pictures' are no folder of the run")
        points = _mapping(section.get("points"), f"{where}: points", file)
        for name, group in _mapping(points.get("groups"), f"{where}: groups", file).items():
            if any(len(_numbers(point, f"{where}: {name}", file)) != 2 for point in _list(group, where, file)):
                raise UserError(f"{file} has a {where} with a point of {name!r} that is not two numbers")
    return [{**section, "title": _FORMER_TITLES.get(section["title"], section["title"])} for section in sections]


def _main_picture(value: Any, file: Path) -> dict[str, Any]:
    """The picture of the first screen that the task declares; what is in it, see `report.first_screen`."""
    wanted = _mapping(value, "main_picture", file)
    keys, words = (
        _list(wanted.get("bars"), "main_picture: bars", file),
        [wanted.get(k, "") for k in ("curve", "section")],
    )
    if not all(isinstance(word, str) for word in (*keys, *words)):
        raise UserError(f"{file} has a 'main_picture' that names no measures or section")
    return wanted


def _failures(data: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Which classes fail (see `report.failures`); empty for runs of versions that did not look for them."""
    found = _mapping(data.get("failures"), "failures", file)
    if not found:
        return {}
    columns = _mapping(found.get("columns"), "failures: columns", file)
    checked = {str(name): _numbers(values, f"failures: {name}", file) for name, values in columns.items()}
    classes = len(data.get("class_names") or next(iter(checked.values()), ()))
    if not classes or found.get("worst_by") not in checked or {len(v) for v in checked.values()} != {classes}:
        raise UserError(f"{file} has 'failures' whose columns are not one number for each of its classes")
    pairs, matrix = (_list(found.get(key), f"failures: {key}", file) for key in ("confusions", "matrix"))
    whole = all(isinstance(n, int) for row in (*pairs, *matrix) for n in _list(row, "failures", file))
    if not whole or not all(len(pair) == 3 and min(pair) >= 0 and max(pair[:2]) < classes for pair in pairs):
        raise UserError(f"{file} has 'failures' with confusions that are not two classes and a count")
    if matrix and [len(row) for row in matrix] != [classes] * classes:
        raise UserError(f"{file} has 'failures' with a matrix that is not classes times classes")
    calibration = _mapping(found.get("calibration"), "failures: calibration", file)
    if calibration and (_number(calibration.get("ece"), "failures: ece", file) is None or _bad_bins(calibration, file)):
        raise UserError(f"{file} has 'failures' with a calibration that cannot be read")
    if not isinstance(found.get("pictures", ""), str) or Path(found.get("pictures", "")).name != found.get(
        "pictures", ""
    ):
        raise UserError(f"{file} has 'failures' whose 'pictures' are no folder of the run")
    return {**found, "columns": checked}


def _bad_bins(calibration: Mapping[str, Any], file: Path) -> bool:
    parts = [_list(calibration.get(key), f"failures: {key}", file) for key in ("bins", "bins_scaled")]
    numbers = [_number(calibration.get(key), f"failures: {key}", file) for key in ("temperature", "ece_scaled")]
    rows = [_numbers(row, "failures: bins", file) for part in parts for row in part]
    return len({value is None for value in numbers}) > 1 or any(len(row) != 3 or None in row for row in rows)


def _check_grid(grid: Mapping[str, Any], where: str, file: Path) -> None:
    """Values by row and column, as many as are named; `marked` cells by their numbers."""
    names = [_list(grid.get(key), f"{where}: {key}", file) for key in ("rows", "columns")]
    values = _list(grid.get("values"), f"{where}: values", file)
    if [len(values), *(len(_numbers(row, f"{where}: values", file)) for row in values)] != [
        len(names[0]),
        *[len(names[1])] * len(values),
    ]:
        raise UserError(f"{file} has a {where} with other values than rows times columns")
    for cell in _list(grid.get("marked"), f"{where}: marked", file):
        if not isinstance(cell, list) or len(cell) != 2 or not all(isinstance(k, int) for k in cell):
            raise UserError(f"{file} has a {where} with a marked cell that is no row and column")


def _list(value: Any, name: str, file: Path) -> list[Any]:
    if not isinstance(value, list | None):
        raise UserError(f"{file} has a {name!r} that is not a list")
    return value or []


def _mapping(value: Any, name: str, file: Path) -> dict[str, Any]:
    if value and not isinstance(value, dict):
        raise UserError(f"{file} has a {name!r} that is not an object")
    return value or {}


def _numbers(value: Any, name: str, file: Path) -> list[float | None]:
    return [_number(entry, name, file) for entry in _list(value, name, file)]


def _number(value: Any, name: str, file: Path) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{file} has {value!r} in {name!r}, expected a number")
    return float(value) if math.isfinite(value) else None
