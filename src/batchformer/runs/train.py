"""One run from start to result.json, or from its last checkpoint to result.json."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import yaml

from batchformer.errors import BadSample, NonFiniteLoss, UserError
from batchformer.files import write_json, write_text
from batchformer.report.failures import failures_csv
from batchformer.runs.checkpoints import LastCheckpoint, choosing_callbacks
from batchformer.runs.folder import RunFolder, is_main_process
from batchformer.runs.loggers import close_loggers, make_loggers
from batchformer.runs.options import RunOptions
from batchformer.runs.progress import ProgressLine
from batchformer.runs.recorder import RunRecorder
from batchformer.runs.result import add_analyses, build_result
from batchformer.runs.settings import defaults_of, has_ended, is_longer, refuse_other_settings
from batchformer.runs.trainer import (
    as_keyboard_interrupt,
    as_user_error,
    make_trainer,
    note_cpu_processes,
    refuse_empty_training,
)
from batchformer.training.sharding import load_whole, unsharded
from batchformer.training.weights import read_checkpoint


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start; nothing is written yet."""

    folder: RunFolder
    task: Any
    data: Any
    trainer: L.Trainer
    recorder: RunRecorder
    resumed_from: dict[str, Any]  # the checkpoint it goes on from, without tensors; empty if there is none


def prepare(
    folder: RunFolder, parts: tuple[Any, Any, dict[str, Any], RunOptions], line: ProgressLine, resume: bool
) -> Prepared:
    """Read the data, make the network and the Trainer, so that errors come before anything is written."""
    task, data, trainer_keywords, options = parts
    with line.meanwhile("reading the data") if is_main_process() else nullcontext():
        data.setup("fit")
    if is_main_process():
        for remark in getattr(data, "remarks", list)():
            warnings.warn(remark, UserWarning, stacklevel=1)  # shown once for all runs of a comparison
    resumes = resume and folder.checkpoint.is_file()
    task.restored = resumes
    task.construct(data)
    task.check_data(data)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.matmul_precision is not None:
        torch.set_float32_matmul_precision(options.matmul_precision)
    resumed_from = _last_checkpoint(folder) if resumes else {}
    recorder = RunRecorder()
    last = LastCheckpoint(folder.checkpoint, options.checkpoint_every_epochs, options.checkpoint_every_steps)
    ids = resumed_from.get("logger_ids", {})
    loggers = make_loggers(options.loggers, folder.path, resumed_from.get("global_step", 0), options.recipe, ids)
    choosing = choosing_callbacks(folder, options, task, data)
    trainer = make_trainer(folder, trainer_keywords, [recorder, *choosing, last], line, loggers)
    refuse_empty_training(trainer)
    task.trainer = trainer
    task.setup("fit")  # Lightning calls it again; here it refuses schedules without an end before there is a folder
    note_cpu_processes(trainer, line)
    return Prepared(folder, task, data, trainer, recorder, resumed_from)


def _last_checkpoint(folder: RunFolder) -> dict[str, Any]:
    """Epochs and steps of the last checkpoint, and what loggers call the run."""
    saved = read_checkpoint(folder.checkpoint)
    recorded = saved["callbacks"].get(RunRecorder.__name__, {})
    inside = not saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
    return {**recorded, "epochs": saved["epoch"] + 1, "global_step": saved["global_step"], "inside_epoch": inside}


def open_folder(run: Prepared, config: dict[str, Any], resume: bool, overwrite: bool) -> Path | None:
    """Prepare the run folder; returns the checkpoint to resume from, or None.

    A run that has ended and is given more epochs or steps goes on; its result and its settings are replaced.
    """
    folder = run.folder
    if not is_main_process():
        return folder.checkpoint if resume and folder.checkpoint.is_file() else None
    if resume and folder.started:
        folder.open_existing()
        if folder.started and not folder.is_run:
            raise UserError(
                f"{folder.path} holds files that are not of a run, which may get lost: choose another --out."
            )
    if not (resume and folder.started):
        folder.open_new(overwrite)
        write_text(folder.config, config_text(config))
        return None
    longer = (
        bool(run.resumed_from)
        and is_longer(folder, config)
        and (folder.finished or has_ended(folder, run.resumed_from))
    )
    if folder.config.is_file():
        classes = {"model": type(run.task), "data": type(run.data), "trainer": L.Trainer, "run": RunOptions}
        refuse_other_settings(folder, config, defaults_of(**classes), longer)
    if longer:
        if run.resumed_from["inside_epoch"]:
            raise UserError(
                f"{folder.path} ended inside an epoch (step {run.resumed_from['global_step']}), and only whole epochs "
                "can be added to: train another run with --out."
            )
        folder.result.unlink(missing_ok=True)  # first: killed in between, it is a run that has ended, without a result
        write_text(folder.config, config_text(config))
    if not folder.checkpoint.is_file():
        folder.clear_unfinished()
        write_text(folder.config, config_text(config))
        return None
    return folder.checkpoint


def train(
    run: Prepared, config: dict[str, Any], checkpoint: Path | None, analysis: bool = True, command: str | None = None
) -> dict[str, Any]:
    """Train (or resume), evaluate the last weights, write result.json; returns its content.

    `command`: the command that trains the run again, for result.json.
    """
    try:
        return _train(run, config, checkpoint, analysis, command)
    finally:
        close_loggers(run.trainer.loggers)


def _train(
    run: Prepared, config: dict[str, Any], checkpoint: Path | None, analysis: bool, command: str | None
) -> dict[str, Any]:
    folder, task, data, trainer, recorder = run.folder, run.task, run.data, run.trainer, run.recorder
    # With max_steps Lightning would run the end of the checkpoint's epoch a second time, and count it twice.
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
    try:
        with as_keyboard_interrupt(trainer):
            with torch.autograd.set_multithreading_enabled(False):
                # A process has one device: switching to autograd's thread for it and back only costs time.
                trainer.fit(task, datamodule=data, ckpt_path=checkpoint)
            if recorder.validated_step != trainer.global_step:
                trainer.validate(task, datamodule=data, verbose=False)
                trainer.save_checkpoint(folder.checkpoint)  # with these numbers in it
    except NonFiniteLoss as problem:
        kept = f"the checkpoint from before it is kept ({folder.checkpoint})"
        left = kept if folder.checkpoint.is_file() else "there is no checkpoint from before it"
        raise NonFiniteLoss(f"{str(problem).rstrip('.')}; {left}.") from problem
    except UserError as problem:
        what_is_left = _keep_or_remove(folder)
        if isinstance(problem, BadSample):
            raise BadSample(f"{str(problem).rstrip('.')}; {what_is_left}.") from problem
        raise
    except Exception as problem:
        if trainer.current_epoch == 0:  # later the logs are worth keeping
            _keep_or_remove(folder)
        if (mistake := as_user_error(problem)) is not None:
            raise mistake from problem
        raise
    chosen = _evaluate_best(run) if config["run"].get("best") and folder.best.is_file() else {}
    result = build_result(task=task, data=data, trainer=trainer, recorder=recorder, config=config) | chosen
    if command is not None:
        result["command"] = command
    if trainer.is_global_zero:
        if analysis:
            whole = unsharded(task, folder.best if chosen else folder.checkpoint)
            add_analyses(result, whole, data, trainer)
            if classes := failures_csv(result):
                write_text(folder.classes, classes)
        write_json(folder.result, result)
    trainer.strategy.barrier("result.json")
    return result


def _evaluate_best(run: Prepared) -> dict[str, Any]:
    """Load the weights of the best epoch on the held-out images and evaluate them; what result.json says of that."""
    task, recorder = run.task, run.recorder
    history = list(recorder.history)
    saved = read_checkpoint(run.folder.best)
    task.on_load_checkpoint(saved)
    load_whole(task, saved["state_dict"])
    with as_keyboard_interrupt(run.trainer):
        run.trainer.validate(task, datamodule=run.data, verbose=False)
    metrics = recorder.metrics
    recorder.history = history  # of the training, not of this evaluation
    chosen = {"epoch": int(saved["epoch"]), "step": int(saved["global_step"]), "set": run.data.holdout_set}
    return {"protocol": f"best on {run.data.holdout_set}", "metrics": metrics, "chosen": chosen}


def _keep_or_remove(folder: RunFolder) -> str:
    """After a failure: keep the run folder if it has a checkpoint to resume from, else remove it."""
    if folder.checkpoint.is_file():
        return f"{folder.path} is kept: continue with --resume once all images are back, or start over with --overwrite"
    if is_main_process():
        folder.remove_unstarted()
    return (
        f"there was no checkpoint yet, so nothing of this run is kept in {folder.path}: afterwards give the same "
        "command again (compare: with --resume)"
    )


def config_text(config: dict[str, Any]) -> str:
    header = "# The resolved recipe of this run. Train it again with: batchformer fit THIS_FILE --out DIR\n"
    return header + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
