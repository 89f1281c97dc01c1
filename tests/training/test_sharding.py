"""Sharded tasks (FSDP) in one process; tests/cli/test_families_in_processes.py trains them in two."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from batchformer.errors import UserError
from batchformer.tasks import LongTailed
from batchformer.training.sharding import (
    ShardedStrategy,
    is_sharded,
    load_whole,
    refuse_unshardable,
    shard,
    unsharded,
)

from ..tasks.conftest import TinyData, make_trainer


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    dist.destroy_process_group()


@pytest.fixture
def trained(tmp_path):
    task = LongTailed("resnet20", {"widths": [4, 4]}, seed=3)
    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(task, datamodule=TinyData())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return task, tmp_path / "last.ckpt"


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_task_is_whole_again_from_its_checkpoint(mesh, trained):
    task, checkpoint = trained
    assert unsharded(task, checkpoint) is task
    weights = {name: value.clone() for name, value in task.state_dict().items()}
    shard(task, mesh)
    assert is_sharded(task)
    assert all(isinstance(parameter, DTensor) for parameter in task.parameters())
    whole = unsharded(task, checkpoint)
    assert type(whole) is LongTailed
    assert (whole.seed, whole.class_counts, whole.trainer) == (3, task.class_counts, task.trainer)
    assert whole.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in whole.state_dict().items())
    load_whole(task, {name: torch.ones_like(value) for name, value in weights.items()})
    assert all((parameter.full_tensor() == 1).all() for parameter in task.parameters())


def test_a_task_that_uses_its_parameters_outside_its_steps_is_refused():
    task = LongTailed("resnet20", algorithm="crt")
    task.trainer = make_trainer(max_epochs=1, strategy=ShardedStrategy())
    with pytest.raises(UserError, match="LongTailed does not train with its parameters divided among processes"):
        refuse_unshardable(task)
