"""The command line in processes that kill or stop themselves."""

import json
import os
import signal
import tempfile
from pathlib import Path

import torch.utils.data

from batchformer.cli import main
from batchformer.runs import checkpoints
from batchformer.training.task import Task

from ..processes import run_in_processes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_step(step: int) -> None:
    begin = Task.on_train_batch_start

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == step:
            die()
        return begin(self, batch, batch_idx)

    Task.on_train_batch_start = on_train_batch_start


def die_in_write(count: int) -> None:
    save, written = checkpoints.torch.save, []

    def half(content, file):
        written.append(content)
        if len(written) == count:
            file.write(b"PK" + bytes(10_000))
            file.flush()
            die()
        save(content, file)

    checkpoints.torch.save = half


def stop_at(owner, name: str, number: int, group: bool = True) -> None:
    """The whole process group, or this process alone, when this function is called."""
    begin = getattr(owner, name)

    def stopping(*args, **keywords):
        os.killpg(0, number) if group else os.kill(os.getpid(), number)
        return begin(*args, **keywords)

    setattr(owner, name, stopping)


WORKER = torch.utils.data._utils
WHERE = {
    "step": die_at_step,
    "write": die_in_write,
    "before": lambda number: stop_at(Task, "construct", number),
    "start": lambda number: stop_at(WORKER.worker, "_worker_loop", number),
    "load": lambda number: stop_at(WORKER.fetch._MapDatasetFetcher, "fetch", number),
    "worker": lambda number: stop_at(WORKER.fetch._MapDatasetFetcher, "fetch", number, group=False),
}

Case = tuple[str, int, list[str]]


def ends_of(cases: list[Case], folder: Path) -> list[tuple[int, str]]:
    """What each of these commands ended with and said on standard error.

    A case is (where, number, arguments). SIGKILL: where is "step" (at the start of that training step) or "write" (in
    the middle of writing that checkpoint, counted from 1). A signal of this number to the whole process group: "before"
    (the training), "start" (as a worker process starts) or "load" (as one loads a batch that is waited for); "worker":
    to that worker alone, as if it got the signal of the group first. Each case is a process of its own.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    run_in_processes(_run_all, 1, folder)
    return [(code, said) for code, said in json.loads((folder / "ends.json").read_text())]


def _run_all(rank: int, folder: str) -> None:
    ends = []
    for where, number, arguments in json.loads((Path(folder) / "cases.json").read_text()):
        with tempfile.TemporaryFile() as said:
            if (child := os.fork()) == 0:
                os.setpgid(0, 0)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts with &
                os.dup2(said.fileno(), 2)
                WHERE[where](number)
                os._exit(main(arguments))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            ends.append((code, said.read().decode()))
    (Path(folder) / "ends.json").write_text(json.dumps(ends))
