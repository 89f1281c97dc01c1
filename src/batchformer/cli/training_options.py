"""The short options that ``fit`` and ``compare`` share, and what they mean in a recipe."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchformer.cli.arguments import Arguments, Option
from batchformer.errors import UserError

COMMON = (
    Option("out"),
    Option("name"),
    Option("data-root"),
    Option("resume", "nothing"),
    Option("overwrite", "nothing"),
    Option("no-analysis", "nothing"),
)
METHODS = ("baseline", "batchformer")
SEED_OF_LIGHTNING = "seed_everything"  # what people know from Lightning; here another word for --seed


def the_recipe(given: Arguments, command: str) -> str:
    if not given.positional:
        raise UserError(f"{command} needs a recipe: batchformer {command} digits-lt; batchformer recipes lists them.")
    if len(given.positional) > 1:
        raise UserError(f"Unexpected argument {given.positional[1]}: {command} takes one recipe, then --key value.")
    return given.positional[0]


def name_of_recipe(given: Arguments, found: str, file: Path) -> str:
    """``--name``, else ``--run.recipe``, else what the file says under ``run: recipe:``, else the name of the file."""
    on_the_line = [value for key, value in given.recipe_keys if key == "run.recipe"]
    return given.value("name") or (on_the_line[-1] if on_the_line else "") or _name_in(file) or found


def _name_in(file: Path) -> str:
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):  # told when the recipe is parsed
        return ""
    run = content.get("run") if isinstance(content, dict) else None
    name = run.get("recipe") if isinstance(run, dict) else None
    return name if isinstance(name, str) else ""


def recipe_overrides(given: Arguments) -> list[tuple[str, str]]:
    """Overrides of the command line, ``--data-root`` first so that a full key wins over it."""
    overrides = []
    if (root := given.value("data-root")) is not None:
        overrides.append(("data.init_args.root", root))
    return [*overrides, *given.recipe_keys]


def seed_overrides(seed: int) -> list[tuple[str, str]]:
    """One seed for the weights, the order of the data, augmentation and dropout."""
    return [("model.seed", str(seed)), ("data.init_args.seed", str(seed))]


def method_override(method: str) -> list[tuple[str, str]]:
    if method not in METHODS:
        raise UserError(f"--method {method}: expected baseline or batchformer.")
    return [("model.method", method)]


def words_again(given: Arguments, *options: str) -> str:
    """What a command was given, as words that can be given again: the recipe, these options, all fields."""
    short = [word for name in options if given.flag(name) for word in (f"--{name}", *given.values[name])]
    fields = [word for name, value in given.recipe_keys for word in (f"--{name}", value)]
    return shlex.join([*given.positional, *short, *fields])


def refuse_both(given: Arguments) -> None:
    if given.flag("resume") and given.flag("overwrite"):
        raise UserError("--resume goes on and --overwrite starts anew: give one of them.")


@contextmanager
def a_word_while_loading() -> Iterator[None]:
    """Importing torch and Lightning takes seconds, on slow machines many; a terminal is not left blank meanwhile."""
    shown = sys.stderr.isatty()
    if shown:
        print("loading torch and Lightning ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
