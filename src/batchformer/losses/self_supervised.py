"""Losses of learning without labels: masked pixels (MAE), and contrast of queries with keys (MoCo)."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.nn.streams import repeat_targets

Pairs = Literal["all", "plain"]
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
        mean, deviation = patch_statistics(patches)
        patches = (patches - mean) / deviation
    patches, mask = repeat_targets((patches, mask), predictions)
    error = (predictions.float() - patches).square().mean(-1)
    return (error * mask).sum(1) / mask.sum(1)


def patch_statistics(
    patches: Float[Tensor, "batch patches pixels"],
) -> tuple[Float[Tensor, "batch patches 1"], Float[Tensor, "batch patches 1"]]:
    """Mean and deviation by which the pixels of each patch are normalised."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + _EPS).sqrt()


def contrastive_loss(
    queries: Float[Tensor, "rows dim"],
    keys: Float[Tensor, "all_rows dim"],
    own: Int[Tensor, " rows"],
    temperature: float,
) -> Float[Tensor, ""]:
    """InfoNCE of MoCo-v3: the mean over the queries of 2 T CE(q k / T, own), `own` being the row of a query's key.

    `keys` are those of all processes. Both are normalised here. The factor 2 T keeps the size of the gradient
    independent of the temperature, as published.
    """
    logits = F.normalize(queries.float(), dim=1) @ F.normalize(keys.float(), dim=1).T / temperature
    return 2 * temperature * F.cross_entropy(logits, own)


def queue_loss(
    queries: Float[Tensor, "rows dim"],
    keys: Float[Tensor, "rows dim"],
    queue: Float[Tensor, "size dim"],
    temperature: float,
) -> Float[Tensor, ""]:
    """InfoNCE of MoCo-v2: the mean over the queries of CE([q k, q queue] / T, 0). The queue holds unit vectors."""
    queries, keys = F.normalize(queries.float(), dim=1), F.normalize(keys.float(), dim=1)
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def pair_streams(
    queries: Float[Tensor, "rows dim"], keys: Float[Tensor, "other_rows dim"], batch: int, which: Pairs
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a stream of the queries and a stream of the keys, (plain, plain) first.

    "all": every query stream with every key stream, four pairs where both have two, as released; "plain": that of the
    plain ones alone. With one stream there is one pair.
    """
    of_queries, of_keys = (rows.split(batch) for rows in (queries, keys))
    if which == "plain":
        return [(of_queries[0], of_keys[0])]
    return [(query, key) for query in of_queries for key in of_keys]
