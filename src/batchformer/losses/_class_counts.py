"""Training images per class, checked once for every loss that divides by them or takes their logarithm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.errors import UserError


def checked_counts(class_counts: Sequence[int] | Tensor, loss: str) -> Float[Tensor, " classes"]:
    counts = torch.as_tensor(class_counts, dtype=torch.float64)
    if counts.ndim != 1 or counts.numel() == 0:
        raise UserError(f"{loss} needs class_counts as one number of training images per class, in label order.")
    if empty := (counts <= 0).nonzero().flatten().tolist():
        raise UserError(
            f"{loss} cannot handle classes without training images (class {', '.join(map(str, empty[:5]))}"
            f"{', ...' if len(empty) > 5 else ''}): add images, drop the class, or train with cross_entropy."
        )
    return counts
