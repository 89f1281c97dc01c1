"""``batchformer test RUN``: evaluate the last checkpoint of a run again."""

import math
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.training import root_override
from batchformer.errors import UserError
from batchformer.files import refuse_to_replace, refuse_unwritable, write_text
from batchformer.metrics.measures import with_current_names

HELP = """
batchformer test RUN [--data-root DIR] [--classes FILE.csv] [--trust]

Evaluate the last checkpoint of a run folder on the test set again, list the classes that fail, and compare the numbers
with result.json. Nothing in the run folder is changed.

  --classes FILE   write precision, recall and F1 of every class (for detectors: average precision) as CSV
  --trust   import classes from outside this package that the run folder names; only if you trust its source
"""


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("data-root"), Option("classes"), Option("trust", "nothing")])
    if len(given.positional) != 1:
        raise UserError("test needs one run folder: batchformer test runs/digits-lt/batchformer-seed0")
    if (listed := given.value("classes")) is not None:
        refuse_unwritable(Path(listed))
        refuse_to_replace(Path(listed), lambda content: content.startswith(b"class,"))

    from batchformer.analysis.after_training import failures
    from batchformer.cli.finished_run import load_run
    from batchformer.cli.show import metrics_table
    from batchformer.runs.folder import is_main_process
    from batchformer.runs.progress import ProgressLine
    from batchformer.runs.recorder import RunRecorder
    from batchformer.runs.result import add_findings, variant_of
    from batchformer.runs.trainer import as_keyboard_interrupt, make_trainer

    found = load_run(given.positional[0], root_override(given), given.flag("trust"))
    recorder = RunRecorder()
    keywords = {**found.trainer_keywords, "logger": False}
    if keywords.get("limit_val_batches") == 0:  # of a run that was trained without evaluation; here it is wanted
        keywords["limit_val_batches"] = None
    trainer = make_trainer(found.folder, keywords, [recorder], ProgressLine())
    with as_keyboard_interrupt(trainer):
        trainer.validate(found.task, datamodule=found.data, verbose=False)
    if not is_main_process():
        return 0  # rank 0 has the results of all processes and prints them
    stored = found.folder.read_result()
    fresh: dict[str, Any] = {
        "recipe": found.config["run"]["recipe"],
        "variant": variant_of(found.config),
        "target": getattr(found.data, "target", None),
        "seed": found.task.seed,
        **{key: stored[key] for key in ("chosen", "epochs") if stored and key in stored},
        "measures": recorder.measures,
        "metrics": recorder.metrics,
        "class_counts": found.task.data_info.get("class_counts", []),
        "class_names": found.task.data_info.get("classes", []),
    }
    print(metrics_table(fresh))
    add_findings(fresh, failures(found.task, found.data, trainer))
    _show_failures(fresh, given.value("classes"))
    if stored is None:
        print(f"\nThe run is not finished (epoch {found.epochs_done} of {found.config['trainer']['max_epochs']}): "
              "there is no result.json to compare with.")  # fmt: skip
        return 0
    stored = with_current_names(stored)
    if not stored["metrics"]:
        print("\nresult.json has no numbers to compare with: the run was not evaluated.")
        return 0
    before = {split: stored["metrics"].get(split) for split in recorder.metrics}
    differences = {
        split: (now, before[split])
        for split, now in recorder.metrics.items()
        if (before[split] is not None if math.isnan(now) else now != before[split])
    }
    if not differences:
        print("\nresult.json has exactly these numbers.")
        return 0
    split, (now, then) = next(iter(differences.items()))
    print(
        f"\nresult.json differs: {split} was {then}, now {now:.4f}. "
        "Another device, precision or library version may round differently; other data would differ more."
    )
    return 1


def _show_failures(fresh: dict[str, Any], listed: str | None) -> None:
    """Print which classes fail, and with --classes write the list of all."""
    from batchformer.report.failures import failures_csv, failures_text

    if summary := failures_text(fresh, "with --classes FILE.csv" if listed is None else listed):
        print(f"\n{summary}")
    if listed is None:
        return
    if not (text := failures_csv(fresh)):
        raise UserError(f"--classes {listed}: this task has no numbers of classes to write.")
    write_text(Path(listed), text)
