"""Defaults of the public functions and classes of a room, and its measures, against those in defaults.json.

A recipe states only what differs from a default, so a default that changes also changes the results of recipes and
of scripts. When this is intended: `python -m tests.defaults` writes them anew, and the difference shows in the commit.
"""

import importlib
import inspect
import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from batchformer.metrics.measures import Measure

ROOMS = ("analysis", "attach", "data", "losses", "metrics", "mix", "models", "nn", "tasks")
FILE = Path(__file__).parent / "defaults.json"
OF_OTHERS = ("SMCADetr", "TwoStageDeformableDetr")  # their options are those of the installed transformers


def defaults(room: str) -> dict[str, dict[str, Any]]:
    module, found = importlib.import_module(f"batchformer.{room}"), {}
    for name in sorted(module.__all__):
        public = getattr(module, name)
        if name.startswith(OF_OTHERS) or not callable(public) or name == "DataInfo":
            continue
        given = {key: each.default for key, each in inspect.signature(public).parameters.items()}
        given = {key: asdict(each) if is_dataclass(each) else each for key, each in given.items()}
        plain = {key: each for key, each in given.items() if isinstance(each, bool | int | float | str | tuple | dict)}
        if plain:
            found[name] = plain
    if room == "metrics":
        found |= measures()
    return json.loads(json.dumps(found))


def measures() -> dict[str, dict[str, Any]]:
    """What differs from the defaults in the measures of a family, their words left out."""
    families = vars(importlib.import_module("batchformer.metrics.measures"))
    return {
        family: {each.key: _decides(each) for each in content}
        for family, content in families.items()
        if isinstance(content, tuple) and all(isinstance(each, Measure) for each in content)
    }


def _decides(measure: Measure) -> dict[str, Any]:
    usual = asdict(Measure(measure.key, measure.label, name=measure.name, note=measure.note))
    return {name: value for name, value in asdict(measure).items() if value != usual[name]}


def written(room: str) -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))[room]


if __name__ == "__main__":
    rooms = []
    for room in ROOMS:
        lines = [f"  {json.dumps(name)}: {json.dumps(options)}" for name, options in defaults(room).items()]
        rooms.append(f'"{room}": {{\n' + ",\n".join(lines) + "\n}")
    FILE.write_text("{" + ",\n".join(rooms) + "}\n", encoding="utf-8")
