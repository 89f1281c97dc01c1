"""Fully sharded data parallel training (FSDP2) of any task: parameters, gradients and optimizer states are divided.

The task as a whole is one sharded unit: its steps gather the parameters before and divide them after. So a task needs
to know nothing of it, whatever networks it has and however its step calls them.
"""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

STEPS = ("training_step", "validation_step", "test_step")


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 over all processes; checkpoints are one file, as those of other runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shard(task: nn.Module, mesh: Any) -> None:
    """Divide the parameters of `task` among the processes of the mesh, and let its steps gather them."""
    if isinstance(task, FSDPModule):
        return
    fully_shard(task, mesh=mesh["data_parallel"])
    for name in STEPS:
        register_fsdp_forward_method(task, name)


def whole(task: nn.Module) -> None:
    """Gather the parameters of a sharded task in every process, for good; nothing happens to other tasks."""
    if isinstance(task, FSDPModule):
        task.unshard()
