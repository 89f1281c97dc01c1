"""Whether a run may go on with the settings that are given now."""

import inspect
import math
from dataclasses import asdict, is_dataclass
from typing import Any

import yaml

from batchformer.errors import UserError
from batchformer.runs.folder import RunFolder
from batchformer.runs.options import dotted, with_current_keys

# Settings that may differ when a run is resumed: they do not change its results.
_FREE_TO_CHANGE = ("run.checkpoint", "run.code", "run.variant", "run.reference", "run.loggers", "data.init_args.root",
                   "data.init_args.workers", "data.init_args.cache", "trainer.enable_progress_bar",
                   "seed_everything")  # fmt: skip
_LENGTH = ("trainer.max_epochs", "trainer.max_steps")


def defaults_of(**classes: type) -> dict[str, Any]:
    """Dotted key -> default, of the constructors of these classes and of the ones they inherit, by section."""
    found: dict[str, Any] = {}
    for section, kind in classes.items():
        prefix = "data.init_args" if section == "data" else section
        if is_dataclass(kind):
            found |= dotted(asdict(kind()), prefix)
            continue
        for base in reversed(kind.__mro__):  # what is nearer replaces what it inherits
            if "__init__" in vars(base):
                for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items():
                    if parameter.default is not inspect.Parameter.empty:
                        given = parameter.default
                        value = asdict(given) if is_dataclass(given) and not isinstance(given, type) else given
                        found |= dotted(value, f"{prefix}.{name}")
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def refuse_other_settings(
    folder: RunFolder, config: dict[str, Any], defaults: dict[str, Any] | None = None, longer: bool = False
) -> None:
    """Refuse to resume a run with other settings: it would not end with the weights of one never stopped.

    A field that the run's (older) version did not have counts as begun with its value in `defaults`. A finished run is
    only read, so there such fields are ignored; where it is made `longer`, its length may differ.
    """
    defaults = defaults or {}
    before, now = _dotted_of(folder), dotted(config)
    groups = {key.rpartition(".")[0] for key in before} | before.keys() | defaults.keys()
    now = {key: value for key, value in now.items() if key in groups or key.rpartition(".")[0] in groups}
    only_read = folder.finished and not longer
    for key in sorted(before.keys() & now.keys() if only_read else before.keys() | now.keys()):
        began = before.get(key, defaults.get(key))
        free = key.startswith(_FREE_TO_CHANGE) or (longer and key in _LENGTH)
        if began != now.get(key) and not free:
            raise UserError(
                f"{folder.path} was started with {key} {began}, now it is {now.get(key)}: resume with "
                "the same settings, or start another run with --out."
            )


def is_longer(folder: RunFolder, config: dict[str, Any]) -> bool:
    """Whether these settings give the run in the folder more epochs or steps than it began with, and fewer of none."""
    if not folder.config.is_file():
        return False
    before, now = _dotted_of(folder), dotted(config)
    lengths = [(_limit(before.get(key)), _limit(now.get(key))) for key in _LENGTH]
    return all(new >= old for old, new in lengths) and any(new > old for old, new in lengths)


def has_ended(folder: RunFolder, checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint (its `epochs` and `global_step`) is of the end of the run in the folder."""
    before = _dotted_of(folder)
    done = (checkpoint["epochs"], checkpoint["global_step"])
    return any(now >= _limit(before.get(key)) for key, now in zip(_LENGTH, done, strict=True))


def _limit(value: int | None) -> float:
    """Lightning writes -1 or null for no limit."""
    return math.inf if value is None or value < 0 else value


def _dotted_of(folder: RunFolder) -> dict[str, Any]:
    found = dotted(with_current_keys(yaml.safe_load(folder.config.read_text())))
    views = "data.init_args.views"
    return found | {views: None} if found.get(views) == 1 else found  # 1 once meant what null means: as the task needs
