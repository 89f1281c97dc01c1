"""No room imports one that stands to its right: the order of the design, read from the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import batchformer

PACKAGE = Path(batchformer.__file__).parent
ROOMS = [
    *("errors", "files", "hub", "lazy", "kernels", "parallel", "nn", "attach", "mix"),
    *("losses", "metrics", "models", "data", "training", "tasks"),
    *("analysis", "report", "runs", "recipes", "cli"),
]
LIBRARY = "mix"  # `import batchformer as bf` brings the library's rooms up to this one
FRONTS = {"runs/__init__": ["runs imports cli"]}  # `runs.fit` and `runs.compare` are the commands of these names
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


class _Imports(ast.NodeVisitor):
    """What a module imports, at its top and inside functions; what only type checkers import is left out."""

    def __init__(self, package: list[str]) -> None:
        self.package, self.found = package, []

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, name.name) for name in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        # `from batchformer import analysis` names a room, `from batchformer import attach` may name a function
        names = [f"{module}.{name.name}" for name in node.names] if module == "batchformer" else [module]
        self.found += [(node.lineno, name) for name in names]

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            self.found.append((node.lineno, str(node.args[0].value)))
        self.generic_visit(node)


def rooms_imported(source: str, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of this package in a module of `package`."""
    imports = _Imports(package)
    imports.visit(ast.parse(source))
    for line, module in imports.found:
        first, _, rest = module.partition(".")
        if first == "batchformer":
            room = rest.partition(".")[0]
            yield line, room if room in ROOMS else LIBRARY


def wrong_imports(source: str, room: str, package: list[str] | None = None) -> list[str]:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    found = rooms_imported(source, package or ["batchformer", room])
    return [f"line {line}: {room} imports {other}" for line, other in found if other not in allowed]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_on_its_left(file: Path) -> None:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    assert parts[0] in ROOMS, f"{parts[0]} has no place in the order of rooms"
    found = wrong_imports(file.read_text(), parts[0], ["batchformer", *parts[:-1]])
    assert [each.partition(": ")[2] for each in found] == FRONTS.get("/".join(parts), [])


@pytest.mark.parametrize(
    "source",
    [
        "from batchformer.analysis.drawing import draw",
        "import batchformer.analysis as pictures",
        "from batchformer import analysis",
        "from ..analysis import drawing",
        "def late():\n    from batchformer.analysis import drawing",
        "import importlib\nimportlib.import_module('batchformer.analysis.drawing')",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from batchformer.analysis import drawing",
    ],
)
def test_an_import_to_the_right_is_found_however_it_is_written(source: str) -> None:
    assert [found.partition(": ")[2] for found in wrong_imports(source, "data")] == ["data imports analysis"]


@pytest.mark.parametrize(
    "source",
    [
        "import batchformer as bf",
        "from batchformer.nn.streams import count_rows",
        "from . import sets",
        "if TYPE_CHECKING:\n    from batchformer.analysis import drawing",
        "import torch",
    ],
)
def test_imports_to_the_left_and_of_types_are_allowed(source: str) -> None:
    assert wrong_imports(source, "data") == []


def test_the_library_may_not_import_its_own_front() -> None:
    assert wrong_imports("import batchformer as bf", "nn") == ["line 1: nn imports mix"]


@pytest.mark.parametrize("room", ["", *(f".{path.parent.name}" for path in sorted(PACKAGE.glob("*/__init__.py")))])
def test_the_annotations_of_public_names_can_be_read(room: str) -> None:
    place = import_module(f"batchformer{room}")
    for name in getattr(place, "__all__", ()):
        found = getattr(place, name)
        for method in vars(found).values() if isinstance(found, type) else [found]:
            # what dataclasses generate is of no file
            if inspect.isfunction(method) and Path(method.__code__.co_filename).is_relative_to(PACKAGE):
                get_type_hints(method)
