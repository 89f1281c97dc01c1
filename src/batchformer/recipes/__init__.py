"""The index of recipes, and how a recipe file is read.

A recipe is one YAML file that also describes itself in its section `about`: a new file in this folder is in the list of
`batchformer recipes`, in docs/recipes.md and in the tests without being named anywhere else.

`extends: NAME` begins with another recipe, a shipped name or a file beside it, and changes some of its fields: rows of
a table that differ in one number then differ in one line. Sections are merged key by key; a list or a number takes the
place of the one before. A `class_path` that changes takes its `init_args` with it. Of `about`, `group`, `needs` and
`small` are inherited and `title` and `paper` are not. `small`, `variants` and `stages` are not merged: they take the
place of the inherited ones.

Neither torch nor the packages of the train extra are imported here; YAML is when the first file is parsed.
"""

import copy
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from batchformer.errors import UserError, did_you_mean

EXTENDS = "extends"
DEFAULT_TASK = "long_tailed"  # of recipes that name none
DESCRIPTIVE = ("about", "variants", "stages")  # not fields of the task, the data, the trainer or the run
SECTIONS = (EXTENDS, *DESCRIPTIVE, "task", "seed_everything", "trainer", "model", "data", "run")
GROUPS = (  # in the order they are listed; a group that is not named here comes after them
    "Start here, nothing to download",
    "Long-tailed recognition, BatchFormer",
    "Unseen domains, BatchFormer",
    "Unseen classes, BatchFormer",
    "Learning without labels",
    "Image classification, BatchFormerV2 (ResNet-50: BatchFormer)",
    "Detection, BatchFormerV2",
    "Panoptic segmentation, BatchFormerV2",
    "Hand meshes, BatchFormerV2",
    "TransMix and other mixing methods, CIFAR-100",
    "TransMix and other mixing methods, ImageNet",
)
NO_GROUP = "Without a group"
_INHERITED = ("group", "needs", "small")


@dataclass(frozen=True)
class PaperRow:
    """The row of a paper's table that a recipe trains.

    Args:
        table: "Table 1" (BatchFormer), "V2, Table 1" (BatchFormerV2), "TransMix, Table 1" (its supplement).
        row: the setting, in words.
        numbers: variant -> measure -> what the paper reports.
    """

    table: str
    row: str
    numbers: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class About:
    """The section `about` of a recipe.

    Args:
        title: one line.
        group: the heading it is listed under.
        needs: name of its data set as in `batchformer data`; None if the data come with the package.
        paper: the row of a paper it trains, if it does.
        small: dotted key -> value, what makes it small enough for two training steps on a CPU.
    """

    title: str
    group: str = NO_GROUP
    needs: str | None = None
    paper: PaperRow | None = None
    small: Mapping[str, Any] = field(default_factory=dict)

    def small_overrides(self) -> list[tuple[str, str]]:
        """`small` as keys and words of the command line."""
        return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.small.items()]


def recipe_names() -> list[str]:
    """Names of all shipped recipes, sorted with numbers by value."""
    return _names_in(_folder())


def recipe_groups(folder: Path | None = None) -> dict[str, list[str]]:
    """The shipped recipes, or the YAML files of a folder, under the headings of their groups."""
    if folder is None:
        groups = {name: about(name).group for name in recipe_names()}
    else:
        groups = {name: about(folder / f"{name}.yaml").group for name in _names_in(folder)}
    others = sorted(set(groups.values()).difference(GROUPS))
    listed = {title: [name for name in groups if groups[name] == title] for title in (*GROUPS, *others)}
    return {title: names for title, names in listed.items() if names}


def about(recipe: str | Path) -> About:
    """The section `about` of a shipped recipe or of the user's own YAML file."""
    name, file = find_recipe(str(recipe))
    given = _with_parents(file, ()).get("about", {})
    paper, first = given.get("paper"), file.read_text(encoding="utf-8").partition("\n")[0]
    return About(
        title=given.get("title") or (first.lstrip("# ").strip() if first.startswith("#") else "") or name,
        group=given.get("group") or NO_GROUP,
        needs=given.get("needs"),
        paper=None if paper is None else PaperRow(**copy.deepcopy(paper)),
        small=copy.deepcopy(given.get("small", {})),
    )


def recipe_text(name: str) -> str:
    return _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def find_recipe(given: str) -> tuple[str, Path]:
    """Name and file of a shipped recipe, or of the user's own YAML file."""
    if given.endswith((".yaml", ".yml")) or "/" in given:
        path = Path(given)
        if path.is_file():
            return path.stem, path
        raise UserError(f"There is no recipe file {given}; batchformer recipes lists the shipped ones.")
    if _is_shipped(given):
        with resources.as_file(_folder().joinpath(f"{given}.yaml")) as path:
            return given, path
    hint = did_you_mean(given, recipe_names()) or " batchformer recipes lists them."
    raise UserError(f"There is no recipe named {given}.{hint}")


def read_recipe(file: Path) -> dict[str, Any]:
    """The recipe merged with what it extends; its top level is checked here, with clearer errors than jsonargparse's.

    `task: {class_path: package.Class, init_args: {...}}` is returned as `task: package.Class` with the arguments in
    `model`, where `model` of the same file wins.
    """
    content = _with_parents(file, ())
    if not isinstance(content.get("data"), dict) or "class_path" not in content["data"]:
        raise UserError(f"{file} has no data: section with a class_path (and init_args).")
    return copy.deepcopy(content)


def merge(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`before`, changed by `after`; neither is touched."""
    merged = dict(before)
    if "class_path" in after and after["class_path"] != before.get("class_path"):
        merged.pop("init_args", None)
    for key, value in after.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _folder() -> Traversable:
    return resources.files(__name__)


def _is_shipped(name: str) -> bool:
    return "/" not in name and _folder().joinpath(f"{name}.yaml").is_file()


def _names_in(folder: Traversable) -> list[str]:
    found = (file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))

    def numbers_by_value(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(found, key=numbers_by_value)


def _with_parents(file: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    content = _read(file)
    parent = content.pop(EXTENDS, None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise UserError(f"{EXTENDS} in {file}: expected the name of a recipe or of a file, got {parent}.")
    beside = file.parent / parent
    found = beside if not _is_shipped(parent) and beside.is_file() else find_recipe(parent)[1]
    if found.resolve() in {path.resolve() for path in (*children, file)}:
        raise UserError(f"{file} extends {parent}, which extends it in turn: name another recipe.")
    inherited = _with_parents(found, (*children, file))
    merged = merge(inherited, content)
    kept = {key: value for key, value in inherited.get("about", {}).items() if key in _INHERITED}
    merged["about"] = {**kept, **content.get("about", {})}
    return {**merged, **{section: content[section] for section in ("variants", "stages") if section in content}}


def _read(file: Path) -> dict[str, Any]:
    """One file, its top level checked."""
    import yaml

    try:
        content = _parse(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(problem).split())}.") from problem
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a recipe: it needs the sections trainer, model and data.")
    for name in content:
        if name not in SECTIONS:
            raise UserError(f"Unknown key {name}.{did_you_mean(str(name), SECTIONS)}")
    if "about" in content:
        _check_about(content["about"], file)
    return _with_task_by_name(dict(content), file)


@functools.lru_cache(maxsize=1024)  # recipes that others extend are read once for each of them
def _parse(text: str) -> Any:
    import yaml

    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _with_task_by_name(content: dict[str, Any], file: Path) -> dict[str, Any]:
    task = content.get("task")
    if not isinstance(task, dict):
        return content
    arguments = task.get("init_args") or {}
    if not isinstance(task.get("class_path"), str) or not isinstance(arguments, dict) or len(task) > 2:
        raise UserError(f"task in {file}: expected a name, or class_path and init_args, got {task}.")
    model = content.get("model") or {}
    return {**content, "task": task["class_path"], "model": merge(arguments, model)}


def _check_about(given: Any, file: Path) -> None:
    """Raise an error of one sentence that names the wrong key of `about`."""
    _check_keys(given, About.__dataclass_fields__, "about", file)
    kinds = {"title": str, "group": str, "needs": str | None, "paper": dict | None, "small": dict}
    for key, kind in kinds.items():
        if key in given and not isinstance(given[key], kind):
            expected = "keys and values" if key in ("paper", "small") else "words"
            raise UserError(f"about.{key} in {file}: expected {expected}, got {given[key]}.")
    if given.get("paper") is not None:
        _check_paper(given["paper"], file)


def _check_paper(given: dict[str, Any], file: Path) -> None:
    _check_keys(given, PaperRow.__dataclass_fields__, "about.paper", file)
    missing = [key for key in PaperRow.__dataclass_fields__ if key not in given]
    if missing:
        raise UserError(f"about.paper in {file} has no {missing[0]}: it needs table, row and numbers.")
    numbers = given["numbers"]
    by_variant = isinstance(numbers, dict) and all(isinstance(row, dict) for row in numbers.values())
    kinds = {type(value) for row in numbers.values() for value in row.values()} if by_variant else {None}
    if not kinds <= {int, float}:
        raise UserError(
            f"about.paper.numbers in {file}: expected numbers by variant and measure, as in "
            f"{{baseline: {{accuracy: 50.7}}}}, got {numbers}."
        )


def _check_keys(given: Any, known: Mapping[str, Any], where: str, file: Path) -> None:
    if not isinstance(given, dict):
        raise UserError(f"{where} in {file}: expected some of {', '.join(known)}, got {given}.")
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known) or f" There are: {', '.join(known)}."
            raise UserError(f"{where} in {file}: there is no key {key}.{hint}")
