"""The fields of a recipe, read from source files: torch and Lightning, whose import takes seconds, are not needed.

A wrong key is refused at once, as is a word where a number or one of some other words belongs, and the shell completes
keys. What cannot be found this way (a task of the user's own, arguments of a network) is left to the parser, which
knows every type: nothing is refused here that it would take.
"""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import batchformer
from batchformer.cli.parser_errors import unknown_key
from batchformer.data.sets import SETS
from batchformer.errors import UserError
from batchformer.recipes import DEFAULT_TASK, find_recipe, read_recipe
from batchformer.runs.options import current_key

_PACKAGE = Path(batchformer.__file__).parent
_SECTIONS = ("trainer", "model", "data", "run")
#: in annotations: values that may have keys below them
_WITH_KEYS = ("dict", "Mapping", "Any", "Logger", "Callback", "Profiler", "Strategy", "Accelerator", "PLUGIN", "Plugin")
#: words of annotations, as errors of the parser put them
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "None": "null"}
_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "none", "nan", "inf", "infinity")


class Source(NamedTuple):
    """A class in a source file."""

    node: ast.ClassDef
    file: Path


class Field(NamedTuple):
    """Whether there are no keys below a key, and the annotation of its values."""

    ends: bool
    annotation: ast.expr | None


def refuse_unknown_keys(file: Path, keys: Sequence[str]) -> None:
    """Refuse keys of the command line that no recipe of this task and these data has."""
    if not keys:
        return
    known = dict(_walk(read_recipe(file)))
    read = {key.partition(".")[0] for key in known} - ({"data"} if "data.class_path" in keys else set())
    for given in keys:
        key = current_key(given)
        head, _, rest = key.partition(".")
        if head in ("config", "seed_everything") or key in ("data.class_path", "data.init_args"):
            continue
        if head == "data" and not rest.startswith("init_args."):
            key = f"data.init_args.{rest}"
        inside_open = any(key.startswith(f"{outer}.") for outer, field in known.items() if not field.ends)
        if head not in _SECTIONS or (head in read and key not in known and not inside_open):
            raise unknown_key(key, known)


def refuse_wrong_words(file: Path, overrides: Sequence[tuple[str, str]]) -> None:
    """Refuse a word where only numbers, true, false, null or words of a list are taken."""
    if "data.class_path" in dict(overrides):
        return
    fields = dict(_walk(read_recipe(file))) if overrides else {}
    for key, value in overrides:
        head, _, rest = current_key(key).partition(".")
        key = f"data.init_args.{rest}" if head == "data" and not rest.startswith("init_args.") else f"{head}.{rest}"
        kinds = _kinds(fields[key].annotation) if key in fields else []
        word = re.fullmatch(r"[A-Za-z][\w-]*", value) and value.lower() not in _YAML_WORDS
        if kinds and word and not any(value in kind.split(", ") for kind in kinds):
            raise UserError(f"{key}: expected {' or '.join(kinds)}, got {value}.")


def _kinds(annotation: ast.expr | None) -> list[str]:
    """What an annotation takes, in words; nothing where it takes texts or more than this knows."""
    if isinstance(annotation, ast.BinOp):
        parts = [annotation.left, annotation.right]
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Optional", "Union"):
        several = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        parts = [*several, *[ast.Constant(None)] * (ast.unparse(annotation.value) == "Optional")]
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        words = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return [", ".join(str(word.value) for word in words if isinstance(word, ast.Constant))]
    else:
        kind = _KINDS.get("" if annotation is None else ast.unparse(annotation))
        return [] if kind is None else [kind]
    found = [_kinds(part) for part in parts]
    return [kind for kinds in found for kind in kinds] if all(found) else []


def keys_of(recipe: dict[str, Any]) -> set[str]:
    """The keys that can be given for a recipe, as far as they are known; none of a section that is not."""
    return {key for key, _ in _walk(recipe)}


def keys_on_the_line(recipe: Sequence[str]) -> set[str]:
    """Those of a recipe by its name, or of digits-lt, as they are written after `--`; none where it cannot be read."""
    try:
        content = read_recipe(find_recipe(recipe[0] if recipe else "digits-lt")[1])
    except (UserError, ImportError):  # reported later; without the train extra there is no YAML
        return set()
    return {key.replace("data.init_args.", "data.") for key in keys_of(content)}


def _walk(recipe: dict[str, Any]) -> Iterator[tuple[str, Field]]:
    """The keys of every section that can be read; of a class after those of the classes that it extends."""
    yield from _fields(_find("Trainer", _lightning_trainer()), "trainer")
    yield from _fields(_find("RunOptions", _PACKAGE / "runs/options.py"), "run")
    task = recipe.get("task", DEFAULT_TASK)
    names = _tasks()
    if task in names:
        yield from _fields(_find(names[task], _PACKAGE / "tasks/__init__.py"), "model")
    name = str((recipe.get("data") or {}).get("class_path", "")).rpartition(".")[2]
    yield from _fields(_data_class(name), "data.init_args")


def _data_class(name: str) -> Source | None:
    modules = sorted({home.partition(":")[0] for home in SETS.values()})
    files = [_PACKAGE / f"data/sets/{module}.py" for module in modules]
    return next((_find(name, file) for file in files if f"\nclass {name}(" in file.read_text(encoding="utf-8")), None)


def _fields(source: Source | None, prefix: str) -> Iterator[tuple[str, Field]]:
    for base in () if source is None else reversed([*_lineage(source)]):
        for name, annotation in _arguments(base.node):
            key = f"{prefix}.{name}"
            inner = list(_options_in(annotation, base.file))
            yield key, Field(bool(inner) or _is_plain(annotation), annotation)
            for each in inner:
                yield from _fields(each, key)


def _lineage(source: Source) -> Iterator[Source]:
    yield source
    for base in source.node.bases:
        found = _find(ast.unparse(base).rpartition(".")[2], source.file)
        if found is not None and found.node is not source.node:
            yield from _lineage(found)


def _arguments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Arguments of the constructor; of a dataclass its fields."""
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield part.target.id, part.annotation
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            for argument in (*part.args.args[1:], *part.args.kwonlyargs):
                yield argument.arg, argument.annotation


def _options_in(annotation: ast.expr | None, file: Path) -> Iterator[Source]:
    """The dataclasses of options that an annotation names."""
    for part in ast.walk(annotation) if annotation is not None else ():
        if isinstance(part, ast.Name) and part.id[:1].isupper():
            found = _find(part.id, file)
            if found is not None and any("dataclass" in ast.unparse(each) for each in found.node.decorator_list):
                yield found


def _is_plain(annotation: ast.expr | None) -> bool:
    """Whether values are numbers, texts or choices of texts, with nothing below them."""
    words = "" if annotation is None else ast.unparse(annotation)
    return bool(words) and not any(kind in words for kind in _WITH_KEYS)


@functools.cache
def _find(name: str, file: Path | None) -> Source | None:
    """The class of this name in a file, or in the file of this package that it is imported from there."""
    tree = _tree(file)
    for part in tree.body if tree is not None else ():
        if isinstance(part, ast.ClassDef) and part.name == name and file is not None:
            return Source(part, file)
        if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("batchformer"):
            original = next((each.name for each in part.names if (each.asname or each.name) == name), None)
            if original is not None:
                place = _PACKAGE.joinpath(*str(part.module).split(".")[1:])
                inside = place / "__init__.py"
                return _find(original, inside if inside.is_file() else place.with_suffix(".py"))
    return None


@functools.cache
def _tree(file: Path | None) -> ast.Module | None:
    return ast.parse(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else None


@functools.cache
def _tasks() -> dict[str, str]:
    """`tasks.TASKS` by the names of the classes."""
    tree = _tree(_PACKAGE / "tasks/__init__.py")
    assert tree is not None
    for part in tree.body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "TASKS" and isinstance(part.value, ast.Dict):
            pairs = zip(part.value.keys, part.value.values, strict=True)
            return {str(ast.literal_eval(key)): ast.unparse(value) for key, value in pairs if key is not None}
    return {}


def _lightning_trainer() -> Path | None:
    spec = find_spec("lightning")
    places: Sequence[str] = list(spec.submodule_search_locations or ()) if spec is not None else ()
    return Path(places[0]) / "pytorch/trainer/trainer.py" if places else None
