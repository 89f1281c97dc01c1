"""Handles are found through wrappers, and files that were written while attached become those of the stock model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.swa_utils import AveragedModel

import batchformer as bf
from batchformer.errors import UserError

from .small_models import PLACES, TOKENS, Net, small, trace


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "FSDP, original parameters": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "FSDP2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
    "AveragedModel": AveragedModel,
    "ModelEmaV2": ModelEmaV2,
    "ModelEmaV3": ModelEmaV3,
    "compiled": compiled,
    "compiled, then DDP": lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
    "DDP, then compiled": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "DDP, then EMA": lambda model: AveragedModel(nn.parallel.DistributedDataParallel(model)),
    "EMA, then DDP, then compiled": lambda model: compiled(nn.parallel.DistributedDataParallel(ModelEmaV3(model))),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_has_its_handle_is_saved_plain_and_detached(wrap: Callable) -> None:
    model = Net().train()
    keys = list(model.state_dict())
    attachment = bf.attach(model, before="fc", heads=2)
    wrapped = wrap(model)
    found = bf.attachment_of(wrapped)
    assert found is not None
    assert (found is attachment) == (found.model is model)  # copies have handles of their own
    file = bf.plain_state_dict(wrapped.state_dict())
    assert list(file) == keys
    if wrap is not WRAPPERS["FSDP2"]:  # whose weights are of a kind that stock models do not load
        Net().load_state_dict(file)
    assert len(wrapped.train()(TOKENS)) == 8
    assert bf.detach(wrapped) is wrapped
    assert bf.attachment_of(wrapped) is None
    assert len(wrapped(TOKENS)) == 4
    with pytest.raises(UserError, match=r"nothing is attached to this \w*Net"):
        bf.detach(wrapped)


def test_a_model_whose_only_part_is_called_module_is_itself_when_attached_to() -> None:
    whole = nn.Sequential()
    whole.add_module("module", nn.Linear(6, 8))
    attachment = bf.attach(whole, before="module", heads=2)
    assert bf.attachment_of(whole) is attachment


@pytest.mark.parametrize("place", PLACES, ids=["before", "after"])
def test_state_dicts_become_plain_wherever_the_module_is_kept(place: dict) -> None:
    model = Net()
    keys = list(model.state_dict())
    attachment = bf.attach(model, variant="stable", layers=2, **place)
    file = bf.plain_state_dict(model.state_dict())
    assert list(file) == list(attachment.plain_state_dict())
    assert file == bf.plain_state_dict(file)
    assert bf.plain_state_dict({key: value for key, value in model.state_dict().items() if key not in keys}) == {}


def test_a_module_inside_a_sequential_inside_a_task_is_taken_out() -> None:
    task = nn.ModuleDict({"net": small()})
    keys = list(task.state_dict())
    bf.attach(task["net"], heads=2)
    assert len(task.state_dict()) > len(keys)
    assert list(bf.plain_state_dict(task.state_dict())) == keys


def test_of_a_checkpoint_each_state_dict_becomes_plain_and_the_rest_stays() -> None:
    model = Net()
    bf.attach(model, before="fc", heads=2)
    ema, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "state_dict_ema": ema.state_dict(),
        "averages": {"ema": model.state_dict(), "decay": 0.99},
        "optimizer": optimizer.state_dict(),
        "metric": torch.tensor(0.5),
    }
    plain = bf.plain_state_dict(checkpoint)
    for name in ("state_dict", "state_dict_ema"):
        Net().load_state_dict(plain[name])
    Net().load_state_dict(plain["averages"]["ema"])
    assert {name: plain[name] for name in ("epoch", "optimizer", "metric")} == {
        name: checkpoint[name] for name in ("epoch", "optimizer", "metric")
    }
    assert "batchformer.0.layers.0.norm1.weight" in checkpoint["state_dict"]  # what was given stays as it is


@pytest.mark.parametrize(
    ("given", "says"),
    [(Net(), "takes a state dict and got Net"), ({}, "found no weights"), ({"epoch": 3}, "found no weights")],
)
def test_what_holds_no_weights_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        bf.plain_state_dict(given)


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_loading_a_plain_file_into_an_attached_model_says_what_to_do(copied: Callable) -> None:
    model, file = Net(), Net().state_dict()
    bf.attach(model, before="fc", heads=2)
    model = copied(model)
    own = [key for key in model.state_dict() if key not in file]
    with pytest.raises(RuntimeError, match="written without the module: load it before attach") as error:
        model.load_state_dict(file)
    assert str(error.value).count("written without") == 1
    result = model.load_state_dict(file, strict=False)
    assert sorted(result.missing_keys) == sorted(own)
    assert torch.equal(model.fc.weight, file["fc.weight"])


def test_other_errors_of_loading_stay_and_detach_leaves_no_hook() -> None:
    model = Net()
    bf.attach(model, before="fc", heads=2)
    file = model.state_dict()
    del file["batchformer.0.layers.0.norm1.weight"], file["fc.bias"]
    with pytest.raises(RuntimeError, match="Missing key") as error:
        model.load_state_dict(file)
    assert "written without" not in str(error.value)
    model = bf.detach(model)
    assert trace(model) == [None]
    assert not any(part._load_state_dict_post_hooks for part in model.modules())
    model.load_state_dict(Net().state_dict())
