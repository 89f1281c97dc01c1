"""Errors a user can act on: one sentence that says what is wrong, where, and what to do."""

import difflib
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_ALIKE = 0.6


class UserError(ValueError):
    """Something the caller asked for cannot be done; the message is one sentence with the way out."""


class NonFiniteLoss(UserError):
    """The training loss became NaN or infinite; raised at the step it is noticed, before any checkpoint is written."""


class BadSample(UserError):
    """A sample cannot be read; raised in the middle of an epoch, since images are opened when they are needed."""


@functools.cache
def warn_once(message: str) -> None:
    """A UserWarning, the first time in this process."""
    warnings.warn(message, UserWarning, stacklevel=2)


def causes(problem: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it came out of."""
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__


def reason_of(problem: BaseException) -> str:
    """The first sentence of a library's error, to stand in one of ours; the kind of the error where it says nothing."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    return lines[0].split(". ")[0].rstrip(".")[:200]


def interruption(problem: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that an error came out of: what fails while a command is being stopped is no news.

    Workers of torch's DataLoader that a signal to the whole process group has ended count as one too: it may reach
    them first.
    """
    for each in causes(problem):
        if isinstance(each, KeyboardInterrupt):
            return each
        if isinstance(each, RuntimeError) and "killed by signal: Terminated" in str(each):
            return KeyboardInterrupt()
    return None


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value of an option that is none of its choices."""
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise UserError(f"{name}={value!r} must be {', '.join(others)} or {last}.")


def read_whole_number(option: str, text: str, least: int) -> int:
    """The value of an option of the command line."""
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"--{option} {text}: expected a whole number.") from None
    if number < least:
        raise UserError(f"--{option} {text}: expected {least} or more.")
    return number


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", count: int = 1) -> str:
    """`` Did you mean a?``, with several `` Did you mean a or b?``, to end a message with; or nothing."""
    found = nearest(name, known, count)
    return f" Did you mean {' or '.join(f'{prefix}{each}' for each in found)}?" if found else ""


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known names most like an unknown one; of equals the first in the alphabet.

    The last part of a dotted name counts most: ``heads`` finds ``model.batchformer.heads``, not ``run.threads``.
    """
    last = _last_part(name).lstrip("-")
    scores = {each: (_likeness(each, name), _likeness(_last_part(each), last)) for each in known}
    alike = sorted(
        (each for each, score in scores.items() if max(score) >= _ALIKE),
        key=lambda each: (-scores[each][0] - 2 * scores[each][1], each),
    )
    return (alike or sorted(each for each in scores if last and last in _last_part(each)))[:count]


def _last_part(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()
