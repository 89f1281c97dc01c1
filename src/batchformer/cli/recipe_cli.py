"""Recipes through Lightning's CLI: every field typed, every field overridable, mistakes told in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from batchformer.cli.mistakes import in_one_line
from batchformer.cli.nearest import did_you_mean
from batchformer.cli.recipe_file import read_recipe
from batchformer.data import ClassificationData, DataModule
from batchformer.data.sets import import_all
from batchformer.errors import UserError
from batchformer.runs.options import RunOptions
from batchformer.tasks import TASKS, ImageTask

TRAINER_DEFAULTS = {
    "use_distributed_sampler": False,  # the data modules share the order among processes themselves
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 50,
}
DEFAULT_TASK = "long_tailed"  # of recipes that name none


class RecipeCLI:
    """Loads and builds recipes of every task; the parser of a task is made when the first of its recipes comes."""

    def __init__(self) -> None:
        self._parsers: dict[str, TaskCLI] = {}
        self._current: TaskCLI | None = None

    def load(self, file: Path, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
        """Parse a recipe file with overrides; returns the resolved recipe as plain values."""
        content = read_recipe(file)
        task = content.pop("task", DEFAULT_TASK)
        if not isinstance(task, str) or task not in TASKS:
            hint = did_you_mean(str(task), TASKS) or f" There are: {', '.join(TASKS)}."
            raise UserError(f"task in {file}: there is no {task}.{hint}")
        if task not in self._parsers:
            self._parsers[task] = TaskCLI(TASKS[task])
        self._current = self._parsers[task]
        resolved = self._current.load(content, file, overrides)
        return resolved if task == DEFAULT_TASK else {"task": task, **resolved}

    def keys_of(self, file: Path) -> set[str]:
        """Every key that can be given for this recipe."""
        loaded = self.load(file)
        assert self._current is not None
        return self._current.own_keys() | _flat_keys(loaded)

    def build(self) -> tuple[ImageTask, DataModule, dict[str, Any], RunOptions]:
        """Task, data module, keywords of the Trainer and run options of what was parsed last."""
        assert self._current is not None
        return self._current.build()


class TaskCLI(LightningCLI):
    """The parser of one task: built once, then any number of its recipes parsed and instantiated with it."""

    def __init__(self, task: type[ImageTask]) -> None:
        import_all()
        super().__init__(
            task,
            getattr(task, "data_class", ClassificationData),
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

    def load(self, content: dict[str, Any], file: Path, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
        words = [word for key, value in overrides for word in (f"--{self._full_key(key)}", value)]
        known = self.own_keys()
        words = [*_seeds_in(content, file), *words]
        text = yaml.safe_dump(content, sort_keys=False)
        try:
            recipe = self.parser.parse_args(["--config", text])
            known |= _flat_keys(self._as_dict(recipe))
            self.config = self.parser.parse_args(["--config", text, *words])
        except argparse.ArgumentError as problem:
            raise in_one_line(str(problem), known) from problem
        self.config.pop("config", None)
        self.config.pop("seed_everything", None)  # the seeds themselves are there
        if hasattr(self, "config_dump"):
            del self.config_dump
        return self._as_dict(self.config)

    def build(self) -> tuple[ImageTask, DataModule, dict[str, Any], RunOptions]:
        # Not kept as `config_init`: the task and the data of a run would be in memory beside those of the next one.
        made = self.parser.instantiate(self.config)
        return made["model"], made["data"], dict(made["trainer"].items()), made["run"]

    def own_keys(self) -> set[str]:
        """The keys of the task, the trainer and the run; those of the data come with its class."""
        skipped = ("help", "print_", "config")
        return {action.dest for action in self.parser._actions if not action.dest.startswith(skipped)} - {"data.help"}

    def _full_key(self, key: str) -> str:
        """``data.root`` is short for ``data.init_args.root``."""
        head, _, rest = key.partition(".")
        if head == "data" and rest and rest.split(".")[0] not in ("class_path", "init_args", "help"):
            return f"data.init_args.{rest}"
        return key

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


def _flat_keys(values: Any, prefix: str = "") -> set[str]:
    if not isinstance(values, dict):
        return {prefix}
    return {
        prefix,
        *(flat for key, value in values.items() for flat in _flat_keys(value, f"{prefix}.{key}".lstrip("."))),
    } - {""}
