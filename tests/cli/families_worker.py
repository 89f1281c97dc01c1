"""What torchrun starts in each process: one short training of every family, one after the other.

    torchrun ... families_worker.py SETTINGS FOLDER

SETTINGS is a JSON file: family -> arguments of `batchformer`. For each family a process writes into FOLDER its exit
code and how many numbers of the parameters its optimizers held. With DIE_AT_STEP in the environment the processes kill
themselves at the start of that step.
"""

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchformer.cli import main
from batchformer.training.task import Task

held: dict[int, tuple[int, int]] = {}  # parameter -> its numbers here, and in all processes


def count(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held[id(parameter)] = here.numel(), parameter.numel()


def die_at(step):
    begin = Task.on_train_batch_start

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, batch, batch_idx)

    Task.on_train_batch_start = on_train_batch_start


if __name__ == "__main__":
    if "DIE_AT_STEP" in os.environ:
        die_at(int(os.environ["DIE_AT_STEP"]))
    register_optimizer_step_pre_hook(count)
    settings, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for family, arguments in json.loads(settings.read_text()).items():
        held.clear()
        if (code := main(arguments)) != 0:
            sys.exit(f"{family} ended with code {code}")  # torchrun then ends the other process, too
        numbers = [sum(column) for column in zip(*held.values(), strict=True)] or [0, 0]
        ended = {"code": code, "here": numbers[0], "all": numbers[1]}
        (folder / f"{family}-{os.environ['RANK']}.json").write_text(json.dumps(ended))
