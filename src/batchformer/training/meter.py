"""Means over an epoch of training, summed on the device without host synchronisation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from batchformer.errors import NonFiniteLoss


class Meter:
    """Means over the samples of an epoch, by name. Tensors are updated in place: a captured CUDA graph may hold them.

    `update` never waits for the device; reading (`values`, `raise_if_not_finite`, `state_dict`) does.
    """

    def __init__(self, device: torch.device, batches_per_step: int = 1) -> None:
        self.device, self.batches_per_step = device, batches_per_step
        self.first_step = 0
        self._sums: dict[str, Tensor] = {}  # name -> (sum, number of samples)
        self._batch = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bad_batch = torch.full((), -1, dtype=torch.int64, device=device)

    def restart(self, global_step: int) -> None:
        """Reset at the start of an epoch, which is this step."""
        self.first_step = global_step
        for pair in self._sums.values():
            pair.zero_()
        self._batch.zero_()
        self._first_bad_batch.fill_(-1)

    @torch.no_grad()
    def update(self, parts: Mapping[str, Tensor], samples: int) -> None:
        """Count one batch: `loss` and other scalars are means over its samples, vectors have one entry per sample."""
        for name, value in parts.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros(2, dtype=torch.float64, device=self.device)
            total, count = self._sums[name].unbind()
            if value.ndim == 0:
                total.add_(value.double(), alpha=samples)
                count.add_(samples)
            else:
                total.add_(value.sum(dtype=torch.float64))
                count.add_(value.numel())
        newly_bad = ~torch.isfinite(parts["loss"]) & (self._first_bad_batch < 0)
        self._first_bad_batch.copy_(torch.where(newly_bad, self._batch, self._first_bad_batch))
        self._batch.add_(1)

    def values(self) -> dict[str, float]:
        """The means by name; names without a sample are left out."""
        if not self._sums:
            return {}
        sums = torch.stack(list(self._sums.values())).tolist()
        return {name: total / count for name, (total, count) in zip(self._sums, sums, strict=True) if count}

    def raise_if_not_finite(self, epoch: int) -> None:
        bad = int(self._first_bad_batch.item())
        if bad >= 0:
            raise NonFiniteLoss(
                f"the training loss is not finite since step {self.first_step + bad // self.batches_per_step} (epoch "
                f"{epoch}): try a lower model.optimizer.lr, more model.schedule.warmup_epochs, or "
                f"trainer.precision=32-true."
            )

    def state_dict(self) -> dict[str, Any]:
        sums = {name: pair.tolist() for name, pair in self._sums.items()}
        return {"sums": sums, "batch": self._batch.item(), "first_step": self.first_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sums = state["sums"] if "sums" in state else _sums_of_0_1(state)
        self._sums = {name: torch.tensor(pair, dtype=torch.float64, device=self.device) for name, pair in sums.items()}
        self._batch.fill_(state["batch"])
        self.first_step = int(state["first_step"])


def _sums_of_0_1(state: Mapping[str, float]) -> dict[str, list[float]]:
    sums = {"loss": [state["loss"], state["rows"]], "acc": [100 * state["right"], state["rows"]]}
    for stream in ("plain", "related"):
        if f"{stream}_loss" in state:
            sums[f"loss_{stream}"] = [state[f"{stream}_loss"], state[f"{stream}_rows"]]
    return sums
