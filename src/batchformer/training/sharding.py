"""Fully sharded data parallel training (FSDP2) of any task: parameters, gradients and optimizer states are divided.

The task as a whole is one sharded unit: its steps gather the parameters before and divide them after. So a task needs
to know nothing of it, whatever networks it has and however its step calls them. A task for which
this holds sets `shardable`; others are refused.
"""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from batchformer.errors import UserError
from batchformer.training.weights import read_checkpoint

STEPS = ("training_step", "validation_step", "test_step")


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


def shard(task: nn.Module, mesh: Any) -> None:
    """Divide the parameters of `task` among the processes of the mesh, and let its steps gather them."""
    if is_sharded(task):
        return
    if not getattr(task, "shardable", False):
        raise UserError(
            f"{type(task).__name__} uses its parameters outside its steps, where sharded ones are not gathered: "
            "use trainer.strategy ddp."
        )
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    fully_shard(task, mesh=mesh["data_parallel"])
    for name in STEPS:
        register_fsdp_forward_method(task, name)


def load_whole(task: nn.Module, state: dict[str, Any]) -> None:
    """`load_state_dict` of whole tensors, for a sharded task, too; every process calls it with the same ones."""
    if not is_sharded(task):
        task.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(task, state, options=StateDictOptions(full_state_dict=True))


def as_one_process_has_it(task: Any, checkpoint: Path) -> Any:
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
