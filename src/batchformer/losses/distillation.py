"""DeiT's distillation (Touvron et al., "Training data-efficient image transformers", section 4)."""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.errors import UserError

Heads = tuple[Float[Tensor, "rows classes"], Float[Tensor, "rows classes"]]
Targets = tuple[Int[Tensor, " rows"] | Float[Tensor, "rows classes"], Float[Tensor, "rows classes"]]


class DistillationLoss(nn.Module):
    """(1 - alpha) L(class head, labels) + alpha D(distillation head, teacher), for outputs (class, distillation) and
    targets (labels, logits of the teacher).

        hard:  D = CE(z_d, argmax z_t)                                            (eq. 3)
        soft:  D = tau^2 KL(softmax(z_t / tau) || softmax(z_d / tau))             (eq. 2)

    The KL is the mean over the rows of its sum over the classes, as written; the released code divides by the number of
    classes besides, which for ImageNet makes the soft term a thousandth.
    """

    def __init__(
        self, criterion: nn.Module, kind: Literal["hard", "soft"] = "hard", alpha: float = 0.5, tau: float = 1.0
    ) -> None:
        super().__init__()
        if kind not in ("hard", "soft"):
            raise UserError(f'kind={kind!r} must be "hard" or "soft".')
        if not 0 <= alpha <= 1 or tau <= 0:
            raise UserError(f"alpha={alpha} must lie between 0 and 1, and tau={tau} above 0.")
        self.criterion, self.kind, self.alpha, self.tau = criterion, kind, alpha, tau

    def forward(self, outputs: Heads, targets: Targets) -> Float[Tensor, ""]:
        labels, teacher = targets
        by_class, by_token = outputs
        return (1 - self.alpha) * self.criterion(by_class, labels) + self.alpha * self._from_teacher(by_token, teacher)

    def _from_teacher(self, logits: Tensor, teacher: Tensor) -> Tensor:
        if self.kind == "hard":
            return F.cross_entropy(logits, teacher.argmax(1))
        student, target = (F.log_softmax(z.float() / self.tau, 1) for z in (logits, teacher))
        return self.tau**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, alpha={self.alpha}, tau={self.tau}"
