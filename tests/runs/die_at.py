"""Runs the command line in processes that kill themselves with SIGKILL: a program for the tests, not a test.

Its argument is a JSON list of [where, number, arguments]: where is "step" (at the start of that training step) or
"write" (in the middle of writing that checkpoint, counted from 1). Each case is a process of its own, forked after the
slow imports; what it ended with is printed as JSON.
"""

import json
import os
import signal
import sys

from batchformer.cli import main
from batchformer.runs import checkpoints
from batchformer.training.task import Task


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


if __name__ == "__main__":
    codes = []
    for where, number, arguments in json.loads(sys.argv[1]):
        if (child := os.fork()) == 0:
            {"step": die_at_step, "write": die_in_write}[where](number)
            os._exit(main(arguments))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes))
