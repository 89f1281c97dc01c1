"""transformers' classifiers with the module inside, as accelerate wraps them and in two processes under DDP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import batchformer as bf

from ..processes import run_in_processes


def attached() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(num_labels=5, intermediate_size=16, **small, **none)).train()
    bf.attach(model, blocks="all", heads=2, dropout=0.0)
    return model


def gradients(forward: nn.Module, model: nn.Module, rank: int) -> list[Tensor]:
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    forward(pixel_values=images, labels=torch.arange(3)).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def _work(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = attached()
    torch.save(gradients(DistributedDataParallel(model), model, rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_under_ddp_are_the_mean_over_processes(tmp_path: Path) -> None:
    """Of the network and of the modules in it, with the labels inside `forward`."""
    run_in_processes(_work, 2, tmp_path)
    model = attached()
    expected = [(a + b) / 2 for a, b in zip(*(gradients(model, model, rank) for rank in range(2)), strict=True)]
    for rank in range(2):
        for ours, theirs in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def _train_with_accelerate(rank: int, folder: str) -> None:
    import accelerate

    model = attached()
    started = {name: value.clone() for name, value in model.named_parameters()}
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)  # puts a `forward` of its own on the model
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    outputs = prepared(pixel_values=torch.randn(3, 3, 16, 16), labels=torch.arange(3))
    assert outputs.logits.shape == (6, 5)
    accelerator.backward(outputs.loss)
    optimizer.step()
    assert not any(torch.equal(value, started[name]) for name, value in model.named_parameters())
    plain = bf.detach(accelerator.unwrap_model(prepared))
    assert plain is model
    assert not any("batchformer" in name for name in plain.state_dict())


def test_accelerate_in_half_precision_trains_it_and_detach_finds_it(tmp_path: Path) -> None:
    """In a process of its own: accelerate keeps its precision for as long as a process lives."""
    pytest.importorskip("accelerate")
    run_in_processes(_train_with_accelerate, 1, tmp_path)
