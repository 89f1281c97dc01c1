"""Recipes through Lightning's CLI: every field typed, every field overridable, mistakes told in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from batchformer._cli.mistakes import in_one_line
from batchformer._cli.nearest import did_you_mean
from batchformer.data import LongTailedData
from batchformer.errors import UserError
from batchformer.running.options import RunOptions
from batchformer.tasks.long_tailed import LongTailed

TRAINER_DEFAULTS = {
    "use_distributed_sampler": False,  # the data modules share the order among processes themselves
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 50,
}

_SECTIONS = ("seed_everything", "trainer", "model", "data", "run")


class RecipeCLI(LightningCLI):
    """Parser built once, then any number of recipes and variants of them parsed and instantiated with it."""

    def __init__(self) -> None:
        super().__init__(
            LongTailed,
            LongTailedData,
            save_config_callback=None,
            subclass_mode_data=True,
            run=False,
            args=[],
            auto_configure_optimizers=False,
            seed_everything_default=0,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
        )

    # LightningCLI parses, seeds and instantiates in its constructor; here that waits for `load`.

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.get_defaults()

    def _set_seed(self) -> None:
        """The task and the data carry their own seeds; generators are seeded from them at every step."""

    def instantiate_classes(self) -> None:
        pass

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunOptions, "run")

    def load(self, file: Path, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
        """Parse a recipe file with overrides; returns the resolved recipe as plain values."""
        words = [word for key, value in overrides for word in (f"--{self._full_key(key)}", value)]
        known: set[str] = self._keys_of_parser()
        content = _read_sections(file)
        words = [*_seeds_in(content, file), *words]
        try:
            recipe = self.parser.parse_args(["--config", str(file)])
            known |= _flat_keys(self._as_dict(recipe))
            self.config = self.parser.parse_args(["--config", str(file), *words])
        except argparse.ArgumentError as problem:
            raise in_one_line(str(problem), known) from problem
        self.config.pop("config", None)
        self.config.pop("seed_everything", None)  # the seeds themselves are there
        if hasattr(self, "config_dump"):
            del self.config_dump
        return self._as_dict(self.config)

    def keys_of(self, file: Path) -> set[str]:
        """Every key that can be given for this recipe."""
        return self._keys_of_parser() | _flat_keys(self.load(file))

    def build(self) -> tuple[LongTailed, LongTailedData, dict[str, Any], RunOptions]:
        """Task, data module, keywords of the Trainer and run options of what was parsed last."""
        self.config_init = self.parser.instantiate(self.config)
        trainer = dict(self.config_init["trainer"].items())
        return self.config_init["model"], self.config_init["data"], trainer, self.config_init["run"]

    def _full_key(self, key: str) -> str:
        """``data.root`` is short for ``data.init_args.root``."""
        head, _, rest = key.partition(".")
        if head == "data" and rest and rest.split(".")[0] not in ("class_path", "init_args", "help"):
            return f"data.init_args.{rest}"
        return key

    def _keys_of_parser(self) -> set[str]:
        skipped = ("help", "print_", "config")
        return {action.dest for action in self.parser._actions if not action.dest.startswith(skipped)} - {"data.help"}

    def _as_dict(self, config: Any) -> dict[str, Any]:
        return yaml.safe_load(self.parser.dump(config, skip_link_targets=False, skip_unset=False, format="yaml"))


def _seeds_in(content: dict[str, Any], file: Path) -> list[str]:
    """``seed_everything`` of a file gives the seeds that the file does not give itself."""
    seed = content.get("seed_everything")
    if seed is None:
        return []
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed_everything in {file}: expected a whole number, got {seed}.")
    given = {"model": content.get("model"), "data.init_args": content["data"].get("init_args")}
    missing = [part for part, values in given.items() if not (isinstance(values, dict) and "seed" in values)]
    return [word for part in missing for word in (f"--{part}.seed", str(seed))]


def _read_sections(file: Path) -> dict[str, Any]:
    """The file as it is, after what jsonargparse would say less clearly about its outermost level."""
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(problem).split())}.") from problem
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a recipe: it needs the sections trainer, model and data.")
    for name in content:
        if name not in _SECTIONS:
            raise UserError(f"Unknown key {name}.{did_you_mean(str(name), _SECTIONS)}")
    if not isinstance(content.get("data"), dict) or "class_path" not in content["data"]:
        raise UserError(f"{file} has no data: section with a class_path (and init_args).")
    return content


def _flat_keys(values: Any, prefix: str = "") -> set[str]:
    if not isinstance(values, dict):
        return {prefix}
    return {
        prefix,
        *(flat for key, value in values.items() for flat in _flat_keys(value, f"{prefix}.{key}".lstrip("."))),
    } - {""}
