"""What attach and detach refuse before they look at a place: the error names it, and nothing stays on the model."""

from __future__ import annotations

import pytest
import timm
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import batchformer as bf
from batchformer.errors import UserError

from .small_models import TOKENS, Net, TwoHeads, small, trace


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.fc = Net(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.net(x))


@pytest.mark.parametrize("thing", [None, "resnet50", Net], ids=["None", "a name", "a class"])
def test_what_is_no_model_is_refused(thing: object) -> None:
    for call in (bf.attach, bf.detach):
        with pytest.raises(UserError, match=rf"{call.__name__} takes a model"):
            call(thing)


def test_what_has_an_attached_part_is_refused() -> None:
    model = Whole().train()
    bf.attach(model.net, before="fc", heads=2)
    with pytest.raises(UserError, match="already attached to 'net', a part of this Whole"):
        bf.attach(model, before="fc", heads=1)
    assert len(model(TOKENS)) == 8  # the part goes on
    bf.detach(model.net)
    bf.attach(model, before="fc", heads=1)


def test_a_sharded_model_is_refused_since_its_processes_would_part_ways() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Whole()
        fully_shard(model.net, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match="attach before sharding it"):
            bf.attach(model, before="fc", heads=1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("arguments", [{"before": ["fc", "head"]}, {"after": ["high", "layers.1"]}])
def test_one_place_under_two_names_is_refused(arguments: dict) -> None:
    model = Net()
    with pytest.raises(UserError, match="names one submodule twice"):
        bf.attach(model, heads=2, example_inputs=TOKENS, **arguments)
    assert trace(model) == [None]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"channels": "middle"}, "channels='middle'"),
        ({"heads": 2.0}, r"heads=2\.0"),
        ({"group_size": 2.5}, r"group_size=2\.5"),
        ({"hidden_dim": 0}, "hidden_dim=0"),
        ({"layers": 1.5}, r"layers=1\.5"),
        ({"process_group": 2}, 'process_group= needs scope="global"'),
    ],
)
def test_a_wrong_value_is_refused_and_leaves_nothing(arguments: dict, says: str) -> None:
    model = Net()
    with pytest.raises(UserError, match=says):
        bf.attach(model, before="fc", **{"heads": 2, **arguments})
    assert trace(model) == [None]


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no option 'head': did you mean 'heads'"):
        bf.attach(small(), head=2)


def test_an_unknown_path_is_answered_with_the_nearest_names() -> None:
    model = timm.create_model("resnet18", num_classes=3)
    with pytest.raises(UserError, match=r"no submodule 'fcc'.*'fc'"):
        bf.attach(model, before="fcc")


def test_attaching_twice_is_refused() -> None:
    model = small()
    bf.attach(model, heads=2)
    with pytest.raises(UserError, match="already attached before '2'"):
        bf.attach(model, before="2", heads=2)


def test_detaching_what_is_not_attached_is_refused() -> None:
    model = small()
    with pytest.raises(UserError, match="nothing is attached to this Sequential"):
        bf.detach(model)
    attachment = bf.attach(model, heads=2)
    attachment.detach()
    with pytest.raises(UserError, match="was already detached"):
        attachment.detach()


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_a_model_without_a_classifier_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="has no classifier"):
        bf.attach(timm.create_model(name, num_classes=0))


def test_a_model_of_ones_own_is_asked_to_name_the_layer() -> None:
    with pytest.raises(UserError, match=r"'head_a', 'head_b'.*before="):
        bf.attach(TwoHeads())


def test_a_list_of_layers_is_refused_because_it_is_never_called() -> None:
    model = timm.create_model("resnet18", num_classes=3)
    model.extra = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UserError, match="'extra' is a list of layers"):
        bf.attach(model, before="extra")


def test_heads_that_do_not_divide_the_width_are_refused_and_nothing_stays() -> None:
    model = small()
    with pytest.raises(UserError, match="dim=8 is not divisible by heads=3"):
        bf.attach(model, heads=3)
    assert bf.attachment_of(model) is None
    bf.attach(model, heads=2)
