"""A model that is forgotten is freed at once, attached or not, and a forward that failed leaves nothing in memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import batchformer as bf

from ..selection import others_slow
from .small_detectors import BUILD, batch

IMAGES = torch.randn(4, 3, 32, 32)


@pytest.fixture(autouse=True)
def _only_counting() -> Iterator[None]:
    """Without the collector of cycles, which might come in between: what is left are counts of references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class HeadWithNorm(nn.Module):
    """Its BatchNorm is a part of the model itself, and stands behind the module."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8))
        self.head, self.norm = nn.Linear(8, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.trunk(x)))


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "classifier": (lambda: timm.create_model("resnet18", num_classes=5), {}),
    "stage": (lambda: timm.create_model("resnet18", num_classes=5), {"after": ["layer3"]}),
    "block": (vit, {"blocks": [0], "heads": 3}),
    "wide": (lambda: timm.create_model("xcit_nano_12_p16_224", num_classes=5), {"blocks": [0]}),
    "norm": (HeadWithNorm, {"before": "head", "example_inputs": IMAGES}),
    "sequential": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.Linear(8, 5)),
        {"before": "2"},
    ),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "file": lambda model: pickle.loads(pickle.dumps(model)),
}


def forgotten(build: Callable[[], nn.Module], keywords: dict[str, Any], copied: Callable[[Any], Any]) -> list[Any]:
    model = build()
    attachment = bf.attach(model, **keywords)
    other = copied(model)
    for one in (model, other):
        one.train()(IMAGES).sum().backward()
    assert bf.attachment_of(model) is attachment
    return [weakref.ref(each) for each in (model, other, attachment, *model.parameters(), *other.parameters())]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("copied", others_slow(COPIES, ["copy"]))
def test_while_attached_and_a_copy_of_it(case: str, copied: str) -> None:
    left = forgotten(*CASES[case], COPIES[copied])
    assert not any(each() is not None for each in left)


@pytest.mark.parametrize("kind", others_slow(["detr", "deformable-two-stage", "segmentation"], ["detr"]))
def test_a_detector(kind: str) -> None:
    def run() -> weakref.ref[Any]:
        model = BUILD[kind]().train()
        bf.attach(model, encoder_layers=[0])
        model(**batch(kind)).loss.backward()
        return weakref.ref(model)

    run()  # whatever transformers keeps of its first model is no part of this
    gc.collect()
    assert run()() is None


def test_the_handle_may_go_first_and_the_model_stay() -> None:
    model = HeadWithNorm()
    keys = list(model.state_dict())
    attachment = bf.attach(model, before="head", example_inputs=IMAGES)
    attachment.load_state_dict(attachment.state_dict())
    gone = weakref.ref(attachment)
    del attachment
    assert gone() is None
    again = bf.attachment_of(model)
    assert again is not None
    assert again.attached
    assert len(model.train()(IMAGES)) == 8
    assert again.detach() is model
    assert list(model.state_dict()) == keys
    assert not again.attached
    assert bf.attachment_of(model) is None


def test_the_handle_alone_keeps_the_model() -> None:
    attachment = bf.attach(HeadWithNorm(), before="head", example_inputs=IMAGES)
    assert len(attachment.model.train()(IMAGES)) == 8
    assert isinstance(attachment.detach(), HeadWithNorm)


def test_a_layer_that_was_replaced_is_freed_and_detach_goes_on() -> None:
    model = timm.create_model("resnet18", num_classes=5)
    attachment = bf.attach(model)
    old = weakref.ref(model.fc)
    model.reset_classifier(7)
    assert old() is None
    copy.deepcopy(model)
    attachment.detach()
    assert len(model.train()(IMAGES)) == 4


class FailsBetween(nn.Module):
    """Two heads on one feature; between them it may fail, as for want of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.fails = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        feature = self.trunk(x)
        self.seen = weakref.ref(feature)
        first = self.one(feature)
        if self.fails:
            raise RuntimeError("out of memory")
        return first, self.two(feature)


def test_a_forward_that_failed_between_two_heads_keeps_no_graph() -> None:
    model = FailsBetween()
    bf.attach(model, before=["one", "two"])
    model.fails = True
    with pytest.raises(RuntimeError) as failed:
        model.train()(torch.randn(4, 6))
    del failed
    gc.collect()  # the frames of the error
    assert model.seen() is None
    model.fails = False
    assert [len(rows) for rows in model(torch.randn(4, 6))] == [8, 8]
