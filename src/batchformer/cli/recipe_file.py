"""A recipe file with what it extends, as one dictionary.

`extends: NAME` in a recipe begins with another one, a shipped name or a file beside it, and changes some of its fields:
rows of a table that differ in one number then differ in one line. Sections are merged key by key; a list or a number
takes the place of the one before. A `class_path` that changes takes its `init_args` with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from batchformer.cli.shelf import find_recipe, recipe_names
from batchformer.errors import UserError, did_you_mean

EXTENDS = "extends"
SECTIONS = (EXTENDS, "about", "variants", "stages", "task", "seed_everything", "trainer", "model", "data", "run")


def read_recipe(file: Path) -> dict[str, Any]:
    """The whole recipe, after what jsonargparse would say less clearly about its outermost level."""
    content = _with_parents(file, ())
    if not isinstance(content.get("data"), dict) or "class_path" not in content["data"]:
        raise UserError(f"{file} has no data: section with a class_path (and init_args).")
    return content


def _with_parents(file: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    content = _read(file)
    parent = content.pop(EXTENDS, None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise UserError(f"{EXTENDS} in {file}: expected the name of a recipe or of a file, got {parent}.")
    found = _find(parent, file)
    if found.resolve() in {path.resolve() for path in (*children, file)}:
        raise UserError(f"{file} extends {parent}, which extends it in turn: name another recipe.")
    return merge(_with_parents(found, (*children, file)), content)


def _find(name: str, child: Path) -> Path:
    if name in recipe_names():
        return find_recipe(name)[1]
    beside = child.parent / name
    return beside if beside.is_file() else find_recipe(name)[1]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(problem).split())}.") from problem
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a recipe: it needs the sections trainer, model and data.")
    for name in content:
        if name not in SECTIONS:
            raise UserError(f"Unknown key {name}.{did_you_mean(str(name), SECTIONS)}")
    return content


def merge(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`before`, changed by `after`; neither is touched."""
    merged = dict(before)
    if "class_path" in after and after["class_path"] != before.get("class_path"):
        merged.pop("init_args", None)
    for key, value in after.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
