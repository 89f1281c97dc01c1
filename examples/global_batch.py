"""Attention over the batch of all processes: DistributedDataParallel or Lightning, a few seconds on a CPU.

    python examples/global_batch.py                                         two processes, started by the script
    torchrun --nproc-per-node 2 examples/global_batch.py                    by torchrun
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/global_batch.py
    torchrun --nproc-per-node 2 examples/global_batch.py --lightning        the same with Lightning (needs `lightning`)

The four lines that matter are marked with numbers.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import batchformer as bf
from batchformer import parallel

COUNTS = (60, 30, 15, 8, 4)  # training images per class: a long tail, 117 in all
EPOCHS, BATCH, LR = 6, 16, 0.05


def make_images(counts: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Noise around one colour per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    images = torch.randn(len(labels), 3, 8, 8, generator=generator)
    images[:, 0] += 2 * torch.linspace(-1, 1, len(counts))[labels][:, None, None]
    return images, labels


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every process
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(COUNTS))
    )


def own_batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """This process' share: as many batches as the others have, the last ones unequal in size."""
    images, labels = make_images(COUNTS, seed=0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    steps = -(-len(labels) // (BATCH * dist.get_world_size()))
    return [(images[rows], labels[rows]) for rows in mine.chunk(steps)]


def train_with_ddp() -> nn.Module:
    model = make_model()
    attachment = bf.attach(model, scope="global")  # 1. every sample attends to all samples of all processes
    wrapped = DistributedDataParallel(model)
    criterion = bf.TwoStreamLoss(nn.CrossEntropyLoss())  # 2. the loss over both streams, as ever
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for epoch in range(EPOCHS):
        with parallel.count_traffic() as traffic:
            for images, labels in own_batches(epoch):
                loss = criterion(wrapped(images), labels) * parallel.mean_loss_weight(len(labels))  # 3. unequal batches
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {traffic.activations:,} bytes sent")
    return attachment.detach()  # 4. the model you had


def train_with_lightning() -> nn.Module:
    import lightning as L

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            bf.attach(self.model, scope="global")
            self.criterion = bf.TwoStreamLoss(nn.CrossEntropyLoss())

        def train_dataloader(self) -> Any:
            return DataLoader(own_batches(self.current_epoch), batch_size=None)  # type: ignore[arg-type]

        def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
            images, labels = batch
            return self.criterion(self.model(images), labels) * parallel.mean_loss_weight(len(labels))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)

    task = Task()
    trainer = L.Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        max_epochs=EPOCHS,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,  # own_batches takes the share of a process
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task)
    return bf.detach(task.model)


def main(lightning: bool) -> None:
    if lightning:  # which makes the process group itself
        model = train_with_lightning().cpu()
    else:
        dist.init_process_group("gloo")  # "nccl", and model and batches on the GPU of LOCAL_RANK, where there are some
        model = train_with_ddp()
    if dist.get_rank() == 0:
        images, labels = make_images((20,) * len(COUNTS), seed=1)
        with torch.inference_mode():
            accuracy = (model.eval()(images).argmax(1) == labels).float().mean().item()
        print(f"{dist.get_world_size()} processes: plain weights, test accuracy {accuracy:.0%}")
    dist.destroy_process_group()


def start_one(rank: int, port: int, processes: int, lightning: bool) -> None:
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "own"}
    os.environ.update({name: str(value) for name, value in told.items()})
    main(lightning)


if __name__ == "__main__":
    with_lightning = "--lightning" in sys.argv
    if "RANK" in os.environ:
        main(with_lightning)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            found = free.getsockname()[1]
        # Forked, they need not import torch again; where a system cannot fork, use torchrun.
        torch.multiprocessing.start_processes(start_one, (found, 2, with_lightning), nprocs=2, start_method="fork")
