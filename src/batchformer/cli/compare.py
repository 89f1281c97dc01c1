"""``batchformer compare RECIPE --seeds 3``: train variants of a recipe over seeds and targets, print one table."""

import gc
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Arguments, Option, read_arguments
from batchformer.cli.show import program
from batchformer.cli.training import (
    COMMON,
    SEED_OF_LIGHTNING,
    SHORT,
    RunMaker,
    command_line_variants,
    loading_message,
    recipe_of,
    recipe_overrides,
    refuse_odd_names,
    refuse_unknown_variant,
    refuse_unreachable_weights,
    seed_overrides,
    shell_arguments,
)
from batchformer.errors import UserError
from batchformer.files import read_json, refuse_to_replace, write_json
from batchformer.runs.folder import RunFolder, is_main_process
from batchformer.runs.lock import locked

_GIVEN_BY_COMPARE = ("model.method", "model.seed", "data.seed", "data.init_args.seed")
HELP = """
batchformer compare RECIPE --seeds 3 [options] [--key value ...]

Train a recipe with and without BatchFormer over several seeds, on the same batches, and print one table with mean and
standard deviation of both and their paired difference with a 95 % interval. Or compare any variants of the recipe with
the first one.

  --seeds 3          number of seeds: 0, 1, 2 (default); or the seeds themselves: --seeds 5 6 7
  --variant NAME:KEY=VALUE[,KEY=VALUE]   a variant; repeat it for each one (--variant plain:model.method=baseline
                     --variant four:model.batchformer.layers=4); NAME alone is a variant defined in the recipe
  --variants FILE    the same from a YAML file: name: {model.method: baseline}
  --targets all      for data with several targets (leave one domain out): all of them, or their names
  --name NAME        recipe name in the results (default: the file name)
  --out DIR          folder for all run folders, compare.json and report.html (default: runs/RECIPE-compare)
  --data-root DIR    where the data is (default: data)
  --epochs N  --lr X  --batch-size N  --device NAME  --init-from [PART=]SOURCE  --best
  --early-stop N  --skip-bad  --logger NAME
                     as in batchformer fit --help
  --resume           continue; finished runs are kept, or continue if --epochs is raised
  --overwrite        start over in an existing folder
  --no-analysis      skip the analyses after each training
  --print-config     print the resolved recipe of every run without training

Any field of the recipe can be set for all variants: --trainer.max_epochs 3 --data.imbalance 50
"""


@dataclass(frozen=True)
class Planned:
    """One run of the comparison: variant, target, seed, the keys that make it, and its folder."""

    variant: str
    target: str | None
    seed: int
    overrides: list[tuple[str, str]]
    folder: RunFolder

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.variant, self.target, f"seed {self.seed}") if part)


def run(args: list[str]) -> int:
    compared(args, show=True)
    return 0


def compared(args: list[str], show: bool = False) -> Path:
    """Train a comparison as these arguments say; returns its folder."""
    own = [Option("seeds", "many"), Option("targets", "many"), Option("variants"), Option(SEED_OF_LIGHTNING)]
    given = read_arguments(args, [*COMMON, *own, Option("method")], recipe_keys=True)
    if given.flag("method"):
        raise UserError("compare trains both methods: leave out --method, or train one of them with batchformer fit.")
    if given.flag(SEED_OF_LIGHTNING):
        raise UserError(f"compare trains over several seeds: give --seeds instead of --{SEED_OF_LIGHTNING}.")
    if taken := [key for key, _ in given.recipe_keys if key in _GIVEN_BY_COMPARE]:
        raise UserError(f"compare trains both methods over --seeds: leave out --{taken[0]}.")
    name, file = recipe_of(given, "compare")
    seeds = read_seeds(given.values.get("seeds", ["3"]))
    overrides = [*recipe_overrides(given), ("run.recipe", name)]
    out = Path(given.value("out") or f"runs/{name}-compare")
    resume = given.flag("resume")
    allowed = resume or given.flag("overwrite") or given.flag("print-config")
    if is_main_process() and not allowed and (out / "compare.json").exists():
        _refuse_what_exists(out, [], allowed)

    if not resume:
        refuse_unreachable_weights(file, overrides)
    with loading_message():
        import torch

        from batchformer.cli.recipe_cli import RecipeCLI
        from batchformer.runs.progress import ProgressLine
        from batchformer.runs.settings import is_longer, refuse_other_settings
        from batchformer.runs.train import config_text

    cli = RecipeCLI()
    planned = _plan(cli, file, given, overrides, seeds, out)
    folders = [each.folder for each in planned]
    if given.flag("print-config"):
        configs = [RunMaker(cli, file, None, resume, False, "").config(each.folder, each.overrides) for each in planned]
        print("---\n".join(config_text(config) for config in configs), end="")
        return out
    if is_main_process():
        _refuse_what_exists(out, folders, allowed)
    line, results = ProgressLine(len(planned)), []
    kept = ("name", "seeds", "variant", "variants", "targets", "init-from", *SHORT, "logger", "no-analysis")
    again = f"batchformer compare {shell_arguments(given, *kept)}"
    maker = RunMaker(cli, file, line, resume, not given.flag("no-analysis"), again)

    def clear() -> None:  # only when the first run is ready: a wrong call must not delete the old comparison
        if not given.flag("overwrite"):
            return
        old = [folder for folder in runs_in(out) if folder.is_run]  # perhaps of other seeds and variants
        for file in (out / "report.html", out / "compare.json"):
            file.unlink(missing_ok=True)
        for folder in dict.fromkeys([*folders, *old]):
            if folder.started:
                folder.clear()
            folder.clear_stages()

    configs = [maker.config(each.folder, each.overrides) for each in planned]
    for config in configs:
        if config["trainer"].get("limit_val_batches") == 0:
            raise UserError("compare compares evaluations, and trainer.limit_val_batches 0 leaves none: leave it out.")
        if config["trainer"].get("fast_dev_run"):
            raise UserError(
                "compare compares whole runs: try one out with batchformer fit and trainer.fast_dev_run, or "
                "compare short ones (--trainer.max_epochs 1)."
            )
    done = [
        resume and each.folder.finished and not is_longer(each.folder, config)
        for each, config in zip(planned, configs, strict=True)
    ]
    try:
        with locked(folder for folder, finished in zip(folders, done, strict=True) if not finished):
            for index, (each, config) in enumerate(zip(planned, configs, strict=True)):
                line.begin_run(index, each.label)
                if done[index]:
                    refuse_other_settings(each.folder, config)
                    results.append(each.folder.read_result() or {})
                    line.skip_to(1.0)
                    continue
                results.append(maker.train(each.folder, each.overrides, False, clear if index == 0 else None))
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    except KeyboardInterrupt:
        words = [word for word in args if word not in ("--resume", "--overwrite")]
        raise KeyboardInterrupt(f"stopped; resume with: {program()} compare {shlex.join(words)} --resume") from None
    line.clear()
    if is_main_process():
        shown = [option for option in kept if option != "seeds"]
        table, content = _write_comparison(name, out, planned, results)
        if show:
            _conclude(out, planned, results, table, content, shell_arguments(given, *shown, "data-root"))
    return out


def _plan(
    cli: Any, file: Path, given: Arguments, overrides: list[tuple[str, str]], seeds: list[int], out: Path
) -> list[Planned]:
    """List the runs, one for every (seed, target, variant); the first variant is the reference."""
    cli.load(file, overrides)
    variants = _variants(cli, given)
    targets = _targets(cli.build()[1], given)
    refuse_odd_names([*variants, *(target for target in targets if target)])
    reference = next(iter(variants))
    usual = all(changed == [("model.method", variant)] for variant, changed in variants.items())
    planned = []
    for seed, target, (variant, changed) in product(seeds, targets, variants.items()):
        named = [] if usual else [("run.variant", variant), ("run.reference", reference)]
        aimed = [] if target is None else [("data.init_args.target", target)]
        words = [*changed, *overrides, *named, *aimed, *seed_overrides(seed)]
        planned.append(Planned(variant, target, seed, words, _folder_of(out, variant, target, seed)))
    return planned


def _folder_of(out: Path, variant: str, target: str | None, seed: int) -> RunFolder:
    return RunFolder(out / "-".join(part for part in (variant, target, f"seed{seed}") if part))


def runs_in(out: Path) -> list[RunFolder]:
    """The runs that the comparison in this folder is made of; there may be others, of an earlier one."""
    if not (out / "compare.json").is_file():
        return []
    made = read_json(out / "compare.json", "is damaged", "compare again with --out.")
    parts = made.get("variants", []), made.get("targets") or [None], made.get("seeds", [])
    folders = (_folder_of(out, *each) for each in product(*parts))
    return [folder for folder in folders if folder.path.parent == out]  # names in a file may lead elsewhere


def _variants(cli: Any, given: Arguments) -> dict[str, list[tuple[str, str]]]:
    from batchformer.cli.recipe_cli import read_variants

    known = cli.variants
    if given.flag("variants") and given.flag("variant"):
        raise UserError("--variants FILE and --variant both define the variants: give only one of them.")
    if given.flag("variants"):
        return read_variants(Path(given.value("variants") or ""))
    if given.flag("variant"):
        on_the_line = command_line_variants(given.values["variant"])
        for name, changed in on_the_line.items():
            if not changed and f"{name}:" not in given.values["variant"]:
                refuse_unknown_variant(name, list(known), given.positional[0])
        return {name: changed or known.get(name, []) for name, changed in on_the_line.items()}
    return known


def _targets(data: Any, given: Arguments) -> list[str | None]:
    known = list(getattr(data, "targets", ()))
    wanted = [word for part in given.values.get("targets", []) for word in part.split(",") if word]
    if not wanted:
        return [None]
    if not known:
        raise UserError(f"--targets: {type(data).__name__} has no targets to choose from: leave it out.")
    if wanted == ["all"]:
        return known
    for name in wanted:
        if name not in known:
            raise UserError(f"--targets {name}: the data have {', '.join(known)}.")
    return list(wanted)


def read_seeds(words: list[str]) -> list[int]:
    """Read ``--seeds``: one number N means the seeds 0 to N - 1, several numbers mean these seeds."""
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
        raise UserError(
            f"{out} already exists: add --resume to continue, --overwrite to start over, or choose another --out."
        )
    if not (out / "compare.json").exists():  # no folder of a comparison yet: the page may be somebody's own
        from batchformer.report.page import MADE_BY

        refuse_to_replace(out / "report.html", lambda content: MADE_BY.encode() in content)


def _write_comparison(
    name: str, out: Path, planned: list[Planned], results: list[dict[str, Any]]
) -> tuple[Any, dict[str, Any]]:
    """Write compare.json and report.html; returns the table, and the content of the first."""
    from batchformer.report import compare_runs, verdict, write_report

    table = compare_runs(results)
    content = {
        "recipe": name,
        "variants": list(dict.fromkeys(each.variant for each in planned)),
        "targets": list(dict.fromkeys(each.target for each in planned if each.target)),
        "seeds": sorted({each.seed for each in planned}),
        "table": table.as_plain(),
        "verdict": verdict(table).sentence,
    }
    write_json(out / "compare.json", content)
    write_report([each.folder.path for each in planned], out / "report.html")
    return table, content


def _conclude(
    out: Path, planned: list[Planned], results: list[dict[str, Any]], table: Any, content: dict[str, Any], again: str
) -> None:
    from batchformer.report import format_table

    name, seeds, variants, targets = (content[key] for key in ("recipe", "seeds", "variants", "targets"))
    over = f", {len(targets)} targets" if targets else ""
    when = "after the best epoch on held-out images" if "chosen" in results[0] else "after the last epoch"
    print(f"\n{name}: {when}, {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}{over}\n")
    print(format_table(table))
    print(f"\n{content['verdict']}\n")
    print(f"Look at:  {out / 'report.html'}   (open it in a browser)")
    # of two variants the one that is compared with the reference, of more the best by the primary measure
    cells = {variant: table.cell(table.primary, variant) for variant in variants}
    gains = {variant: table.primary.gain(cell.mean) for variant, cell in cells.items() if cell is not None}
    best = variants[1] if len(variants) == 2 else max(gains, key=gains.__getitem__, default=variants[0])
    trained = shlex.quote(str(next(each.folder.path for each in planned if each.variant == best)))
    averaged = " --ema" if table.primary.key.endswith("_swad") else ""
    print(f"Next:     {program()} export {trained}{averaged}     export the plain weights, without BatchFormer")
    print(f"          {program()} compare {again} --seeds 5 --out DIR   use more seeds for a narrower interval")
    print(f"          {program()} recipes   list all data sets and tasks, including your own images")
