"""Parser of a command line: the command's own options, and keys of a recipe.

Written by hand because argparse guesses: it accepts abbreviations, takes the value of an unknown option for a
positional argument, and prints a page of usage for an error.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from batchformer.errors import UserError, did_you_mean, read_whole_number

_BY_OTHER_NAMES = {  # of options that people know from other programs
    "dry-run": "--trainer.fast_dev_run true trains and evaluates one batch and keeps nothing"
}


@dataclass(frozen=True)
class Option:
    """``--name``: a flag, one value, several values up to the next option, or one value each time it is given."""

    name: str
    takes: Literal["nothing", "one", "many", "repeated"] = "one"


@dataclass
class Arguments:
    """The parsed arguments of a command."""

    positional: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    recipe_keys: list[tuple[str, str]] = field(default_factory=list)

    def flag(self, name: str) -> bool:
        return name in self.values

    def value(self, name: str) -> str | None:
        return self.values[name][-1] if name in self.values else None

    def integer(self, name: str, default: int, at_least: int = 0) -> int:
        text = self.value(name)
        return default if text is None else read_whole_number(name, text, at_least)


def read_arguments(args: Sequence[str], options: Sequence[Option], recipe_keys: bool = False) -> Arguments:
    """Split ``args``; with ``recipe_keys`` dotted names (``--trainer.max_epochs 3``) are collected, not refused."""
    known = {option.name: option for option in options}
    found = Arguments()
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if word.startswith("-") and len(word) > 1 and not re.fullmatch(r"-[\d.]+", word):
                raise UserError(f"Unknown option {word}: options start with two dashes.")
            found.positional.append(word)
            continue
        name, equals, given = word[2:].partition("=")
        option = known.get(name)
        if option is None:
            if recipe_keys and ("." in name or name == "config"):
                found.recipe_keys.append((name, given if equals else _take_one(name, rest)))
                continue
            if recipe_keys and (other := _BY_OTHER_NAMES.get(name.replace("_", "-"))):
                raise UserError(f"There is no --{name}: {other}.")
            hint = did_you_mean(name, known, prefix="--")
            if recipe_keys and not hint:
                from batchformer.cli.known_keys import keys_on_the_line

                hint = did_you_mean(name.replace("-", "_"), keys_on_the_line(found.positional), prefix="--")
            raise UserError(f"Unknown option --{name}.{hint}")
        if option.takes == "nothing":
            if equals:
                raise UserError(f"--{name} takes no value.")
            found.values[name] = []
        elif option.takes == "one":
            found.values[name] = [given if equals else _take_one(name, rest)]
        elif option.takes == "repeated":
            found.values.setdefault(name, []).append(given if equals else _take_one(name, rest))
        else:
            values = [given] if equals else []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            if not values:
                raise UserError(f"--{name} needs a value.")
            found.values[name] = values
    return found


def _take_one(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise UserError(f"--{name} needs a value.")
    return rest.pop(0)
