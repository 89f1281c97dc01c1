"""LDAM with deferred re-weighting."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.losses.balanced_softmax import checked_counts


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

    def forward(
        self, logits: Float[Tensor, "rows classes"], targets: Int[Tensor, " rows"] | Float[Tensor, "rows classes"]
    ) -> Float[Tensor, ""]:
        if not targets.is_floating_point():
            # F.one_hot reads the largest label back from the device; a comparison does not
            targets = targets[:, None] == torch.arange(logits.shape[1], device=logits.device)
        soft = targets.to(self.margins.dtype)
        log_probabilities = (self.scale * (logits.float() - soft * self.margins)).log_softmax(1)
        mass = soft * self.weights
        return -(mass * log_probabilities).sum() / mass.sum()

    def extra_repr(self) -> str:
        return f"scale={self.scale}, reweight_epoch={self.reweight_epoch}"
