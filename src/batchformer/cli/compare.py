"""``batchformer compare RECIPE --seeds 3``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.show import program
from batchformer.cli.training_options import (
    COMMON,
    METHODS,
    SEED_OF_LIGHTNING,
    a_word_while_loading,
    method_override,
    name_of_recipe,
    recipe_overrides,
    refuse_both,
    seed_overrides,
    the_recipe,
    words_again,
)
from batchformer.errors import UserError
from batchformer.recipes import find_recipe
from batchformer.runs.atomic import write_json
from batchformer.runs.folder import RunFolder, is_main_process

_GIVEN_BY_COMPARE = ("model.method", "model.seed", "data.seed", "data.init_args.seed")
HELP = """
batchformer compare RECIPE --seeds 3 [options] [--key value ...]

Train a recipe with and without BatchFormer over several seeds, on the same batches, and print one table:
mean and deviation of both, and their paired difference with its 95 % interval.

  --seeds 3          that many seeds: 0, 1, 2;   --seeds 5 6 7: these ones (3)
  --name NAME        what the results call this variant of the recipe (the recipe's name)
  --out DIR          folder of the comparison (runs/RECIPE-compare): a run folder each, compare.json, report.html
  --data-root DIR    where the data is (data)
  --resume           go on; runs that are finished are kept
  --overwrite        start anew in a folder that exists
  --no-analysis      leave out the gradient influence

Any field of the recipe can be changed for both sides: --trainer.max_epochs 3 --data.imbalance 50
"""


def run(args: list[str]) -> int:
    given = read_arguments(
        args, [*COMMON, Option("seeds", "many"), Option(SEED_OF_LIGHTNING), Option("method")], recipe_keys=True
    )
    refuse_both(given)
    if given.flag("method"):
        raise UserError("compare trains both methods: leave out --method, or train one of them with batchformer fit.")
    if given.flag(SEED_OF_LIGHTNING):
        raise UserError(f"compare trains over several seeds: give --seeds instead of --{SEED_OF_LIGHTNING}.")
    if taken := [key for key, _ in given.recipe_keys if key in _GIVEN_BY_COMPARE]:
        raise UserError(f"compare trains both methods over --seeds: leave out --{taken[0]}.")
    name, file = find_recipe(the_recipe(given, "compare"))
    name = name_of_recipe(given, name, file)
    seeds = read_seeds(given.values.get("seeds", ["3"]))
    out = Path(given.value("out") or f"runs/{name}-compare")
    resume = given.flag("resume")
    pairs = [(seed, method) for seed in seeds for method in METHODS]
    folders = [RunFolder(out / f"{method}-seed{seed}") for seed, method in pairs]
    if is_main_process():
        _refuse_what_exists(out, folders, resume or given.flag("overwrite"))

    with a_word_while_loading():
        from batchformer.cli.recipe_cli import RecipeCLI
        from batchformer.runs.progress import ProgressLine
        from batchformer.runs.train import open_folder, prepare, train

    cli, line, results = RecipeCLI(), ProgressLine(len(pairs)), []
    overrides = [*recipe_overrides(given), ("run.recipe", name)]
    again = f"batchformer compare {words_again(given, 'name', 'seeds', 'no-analysis')}"
    try:
        for index, ((seed, method), folder) in enumerate(zip(pairs, folders, strict=True)):
            line.begin_run(index, f"{method} seed {seed}")
            config = cli.load(file, [*overrides, *seed_overrides(seed), *method_override(method)])
            if config["trainer"].get("limit_val_batches") == 0:
                raise UserError(
                    "compare compares evaluations, and trainer.limit_val_batches 0 leaves none: leave it out."
                )
            if resume and folder.finished:
                results.append(_kept(folder, config, line))
                continue
            prepared = prepare(folder, cli.build(), line, resume)
            if index == 0 and given.flag("overwrite") and is_main_process():
                _clear(out, folders)  # as late as this: a wrong call must not cost the old comparison
            checkpoint = open_folder(folder, config, resume, overwrite=False)
            results.append(train(prepared, config, checkpoint, not given.flag("no-analysis"), again))
            del prepared
            _free_memory()
    except KeyboardInterrupt:
        words = [word for word in args if word not in ("--resume", "--overwrite")]
        raise KeyboardInterrupt(f"stopped; go on with: {program()} compare {shlex.join(words)} --resume") from None
    line.clear()
    if is_main_process():
        _conclude(name, out, seeds, results, words_again(given, "name", "data-root", "no-analysis"))
    return 0


def read_seeds(words: list[str]) -> list[int]:
    """``3`` is 0, 1, 2; several numbers are themselves."""
    try:
        numbers = [int(word) for part in words for word in part.split(",") if word]
    except ValueError:
        raise UserError(f"--seeds {' '.join(words)}: expected how many seeds, or their numbers.") from None
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UserError(f"--seeds {' '.join(words)}: expected different numbers, none below 0.")
    if len(numbers) == 1:
        if numbers[0] == 0:
            raise UserError("--seeds 0: expected at least one seed.")
        return list(range(numbers[0]))
    return numbers


def _refuse_what_exists(out: Path, folders: list[RunFolder], allowed: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, not a folder; choose another --out.")
    if not allowed and ((out / "compare.json").exists() or any(folder.started for folder in folders)):
        raise UserError(f"{out} exists already: add --resume to go on, --overwrite to start anew, or --out DIR.")


def _clear(out: Path, folders: list[RunFolder]) -> None:
    for name in ("report.html", "compare.json"):
        (out / name).unlink(missing_ok=True)
    for folder in folders:
        if folder.started:
            folder.clear()


def _kept(folder: RunFolder, config: dict[str, Any], line: Any) -> dict[str, Any]:
    """The result of a run that an earlier call has finished."""
    from batchformer.runs.train import refuse_other_settings

    refuse_other_settings(folder, config)
    result = folder.read_result()
    assert result is not None
    line.skip_to(1.0)
    return result


def _conclude(name: str, out: Path, seeds: list[int], results: list[dict[str, Any]], again: str) -> None:
    from batchformer.report import comparison_table, format_table, verdict, write_report
    from batchformer.report.measures import measure_of

    rows = comparison_table(results)
    write_json(
        out / "compare.json",
        {"recipe": name, "seeds": seeds, "table": [as_plain(row) for row in rows], "verdict": verdict(rows).sentence},
    )
    page = write_report([out], out / "report.html")
    objects = measure_of(result["metrics"] for result in results).objects
    what, shown = (
        ("", "curves, every class") if objects else ("test accuracy ", "curves, accuracy per class, gradient influence")
    )
    print(f"\n{name}: {what}after the last epoch, {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}\n")
    print(format_table(rows))
    print(f"\n{verdict(rows).sentence}\n")
    print(f"Look at:  {page}   (open it in a browser: {shown})")
    trained = shlex.quote(f"{out}/batchformer-seed{seeds[0]}")
    print(f"Next:     {program()} export {trained}     the plain weights, without BatchFormer")
    print(f"          {program()} compare {again} --seeds 5 --out DIR   more seeds, a narrower interval")
    print(f"          {program()} recipes   the other data sets, and folder-lt for your own images")


def as_plain(row: Any) -> dict[str, Any]:
    from dataclasses import asdict, is_dataclass

    def plain(value: Any) -> Any:
        return value._asdict() if hasattr(value, "_asdict") else value

    fields = asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row)
    return {key: plain(value) for key, value in fields.items()}


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
