"""Momentum encoders and queues of contrastive learning (He et al., "Momentum Contrast", 2020).

Both are modules: as submodules of a task or of its algorithm they are in its checkpoints. They change tensors in place
and never synchronise with the host, so a captured CUDA graph may hold them.
"""

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.metrics.gather import process_and_count
from batchformer.training.sharding import whole_tensors


class MomentumEncoder(nn.Module):
    """A copy k of an encoder q whose parameters follow those of q, without gradients:

        k <- m k + (1 - m) q

    Call `follow(q)` before each forward pass, as MoCo does. Parameters are paired by name, so q may have more of them
    (a classifier, BatchFormer). Buffers are the copy's own: in training mode its BatchNorm uses the statistics of its
    own batches, of one process each unless `trainer.sync_batchnorm` is set. `ShuffledRows` gives it other images than
    the queries of the process, as in MoCo.

    Args:
        encoder: what is copied.
        momentum: m; change it between steps with `set_momentum` (MoCo-v3).
    """

    changes_in_step = True
    rate: Float[Tensor, ""]

    def __init__(self, encoder: nn.Module, momentum: float = 0.999) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        # a function of the position in the run, so not part of checkpoints; a tensor, which a captured graph reads
        self.register_buffer("rate", torch.zeros(()), persistent=False)
        self.set_momentum(momentum)

    def set_momentum(self, momentum: float) -> None:
        self.rate.fill_(1.0 - momentum)

    def forward(self, *inputs: Any) -> Any:
        with torch.no_grad():
            return self.encoder(*inputs)

    @torch.no_grad()
    def follow(self, source: nn.Module) -> None:
        """One step towards the parameters of the same names in `source`."""
        names, own = zip(*self.encoder.named_parameters(), strict=True)
        difference = torch._foreach_sub([source.get_parameter(name) for name in names], own)
        torch._foreach_mul_(difference, self.rate)
        torch._foreach_add_(own, difference)

    @torch.no_grad()
    def copy_from(self, source: nn.Module) -> None:
        """Take over the parameters and buffers of the same names, as at the start of a run."""
        values, own = source.state_dict(), self.encoder.state_dict()
        for value, new in zip(own.values(), whole_tensors([values[name] for name in own]), strict=True):
            value.copy_(new)


class Queue(nn.Module):
    """The last `size` keys, first in first out, with their labels where there are classes.

    It starts with random unit vectors and random labels, as in MoCo and PaCo (whose code normalises the initial queue
    over the wrong dimension, and labels it from 1,000 classes on every data set).

    Args:
        size: number of keys; a multiple of the number pushed at once.
        dim: width of a key.
        classes: number of classes from which initial labels are drawn; None keeps no labels.
    """

    keys: Float[Tensor, "size dim"]
    labels: Int[Tensor, " size"] | None
    position: Int[Tensor, ""]

    def __init__(self, size: int, dim: int, classes: int | None = None) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("labels", None if classes is None else torch.randint(classes, (size,)))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, keys: Float[Tensor, "n dim"], labels: Int[Tensor, " n"] | None = None) -> None:
        """Replace the oldest keys by these; with several processes give all the same (`of_all_processes`)."""
        check_queue(len(self.keys), len(keys))
        index = (self.position + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        self.keys.index_copy_(0, index, keys.to(self.keys.dtype))
        if self.labels is not None and labels is not None:
            self.labels.index_copy_(0, index, labels)
        self.position.add_(len(keys)).remainder_(len(self.keys))


def check_queue(size: int, pushed: int, name: str = "a queue of") -> None:
    """Refuse a queue that the keys of a step do not fill evenly: some of them would be kept for fewer steps."""
    if size < 1 or size % pushed:
        below = size // pushed * pushed
        near = " or ".join(str(fit) for fit in (below, below + pushed) if fit > 0)
        raise UserError(
            f"{name} {size} is no multiple of the {pushed} keys that a step adds (of all processes): choose {near}, or "
            f"another data.batch_size."
        )


def of_all_processes(rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "all ..."]:
    """The rows of all processes, in the order of one process with the batch of all of them; gradients flow back.

    Every process has equally many rows. The backward pass adds up the gradients of all processes' losses, so with DDP,
    which averages, the result is the gradient of the mean loss.
    """
    if process_and_count()[1] == 1:
        return rows
    from torch.distributed.nn.functional import all_gather

    return torch.stack(all_gather(rows.contiguous()), 1).flatten(0, 1)


def own_rows(count: int, device: torch.device) -> Int[Tensor, " count"]:
    """Where the `count` rows of this process are in what `of_all_processes` returns."""
    process, processes = process_and_count()
    return torch.arange(count, device=device) * processes + process


class ShuffledRows:
    """Exchanges rows between processes, and the results back: MoCo's shuffled BatchNorm.

    BatchNorm normalises a key with the other images of its process. Where these are the images of the queries, their
    statistics tell which key belongs to which query, and the loss falls without anything being learnt. So the keys of
    a process are computed for images of all processes, drawn again in every step (He et al., 2020, section 3.3).

    Args:
        rows: how many a process has; all have equally many.
        random: the same in all processes: from the seed and the step, not from the process.
        device: of the rows.
    """

    def __init__(self, rows: int, random: np.random.Generator, device: torch.device) -> None:
        order = torch.from_numpy(random.permutation(rows * process_and_count()[1])).to(device)
        own = own_rows(rows, device)
        self._taken, self._back = order[own], order.argsort()[own]

    def send(self, rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
        """Rows of all processes for this one, in exchange for its own."""
        return of_all_processes(rows)[self._taken]

    def bring_back(self, rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
        """What all processes made of the rows of this one, in their first order."""
        return of_all_processes(rows)[self._back]
