"""A `StreamGuard` that sees what the loss of a training loop sees, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchformer.attach.attachment import Attachment
from batchformer.nn import StreamGuard, TwoStreamLoss, repeat_targets


class WatchedLoss:
    """A hook of `TwoStreamLoss`: the guard gets the cross entropy of every row, whatever the criterion.

    Class ids and soft labels are understood; of several outputs the first counts. Anything else passes unwatched.
    Without a guard given one is made at the first step, which shows how many classes there are.
    """

    def __init__(self, attachment: Attachment, guard: StreamGuard | None = None) -> None:
        self.attachment, self.guard = attachment, guard
        self._state: dict[str, Any] | None = None  # of the guard of a run that this one goes on from
        self._handles: list[Any] = []

    def watch(self, losses: Iterable[TwoStreamLoss]) -> None:
        self._handles += [loss.register_forward_hook(self) for loss in losses]

    def leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def go_on_from(self, state: dict[str, Any]) -> None:
        """What `StreamGuard.state_dict` gave in an earlier run; taken up at the first step, on its device."""
        self._state = state

    @torch.no_grad()
    def __call__(self, loss: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if len(args) != 2:
            return
        logits, targets = (given[0] if isinstance(given, tuple) else given for given in args)
        if not _understood(logits, targets) or self.attachment.related(logits) is None:
            return
        if self.guard is None:
            self.guard = StreamGuard(logits.shape[1])
        if self._state is not None:
            self.guard.load_state_dict(self._state, logits.device)
            self._state = None
        repeated = repeat_targets(targets, logits)
        self.guard.update_rows(F.cross_entropy(logits.float(), repeated, reduction="none"), self.attachment)


def _understood(logits: Any, targets: Any) -> bool:
    """Scores of two classes or more, and class ids or a distribution over the same classes."""
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)) or logits.ndim != 2 or logits.shape[1] < 2:
        return False
    ids = targets.ndim == 1 and targets.dtype == torch.long
    return ids or (targets.ndim == 2 and targets.is_floating_point() and targets.shape[1] == logits.shape[1])
