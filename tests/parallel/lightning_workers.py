"""Lightning in two processes that were told what torchrun tells: what `test_launch.py` forks."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import batchformer as bf
from batchformer import parallel

from .cases import own_rows
from .models import images_and_labels, make_token_model

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES = (3, 5)
STEPS, LR = 2, 0.1


class Task(L.LightningModule):
    """Unequal batches, two steps, no dropout: the weights afterwards can be foretold."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        self.model, self.shard = make_token_model("global"), shard

    def configure_model(self) -> None:
        if self.shard:
            fully_shard(self.model)

    def train_dataloader(self) -> Any:
        images, labels = images_and_labels(sum(BATCHES))
        rows = own_rows(dist.get_rank(), BATCHES)
        return DataLoader([(images[rows], labels[rows])] * STEPS, batch_size=None)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = bf.TwoStreamLoss(F.cross_entropy)(self.model(images), labels)
        return loss * parallel.mean_loss_weight(len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def fit(strategy: Any, shard: bool) -> dict[str, Tensor]:
    task = Task(shard)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        precision="64-true" if not shard else "32-true",
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task)
    weights = {key: p.full_tensor() if shard else p for key, p in task.model.named_parameters()}
    dist.destroy_process_group()
    return {key: weight.detach().clone() for key, weight in weights.items()}


def work(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    ports, results = json.loads(Path(folder, "ports.json").read_text()), dict[str, Any]()
    timeout = datetime.timedelta(seconds=60)
    try:
        import global_batch

        with open(f"{folder}/example-{rank}.txt", "w") as sys.stdout:
            global_batch.start_one(rank, ports[0], 2, lightning=True)
        os.environ["MASTER_PORT"] = str(ports[1])
        results["ddp"] = fit(DDPStrategy(timeout=timeout), shard=False)
        os.environ["MASTER_PORT"] = str(ports[2])
        results["fsdp"] = fit(ModelParallelStrategy(timeout=timeout), shard=True)
    except BaseException:
        results["failed"] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
