"""The nearest names to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Whole names first; failing that, names whose last part resembles: ``epochs`` finds ``trainer.max_epochs``."""
    names = sorted(set(known))
    found = difflib.get_close_matches(name, names, n=count, cutoff=0.6)
    if not found:
        by_last_part: dict[str, str] = {}
        for candidate in names:
            by_last_part.setdefault(candidate.rsplit(".", 1)[-1], candidate)
        last = name.rsplit(".", 1)[-1].lstrip("-")
        found = [by_last_part[part] for part in difflib.get_close_matches(last, by_last_part, n=count, cutoff=0.6)]
        found = found or [candidate for part, candidate in by_last_part.items() if last and last in part][:count]
    return found


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`` Did you mean ...?``, or nothing."""
    found = nearest(name, known)
    return f" Did you mean {prefix}{found[0]}?" if found else ""
