"""Fully sharded data parallel training (FSDP2) of any task: parameters, gradients and optimizer states are divided.

The task as a whole is one sharded unit. A training step gathers the parameters before and divides them after, and so do
`begin_epoch` and an evaluation as a whole, from its start hook to its end hook. So a task needs to know nothing of it,
whatever networks it has and however it calls them there. Elsewhere parameters are divided (`DTensor`): optimizers and
averages work on the part of each process. What a training step changes in place must not be divided, since the gathered
copy is dropped after it: modules with `changes_in_step`, as momentum encoders, stay whole in every process. A task for
which this holds sets `shardable`; others are refused.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.errors import UserError
from batchformer.metrics.gather import process_and_count
from batchformer.training.weights import read_checkpoint


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 over all processes; checkpoints are one file, as those of other runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def is_sharded(task: nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")  # imported when a task is sharded: it takes a while
    return module is not None and isinstance(task, module.FSDPModule)


def refuse_unshardable(task: Any) -> None:
    if isinstance(task.trainer.strategy, ModelParallelStrategy) and not task.shardable:
        raise UserError(
            f"{type(task).__name__} does not train with its parameters divided among processes (shardable): use "
            "trainer.strategy ddp."
        )


def shard(task: nn.Module, mesh: Any) -> None:
    """Divide the parameters of `task` among the processes of the mesh, and let its training step gather them."""
    if is_sharded(task):
        return
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    whole = {p for module in task.modules() if getattr(module, "changes_in_step", False) for p in module.parameters()}
    fully_shard(task, mesh=mesh["data_parallel"], ignored_params=whole)
    register_fsdp_forward_method(task, "training_step")


def gather(task: nn.Module) -> None:
    """Put whole parameters in the place of those of a sharded task, until `divide`; changes of them are lost."""
    if is_sharded(task):
        task.unshard()  # type: ignore[operator]


def divide(task: nn.Module) -> None:
    if is_sharded(task):
        task.reshard()  # type: ignore[operator]


def share_statistics(task: nn.Module) -> None:
    """Give all processes the statistics of BatchNorm that process 0 has, and so its checkpoints: evaluate with them."""
    if process_and_count()[1] == 1:
        return
    for norm in task.modules():
        if isinstance(norm, _BatchNorm):
            for statistic in norm.buffers(recurse=False):
                torch.distributed.broadcast(statistic, 0)


def whole_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor as it is in one process; every process calls it with its parts."""
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


def divided_as(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Whole tensors on the devices of these parameters, and divided as they are."""
    found = []
    for parameter, tensor in zip(parameters, tensors, strict=True):
        part = tensor.to(parameter.device)
        if hasattr(parameter, "full_tensor") and not hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            part = distribute_tensor(part, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]
        found.append(part)
    return found


def load_whole(task: nn.Module, state: dict[str, Any]) -> None:
    """`load_state_dict` of whole tensors, for a sharded task, too; every process calls it with the same ones."""
    if not is_sharded(task):
        task.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(task, state, options=StateDictOptions(full_state_dict=True))


def unsharded(task: Any, checkpoint: Path) -> Any:
    """A sharded task anew, whole, from its checkpoint; another task is returned as it is.

    What is measured after training runs in one process alone, where gathering a sharded parameter would wait for ever.
    """
    if not is_sharded(task):
        return task
    plain_class = type(task).__bases__[1]  # fully_shard has put a class of (FSDPModule, this one) in its place
    saved = read_checkpoint(checkpoint)
    copy = plain_class(**task.hparams)
    copy.expect_checkpoint()
    copy.on_load_checkpoint(saved)
    copy.load_state_dict(saved["state_dict"])
    copy.trainer = task.trainer
    return copy.to(task.device)
