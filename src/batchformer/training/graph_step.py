"""A whole training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Labels = Any  # a tensor, or a named tuple of tensors
Step = Callable[[Tensor, Labels], tuple[Tensor, ...]]


class GraphedStep:
    """Runs `step(images, labels)`: first as it is, then captured once and replayed. Labels may be a named tuple.

    The first `warmup` calls are real steps on a side stream, as capture asks for: they make the optimiser's buffers,
    compile what is to be compiled and choose cuDNN's algorithms. The next call captures (which computes nothing) and
    replays. From then on a call costs the copies into the captured inputs and one launch. A batch of another shape or
    dtype, such as the last of an epoch, and anything not on a CUDA device, takes the plain way.

    What `step` must keep to: no synchronisation with the device; everything it reads or updates between calls (weights,
    learning rates, counters) stays the same tensor, changed in place; it drops the gradients at its start
    (`zero_grad(set_to_none=True)`), so that those of the capture live in the graph's own memory; what it returns is
    detached and holds until the next call. Random numbers come from the default generator as it stands at each call, so
    seeding it before a call gives the numbers an uncaptured step would draw.

    Args:
        step: the training step.
        warmup: real steps before the capture.
        memory_format: layout of the captured images; the copy into them converts.
    """

    def __init__(self, step: Step, warmup: int = 3, memory_format: torch.memory_format = torch.preserve_format) -> None:
        self.step, self.warmup, self.memory_format = step, warmup, memory_format
        self._shape: tuple[object, ...] | None = None
        self._warm_calls = 0
        self._side: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, Labels] | None = None
        self._outputs: tuple[Tensor, ...] = ()

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, images: Tensor, labels: Labels) -> tuple[Tensor, ...]:
        if not images.is_cuda:
            return self.step(images, labels)
        shape = tuple((part.shape, part.dtype) for part in (images, *_parts(labels)))
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            return self.step(images, labels)
        if self._graph is None:
            if self._warm_calls < self.warmup:
                self._warm_calls += 1
                return self._on_side_stream(images, labels)
            self._capture(images, labels)
        assert self._graph is not None
        assert self._inputs is not None
        self._inputs[0].copy_(images, non_blocking=True)
        for captured, part in zip(_parts(self._inputs[1]), _parts(labels), strict=True):
            captured.copy_(part, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _on_side_stream(self, images: Tensor, labels: Labels) -> tuple[Tensor, ...]:
        # one side stream for all: the allocator keeps the memory of each stream apart
        side = self._side = self._side or torch.cuda.Stream(images.device)
        current = torch.cuda.current_stream(images.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = self.step(images, labels)
        current.wait_stream(side)
        return outputs

    def _capture(self, images: Tensor, labels: Labels) -> None:
        copies = [part.clone(memory_format=torch.contiguous_format) for part in _parts(labels)]
        own = copies[0] if isinstance(labels, Tensor) else type(labels)(*copies)
        self._inputs = (images.clone(memory_format=self.memory_format), own)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a data loader's pinning thread may call CUDA meanwhile without breaking the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self.step(*self._inputs)
        self._graph, self._side = graph, None


def _parts(labels: Labels) -> tuple[Tensor, ...]:
    return (labels,) if isinstance(labels, Tensor) else tuple(labels)
