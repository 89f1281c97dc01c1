"""Detectors in two processes with unequal batches: together they learn what one process learns from all the images."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import batchformer as bf
from batchformer.models import create_detector, with_mask_head

from ..processes import run_in_processes

SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 8, "encoder_ffn_dim": 8,
         "decoder_attention_heads": 8, "decoder_ffn_dim": 8, "num_queries": 6, "dropout": 0.0, "image_size": 64,
         "num_labels": 3, "backbone": "test_resnet"}  # fmt: skip
OBJECTS = [0, 4, 1]  # in each image: the first one is all that the first process has
SHARES = (slice(0, 1), slice(1, 3))
pytestmark = pytest.mark.filterwarnings('ignore:scope="global" attends')  # in one process over its own batch alone
KINDS = {
    "deformable-detr-two-stage": True,
    "smca-detr": False,
    "detr": False,
    "panoptic": True,
}  # with the module?


def build(kind):
    torch.manual_seed(0)
    more = {"num_feature_levels": 3} if kind.startswith("deformable-detr") else {}
    model = create_detector("detr" if kind == "panoptic" else kind, **SMALL, **more)
    if kind == "panoptic":
        model = with_mask_head(model)
    model = model.double().train()
    if KINDS[kind]:
        bf.attach(model, encoder_layers=[0], dropout=0.0, scope="global")
    return model


def images(share=slice(None)):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 64, 64, generator=generator).double()
    labels = [
        {
            "class_labels": torch.randint(3, (count,), generator=generator),
            "boxes": torch.rand(count, 4, generator=generator).double() * 0.3 + 0.3,
            "masks": torch.rand(count, 64, 64, generator=generator).round().double(),
        }
        for count in OBJECTS
    ]
    return {"pixel_values": pixels[share], "labels": labels[share]}


def gradients(model, outputs, kind):
    """Of all that is divided by the number of boxes: everything but DETR's cross entropy."""
    loss = outputs.loss
    if kind in ("detr", "panoptic"):
        loss = sum(part for name, part in outputs.loss_dict.items() if name.startswith("loss") and "_ce" not in name)
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def work(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience)
    found, own = {}, images(SHARES[rank])
    for kind in KINDS:
        parallel = DistributedDataParallel(build(kind), find_unused_parameters=kind in ("detr", "panoptic"))
        found[kind] = gradients(parallel.module, parallel(**own), kind)
    model = build("smca-detr").eval()
    with torch.no_grad():  # evaluation: the second process has one batch more
        for _ in range(1 + rank):
            found["evaluated"] = model(**own).loss
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(work, 2, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_their_mean_gradient_is_that_of_one_process_with_all_images(kind, found):
    """So the losses are divided by the boxes of all processes; with two streams, each of them is."""
    model = build(kind)
    expected = gradients(model, model(**images()), kind)
    assert any(name.startswith("batchformer.") for name in expected) == KINDS[kind]
    for of_process in found:
        assert of_process[kind].keys() >= expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(of_process[kind][name], gradient, rtol=1e-6, atol=1e-8)


def test_in_evaluation_each_counts_its_own_boxes_and_waits_for_nobody(found):
    model = build("smca-detr").eval()
    for share, of_process in zip(SHARES, found, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(of_process["evaluated"], model(**images(share)).loss)
