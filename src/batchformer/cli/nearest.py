"""The nearest names to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALIKE = 0.6


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Whole names first; failing that, names whose last part resembles: ``epochs`` finds ``trainer.max_epochs``."""
    names = sorted(set(known))
    found = _alike(name, {candidate: candidate for candidate in names})
    if not found:
        by_last_part: dict[str, str] = {}
        for candidate in names:
            by_last_part.setdefault(candidate.rsplit(".", 1)[-1], candidate)
        last = name.rsplit(".", 1)[-1].lstrip("-")
        found = _alike(last, by_last_part)
        found = found or [candidate for part, candidate in by_last_part.items() if last and last in part]
    return found[:count]


def _alike(word: str, choices: dict[str, str]) -> list[str]:
    """The most alike first; of equals the first in the alphabet (difflib alone gives the last: min before max)."""
    scores = {choice: difflib.SequenceMatcher(None, choice, word).ratio() for choice in choices}
    alike = sorted((choice for choice in choices if scores[choice] >= _ALIKE), key=lambda c: (-scores[c], c))
    return [choices[choice] for choice in alike]


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`` Did you mean ...?``, or nothing."""
    found = nearest(name, known)
    return f" Did you mean {prefix}{found[0]}?" if found else ""
