"""Names of a package that are imported on first access."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(room: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package for the names that it imports under `if TYPE_CHECKING:`, read from its source."""

    def find(name: str) -> Any:
        loader: Any = sys.modules[room].__loader__
        for block in ast.parse(loader.get_source(room)).body:
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                for part in block.body:
                    if isinstance(part, ast.ImportFrom) and name in (each.name for each in part.names):
                        value = getattr(import_module(str(part.module)), name)
                        setattr(sys.modules[room], name, value)
                        return value
        raise AttributeError(f"module {room!r} has no attribute {name!r}")

    return find
