"""Losses of learning without labels: masked pixels (MAE)."""

from jaxtyping import Float
from torch import Tensor

from batchformer.nn.streams import repeat_targets

_EPS = 1e-6


def masked_pixel_loss(
    predictions: Float[Tensor, "rows patches pixels"],
    patches: Float[Tensor, "batch patches pixels"],
    mask: Float[Tensor, "batch patches"],
    normalise: bool = True,
) -> Float[Tensor, " rows"]:
    """The mean squared error of the masked patches, for each row (MAE, section 3).

    For patch p of N with mask m_p (1 where masked) and prediction z_p:

        L = sum_p m_p mean((z_p - x_p)^2) / sum_p m_p

    `normalise`: each patch x_p has mean 0 and (unbiased) variance 1. Two streams: the targets and the mask are those of
    both. All images have the same number of masked patches, so the mean over rows is the published loss.
    """
    if normalise:
        patches = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + _EPS).sqrt()
    patches, mask = repeat_targets((patches, mask), predictions)
    error = (predictions.float() - patches).square().mean(-1)
    return (error * mask).sum(1) / mask.sum(1)
