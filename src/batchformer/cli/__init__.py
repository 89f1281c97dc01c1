"""The ``batchformer`` command: finds the sub-command, runs it, and reports errors in one line."""

import importlib
import io
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from batchformer.errors import UserError, causes, did_you_mean, interruption

COMMANDS = {
    "fit": "train one recipe",
    "compare": "train a recipe with and without BatchFormer over several seeds and print one table",
    "tune": "find a learning rate and the largest batch for a recipe",
    "test": "evaluate a finished run again",
    "predict": "classify images, or draw detections, with a finished run",
    "probe": "train a linear classifier on the frozen backbone of a run",
    "export": "write the plain network of a run as safetensors, ONNX, pt2 or a folder, and verify it",
    "report": "write an HTML page about runs or comparisons",
    "grad-cam": "draw Grad-CAM maps of runs on test images of rare classes",
    "recipes": "list the recipes or print one",
    "data": "list the supported data sets, or inspect and check your own",
    "features": "write image features for generalized zero-shot learning",
    "completion": "print a shell script that completes commands, recipes and fields",
}
_ELSEWHERE = {"features": "batchformer.tasks.zero_shot.generalized_features"}  # commands of task families
_TRAIN_EXTRA = ("lightning", "jsonargparse", "timm", "torchvision", "torchmetrics", "transformers", "scipy",
                "tensorboard", "sklearn", "safetensors", "PIL", "yaml", "docstring_parser")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (something failed), 2 (wrong call) or 130 (interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [word for word in args if word != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # an unprintable name must not raise an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _sigterm_as_interrupt():
            return _dispatch(args, debug)
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as problem:
        if debug:
            raise
        from batchformer.runs.folder import is_main_process

        code, sentence = _explain(problem)
        # an unreadable image, no memory left: of this process alone
        own = any(type(cause).__name__ in ("BadSample", "OutOfMemoryError") for cause in causes(problem))
        if is_main_process() or own:
            print(f"batchformer: {sentence}", file=sys.stderr)
        return code


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, which job schedulers send, ends a command as Ctrl-C does; `timeout` sends it twice at once."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    last = -math.inf

    def stop(number: int, _: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > 1:  # seconds; an interrupt may be lost (in a destructor), and the next one counts again
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the libraries' banners, tips and warnings out of the terminal; ``--debug`` shows everything.

    Errors are still raised, and warnings of this package are one line each.

    Logging is switched off as a whole because Lightning sets the level of its own logger when it is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    before, as_python_does = logging.root.manager.disable, warnings.formatwarning
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"batchformer(\.|$)")
        # without the line of code that raised it
        warnings.formatwarning = lambda message, *_, **__: f"batchformer: warning: {' '.join(str(message).split())}\n"
        try:
            yield
        finally:
            warnings.formatwarning = as_python_does
            logging.disable(before)


def _dispatch(args: list[str], debug: bool) -> int:
    if args[:1] == ["help"] and len(args) > 1:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if args[0] in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"batchformer {version('batchformer')}")
        return 0
    name, rest = args[0], args[1:]
    command = _command(name)
    if "-h" in rest or "--help" in rest:
        print(command.HELP.strip())
        return 0
    if debug:
        return command.run(rest)
    with quiet_libraries():
        return command.run(rest)


def _command(name: str) -> Any:
    """The module of a command: one of ours, or one that an installed package registers.

    A package registers with an entry point in the group `batchformer.commands` that names a module like those here:
    `HELP` and `run(args)`.
    """
    if name in COMMANDS:
        return importlib.import_module(_ELSEWHERE.get(name, f"batchformer.cli.{name.replace('-', '_')}"))
    others = _registered()
    if name in others:
        return others[name].load()
    known = [*COMMANDS, *others]
    hint = did_you_mean(name, known) or f" There are: {', '.join(known)}."
    raise UserError(f"There is no command {name}.{hint}")


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="batchformer.commands") if point.name not in COMMANDS}


def _explain(problem: BaseException) -> tuple[int, str]:
    if (stopped := interruption(problem)) is not None:
        return 130, str(stopped) or "stopped."
    cause: BaseException | None = problem
    while cause is not None:  # jsonargparse wraps errors from constructors of optional types in its own
        if isinstance(cause, UserError):
            return 2, " ".join(str(cause).split())
        cause = cause.__cause__
    if isinstance(problem, ModuleNotFoundError) and (problem.name or "").split(".")[0] in _TRAIN_EXTRA:
        return 2, f'this command needs {problem.name}; install it with: pip install "batchformer[train]"'
    from batchformer.files import disk_problem

    if (reason := disk_problem(problem)) is not None:
        where = f" ({problem.filename})" if isinstance(problem, OSError) and problem.filename else ""
        return 1, f"{reason}{where}; free some space or choose another --out, then continue with --resume."
    first_line = (str(problem).strip().splitlines() or ["no message"])[0]
    return 1, f"{type(problem).__name__}: {first_line} (add --debug to see where)"


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    if others := _registered():
        commands += f"\nFrom other packages: {', '.join(others)}"
    return f"""batchformer: learn from the relations between the samples of a mini-batch

  batchformer compare digits-lt --seeds 3     see what the method does; no download, about two minutes
  batchformer fit cifar100-lt-100             train one row of a paper's table
  batchformer fit folder-lt --data-root DIR   train on your own images: DIR/train/<class>/, DIR/val/<class>/

Commands (details: batchformer COMMAND --help):
{commands}

Any field of a recipe can be changed on the command line: --trainer.max_epochs 3 --model.batchformer.heads 8
--debug shows where an error comes from; --version prints the version."""
