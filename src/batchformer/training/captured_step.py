"""A whole training step as one CUDA graph."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from batchformer.errors import UserError

Step = Callable[[Any], Any]


class CapturedStep:
    """Runs `step(batch)`: eagerly at first, then captured once and replayed. A batch is nested dicts and tuples.

    The first `warmup` calls are real steps on a side stream, as capture requires: they make the optimiser's buffers,
    compile what is to be compiled and choose cuDNN's algorithms. The next call captures (which computes nothing) and
    replays. From then on a call costs the copies into the captured inputs and one launch. A batch of another structure,
    shape or dtype, such as the last of an epoch, and anything not on a CUDA device, runs eagerly.

    Requirements on `step`: no host synchronisation; everything it reads or updates between calls (weights,
    learning rates, counters) stays the same tensor, changed in place; it drops the gradients at its start
    (`zero_grad(set_to_none=True)`), so that those of the capture are in the graph's memory pool; what it returns is
    detached and holds until the next call. Random numbers come from the default generator as it stands at each call, so
    seeding it before a call gives the numbers an uncaptured step would draw.

    Args:
        step: the training step.
        warmup: real steps before the capture.
        memory_format: layout of captured images; the copy into them converts.
    """

    def __init__(self, step: Step, warmup: int = 3, memory_format: torch.memory_format = torch.preserve_format) -> None:
        self.step, self.warmup, self.memory_format = step, warmup, memory_format
        self._signature: tuple[object, ...] | None = None
        self._warm_calls = 0
        self._side: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._outputs: Any = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, batch: Any) -> Any:
        leaves, structure = pytree.tree_flatten(batch)
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return self.step(batch)
        signature = (structure, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if self._signature is None:
            self._signature = signature
        if signature != self._signature:
            return self.step(batch)
        if self._graph is None:
            if self._warm_calls < self.warmup:
                self._warm_calls += 1
                return self._on_side_stream(batch)
            self._capture(leaves, structure)
        assert self._graph is not None
        for captured, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                captured.copy_(leaf, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _on_side_stream(self, batch: Any) -> Any:
        # one side stream for all: the allocator keeps the memory of each stream apart
        side = self._side = self._side or torch.cuda.Stream()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = self.step(batch)
        current.wait_stream(side)
        return outputs

    def _capture(self, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        self._inputs = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                image = leaf.ndim == 4 and leaf.is_floating_point() and leaf.shape[1] > 1
                leaf = leaf.clone(memory_format=self.memory_format if image else torch.contiguous_format)
            self._inputs.append(leaf)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a data loader's pinning thread may call CUDA meanwhile without breaking the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self.step(pytree.tree_unflatten(self._inputs, structure))
        self._graph, self._side = graph, None


def count_step(trainer: L.Trainer) -> None:
    """Count a step that was made without Lightning's optimiser wrapper, which would have counted it."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def align_step_counts(trainer: L.Trainer) -> None:
    """Set the step counters of manual and automatic optimisation equal: a run may be resumed with the other kind."""
    loop = trainer.fit_loop.epoch_loop
    totals = (
        loop.manual_optimization.optim_step_progress.total,
        loop.automatic_optimization.optim_progress.optimizer.step.total,
    )
    for name in ("ready", "completed"):
        steps = max(getattr(total, name) for total in totals)
        for total in totals:
            setattr(total, name, steps)


def refuse_uncapturable(trainer: L.Trainer) -> None:
    """Refuse settings of the trainer that a captured step would not follow."""
    for given, what in (
        (trainer.accumulate_grad_batches != 1, "trainer.accumulate_grad_batches"),
        (bool(trainer.gradient_clip_val), "trainer.gradient_clip_val"),
        (trainer.world_size > 1, "several devices"),
        (trainer.precision == "16-mixed", "precision 16-mixed (use bf16-mixed)"),
    ):
        if given:
            raise UserError(f"cuda_graph=true cannot be combined with {what}: set model.cuda_graph=false or drop it.")
