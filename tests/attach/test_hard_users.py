"""What attach meets in the programs of others: models without data, sharded, with two names, attached in part."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import batchformer as bf
from batchformer.errors import UserError


class Net(nn.Module):
    """Two token layers, of which the list `layers` is another name, and a classifier that is `head` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([self.low, self.high])
        self.fc = self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.high(self.low(x)).mean(1))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.fc = Net(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.net(x))


def trace(model: nn.Module) -> list[object]:
    """Whatever attach leaves on a model."""
    hooks = [hook for part in model.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]
    return hooks + [part for part in model.modules() if "forward" in part.__dict__] + [bf.attachment_of(model)]


TOKENS = torch.randn(4, 5, 6)
# a dry run finds the tokens by itself nowhere, since the model takes no images
PLACES = [{"before": "fc", "heads": 2}, {"after": "high", "heads": 2, "example_inputs": TOKENS}]


@pytest.mark.parametrize("place", PLACES, ids=["before", "after"])
def test_attached_in_inference_mode_the_module_trains_all_the_same(place: dict) -> None:
    model = Net().train()
    with torch.inference_mode():
        attachment = bf.attach(model, **place)
    bf.TwoStreamLoss(nn.CrossEntropyLoss())(model(TOKENS), torch.arange(4) % 3).backward()
    assert all(parameter.grad is not None for parameter in attachment.parameters())


@pytest.mark.parametrize("place", PLACES, ids=["before", "after"])
def test_a_model_without_data_is_attached_to_and_filled_later(place: dict) -> None:
    with torch.device("meta"):
        model = Net().train()
        if "example_inputs" in place:
            place = {**place, "example_inputs": torch.empty(TOKENS.shape)}
    attachment = bf.attach(model, variant="stable", **place)
    assert model(TOKENS.to("meta")).shape == (8, 3)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in attachment.parameters())
    assert attachment.modules[0].layers[0].scale2.unique().item() == pytest.approx(0.1)


def test_places_are_found_by_any_of_their_names() -> None:
    model = Net().train()
    by_alias = bf.attach(model, after="layers.1", heads=2, example_inputs=TOKENS)
    assert len(model(TOKENS)) == 8
    by_alias.detach()
    assert len(model(TOKENS)) == 4


@pytest.mark.parametrize("arguments", [{"before": ["fc", "head"]}, {"after": ["high", "layers.1"]}])
def test_one_place_under_two_names_is_refused(arguments: dict) -> None:
    model = Net()
    with pytest.raises(UserError, match="names one submodule twice"):
        bf.attach(model, heads=2, example_inputs=TOKENS, **arguments)
    assert trace(model) == [None]


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


class Forked(nn.Module):
    """Its layer gives two tensors, of which the model reads the second; `read` says whether the first as well."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    def __init__(self, read: bool, checkpointed: bool) -> None:
        super().__init__()
        self.fork, self.fc, self.read, self.checkpointed = self.Fork(), nn.Linear(8, 3), read, checkpointed
        nn.init.zeros_(self.fc.weight)  # as many a head begins: no output shows what reaches it

    def forward(self, x: Tensor) -> Tensor:
        one, two = checkpoint(self.fork, x, use_reentrant=True) if self.checkpointed else self.fork(x)
        return self.fc((one + two if self.read else two).mean(1))


def test_a_layer_whose_first_tensor_nobody_reads_is_refused() -> None:
    model = Forked(read=False, checkpointed=False)
    with pytest.raises(UserError, match="'fork' gives several tensors, and Forked does not read the first one"):
        bf.attach(model, after="fork", heads=2, example_inputs=TOKENS)
    assert trace(model) == [None]


def test_one_that_another_output_reads_is_not() -> None:
    class Both(Forked):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            one, two = self.fork(x)
            return {"second": self.fc(two.mean(1)), "first": one}

    bf.attach(Both(read=False, checkpointed=False), after="fork", heads=2, example_inputs=TOKENS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_one_that_is_read_or_cannot_be_followed_is_not(checkpointed: bool, trainable: bool) -> None:
    model = Forked(read=True, checkpointed=checkpointed).requires_grad_(trainable).train()
    bf.attach(model, after="fork", heads=2, example_inputs=TOKENS)
    assert len(model(TOKENS)) == 8
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
def test_rows_that_are_no_images_are_refused(streams: str) -> None:
    """Transformers with the sequence first have tokens there; with as many images as tokens nothing else would tell."""

    class SequenceFirst(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.high(self.low(x).transpose(0, 1)).mean(0))

    with pytest.raises(UserError, match="'high' does not have the images on its first axis"):
        bf.attach(SequenceFirst(), after="high", heads=2, example_inputs=TOKENS, streams=streams)


class Adapted(nn.Module):
    """A layer with a low-rank part beside it, as PEFT wraps it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def get_base_layer(self):
        return self.base_layer


def test_the_module_stands_before_an_adapted_classifier_not_inside_the_adapter() -> None:
    model = timm.create_model("resnet18", num_classes=3).train()
    model.fc = Adapted(model.fc)
    attachment = bf.attach(model)
    assert [(point.paths, point.module.dim) for point in attachment.points] == [(("fc",), 512)]
    assert len(model(torch.randn(2, 3, 32, 32))) == 4


def test_a_layer_that_is_only_called_like_an_adapters_is_none() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.out = nn.Linear(512, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.base_layer(x).relu())

    model = timm.create_model("resnet18", num_classes=3)
    model.fc = Head()
    assert bf.attach(model).paths == ("fc.out",)


@pytest.mark.parametrize("thing", [None, "resnet50", Net], ids=["None", "a name", "a class"])
def test_what_is_no_model_is_refused(thing: object) -> None:
    for call in (bf.attach, bf.detach):
        with pytest.raises(UserError, match=rf"{call.__name__} takes a model"):
            call(thing)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"channels": "middle"}, "channels='middle'"),
        ({"heads": 2.0}, r"heads=2\.0"),
        ({"group_size": 2.5}, r"group_size=2\.5"),
        ({"hidden_dim": 0}, "hidden_dim=0"),
        ({"layers": 1.5}, r"layers=1\.5"),
        ({"process_group": 2}, 'process_group= says whose batches scope="global"'),
    ],
)
def test_a_wrong_value_is_refused_and_leaves_nothing(arguments: dict, says: str) -> None:
    model = Net()
    with pytest.raises(UserError, match=says):
        bf.attach(model, before="fc", **{"heads": 2, **arguments})
    assert trace(model) == [None]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripting_says_to_detach_first_and_then_works() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 6)
    expected = model(x)
    bf.attach(model, heads=2)
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    with pytest.raises(AttributeError, match=r"detach it first, bf\.detach\(model\)"):
        torch.jit.script(model)
    assert torch.equal(torch.jit.script(bf.detach(model))(x), expected)


@pytest.mark.parametrize("part", ["", "low", "replaced"])
@pytest.mark.parametrize("place", PLACES)
def test_what_was_compiled_in_place_is_looked_at_uncompiled_and_follows(place: dict, part: str) -> None:
    model = Net().train()
    if part == "replaced":
        model.low = torch.compile(model.low, backend="eager")
    else:
        model.get_submodule(part).compile(backend="eager")
    assert len(model(TOKENS)) == 4
    with torch.compiler.set_stance("fail_on_recompile"):  # a compiler that follows the watching never comes to an end
        attachment = bf.attach(model, **place)
    assert len(model(TOKENS)) == 8
    assert len(attachment.detach()(TOKENS)) == 4
