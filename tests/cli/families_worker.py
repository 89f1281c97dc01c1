"""What torchrun starts in each process: one short training of every family, one after the other.

    torchrun ... families_worker.py SETTINGS FOLDER

SETTINGS is a JSON file: family -> arguments of `batchformer`. For each family a process writes into FOLDER its exit
code, how many numbers of the parameters its optimizers held, and their sum. With DIE_AT_STEP in the environment the
processes kill themselves at the start of that step.
"""

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.tensor import DTensor

from batchformer.cli import main
from batchformer.training.task import Task

held: list[
    tuple[int, int, float]
] = []  # of each parameter: its numbers here, in all processes, and the sum of those here
end, begin_step = Task.on_train_end, Task.on_train_batch_start


def on_train_end(task):
    for group in [group for optimizer in task.trainer.optimizers for group in optimizer.param_groups]:
        for parameter in group["params"]:
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held.append((here.numel(), parameter.numel(), here.double().sum().item()))
    end(task)


def on_train_batch_start(task, batch, batch_idx):
    if str(task.trainer.global_step) == os.environ.get("DIE_AT_STEP"):
        os.kill(os.getpid(), signal.SIGKILL)
    begin_step(task, batch, batch_idx)


if __name__ == "__main__":
    Task.on_train_end, Task.on_train_batch_start = on_train_end, on_train_batch_start
    settings, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for family, arguments in json.loads(settings.read_text()).items():
        held.clear()
        if (code := main(arguments)) != 0:
            sys.exit(f"{family} ended with code {code}")  # torchrun then ends the other process, too
        here, everywhere, total = (sum(column) for column in zip(*held, strict=True))
        ended = {"code": code, "here": here, "all": everywhere, "sum": total}
        (folder / f"{family}-{os.environ['RANK']}.json").write_text(json.dumps(ended))
