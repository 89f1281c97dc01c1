"""Every file of benchmarks/ can be run as `python -m benchmarks.NAME`: its imports of others go through the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"}


@pytest.mark.parametrize("name", FILES)
def test_other_files_of_the_folder_are_imported_from_the_package(name: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module)
    assert not imported & FILES.keys()
