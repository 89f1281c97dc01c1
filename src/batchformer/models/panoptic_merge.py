"""Merge the masks a detector predicts for its queries into one panoptic segmentation of the image."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

_SMALLEST = 4  # pixels; DETR drops segments of this area and below


@torch.no_grad()
def panoptic_segments(
    outputs: Any,
    canvas: tuple[int, int],
    sizes: Int[Tensor, "batch 2"],
    original_sizes: Int[Tensor, "batch 2"],
    is_thing: Sequence[bool],
    threshold: float = 0.85,
) -> list[dict[str, Any]]:
    """For each image `segmentation`, segment ids from 1 in the size of the original, and `segments_info`.

    As DETR does it: each pixel goes to the query with the largest mask logit, among those with an object of probability
    above `threshold` (the last class is "nothing"); queries of the same stuff are one segment; segments of four pixels
    or less are dropped and their pixels given to others. `outputs` has `logits` and `pred_masks`, as
    `DetrForSegmentation` returns them; `canvas` is the size the batch was padded to, `sizes` and `original_sizes` are
    heights and widths before padding and before resizing.

    transformers' `post_process_panoptic_segmentation` is no substitute: it treats the padding as part of the image, and
    after fusing stuff it assigns segment ids twice.
    """
    scores, labels = outputs.logits.softmax(-1).max(-1)
    results = []
    for k, (size, original) in enumerate(zip(sizes.tolist(), original_sizes.tolist(), strict=True)):
        sure = (labels[k] != outputs.logits.shape[-1] - 1) & (scores[k] > threshold)
        masks = _in_original(outputs.pred_masks[k, sure], canvas, size, original)
        results.append(_merge(masks, labels[k, sure].tolist(), scores[k, sure].tolist(), is_thing))
    return results


def _in_original(
    masks: Float[Tensor, "queries rows columns"], canvas: tuple[int, int], size: Sequence[int], original: Sequence[int]
) -> Float[Tensor, "queries height width"]:
    """Resize masks to the padded canvas, crop the image without padding, and resize to its original size."""
    if not len(masks):
        return masks.new_zeros(0, *original)
    whole = interpolate(masks[None].float(), size=tuple(canvas), mode="bilinear", align_corners=False)
    return interpolate(whole[..., : size[0], : size[1]], size=tuple(original), mode="bilinear", align_corners=False)[0]


def _merge(
    masks: Float[Tensor, "queries height width"], labels: list[int], scores: list[float], is_thing: Sequence[bool]
) -> dict[str, Any]:
    first_of: dict[int, int] = {}
    # the query whose segment each query belongs to: its own, or the first of the same stuff
    owner = [query if is_thing[label] else first_of.setdefault(label, query) for query, label in enumerate(labels)]
    alive = torch.ones(len(labels), dtype=torch.bool, device=masks.device)
    belongs = torch.tensor(owner, dtype=torch.int64, device=masks.device)
    winner = masks.new_zeros(masks.shape[1:], dtype=torch.int64)
    while alive.any():
        winner = belongs[masks.masked_fill(~alive[:, None, None], -torch.inf).argmax(0)]
        areas = torch.bincount(winner.reshape(-1), minlength=len(labels))
        small = alive & (areas[belongs] <= _SMALLEST)
        if not small.any():
            break
        alive &= ~small
    kept = sorted({owner[query] for query in alive.nonzero()[:, 0].tolist()})
    number = torch.zeros(len(labels) + 1, dtype=torch.int32, device=masks.device)
    number[kept] = torch.arange(1, len(kept) + 1, dtype=torch.int32, device=masks.device)
    segmentation = number[winner] if kept else torch.zeros_like(winner, dtype=torch.int32)
    infos = [
        {
            "id": place,
            "label_id": labels[query],
            "score": max(s for s, o in zip(scores, owner, strict=True) if o == query),
        }
        for place, query in enumerate(kept, 1)
    ]
    return {"segmentation": segmentation, "segments_info": infos}
