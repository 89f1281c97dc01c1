"""What ``fit`` and ``compare`` share: their options, and one run with all its stages."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Arguments, Option
from batchformer.cli.known_keys import refuse_unknown_keys, refuse_wrong_words
from batchformer.errors import UserError, did_you_mean
from batchformer.hub import PRETRAINED, SCRATCH, refuse_unreachable
from batchformer.recipes import find_recipe, read_recipe
from batchformer.runs.folder import RunFolder, is_main_process
from batchformer.runs.options import LOGGERS, current_key

#: short names of fields that every recipe has
ALIASES = {"epochs": "trainer.max_epochs", "lr": "model.optimizer.lr", "batch-size": "data.init_args.batch_size"}
SHORT = (*ALIASES, "device", "skip-bad", "best", "early-stop")
COMMON = (
    *(Option(name) for name in (*ALIASES, "device", "early-stop")),
    *(Option(name, "nothing") for name in ("skip-bad", "best")),
    Option("out"),
    Option("name"),
    Option("data-root"),
    Option("init-from", "repeated"),
    Option("variant", "repeated"),
    Option("logger", "repeated"),
    Option("print-config", "nothing"),
    Option("resume", "nothing"),
    Option("overwrite", "nothing"),
    Option("no-analysis", "nothing"),
)
SEED_OF_LIGHTNING = "seed_everything"  # Lightning's name for it; an alias of --seed
Overrides = list[tuple[str, str]]


def recipe_of(given: Arguments, command: str) -> tuple[str, Path]:
    """Name and file of the recipe of this command."""
    if given.flag("resume") and given.flag("overwrite"):
        raise UserError("--resume continues a run and --overwrite starts over: give only one of them.")
    if not given.positional:
        raise UserError(f"{command} needs a recipe: batchformer {command} digits-lt; batchformer recipes lists them.")
    if len(given.positional) > 1:
        raise UserError(f"Unexpected argument {given.positional[1]}: {command} takes one recipe, then --key value.")
    name, file = find_recipe(given.positional[0])
    refuse_unknown_keys(file, [key for key, _ in given.recipe_keys])
    return name_of_recipe(given, name, file), file


def name_of_recipe(given: Arguments, found: str, file: Path) -> str:
    """``--name``, else ``--run.recipe``, else what the file says under ``run: recipe:``, else the name of the file."""
    on_the_line = [value for key, value in given.recipe_keys if key == "run.recipe"]
    in_file = _section(read_recipe(file), "run").get("recipe")
    in_file = in_file if isinstance(in_file, str) else ""
    return given.value("name") or (on_the_line[-1] if on_the_line else "") or in_file or found


def _section(recipe: dict[str, Any], *names: str) -> dict[str, Any]:
    """What a recipe has under these names, one inside the other; {} where that is no section."""
    for name in names:
        inside = recipe.get(name)
        recipe = inside if isinstance(inside, dict) else {}
    return recipe


def recipe_overrides(given: Arguments) -> Overrides:
    """Overrides of the command line, short options first so that a full key wins over them."""
    file = find_recipe(given.positional[0])[1]
    overrides, recipe = root_override(given), read_recipe(file)
    begins_pretrained = _section(recipe, "model", "backbone_args").get("pretrained") is True
    for source in given.values.get("init-from", []):
        part, equals, place = source.partition("=")
        if not equals and source == SCRATCH:
            overrides.append(("run.init_from", "{}"))
        elif equals:
            overrides.append((f"run.init_from.{part}", "null" if place == SCRATCH else place))
        else:
            overrides.append(("run.init_from.network", source))
        if (part if equals else "network") in ("network", "backbone") and begins_pretrained:
            overrides.append(("model.backbone_args.pretrained", "false"))  # these weights take the place of timm's
    if loggers := given.values.get("logger"):
        for name in loggers:
            if name not in LOGGERS:
                raise UserError(f"--logger {name}: expected one of {', '.join(LOGGERS)}.")
        overrides.append(("run.loggers", json.dumps(loggers)))
    overrides += [*_short(given, recipe), *given.recipe_keys]
    refuse_wrong_words(file, overrides)
    return overrides


def _short(given: Arguments, recipe: dict[str, Any]) -> Overrides:
    """The fields that aliases stand for. `--best` and `--early-stop N` hold out a tenth of the training images, unless
    the recipe says how many."""
    overrides = [(key, str(given.value(name))) for name, key in ALIASES.items() if given.flag(name)]
    steps = _section(recipe, "trainer").get("max_steps")
    if given.flag("epochs") and isinstance(steps, int) and steps > 0:
        raise UserError(
            f"--epochs: this recipe ends after {steps} steps, not epochs: give --trainer.max_steps, or "
            f"--trainer.max_steps -1 with --trainer.max_epochs."
        )
    if given.flag("skip-bad"):
        overrides.append(("data.init_args.skip_bad", check_file(find_recipe(given.positional[0])[0])))
    chooses = given.flag("best") or given.flag("early-stop")
    if chooses and "holdout" not in _section(recipe, "data", "init_args"):
        overrides.append(("data.init_args.holdout", "0.1"))
    overrides += [("run.best", "true")] if given.flag("best") else []
    if given.flag("early-stop"):
        overrides.append(("run.early_stop", str(given.integer("early-stop", 1, 1))))
    return [*overrides, *(_device(str(given.value("device"))) if given.flag("device") else [])]


def check_file(recipe: str) -> str:
    """Where `data --check` writes what it found, and `--skip-bad` reads it."""
    return f"runs/{recipe}/data-check.json"


def _device(name: str) -> Overrides:
    """``cpu``, ``cuda``, ``cuda:1``, ``0``, ``0,1``, ``mps`` or ``auto`` in Lightning's words."""
    found = re.fullmatch(r"(?:(?:cuda|gpu):?)?([\d,]+)?", name)
    if name in ("cpu", "mps", "auto"):
        kind, devices = name, "auto" if name == "auto" else "1"
    elif name and found:
        kind, devices = "gpu", f"[{found[1].strip(',')}]" if found[1] else "1"
    else:
        raise UserError(f"--device {name}: expected cpu, cuda, cuda:1, a number or several (0,1), mps, or auto.")
    return [("trainer.accelerator", kind), ("trainer.devices", devices)]


def refuse_unreachable_weights(file: Path, overrides: Sequence[tuple[str, str]]) -> None:
    """Say at once where pretrained weights cannot be had: importing torch and Lightning alone takes longer."""
    recipe = read_recipe(file)
    sources, backbone = dict(_section(recipe, "run", "init_from")), _section(recipe, "model").get("backbone")
    if _section(recipe, "model", "backbone_args").get("pretrained") is True:
        sources["network"] = PRETRAINED  # the older option for them
    for key, value in overrides:
        if key == "run.init_from":
            sources = {}
        elif current_key(key).startswith("run.init_from."):
            sources[current_key(key).removeprefix("run.init_from.")] = value
        elif key == "model.backbone":
            backbone = value
        elif key.startswith("model.backbone_args") and sources.get("network") == PRETRAINED:
            del sources["network"]  # left to timm
    parts = [part for part, source in sources.items() if source == PRETRAINED]
    if parts and isinstance(backbone, str) and not (parts != ["network"] and sources.get("network")):
        refuse_unreachable(backbone, "" if parts == ["network"] else parts[0])


def root_override(given: Arguments) -> Overrides:
    root = given.value("data-root")
    return [] if root is None else [("data.init_args.root", root)]


def single_run_overrides(given: Arguments) -> Overrides:
    """Those of the command line with the seed and the method of one run."""
    overrides = recipe_overrides(given)
    for option in (SEED_OF_LIGHTNING, "seed"):
        if given.flag(option):
            overrides += seed_overrides(given.integer(option, 0))
    method = given.value("method")
    if method not in (None, "baseline", "batchformer"):
        raise UserError(f"--method {method}: expected baseline or batchformer.")
    return overrides if method is None else [*overrides, ("model.method", str(method))]


def seed_overrides(seed: int) -> Overrides:
    """One seed for the weights, the order of the data, augmentation and dropout."""
    return [("model.seed", str(seed)), ("data.init_args.seed", str(seed))]


def command_line_variants(words: Sequence[str]) -> dict[str, Overrides]:
    """``name:key=value,key=value``; a name given again changes more keys, ``name:`` is the recipe as it is."""
    variants: dict[str, Overrides] = {}
    for word in words:
        name, _, keys = word.partition(":")
        changed = variants.setdefault(name, [])
        for pair in re.split(r",(?=[\w.]+=)", keys) if keys else []:
            key, equals, value = pair.partition("=")
            if not equals or "." not in key:
                raise UserError(f"--variant {word}: expected name:key=value, such as no-module:model.method=baseline.")
            changed.append((key, value))
    return variants


def refuse_unknown_variant(name: str, known: Sequence[str], recipe: str) -> None:
    """Of a name that was given without keys."""
    if name not in known:
        hint = did_you_mean(name, known) or f" There are: {', '.join(known)}."
        raise UserError(f"{recipe} has no variant {name}.{hint}")


def refuse_odd_names(names: Sequence[str]) -> None:
    """Refuse names of variants and targets that cannot be part of the name of a folder."""
    for name in names:
        if not re.fullmatch(r"[\w][\w.+ -]*", name):
            raise UserError(f"{name!r} cannot name a run: use letters, digits, and . + - _ only.")


def shell_arguments(given: Arguments, *options: str) -> str:
    """The arguments of this command as text for the shell: the recipe, these options, all fields."""
    short: list[str] = []
    for name in options:
        if given.flag(name):
            values = given.values[name]
            several = name in ("variant", "init-from", "logger")
            short += [w for value in values for w in (f"--{name}", value)] if several else [f"--{name}", *values]
    fields = [word for name, value in given.recipe_keys for word in (f"--{name}", value)]
    return shlex.join([*given.positional, *short, *fields])


@contextmanager
def loading_message() -> Iterator[None]:
    """Show in a terminal that torch and Lightning are being imported, which takes seconds."""
    shown = sys.stderr.isatty() and "torch" not in sys.modules
    if shown:
        print("loading torch and Lightning ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


class RunMaker:
    """Trains runs of one recipe, one after another in this process, each with its stages.

    A recipe with several stages trains each from the weights of the one before; the folder of the run holds the last
    one, and the others in a hidden folder. A stage that is finished is not trained again when a run is resumed.
    """

    def __init__(self, cli: Any, file: Path, line: Any, resume: bool, analysis: bool, command: str) -> None:
        self.cli, self.file, self.line, self.resume = cli, file, line, resume
        self.analysis, self.command = analysis, command

    def config(self, folder: RunFolder, overrides: Overrides) -> dict[str, Any]:
        """The resolved recipe of the last stage."""
        return self.cli.load(self.file, self._stages(folder, overrides)[-1][1])

    def train(self, folder: RunFolder, overrides: Overrides, overwrite: bool, before_writing: Any = None) -> dict:
        result: dict[str, Any] = {}
        for place, changed in self._stages(folder, overrides):
            if place is not folder and self.resume and place.finished:
                continue
            config = self.cli.load(self.file, changed)
            result = self._train_one(place, config, overwrite, before_writing)
            before_writing = None
        return result

    def _stages(self, folder: RunFolder, overrides: Overrides) -> list[tuple[RunFolder, Overrides]]:
        """Where each stage is kept and what it changes; weights given on the command line are for the first one."""
        self.cli.load(self.file, overrides)
        stages = self.cli.stages
        if not stages:
            return [(folder, overrides)]
        kept = [(key, value) for key, value in overrides if not current_key(key).startswith("run.init_from")]
        places = [folder.stage(number, name) for number, (name, _) in enumerate(stages[:-1], 1)] + [folder]
        begins = [[], *([("run.init_from", json.dumps({"network": str(place.path)}))] for place in places[:-1])]
        return [
            (place, [*changed, *(kept if begin else overrides), *begin])
            for place, (_, changed), begin in zip(places, stages, begins, strict=True)
        ]

    def _train_one(self, folder: RunFolder, config: dict[str, Any], overwrite: bool, before_writing: Any) -> dict:
        from batchformer.runs.train import open_folder, prepare, train

        prepared = prepare(folder, self.cli.build(), self.line, self.resume)
        if before_writing is not None and is_main_process():
            before_writing()
        checkpoint = open_folder(prepared, config, self.resume, overwrite)
        if checkpoint is not None and is_main_process():
            self.line.say(f"Resuming from {checkpoint}.")
        return train(prepared, config, checkpoint, self.analysis, self.command)
