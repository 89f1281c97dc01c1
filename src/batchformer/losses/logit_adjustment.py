"""Logit adjustment, as a loss."""

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.losses.balanced_softmax import checked_counts


class LogitAdjustedLoss(nn.Module):
    """Cross entropy with the log of the class prior added to the logits.

    Menon et al., "Long-tail learning via logit adjustment" (ICLR 2021), eq. 10, for the training prior
    pi_c = n_c / sum n and logits z:

        L(z, y) = CE(z + tau log pi, y)

    At test time nothing is added. tau = 1 is consistent for the balanced error and equals Balanced Softmax; larger
    values lean further towards the tail. The paper's other variant, subtracting tau log pi after plain training, needs
    no loss. BatchFormer's released code has Balanced Softmax only, without tau.
    """

    adjustment: Float[Tensor, " classes"]

    def __init__(self, class_counts: Sequence[int] | Tensor, tau: float = 1.0) -> None:
        super().__init__()
        counts = checked_counts(class_counts, "logit adjustment")
        self.tau = tau
        self.register_buffer("adjustment", (tau * (counts / counts.sum()).log()).float(), persistent=False)

    def forward(
        self, logits: Float[Tensor, "rows classes"], targets: Int[Tensor, " rows"] | Float[Tensor, "rows classes"]
    ) -> Float[Tensor, ""]:
        return F.cross_entropy(logits + self.adjustment, targets)

    def extra_repr(self) -> str:
        return f"tau={self.tau}"
