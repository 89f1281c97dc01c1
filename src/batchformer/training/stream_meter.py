"""The losses of the plain and of the related rows, each by itself, counted on the device."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.training.train_meter import TrainMeter


class StreamMeter(TrainMeter):
    """What `TrainMeter` counts, and beside it the mean loss of each stream over the epoch."""

    counted = (*TrainMeter.counted, "plain_loss", "plain_rows", "related_loss", "related_rows")

    def __init__(self, device: torch.device, batches_per_step: int = 1) -> None:
        super().__init__(device, batches_per_step)
        self._plain_loss = torch.zeros((), dtype=torch.float64, device=device)
        self._plain_rows = torch.zeros((), dtype=torch.int64, device=device)
        self._related_loss = torch.zeros((), dtype=torch.float64, device=device)
        self._related_rows = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update_streams(self, plain: Float[Tensor, " rows"] | None, related: Float[Tensor, " rows"] | None) -> None:
        """The loss of each row; None for a stream that is not there."""
        for name, losses in (("plain", plain), ("related", related)):
            if losses is not None:
                getattr(self, f"_{name}_loss").add_(losses.sum(dtype=torch.float64))
                getattr(self, f"_{name}_rows").add_(losses.numel())

    def stream_losses(self) -> dict[str, float]:
        """Mean loss of the plain and of the related rows; nan where there was none. Waits for the device."""
        sums = torch.stack([self._plain_loss, self._plain_rows, self._related_loss, self._related_rows]).tolist()
        return {
            name: sums[k] / sums[k + 1] if sums[k + 1] else float("nan") for k, name in ((0, "plain"), (2, "related"))
        }
