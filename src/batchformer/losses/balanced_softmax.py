"""Balanced Softmax."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.errors import UserError


class BalancedSoftmaxLoss(nn.Module):
    """Cross entropy under the label distribution of the training set.

    Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition" (NeurIPS 2020), eq. 4, for n_c training
    images of class c and logits z:

        L(z, y) = - log( n_y exp(z_y) / sum_c n_c exp(z_c) )  =  CE(z + log n, y)

    At test time nothing is added: the plain logits are those of a balanced test set. The released code does exactly
    this; it is logit adjustment with tau = 1, as a constant added to all logits (log of the number of images) changes
    no softmax.
    """

    log_counts: Float[Tensor, " classes"]

    def __init__(self, class_counts: Sequence[int] | Tensor) -> None:
        super().__init__()
        log_counts = checked_counts(class_counts, "Balanced Softmax").log().float()
        self.register_buffer("log_counts", log_counts, persistent=False)

    def forward(
        self, logits: Float[Tensor, "rows classes"], targets: Int[Tensor, " rows"] | Float[Tensor, "rows classes"]
    ) -> Float[Tensor, ""]:
        return F.cross_entropy(logits + self.log_counts, targets)


def checked_counts(class_counts: Sequence[int] | Tensor, loss: str) -> Float[Tensor, " classes"]:
    """Training images per class, for a loss that divides by them or takes their logarithm."""
    counts = torch.as_tensor(class_counts, dtype=torch.float64)
    if counts.ndim != 1 or counts.numel() == 0:
        raise UserError(f"{loss} needs class_counts as one number of training images per class, in label order.")
    if empty := (counts <= 0).nonzero().flatten().tolist():
        raise UserError(
            f"{loss} cannot handle classes without training images (class {', '.join(map(str, empty[:5]))}"
            f"{', ...' if len(empty) > 5 else ''}): add images, drop the class, or train with cross_entropy."
        )
    return counts
