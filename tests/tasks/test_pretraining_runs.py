"""Pre-training stopped and resumed, and in two processes."""

import datetime
import os

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from batchformer.data import DigitsLT
from batchformer.tasks import MAE, MoCo

from ..processes import run_in_processes
from .conftest import make_trainer

VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
NO_WARMUP = {"warmup_epochs": 0.0, "warmup_lr": 0.0, "min_lr": 0.0}
OPTIMIZER = {"name": "sgd", "lr": 0.1, "lr_per": None}


def make(kind: str, **module):
    shared = {"optimizer": OPTIMIZER, "schedule": NO_WARMUP, "batchformer": {"heads": 2, **module}}
    if kind == "mae":
        return MAE("vit_tiny_patch16_224", VIT, decoder={"dim": 16, "depth": 1, "heads": 2}, **shared)
    contrast = {"version": kind, "hidden_dim": 16, "out_dim": 8, "queue": 64}
    return MoCo("vit_tiny_patch16_224", VIT, contrast={**contrast, "extra_layer": False}, **shared)


class SaveInside(L.Callback):
    """A checkpoint after the second batch."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def train(task, batch_size=16, resume=None, callbacks=(), **options):
    keywords = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, "use_distributed_sampler": False}
    trainer = make_trainer(callbacks=list(callbacks), **{**keywords, **options})
    trainer.fit(task, datamodule=DigitsLT(imbalance=1.0, batch_size=batch_size), ckpt_path=resume)
    return {name: value.clone() for name, value in task.state_dict().items()}


@pytest.mark.parametrize("kind", ["mae", "v2", "v3"])
def test_a_run_resumed_inside_an_epoch_has_the_bits_of_one_never_stopped(kind, tmp_path):
    path = tmp_path / "inside.ckpt"
    whole = train(make(kind), callbacks=[SaveInside(path)])
    resumed = train(make(kind), resume=path)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert kind == "mae" or any(name.startswith("keys.") for name in whole)


def work(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GROUP_RANK="0")
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience)
    together = {"devices": 2, "strategy": "ddp", "plugins": [TorchElasticEnvironment()], "limit_train_batches": 2}
    found = train(make("v2", dropout=0.0, scope="global"), 8, **together)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_whole_batch(tmp_path):
    """MoCo-v2 with a ViT has no BatchNorm, and with scope="global" the module attends over both processes."""
    run_in_processes(work, 2, tmp_path)
    alone = train(make("v2", dropout=0.0), 16, limit_train_batches=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, value in alone.items():
            if name != "queue.keys":  # the same keys in another order
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)
        keys, expected = (one["queue.keys"][:64].sort(0).values for one in (found, alone))
        torch.testing.assert_close(keys, expected, atol=1e-5, rtol=1e-4)
