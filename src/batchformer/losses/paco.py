"""The loss of parametric contrastive learning."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.losses.classification import checked_counts


class PaCoLoss(nn.Module):
    """One softmax over class logits and contrasts with other samples.

    Cui et al., "Parametric Contrastive Learning" (ICCV 2021), as released. For the class prior pi, an anchor of class y
    with class logits z (its products with the parametric centres) and projection q, and contrasts f_j of classes y_j,
    all unit vectors:

        s_j = q . f_j / T,    D = sum_c exp(z_c + log pi_c) + gamma sum_j exp(s_j)

        L = - [ beta log(exp(z_y + log pi_y) / D) + sum_{j: y_j = y} alpha log(exp(s_j) / D) ] / (beta + alpha n_y)

    where n_y counts the contrasts of class y. The anchor itself, which is one of the contrasts, is left out of n_y, of
    the sum and of D. The released code has a temperature of the class logits too (`supt`), which is 1 in all its
    scripts. With alpha = gamma = 0 this is Balanced Softmax.

    Args:
        class_counts: training images of each class, in label order.
        alpha: weight of every contrast of the anchor's class.
        beta: weight of the anchor's class logit.
        gamma: weight of the contrasts in the denominator.
        temperature: T.
    """

    log_prior: Float[Tensor, " classes"]

    def __init__(
        self,
        class_counts: Sequence[int] | Tensor,
        alpha: float = 0.01,
        beta: float = 1.0,
        gamma: float = 1.0,
        temperature: float = 0.05,
    ) -> None:
        super().__init__()
        if min(alpha, beta, gamma) < 0 or alpha + beta == 0 or temperature <= 0:
            raise UserError(
                f"PaCo: alpha={alpha}, beta={beta} and gamma={gamma} must not be negative, alpha and beta not both 0, "
                f"and temperature={temperature} above 0."
            )
        counts = checked_counts(class_counts, "PaCo")
        self.alpha, self.beta, self.gamma, self.temperature = alpha, beta, gamma, temperature
        self.register_buffer("log_prior", (counts / counts.sum()).log().float(), persistent=False)

    def forward(
        self,
        logits: Float[Tensor, "rows classes"],
        targets: Int[Tensor, " rows"],
        anchors: Float[Tensor, "rows dim"],
        contrasts: Float[Tensor, "samples dim"],
        contrast_targets: Int[Tensor, " samples"],
        own: Int[Tensor, " rows"],
    ) -> Float[Tensor, ""]:
        """The mean over the rows; `own` is the number of each anchor among the contrasts."""
        # by torch's own precision of float32 products; half precision would leave two digits of the cosines
        with torch.autocast(logits.device.type, enabled=False):
            similar = anchors.float() @ contrasts.float().T / self.temperature
            of_class = logits.float() + self.log_prior
            other = own[:, None] != torch.arange(len(contrasts), device=own.device)
            positive = other & (targets[:, None] == contrast_targets)
            of_samples = similar.masked_fill(~other, -torch.inf)
            if self.gamma == 0:
                total = of_class.logsumexp(1)
            else:
                total = torch.cat([of_class, of_samples + math.log(self.gamma)], 1).logsumexp(1)
            pulled = self.beta * of_class.gather(1, targets[:, None]).squeeze(1)
            pulled = pulled + self.alpha * (similar * positive).sum(1)
            return (total - pulled / (self.beta + self.alpha * positive.sum(1))).mean()

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}, gamma={self.gamma}, temperature={self.temperature}"
