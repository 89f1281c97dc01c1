"""The losses of RIDE: of its experts, and of the router that decides how many of them an image passes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from batchformer.losses.classification import LDAMLoss, checked_counts, soft_distillation

ExpertLogits = Float[Tensor, "rows experts classes"]


class RideLoss(nn.Module):
    """Sum over the experts of the loss of each and its distance to their mean (a negative factor makes them diverse).

    Wang et al., "Long-tailed Recognition by Routing Diverse Distribution-Aware Experts" (ICLR 2021), section 3, for
    logits z_e of expert e and their mean m, which is not differentiated, class counts n_c and C classes:

        L = sum_e  base(z_e, y) + diversity * mean(T)^2 * KL(softmax(m / T) || softmax(z_e / T))
        T_c = w_c / max w,   w_c = 1 - f + f C n_c / sum n

    T is 1 for all classes before `reweight_epoch`. The released code adds the KL in this direction; with a `diversity`
    of exactly 0 it takes base(m, y) for each expert instead, the collaborative loss, so that an ablation with 0 is not
    RIDE without diversity. Here 0 is without diversity, and `collaborative` is an option of its own.

    With a teacher (targets are labels and its logits t), tau^2 KL(softmax(t / tau) || softmax(m / tau)) is added with
    `teacher_weight`. RIDE's own code adds the whole sum once per expert (`times_experts`); BatchFormer's copy once.

    Args:
        base: loss of one expert from logits and labels, a mean over rows: LDAM in the paper, whose margins are 30 times
            the usual ones where the logits are 30 times the cosines.
        class_counts: training images of each class.
        diversity: factor of the distance to the mean (-0.45 for CIFAR, -0.2 else).
        temperature_factor: f (0.05 for CIFAR, 0.02 for ImageNet-LT, 0.015 for iNaturalist).
        reweight_epoch: first epoch with T by class; None means never. Call `set_epoch` at the start of each epoch.
    """

    temperature: Float[Tensor, " classes"]
    _deferred: Float[Tensor, " classes"]

    def __init__(
        self,
        base: nn.Module,
        class_counts: Sequence[int] | Tensor,
        diversity: float = -0.2,
        temperature_factor: float = 0.02,
        reweight_epoch: int | None = None,
        collaborative: bool = False,
        teacher_weight: float = 0.0,
        teacher_temperature: float = 1.5,
        times_experts: bool = False,
    ) -> None:
        super().__init__()
        counts = checked_counts(class_counts, "RIDE")
        weights = 1 - temperature_factor + temperature_factor * len(counts) * counts / counts.sum()
        self.base, self.diversity, self.reweight_epoch = base, diversity, reweight_epoch
        self.collaborative, self.times_experts = collaborative, times_experts
        self.teacher_weight, self.teacher_temperature = teacher_weight, teacher_temperature
        self.register_buffer("_deferred", (weights / weights.max()).float(), persistent=False)
        self.register_buffer("temperature", torch.ones_like(self._deferred), persistent=False)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose temperatures and class weights; in place, so that a captured CUDA graph sees them."""
        if isinstance(self.base, LDAMLoss):
            self.base.set_epoch(epoch)
        if self.reweight_epoch is not None and epoch >= self.reweight_epoch:
            self.temperature.copy_(self._deferred)
        else:
            self.temperature.fill_(1.0)

    def forward(
        self, logits: ExpertLogits, targets: Int[Tensor, " rows"] | tuple[Int[Tensor, " rows"], Tensor]
    ) -> Float[Tensor, ""]:
        labels, teacher = targets if isinstance(targets, tuple) else (targets, None)
        logits = logits.float()
        experts, mean = logits.shape[1], logits.mean(1)
        if self.collaborative:
            loss = experts * self.base(mean, labels)
        else:  # the mean over all rows of all experts, times their number
            loss = experts * self.base(logits.flatten(0, 1), labels.repeat_interleave(experts, 0))
        if self.diversity:
            loss = loss + self.diversity * self.temperature.mean().square() * self.distance(logits, mean)
        if teacher is None:
            return loss
        loss = loss + self.teacher_weight * soft_distillation(mean, teacher, self.teacher_temperature)
        return experts * loss if self.times_experts else loss

    def distance(self, logits: ExpertLogits, mean: Float[Tensor, "rows classes"]) -> Float[Tensor, ""]:
        """Mean over the rows of the sum over the experts of KL(softmax(mean / T) || softmax(expert / T))."""
        of_mean = (mean.detach()[:, None] / self.temperature).log_softmax(2)
        of_experts = (logits / self.temperature).log_softmax(2)
        return F.kl_div(of_experts, of_mean, reduction="none", log_target=True).sum((1, 2)).mean()

    def extra_repr(self) -> str:
        return f"diversity={self.diversity}, reweight_epoch={self.reweight_epoch}, collaborative={self.collaborative}"


class RoutingLoss(nn.Module):
    """Binary cross entropy of the router's scores: does a further expert help?

    The target after expert k is 1 where the mean of the experts 1..k is wrong and that of some more experts is right.
    Mean over the rows and over the experts but the last. These are few images, and each weighs `pos_weight`.
    """

    pos_weight: Float[Tensor, ""]

    def __init__(self, pos_weight: float = 100.0) -> None:
        super().__init__()
        self.register_buffer("pos_weight", torch.tensor(pos_weight), persistent=False)

    def forward(self, scores: Float[Tensor, "rows stops"], right: Bool[Tensor, "rows experts"]) -> Float[Tensor, ""]:
        """`right`: whether the mean of the first expert, of the first two, and so on, is right."""
        later = right.flip(1).cumsum(1).flip(1)[:, 1:] > 0
        helps = ~right[:, :-1] & later
        return F.binary_cross_entropy_with_logits(scores.float(), helps.float(), pos_weight=self.pos_weight)
