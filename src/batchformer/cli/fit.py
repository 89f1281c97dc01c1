"""``batchformer fit RECIPE``: train one run of a recipe."""

import shlex
import tempfile
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Arguments, Option, read_arguments
from batchformer.cli.show import metrics_table, program
from batchformer.cli.training import (
    COMMON,
    SEED_OF_LIGHTNING,
    SHORT,
    RunMaker,
    command_line_variants,
    loading_message,
    recipe_of,
    refuse_unknown_variant,
    refuse_unreachable_weights,
    shell_arguments,
    single_run_overrides,
)
from batchformer.report.failures import failures_text
from batchformer.runs.folder import RunFolder, is_main_process
from batchformer.runs.lock import locked

HELP = """
batchformer fit RECIPE [options] [--key value ...]

Train one recipe: a shipped name (batchformer recipes) or a YAML file of your own.

  --method baseline|batchformer   with or without BatchFormer (default: batchformer)
  --seed N                        seed for weights, data order, augmentation and dropout (default: 0)
  --name NAME                     recipe name in result.json (default: the file name)
  --out DIR                       run folder (default: runs/RECIPE/VARIANT-seedN)
  --variant NAME[:KEY=VALUE,...]  one of the recipe's variants, or one named here
  --data-root DIR                 where the data is (default: data)
  --epochs N  --lr X  --batch-size N   short for --trainer.max_epochs, --model.optimizer.lr, --data.batch_size
  --device cpu|cuda|cuda:1|0,1|mps     where to train (default: Lightning's choice)
  --init-from [PART=]SOURCE       initial weights: a run folder, a .safetensors, .pth or .pt file, or a save_pretrained
                                  folder, for the whole network or one part (backbone=FILE, detector=RUN);
                                  pretrained: timm's weights; scratch: random weights
  --best                          report the best epoch on a held-out tenth of the training images (--data.holdout)
                                  instead of the last epoch; val is never used for selection
  --early-stop N                  stop after N evaluations on these images without improvement
  --skip-bad                      skip the files that batchformer data RECIPE --check found
  --logger NAME                   tensorboard (default), csv, wandb or mlflow, in addition to metrics.csv; repeatable
  --resume                        continue from the last checkpoint; the weights are the same as without the
                                  interruption. A finished run continues if --epochs is raised
  --overwrite                     start over in an existing run folder
  --no-analysis                   skip the analyses at the end
  --print-config                  print the resolved recipe with all its fields without training

To try out a recipe, --trainer.fast_dev_run true trains and evaluates one batch and keeps nothing.
Any field of the recipe can be set: --trainer.max_epochs 3 --trainer.precision bf16-mixed --trainer.devices 2
  --model.batchformer.heads 8 --model.loss.name cross_entropy --data.imbalance 50 --run.checkpoint_every_steps 100
  --model.batchformer.blocks [8] --model.batchformer.variant stable --model.ema 0.9999   (vit-*, deit-*)
"""


def run(args: list[str]) -> int:
    folder = trained(args)
    if folder is not None and is_main_process():
        _show(folder)
    return 0


def trained(args: list[str]) -> RunFolder | None:
    """Train a run as these arguments say; returns its folder, or None where nothing was to be kept."""
    given = read_arguments(
        args, [*COMMON, Option("seed"), Option(SEED_OF_LIGHTNING), Option("method")], recipe_keys=True
    )
    name, file = recipe_of(given, "fit")
    overrides = [*single_run_overrides(given), ("run.recipe", name)]
    if not given.flag("resume"):
        refuse_unreachable_weights(file, overrides)
    with loading_message():
        from batchformer.cli.recipe_cli import RecipeCLI
        from batchformer.runs.progress import ProgressLine
        from batchformer.runs.result import variant_of
        from batchformer.runs.settings import is_longer, refuse_other_settings
        from batchformer.runs.train import config_text

    cli, resume = RecipeCLI(), given.flag("resume")
    line = ProgressLine()
    kept = ("name", "method", "variant", SEED_OF_LIGHTNING, "seed", "init-from", *SHORT, "logger", "no-analysis")
    again = f"batchformer fit {shell_arguments(given, *kept)}"
    maker = RunMaker(cli, file, line, resume, not given.flag("no-analysis"), again)
    overrides = [*variant_overrides(cli, file, given, overrides), *overrides]
    first = cli.load(file, overrides)
    variant, seed = variant_of(first), first["model"]["seed"]
    target = first["data"].get("init_args", {}).get("target")
    run_name = "-".join(part for part in (variant, target, f"seed{seed}") if part)
    folder = RunFolder(Path(given.value("out") or f"runs/{name}/{run_name}"))
    config = maker.config(folder, overrides)
    if given.flag("print-config"):
        print(config_text(config), end="")
        return None
    if config["trainer"].get("fast_dev_run"):
        with tempfile.TemporaryDirectory() as place:
            maker.train(RunFolder(Path(place) / "run"), overrides, False)
        if is_main_process():
            print("Training and evaluation ran on one batch (trainer.fast_dev_run); nothing was kept.")
        return None
    if resume and folder.finished and not is_longer(folder, config):
        if folder.config.is_file():
            refuse_other_settings(folder, config)
        folder.read_result()  # an error for a damaged one, before anything else
        print(f"{folder.path} is already finished; nothing to do.")
        return folder
    line.begin_run(0, " ".join(part for part in (variant, target, f"seed {seed}") if part))
    try:
        with locked([folder]):
            maker.train(folder, overrides, given.flag("overwrite"))
    except KeyboardInterrupt:
        words = [word for word in args if word not in ("--resume", "--overwrite")]
        raise KeyboardInterrupt(f"stopped; resume with: {program()} fit {shlex.join(words)} --resume") from None
    return folder


def variant_overrides(
    cli: Any, file: Path, given: Arguments, overrides: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The keys of the variant given by `--variant`, the last one if it was given twice.

    Without `--variant` the recipe is trained as it is, under the name of the variant with these settings, if any.
    """
    as_it_is = cli.load(file, [] if given.flag("variant") else overrides)
    known = cli.variants
    if given.flag("variant"):
        name, changed = list(command_line_variants(given.values["variant"]).items())[-1]
        if not changed and f"{name}:" not in given.values["variant"]:
            refuse_unknown_variant(name, list(known), file.stem)
        changed = [*known.get(name, []), *changed]
    elif given.flag("method") or all(keys == [("model.method", each)] for each, keys in known.items()):
        return []  # its name is that of the method
    else:
        same = [each for each, keys in known.items() if cli.load(file, [*overrides, *keys]) == as_it_is]
        if len(same) != 1 or as_it_is["run"].get("variant"):
            return []
        name, changed = same[0], []
    return [*changed, ("run.variant", name), ("run.reference", next(iter(known)))]


def _show(folder: RunFolder) -> None:
    from batchformer.recipes import DEFAULT_TASK
    from batchformer.tasks import TASKS, Task

    result = folder.read_result()
    assert result is not None
    print(metrics_table(result))
    if failures := failures_text(result, str(folder.classes)):
        print(f"\n{failures}")
    logs = "".join(f", {name}/" for name in ("tensorboard", "wandb") if (folder.path / name).is_dir())
    print(f"\nRun folder: {folder.path} (result.json, metrics.csv, checkpoints/{logs})")
    first = "report" if result["metrics"] else "test"  # without numbers there is nothing to report
    run = shlex.quote(str(folder.path))
    trust = " --trust" if result["config"]["run"].get("code") else ""  # a task or data of the user's own
    commands = [f"{first} {run}{trust if first == 'test' else ''}", f"export {run}{trust}"]
    kind = TASKS.get(result["config"].get("task", DEFAULT_TASK))
    if not trust and kind is not None and kind.predict is not Task.predict:
        commands.append(f"predict {run} IMAGES")
    print("Next: " + "   |   ".join(f"{program()} {command}" for command in commands))
