"""Loss and accuracy of the epoch so far, counted on the device without ever asking it."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.errors import NonFiniteLoss


class TrainMeter:
    """Sums of an epoch, in tensors that are updated in place: a captured CUDA graph may hold them.

    Reading (`values`, `raise_if_not_finite`) waits for the device; `update` never does.
    """

    #: the sums that an epoch starts anew and a checkpoint holds
    counted: ClassVar[tuple[str, ...]] = ("loss", "right", "rows", "batch")

    def __init__(self, device: torch.device, batches_per_step: int = 1) -> None:
        self.batches_per_step = batches_per_step
        self.first_step = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # times rows
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._rows = torch.zeros((), dtype=torch.int64, device=device)
        self._batch = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bad_batch = torch.full((), -1, dtype=torch.int64, device=device)

    def restart(self, global_step: int) -> None:
        """A new epoch begins at this step."""
        self.first_step = global_step
        for name in self.counted:
            getattr(self, f"_{name}").zero_()
        self._first_bad_batch.fill_(-1)

    @torch.no_grad()
    def update(self, loss: Float[Tensor, ""], right: Bool[Tensor, " rows"]) -> None:
        rows = right.numel()
        self._loss.add_(loss.double(), alpha=rows)
        self._right.add_(right.sum())
        self._rows.add_(rows)
        newly_bad = ~torch.isfinite(loss) & (self._first_bad_batch < 0)
        self._first_bad_batch.copy_(torch.where(newly_bad, self._batch, self._first_bad_batch))
        self._batch.add_(1)

    def values(self) -> tuple[float, float]:
        """Mean loss and accuracy in percent; nan before the first batch."""
        loss, right, rows = torch.stack([self._loss, self._right, self._rows]).tolist()
        return (loss / rows, 100 * right / rows) if rows else (float("nan"), float("nan"))

    def raise_if_not_finite(self, epoch: int) -> None:
        bad = int(self._first_bad_batch.item())
        if bad >= 0:
            raise NonFiniteLoss(
                f"the training loss is not finite since step {self.first_step + bad // self.batches_per_step} (epoch "
                f"{epoch}): try a lower model.optimizer.lr, more model.schedule.warmup_epochs, or "
                f"trainer.precision=32-true."
            )

    def state_dict(self) -> dict[str, float]:
        counted = {name: getattr(self, f"_{name}").item() for name in self.counted}
        return {**counted, "first_step": self.first_step}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name in self.counted:
            getattr(self, f"_{name}").fill_(state[name])
        self.first_step = int(state["first_step"])
