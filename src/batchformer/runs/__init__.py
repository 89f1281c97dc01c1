"""One training run on disk: its folder, its checkpoints, its result file, and resuming.

From Python: `runs.fit`, `runs.compare` and `runs.load` do what the commands of these names do.
"""

from importlib import import_module
from typing import Any

_FRONT = ("Run", "Runs", "compare", "fit", "load")  # of the commands, which parse recipes: imported on first access


def __getattr__(name: str) -> Any:
    if name not in _FRONT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("batchformer.cli.from_python"), name)


def __dir__() -> list[str]:
    return [*globals(), *_FRONT]
