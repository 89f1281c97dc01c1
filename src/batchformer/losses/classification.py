"""Losses of classifiers: for imbalanced classes, and with a teacher."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.errors import UserError

Logits = Float[Tensor, "rows classes"]
Targets = Int[Tensor, " rows"] | Float[Tensor, "rows classes"]


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

    def __init__(self, class_counts: Sequence[int] | Tensor, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction
        log_counts = checked_counts(class_counts, "Balanced Softmax").log().float()
        self.register_buffer("log_counts", log_counts, persistent=False)

    def forward(self, logits: Logits, targets: Targets) -> Float[Tensor, "*rows"]:
        return F.cross_entropy(logits + self.log_counts, targets, reduction=self.reduction)


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

    def __init__(self, class_counts: Sequence[int] | Tensor, tau: float = 1.0, reduction: str = "mean") -> None:
        super().__init__()
        counts = checked_counts(class_counts, "logit adjustment")
        self.tau, self.reduction = tau, reduction
        self.register_buffer("adjustment", (tau * (counts / counts.sum()).log()).float(), persistent=False)

    def forward(self, logits: Logits, targets: Targets) -> Float[Tensor, "*rows"]:
        return F.cross_entropy(logits + self.adjustment, targets, reduction=self.reduction)

    def extra_repr(self) -> str:
        return f"tau={self.tau}"


class LDAMLoss(nn.Module):
    """Label-distribution-aware margins, and class weights from some epoch on.

    Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss" (NeurIPS 2019), eq. 12-13:
    rare classes get larger margins,

        m_c = max_margin * n_c^(-1/4) / max_k n_k^(-1/4)
        L(z, y) = CE(scale * (z - m_y e_y), y)

    The logits z must be cosines (`batchformer.models.NormedLinear`): on unbounded logits the network outgrows a margin.

    Deferred re-weighting (DRW, section 3.3): before `reweight_epoch` all classes weigh the same; from it on class c
    weighs 1 / E_c, where E_c = (1 - beta^n_c) / (1 - beta) is the effective number of Cui et al. (CVPR 2019), and the
    weights are scaled to sum to the number of classes. A batch is averaged by its weights, as torch's weighted cross
    entropy does (and with it the released LDAM code). None means never. Call `set_epoch` at the start of each epoch.

    Soft labels: row i loses the margin y_ic m_c from logit c, and counts class c with weight y_ic w_c; one-hot rows
    give exactly the loss of class ids.
    """

    margins: Float[Tensor, " classes"]
    weights: Float[Tensor, " classes"]
    _deferred: Float[Tensor, " classes"]

    def __init__(
        self,
        class_counts: Sequence[int] | Tensor,
        max_margin: float = 0.5,
        scale: float = 30.0,
        reweight_epoch: int | None = None,
        beta: float = 0.9999,
    ) -> None:
        super().__init__()
        if not 0 <= beta < 1:
            raise UserError(f"LDAM's beta={beta} must be in [0, 1): 0.9999 is the published value, 0 weighs all alike.")
        counts = checked_counts(class_counts, "LDAM")
        margins = counts**-0.25
        deferred = (1 - beta) / (1 - beta**counts)
        self.scale, self.reweight_epoch = scale, reweight_epoch
        self.register_buffer("margins", (margins * max_margin / margins.max()).float(), persistent=False)
        self.register_buffer("weights", torch.ones_like(self.margins), persistent=False)
        self.register_buffer("_deferred", (deferred / deferred.mean()).float(), persistent=False)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the class weights; in place, so that a captured CUDA graph sees them."""
        if self.reweight_epoch is not None and epoch >= self.reweight_epoch:
            self.weights.copy_(self._deferred)
        else:
            self.weights.fill_(1.0)

    def forward(self, logits: Logits, targets: Targets) -> Float[Tensor, ""]:
        if not targets.is_floating_point():
            # F.one_hot reads the largest label back from the device; a comparison does not
            targets = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
        soft = targets.to(self.margins.dtype)
        log_probabilities = (self.scale * (logits.float() - soft * self.margins)).log_softmax(1)
        mass = soft * self.weights
        return -(mass * log_probabilities).sum() / mass.sum()

    def extra_repr(self) -> str:
        return f"scale={self.scale}, reweight_epoch={self.reweight_epoch}"


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


class DistillationLoss(nn.Module):
    """(1 - alpha) L(class head, labels) + alpha D(distillation head, teacher), for outputs (class, distillation) and
    targets (labels, logits of the teacher): DeiT's (Touvron et al., "Training data-efficient image transformers",
    section 4).

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

    def forward(self, outputs: tuple[Logits, Logits], targets: tuple[Targets, Logits]) -> Float[Tensor, ""]:
        labels, teacher = targets
        by_class, by_token = outputs
        return (1 - self.alpha) * self.criterion(by_class, labels) + self.alpha * self._from_teacher(by_token, teacher)

    def _from_teacher(self, logits: Tensor, teacher: Tensor) -> Tensor:
        if self.kind == "hard":
            return F.cross_entropy(logits, teacher.argmax(1))
        return soft_distillation(logits, teacher, self.tau)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, alpha={self.alpha}, tau={self.tau}"


def soft_distillation(logits: Logits, teacher: Logits, tau: float) -> Float[Tensor, ""]:
    """tau^2 KL(softmax(teacher / tau) || softmax(logits / tau)), the mean over the rows of its sum over the classes."""
    student, target = (F.log_softmax(z.float() / tau, 1) for z in (logits, teacher))
    return tau**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)
