"""Lightning's tuner on a recipe: the largest batch that fits the device, and a learning rate from a range test."""

import copy
import io
import math
import sys
from collections import Counter
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.tuner import Tuner

from batchformer.errors import UserError
from batchformer.runs.folder import RunFolder
from batchformer.runs.trainer import as_keyboard_interrupt, as_user_error, make_trainer

_STEPS_PER_TRIAL = 3
_FIRST_STEPS = 10
_ENDLESS = 100_000  # epochs: the tuner counts steps, and schedules need an end


def largest_batch(parts: tuple[Any, ...], folder: Path) -> int:
    """The largest of batch_size, 2 batch_size, 4 batch_size ... (or its halves) that the device trains on.

    At most the images of the training set. Lightning's `Tuner.scale_batch_size`; its own answer may be a size that it
    did not try, so the steps that were done are counted here.
    """
    task, data, trainer = _prepared(parts, folder)
    done: Counter[int] = Counter()
    after_step = task.after_step

    def counted() -> None:
        after_step()
        done[data.batch_size] += 1

    task.after_step = counted
    data.drop_last = False  # Lightning makes a loader for a size that it does not try
    most = getattr(data, "train_images", 2**20) + 1
    _tuned(trainer, lambda tuner: tuner.scale_batch_size(
        task, datamodule=data, init_val=data.batch_size, steps_per_trial=_STEPS_PER_TRIAL, max_val=most
    ))  # fmt: skip
    fitting = [size for size, steps in done.items() if steps >= _STEPS_PER_TRIAL]
    if not fitting:
        raise UserError("no batch fits the memory of the device: lower data.image_size, or choose a smaller backbone.")
    return max(fitting)


def learning_rate(parts: tuple[Any, ...], folder: Path, lr: float, steps: int) -> float:
    """A value of model.optimizer.lr, which is `lr` now: where the loss falls fastest while the rate rises.

    The range test is Lightning's `Tuner.lr_find`, from 1e-8 to 1. It gives all parameters one rate; here groups keep
    their factors of it (the module's, the backbone's), and the scaling of `lr` by the batch is taken out of the answer.
    """
    task, data, trainer = _prepared(parts, folder)
    task.learning_rate = lambda: None  # the schedule of the task
    task._raise_if_not_finite = lambda: None  # the loss may diverge at the end of the range
    scale = [1.0]
    configure = task.configure_optimizers

    def configured() -> Any:
        optimizer = configure()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"{type(task).__name__} has several optimizers: their learning rates cannot be searched.")
        factor, rate = max((group.get("lr_factor", 1.0), group["lr"]) for group in optimizer.param_groups)
        if not rate:
            raise UserError(f"{type(task).__name__} trains at a learning rate of 0: there is none to look for.")
        scale[0] = rate / factor / lr
        optimizer.register_step_pre_hook(_keep_factors)
        return optimizer

    task.configure_optimizers = configured
    finder: Any = _tuned(
        trainer, lambda tuner: tuner.lr_find(task, datamodule=data, num_training=steps, update_attr=False)
    )
    return steepest(finder.results["lr"], finder.results["loss"]) / scale[0]


def steepest(rates: list[float], losses: list[float]) -> float:
    """The rate at which the loss falls most per factor of the rate, before its minimum.

    The first steps are left out, as Lightning does: its running mean of the losses begins too low. Its own suggestion
    takes the slope over the rate itself, which is steepest near its lower end.
    """
    pairs = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)][_FIRST_STEPS:]
    low = min(range(len(pairs)), key=lambda k: pairs[k][1], default=0)
    if low < 2:
        raise UserError("no learning rate was found, the loss did not fall: give more --steps, or look at the data.")
    logs, values = (torch.tensor(each) for each in zip(*[(math.log(r), v) for r, v in pairs[: low + 1]], strict=True))
    return pairs[int(torch.gradient(values, spacing=(logs,))[0].argmin())][0]


def _keep_factors(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:  # the tuner sets them all again after the step
        group["lr"] *= group.get("lr_factor", 1.0)


def _prepared(parts: tuple[Any, ...], folder: Path) -> tuple[Any, Any, L.Trainer]:
    task, data, keywords, _ = parts
    task.cuda_graph = False
    data.setup("fit")
    task.construct(data)
    task.check_data(data)
    settings = {**copy.copy(keywords), "logger": False, "max_epochs": _ENDLESS, "max_steps": -1, "devices": 1}
    settings |= {"enable_checkpointing": False, "limit_val_batches": 0, "fast_dev_run": False}
    return task, data, make_trainer(RunFolder(folder), settings, [], None)


def _tuned(trainer: L.Trainer, search: Any) -> Any:
    try:
        # the tuner's bar is for terminals
        bar = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
        with as_keyboard_interrupt(trainer), bar:
            return search(Tuner(trainer))
    except UserError:
        raise
    except Exception as problem:
        if (mistake := as_user_error(problem)) is not None:
            raise mistake from problem
        raise
