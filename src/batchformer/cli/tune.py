"""``batchformer tune RECIPE``: find a learning rate and the largest batch with Lightning's tuner."""

import shlex
import tempfile
from pathlib import Path

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.fit import variant_overrides
from batchformer.cli.show import program
from batchformer.cli.training import (
    COMMON,
    SHORT,
    loading_message,
    recipe_of,
    refuse_unreachable_weights,
    shell_arguments,
    single_run_overrides,
)
from batchformer.errors import UserError

HELP = """
batchformer tune RECIPE [options] [--key value ...]

Find a learning rate, and on a GPU first the largest batch that fits, with Lightning's tuner. Each takes a few steps and
keeps nothing. The result is printed as options for batchformer fit.

  --find lr|batch-size|both   what to search for (default: both on a GPU, otherwise lr)
  --steps N                   steps of the range test, in which the learning rate rises from 1e-8 to 1 (default: 100)
  --seed N  --method NAME  --variant NAME  --data-root DIR  --init-from SOURCE  --device NAME  --batch-size N
                              and other options that select what is trained, as in batchformer fit --help
"""
_OF_FIT = [option for option in COMMON if option.name not in ("print-config", "resume", "overwrite")]
_CHOICES = ("lr", "batch-size", "both")


def run(args: list[str]) -> int:
    own = [Option("find"), Option("steps"), Option("seed"), Option("method")]
    given = read_arguments(args, [*_OF_FIT, *own], recipe_keys=True)
    name, file = recipe_of(given, "tune")
    what, steps = given.value("find"), given.integer("steps", 100, 30)
    if what is not None and what not in _CHOICES:
        raise UserError(f"--find {what}: expected {', '.join(_CHOICES)}.")
    overrides = single_run_overrides(given)
    refuse_unreachable_weights(file, overrides)
    with loading_message():
        import torch

        from batchformer.cli.recipe_cli import RecipeCLI
        from batchformer.runs.progress import ProgressLine
        from batchformer.runs.tuning import largest_batch, learning_rate

    cli, line = RecipeCLI(), ProgressLine()
    overrides = [*variant_overrides(cli, file, given, overrides), *overrides]
    config = cli.load(file, overrides)
    optimizer = config["model"].get("optimizer") or {}
    if not isinstance(optimizer.get("lr"), int | float):
        raise UserError(f"{name} has no model.optimizer.lr: there is no learning rate to look for.")
    on_cpu = config["trainer"].get("accelerator") == "cpu" or not torch.cuda.is_available()
    what = what or ("lr" if on_cpu else "both")
    found: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        if what != "lr":
            with line.meanwhile("trying batches"):
                size = largest_batch(cli.build(), Path(place))
            found += ["--batch-size", str(size)]
            print(f"batch size:     {size}, the largest that was trained on (it was {_batch(config)})")
            overrides.append(("data.init_args.batch_size", str(size)))
            cli.load(file, overrides)
        if what != "batch-size":
            rate = learning_rate(cli.build(), Path(place), float(optimizer["lr"]), steps)
            found += ["--lr", f"{rate:.2g}"]
            print(f"learning rate:  {rate:.2g}, where the loss falls fastest (it was {optimizer['lr']:g})")
    names = ("variant", "method", "seed", "data-root", "init-from", *SHORT, "name", "out", "logger", "no-analysis")
    again = shell_arguments(given, *(name for name in names if f"--{name}" not in found))
    print(f"\nNext: {program()} fit {again} {shlex.join(found)}")
    return 0


def _batch(config: dict) -> str:
    return str((config["data"].get("init_args") or {}).get("batch_size", "the default"))
