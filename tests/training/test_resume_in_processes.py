"""Two processes stopped in the middle of an epoch: each goes on with what it has counted itself."""

import datetime
import os

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from batchformer.data import DigitsLT
from batchformer.tasks import LongTailed

from ..processes import run_in_processes
from ..tasks.conftest import make_trainer


class SaveInside(L.Callback):
    """A checkpoint after the second batch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def train(resume, *callbacks):
    trainer = make_trainer(
        max_epochs=1, limit_train_batches=4, limit_val_batches=0, use_distributed_sampler=False, callbacks=[*callbacks],
        devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    task = LongTailed("resnet20", backbone_args={"widths": [4, 8]}, method="baseline")
    trainer.fit(task, datamodule=DigitsLT(batch_size=16), ckpt_path=resume)
    return {name: float(trainer.callback_metrics[f"train/{name}"]) for name in ("loss", "acc")}


def work(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GROUP_RANK="0")
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience)
    path = f"{folder}/inside.ckpt"
    torch.save([train(None, SaveInside(path)), train(path)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_the_training_loss_of_the_epoch_is_that_of_a_run_never_stopped(tmp_path):
    run_in_processes(work, 2, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for unbroken, resumed in ranks:
        assert resumed == unbroken
    assert ranks[0] == ranks[1]  # the mean over both, not what each has counted
