"""Lightning's Trainer with the progress line and checkpoints that every run has.

Invalid settings raise a one-sentence error before a run folder is made.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator

from batchformer.errors import UserError, interruption
from batchformer.runs.checkpoints import AtomicCheckpointIO
from batchformer.runs.folder import RunFolder
from batchformer.runs.progress import ProgressLine, RunProgress
from batchformer.training.sharding import ShardedStrategy

_NEEDS_OTHER_HARDWARE = ("backend found", "not available", "can not run on your system", "torch_xla")
_PROCESSES_PER_CORE = 4  # room for tests of several processes on a small machine
_RETURN_NOTHING = ("_spawn", "_fork", "_notebook")


def make_trainer(
    folder: RunFolder, keywords: dict[str, Any], callbacks: list[Any], line: ProgressLine | None, loggers: Any = False
) -> L.Trainer:
    """Lightning's Trainer with the settings of a recipe, and the callbacks that every run has.

    `loggers` are used where the recipe names none (`trainer.logger`). What Lightning refuses is a
    `UserError` that names the setting.
    """
    keywords = dict(keywords)
    own_callbacks = list(callbacks)
    if line is not None and keywords.get("enable_progress_bar") is not False:
        own_callbacks.append(RunProgress(line))
    else:
        keywords["enable_progress_bar"] = False
    given = keywords.get("callbacks") or []
    keywords["callbacks"] = [*(given if isinstance(given, list) else [given]), *own_callbacks]
    if keywords.get("logger") is None:
        keywords["logger"] = loggers
    plugins = keywords.get("plugins") or []
    keywords["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
    keywords["default_root_dir"] = str(folder.path)
    strategy = keywords.get("strategy")
    if isinstance(strategy, str) and strategy.endswith(_RETURN_NOTHING):
        # Lightning copies into such processes what cannot be copied, and brings back the weights but no history.
        raise UserError(f"trainer.strategy {strategy} keeps the numbers of a run in its processes: use ddp.")
    if strategy == "fsdp":  # Lightning's own of that name is for GPUs alone and knows no checkpoint IO
        keywords["strategy"] = ShardedStrategy()
        keywords["inference_mode"] = False  # parameters that are first gathered in that mode could not be trained
    try:
        trainer = L.Trainer(**keywords)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ModuleNotFoundError) as problem:
        reason = " ".join(str(problem).split()).rstrip(".!")
        accelerator = keywords.get("accelerator")
        if isinstance(accelerator, str) and any(words in reason for words in _NEEDS_OTHER_HARDWARE):
            raise UserError(
                f"trainer.accelerator {accelerator}: this machine has none that torch can use; "
                "leave it out, or give cpu."
            ) from problem
        raise UserError(f"Lightning refuses the trainer settings: {reason}.") from problem
    most = _PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > most:  # Lightning starts any number
        raise UserError(
            f"trainer.devices {trainer.num_devices} would start so many processes on the {os.cpu_count() or 1} cores "
            f"of this machine: give {most} or fewer."
        )
    if keywords.get("sync_batchnorm") and trainer.world_size > 1 and isinstance(trainer.accelerator, CPUAccelerator):
        raise UserError("trainer.sync_batchnorm is for GPUs alone, as torch has it: leave it out on the CPU.")
    return trainer


def note_cpu_processes(trainer: L.Trainer, line: ProgressLine) -> None:
    """Print a note before Lightning starts processes on the CPU: the user may have expected GPUs."""
    environment = trainer._accelerator_connector.cluster_environment
    on_cpu = isinstance(trainer.accelerator, CPUAccelerator)
    if trainer.num_devices > 1 and on_cpu and not environment.creates_processes_externally:
        line.say(
            f"No GPU is used: trainer.devices {trainer.num_devices} starts {trainer.num_devices} processes on the CPU "
            "(DDP over gloo), each with batches of data.batch_size; without it one process trains."
        )


@contextmanager
def as_keyboard_interrupt(trainer: L.Trainer) -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C and SIGTERM; Lightning raises SystemExit, and an error for killed workers.

    With several processes Lightning's handler broadcasts SIGTERM by a collective, which deadlocks while another process
    is inside one: there the handler of the command is enough.
    """
    if trainer.world_size > 1 and callable(signal.getsignal(signal.SIGTERM)):
        trainer._signal_connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    except (Exception, SystemExit) as problem:
        if not isinstance(problem, SystemExit) and interruption(problem) is None:
            raise
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning has disabled it
        raise KeyboardInterrupt from None


def refuse_empty_training(trainer: L.Trainer) -> None:
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise UserError(f"trainer.{name} 0 trains nothing: give 1 or more.")
    if trainer.check_val_every_n_epoch == 0:  # Lightning divides by it
        raise UserError(
            "trainer.check_val_every_n_epoch 0: give 1 or more; to leave validation out, trainer.limit_val_batches 0."
        )


def as_user_error(problem: Exception) -> UserError | None:
    """torch's errors about batches that are too small or too large, with a remedy; None for other errors.

    Also Lightning's error, raised once it has the loaders, about a fraction of the batches below one batch.
    """
    if isinstance(problem, MisconfigurationException):
        return UserError(f"Lightning refuses the trainer settings: {' '.join(str(problem).split()).rstrip('.')}.")
    if isinstance(problem, ValueError) and str(problem).startswith("Expected more than 1 value per channel"):
        return UserError(
            "BatchNorm cannot train on a batch of one image whose map is one pixel: raise data.batch_size to 2 or "
            "more, or data.image_size."
        )
    if isinstance(problem, torch.OutOfMemoryError):
        return UserError(
            "the memory of the device is full: lower data.batch_size (with trainer.accumulate_grad_batches the "
            "optimiser still sees as many images) or data.image_size."
        )
    return None
