"""Recipes through Lightning's CLI: every field typed, every field overridable, errors in one line."""

import argparse
import copy
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from batchformer.cli.parser_errors import in_one_line
from batchformer.cli.training import Overrides
from batchformer.data.sets import import_all
from batchformer.errors import UserError, did_you_mean
from batchformer.recipes import DEFAULT_TASK, read_recipe
from batchformer.runs.options import RunOptions, current_key, dotted, with_current_keys
from batchformer.tasks import TASKS, Task

TRAINER_DEFAULTS = {
    "use_distributed_sampler": False,  # the data modules split samples among processes themselves
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 50,
}
PAIR = {"baseline": {"model.method": "baseline"}, "batchformer": {"model.method": "batchformer"}}
_KNOWN_CODE = ("batchformer.", "lightning.", "pytorch_lightning.", "torch.")


class RecipeCLI:
    """Loads and builds recipes of every task; the parser of a task is built on first use.

    Args:
        trust: whether classes outside this package that a file names may be imported. A recipe is the user's own; the
            config.yaml of a run folder may not be.
    """

    def __init__(self, trust: bool = True) -> None:
        self.trust = trust
        self.variants: dict[str, Overrides] = {}
        self.stages: list[tuple[str, Overrides]] = []
        self._parsers: dict[type[Task], TaskCLI] = {}
        self._current: TaskCLI | None = None

    def load(self, file: Path, overrides: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
        """Parse a recipe file with overrides; returns the resolved recipe as plain values."""
        content = with_current_keys(read_recipe(file))
        content.pop("about", None)
        variants, stages = content.pop("variants", None), content.pop("stages", None)
        name = content.pop("task", DEFAULT_TASK)
        kept = run.get("code") if isinstance(run := content.get("run"), dict) else None  # the folder a run recorded
        code = Path(kept) if isinstance(kept, str) else file.resolve().parent
        if not self.trust:
            refuse_code_of_others(name, content, file)
        named = [name, *(path for key, path in (*_texts(content), *overrides) if key.endswith("class_path"))]
        if any("." in path and not path.startswith(_KNOWN_CODE) for path in map(str, named)):
            overrides = [("run.code", str(code)), *overrides]
            if str(code) not in sys.path:
                sys.path.append(str(code))  # at the end: it must not shadow other modules
        task = self._task(name, file, code)
        if task not in self._parsers:
            self._parsers[task] = TaskCLI(task)
        self._current = self._parsers[task]
        keys = self._current.own_keys()
        if "model.seed" not in keys:
            raise UserError(f"{name} takes no seed: add seed: int = 0 to its arguments and hand it to Task.")
        usual = _named_overrides(PAIR, "variants") if "model.method" in keys else {"default": []}
        self.variants = usual if variants is None else _named_overrides(variants, f"variants in {file}")
        self.stages = _stages_in(stages, file)
        resolved = self._current.load(content, file, [(current_key(key), value) for key, value in overrides])
        return resolved if name == DEFAULT_TASK else {"task": name, **resolved}

    def build(self) -> tuple[Task, Any, dict[str, Any], RunOptions]:
        """Task, data module, keywords of the Trainer and run options of what was parsed last."""
        assert self._current is not None
        return self._current.build()

    @staticmethod
    def _task(name: Any, file: Path, code: Path) -> type[Task]:
        if isinstance(name, str) and name in TASKS:
            return TASKS[name]
        if not isinstance(name, str) or "." not in name:
            hint = did_you_mean(str(name), TASKS) or f" There are: {', '.join(TASKS)}, or the class path of your own."
            raise UserError(f"task in {file}: there is no {name}.{hint}")
        module, _, kind = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError) as problem:
            raise UserError(
                f"task in {file}: {name} cannot be imported ({problem}); it is looked for in {code} and on the Python "
                f"path."
            ) from problem
        if not (inspect.isclass(found) and issubclass(found, Task)):
            raise UserError(f"task in {file}: {name} is not a batchformer.tasks.Task.")
        return found


class TaskCLI(LightningCLI):
    """The parser of one task: built once, then any number of its recipes parsed and instantiated with it."""

    def __init__(self, task: type[Task]) -> None:
        import_all()
        self._parsed: dict[tuple[str, ...], tuple[Any, dict[str, Any]]] = {}
        super().__init__(
            task,
            task.data_class,
            save_config_callback=None,
            subclass_mode_data=True,
            run=False,
            args=[],
            auto_configure_optimizers=False,
            seed_everything_default=0,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
        )

    # LightningCLI parses, seeds and instantiates in its constructor; here `load` does it.

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.get_defaults()

    def _set_seed(self) -> None:
        """No-op: the task and the data have their own seeds; generators are seeded from them at every step."""

    def instantiate_classes(self) -> None:
        pass

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunOptions, "run")

    def load(self, content: dict[str, Any], file: Path, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
        words = [word for key, value in overrides for word in (f"--{self._full_key(key)}", value)]
        text = yaml.safe_dump(content, sort_keys=False)
        said = (text, *_seeds_in(content, file), *words)
        if said not in self._parsed:  # a command asks for the same recipe several times, and parsing takes 0.1 s
            self._parsed[said] = self._parse(*said)
        self.config, plain = self._parsed[said]
        self.config_dump = copy.deepcopy(plain)  # what LightningCLI makes of the config as it instantiates
        return copy.deepcopy(plain)

    def _parse(self, text: str, *words: str) -> tuple[Any, dict[str, Any]]:
        try:
            config = self.parser.parse_args(["--config", text, *words])
        except argparse.ArgumentError as error:
            problem, known = error, self.own_keys()
            try:
                known |= _flat_keys(self._as_dict(self.parser.parse_args(["--config", text])))
            except argparse.ArgumentError as error_in_file:
                problem = error_in_file
            raise in_one_line(str(problem), known) from problem
        config.pop("config", None)
        config.pop("seed_everything", None)  # the seeds themselves are there
        return config, self._as_dict(config)

    def build(self) -> tuple[Task, Any, dict[str, Any], RunOptions]:
        # Not kept as `config_init`: the task and the data of a run would be in memory beside those of the next one.
        made = self.parser.instantiate(self.config)
        task, run = made["model"], made["run"]
        task.init_from = {part: source for part, source in run.init_from.items() if source is not None}
        return task, made["data"], dict(made["trainer"].items()), run

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
        text = self.parser.dump(config, skip_link_targets=False, skip_unset=False, format="yaml")
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_variants(file: Path) -> dict[str, Overrides]:
    """``--variants FILE``: a YAML file of names and the keys that each changes."""
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as problem:
        raise UserError(f"--variants {file} cannot be read: {problem.strerror}.") from problem
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise UserError(f"--variants {file} is not valid YAML: {' '.join(str(problem).split())}.") from problem
    return _named_overrides(content, f"--variants {file}")


def _stages_in(given: Any, file: Path) -> list[tuple[str, Overrides]]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(stage, dict) and "name" in stage for stage in given):
        raise UserError(f"stages in {file}: expected a list of stages, each with a name and the keys that it changes.")
    return [(str(stage["name"]), _as_overrides({k: v for k, v in stage.items() if k != "name"})) for stage in given]


def _named_overrides(given: Any, where: str) -> dict[str, Overrides]:
    if not isinstance(given, dict) or not given or not all(isinstance(keys, dict | None) for keys in given.values()):
        raise UserError(f"{where}: expected names, and for each the keys that it changes (model.method: baseline).")
    return {str(name): _as_overrides(keys or {}) for name, keys in given.items()}


def _as_overrides(keys: dict[str, Any]) -> Overrides:
    """Dotted keys and values as on the command line; the sections of a recipe (model:, data:) are flattened."""
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in _leaves(keys)]


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value and str(key) in ("model", "data", "init_args", "trainer", "run"):
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def _texts(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a file, at any depth, with the key it is under."""
    if isinstance(values, str):
        yield key, values
    elif isinstance(values, dict | list):
        for inner, value in values.items() if isinstance(values, dict) else ((key, value) for value in values):
            yield from _texts(value, inner)


def refuse_code_of_others(task: Any, content: dict[str, Any], file: Path) -> None:
    """Refuse a file that names classes outside this package, wherever one may stand in it."""
    named = [task] if isinstance(task, str) and task not in TASKS else []
    named += [path for key, path in _texts(content) if key == "class_path"]
    # jsonargparse takes a text for a class path, or for a file with more settings, wherever a class may stand
    named += [text for _, text in _texts(content.get("trainer")) if "." in text]
    named += [text for name in ("model", "data", "run") if isinstance(text := content.get(name), str)]
    for path in named:
        if not path.startswith(_KNOWN_CODE):
            raise UserError(
                f"{file} names {path}, which is code outside this package: add --trust to import it, if you know where "
                f"the run folder comes from."
            )


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


def _flat_keys(values: dict[str, Any]) -> set[str]:
    """The dotted keys of all values and of the sections they are in."""
    parts = [key.split(".") for key in dotted(values)]
    return {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}
