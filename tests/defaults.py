"""Defaults of the public functions and classes of a room, against those written down in defaults.json.

A recipe states only what differs from a default, so a default that changes also changes the results of recipes and
of scripts. When this is intended: `python -m tests.defaults` writes them anew, and the difference shows in the commit.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

ROOMS = ("attach", "data", "losses", "mix", "models", "nn", "tasks")
FILE = Path(__file__).parent / "defaults.json"
OF_OTHERS = ("SMCADetr", "TwoStageDeformableDetr")  # their options are those of the installed transformers


def defaults(room: str) -> dict[str, dict[str, Any]]:
    module, found = importlib.import_module(f"batchformer.{room}"), {}
    for name in sorted(module.__all__):
        public = getattr(module, name)
        if name.startswith(OF_OTHERS) or not callable(public) or name == "DataInfo":
            continue
        given = {key: parameter.default for key, parameter in inspect.signature(public).parameters.items()}
        plain = {key: value for key, value in given.items() if isinstance(value, bool | int | float | str | tuple)}
        if plain:
            found[name] = json.loads(json.dumps(plain))
    return found


def written(room: str) -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))[room]


if __name__ == "__main__":
    rooms = []
    for room in ROOMS:
        lines = [f"  {json.dumps(name)}: {json.dumps(options)}" for name, options in defaults(room).items()]
        rooms.append(f'"{room}": {{\n' + ",\n".join(lines) + "\n}")
    FILE.write_text("{" + ",\n".join(rooms) + "}\n", encoding="utf-8")
