"""An attached detector in a life of its own: files, copies, precision, compiled, in several processes, trained."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchformer as bf

from ..processes import run_in_processes
from ..selection import others_slow
from .small_detectors import BUILD, batch

KINDS = list(BUILD)
MECHANISMS = others_slow(KINDS, ("detr", "deformable-two-stage", "segmentation"))


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def detect(model: nn.Module, kind: str) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch(kind)).logits


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", others_slow(["detr", "deformable-two-stage", "segmentation", "smca"], ["detr"]))
def test_files_before_while_and_after(kind: str, tmp_path: Path) -> None:
    model = BUILD[kind]()
    model.save_pretrained(tmp_path / "before")
    stock = load_file(tmp_path / "before" / "model.safetensors")
    model = type(model).from_pretrained(tmp_path / "before")
    attachment = bf.attach(model, encoder_layers="all")
    with torch.no_grad():
        for parameter in attachment.parameters():
            parameter.add_(0.1)
    expected = detect(model, kind)

    model.save_pretrained(tmp_path / "while")
    both = load_file(tmp_path / "while" / "model.safetensors")
    assert {name for name in both if not name.startswith("batchformer.")} == set(stock)
    loaded, problems = type(model).from_pretrained(tmp_path / "while", output_loading_info=True)
    assert all(name.startswith("batchformer.") for name in problems["unexpected_keys"])
    assert not problems["missing_keys"]
    assert torch.equal(detect(loaded, kind), expected)
    again = bf.attach(loaded, encoder_layers="all")
    own = {name.removeprefix("batchformer."): value for name, value in both.items() if name.startswith("batchformer.")}
    again.load_state_dict(own)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), attachment.parameters(), strict=True))

    model.save_pretrained(tmp_path / "plain", state_dict=attachment.plain_state_dict())
    attachment.detach().save_pretrained(tmp_path / "after")
    for folder in ("plain", "after"):
        assert set(load_file(tmp_path / folder / "model.safetensors")) == set(stock)
        loaded, problems = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(problems.values())
        assert torch.equal(detect(loaded, kind), expected)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_detach_leaves_the_models_own_loss(kind: str) -> None:
    model = BUILD[kind]()
    before = model.loss_function, sorted(model.__dict__)
    bf.attach(model, encoder_layers=[0])
    assert model.loss_function is not before[0]
    bf.detach(model)
    assert (model.loss_function, sorted(model.__dict__)) == before


def test_a_loss_of_ones_own_is_kept_and_averaged() -> None:
    model, inputs = BUILD["detr"](auxiliary_loss=False).train(), batch()
    calls: list[int] = []

    def own(logits: Any, labels: Any, device: Any, pred_boxes: Any, config: Any, *rest: Any, **more: Any) -> Any:
        calls.append(len(logits))
        return logits.square().mean() * len(labels), {}, None

    model.loss_function = own
    attachment = bf.attach(model, encoder_layers=[0], dropout=0.0)
    outputs = model(**inputs)
    assert calls == [2, 2]
    torch.testing.assert_close(outputs.loss, 2 * outputs.logits.square().mean())
    attachment.detach()
    assert model.loss_function is own


@pytest.mark.parametrize("kind", MECHANISMS)
def test_copies_and_pickles_compute_the_loss_of_both_streams(kind: str) -> None:
    model, inputs = BUILD[kind]().train(), batch(kind)
    attachment = bf.attach(model, encoder_layers=[0], dropout=0.0, mask_padding=True)
    expected = model(**inputs).loss
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    attachment.detach()
    for other in others:
        torch.testing.assert_close(other(**inputs).loss, expected)
        own = bf.attachment_of(other)
        torch.testing.assert_close(sum(own.stream_losses()) / 2, expected)


@pytest.mark.parametrize("kind", others_slow(["detr", "conditional", "deformable", "smca"], ["detr", "deformable"]))
def test_checkpointed_gradients_are_those_of_their_own_batch(kind: str) -> None:
    """Two forwards of different padding before one backward: a mask noted while running would be the wrong one."""
    model = BUILD[kind]().train()
    bf.attach(model, encoder_layers="all", dropout=0.0, mask_padding=True)
    first, second = batch(kind), batch(kind)
    second["pixel_mask"] = second["pixel_mask"].flip(0)
    found = []
    for on in (False, True):
        model.gradient_checkpointing_enable() if on else model.gradient_checkpointing_disable()
        found.append(gradients(model, model(**first).loss + 2 * model(**second).loss))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_autocast_trains_both_streams_with_labels(kind: str) -> None:
    model, inputs = BUILD[kind]().train(), batch(kind)
    attachment = bf.attach(model, encoder_layers=[0], mask_padding=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attachment.parameters())


def test_compiled_code_is_that_of_the_attached_model_also_after_a_plain_twin() -> None:
    """The encoder, where the insertion is: the whole of DETR breaks into a dozen graphs, with or without us."""
    torch._dynamo.reset()
    small = {"encoder_layers": 1, "decoder_layers": 1, "auxiliary_loss": False}
    model, inputs = BUILD["detr"](**small).train(), {**batch(), "labels": None}
    twin = copy.deepcopy(model)
    twin.model.encoder.compile(backend="eager")
    assert len(twin(**inputs).logits) == 2
    bf.attach(model, encoder_layers=[0], dropout=0.0)
    expected = model(**inputs).logits
    model.model.encoder.compile(backend="eager")
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert len(expected) == 4


def test_zero_projections_of_a_pre_norm_module_give_the_plain_loss() -> None:
    """The related stream is then the plain one, and so is the loss."""
    for kind in KINDS:
        model, inputs = BUILD[kind]().train(), batch(kind)
        expected = model(**inputs).loss
        attachment = bf.attach(model, encoder_layers="all", norm="pre", dropout=0.0)
        for name, parameter in attachment.named_parameters():
            if "out_proj" in name or "linear2" in name:
                nn.init.zeros_(parameter)
        torch.testing.assert_close(model(**inputs).loss, expected, atol=1e-6, rtol=1e-6)


def test_the_loss_of_one_image_reaches_another_through_the_module_only() -> None:
    model, inputs = BUILD["deformable"]().train(), batch("deformable", count=3)
    attachment = bf.attach(model, encoder_layers=[0], dropout=0.0)
    images = inputs["pixel_values"].requires_grad_()

    def reached(row: int) -> list[bool]:
        (gradient,) = torch.autograd.grad(model(**inputs).pred_boxes[row].sum(), images)
        return [bool(one.abs().amax() > 0) for one in gradient]

    assert reached(0) == [True, False, False]
    assert reached(3) == [True, True, True]
    with attachment.disabled():
        assert reached(0) == [True, False, False]


def _work(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = _parallel_model()
    parallel = DistributedDataParallel(model)
    torch.save(gradients(model, parallel(**_part(rank)).loss), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _parallel_model() -> nn.Module:
    model = BUILD["conditional"]().train()
    torch.manual_seed(0)
    bf.attach(model, encoder_layers=[0], dropout=0.0)
    return model


def _part(rank: int) -> dict[str, Any]:
    return batch("conditional", count=2 + rank, objects=rank == 0)


def test_two_processes_average_the_gradients_of_their_own_batches(tmp_path: Path) -> None:
    """One process has images without any object."""
    run_in_processes(_work, 2, tmp_path)
    model = _parallel_model()
    alone = [gradients(model, model(**_part(rank)).loss) for rank in range(2)]
    for rank in range(2):
        together = torch.load(tmp_path / f"{rank}.pt")
        assert any(name.startswith("batchformer.") for name in together)
        for name, gradient in together.items():
            other = alone[1].get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, (alone[0][name] + other) / 2, atol=1e-5, rtol=1e-4)
