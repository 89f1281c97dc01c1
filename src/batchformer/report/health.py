"""`stream_health.json` of a run folder (or `stream_health` in a result): what `analysis.stream_health` measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.files import read_json
from batchformer.metrics.measures import known

FILE = "stream_health.json"
Measured = Sequence[float | None]


def read_health(result: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """From the result itself, else from the file beside it; empty where neither is there."""
    if "stream_health" in result:
        return _checked(result["stream_health"], file)
    beside = file.with_name(FILE) if file.name == "result.json" else file.with_name(f"{file.stem}.{FILE}")
    return _checked(read_json(beside, "is damaged", "delete it or measure again"), beside) if beside.is_file() else {}


def _checked(health: Any, file: Path) -> dict[str, Any]:
    parts = [health.get(part, []) for part in ("points", "blocks")] if isinstance(health, dict) else [None]
    if not all(isinstance(part, list) and all(isinstance(entry, dict) for entry in part) for part in parts):
        raise UserError(f"{file} is not a measurement of the streams: its points and blocks must be lists of objects")
    return health


def number(entry: Any, *keys: str) -> float | None:
    """A number by nested keys, None where it is missing."""
    for key in keys:
        entry = entry.get(key) if isinstance(entry, dict) else None
    return next(iter(known([entry])), None)


def series(entries: Sequence[Mapping[str, Any]], *keys: str) -> list[float | None]:
    return [number(entry, *keys) for entry in entries]


def short_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """`blocks.8` is 8, `layer3` is layer3."""
    return [str(entry.get("path", "?")).rpartition(".")[2] for entry in entries]


def attention_per_head(points: Sequence[Mapping[str, Any]], what: str) -> list[list[float]]:
    """Of each insertion: one value for every head of every layer."""
    found = []
    for point in points:
        layers = point.get("attention")
        values = [layer.get(what) for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
        found.append(known(v for heads in values if isinstance(heads, list) for v in heads))
    return found


@dataclass(frozen=True)
class Reading:
    """Interpretation of a measurement. `alive` is None where it cannot be decided."""

    alive: bool | None
    sentence: str


def reading(health: Mapping[str, Any]) -> Reading:
    """Interpret a measurement. Dead: related rows at chance, whatever the plain ones have learnt. Idle: hardly related.

    The thresholds are those the project sets for a variant that trains at any depth: each insertion changes the related
    tokens by 5 % of their norm or more (without dropout), and 1 % or more of a sample's gradient, by norms, falls on
    others.
    """
    plain, related, chance = (number(health, key) for key in ("plain_loss", "related_loss", "chance"))
    if chance and related is not None and related >= 0.97 * chance:
        beside = "" if plain is None or plain <= 0.85 * chance else f" and the plain one is near it ({plain:.2f})"
        return Reading(
            False, f"The related stream stays at chance ({related:.2f}){beside}: nothing is learnt through the modules."
        )
    changes = [v for v in series(health.get("points", []), "change_quiet") if v is not None]
    share = number(health, "gradient_on_others", "quiet", "norm_share")
    if not changes or share is None:
        return Reading(None, "The measurement is incomplete, so it does not show whether the modules relate samples.")
    squared = number(health, "gradient_on_others", "quiet", "squared_share")
    by_squares = "" if squared is None else f", {squared:.1%} by squares"
    text = (
        f"each changes the related tokens by {min(changes):.1%} of their norm or more, and {share:.1%} of the gradient "
        f"of a sample's loss falls on other samples (by norms{by_squares})."
    )
    if min(changes) >= 0.05 and share >= 0.01:
        return Reading(True, f"The modules relate samples: {text}")
    return Reading(False, f"The modules hardly relate samples: {text}")
