"""How a detector's predictions are compared with the objects: matching, losses of each layer, number of boxes.

Matching and losses are transformers' own. What is not: the number of boxes they are divided by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchformer.parallel.lost import naming_the_lost

Labels = Sequence[Mapping[str, Tensor]]
Parts = dict[str, Tensor]
_NOT_OF_EVERY_LAYER = "masks"  # only the last decoder layer has them


@torch.compiler.disable
def mean_boxes(labels: Labels, device: torch.device) -> float:
    """The objects of a batch, in the mean over the processes that train together, and at least 1: as released.

    With it the mean of the processes' gradients, which DDP and FSDP take, is that of one process with all the images,
    however the objects are spread. transformers counts those of each process by itself; and once accelerate is in use
    (its `Accelerator`, transformers' `Trainer`), the objects of all, divided by the number of processes twice.

    Where no gradient is recorded, each process counts its own: their shares of a test set may be of unequal lengths,
    and the longer ones would wait for ever.
    """
    count = float(sum(len(one["class_labels"]) for one in labels))
    if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        total = torch.tensor(count, device=device)
        assert dist.group.WORLD is not None
        with naming_the_lost(dist.group.WORLD, f"the number of boxes ({count:g})"):
            dist.all_reduce(total)
            count = total.item() / dist.get_world_size()
    return max(1.0, count)


def layer_losses(criterion: Any, predictions: Mapping[str, Tensor], labels: Labels, boxes: float) -> Parts:
    """`criterion`, one of transformers, for one layer's predictions, which are matched with the objects first."""
    indices = criterion.matcher(predictions, labels)
    parts: Parts = {}
    for name in criterion.losses:
        if name != _NOT_OF_EVERY_LAYER or "pred_masks" in predictions:
            parts.update(criterion.get_loss(name, predictions, labels, indices, boxes))
    return parts


def weighted(parts: Parts, weights: Mapping[str, float]) -> Tensor:
    """Their sum; what has no weight (the cardinality error, to be looked at) does not count."""
    terms = [weight * parts[name] for name, weight in weights.items() if name in parts]
    return torch.stack([term.reshape(()) for term in terms]).sum()


def decoder_losses(
    criterion: Any,
    last: dict[str, Tensor],
    outputs_class: Tensor | None,
    outputs_coord: Tensor | None,
    labels: Labels,
    weights: Mapping[str, float],
) -> tuple[Tensor, Parts, list[dict[str, Tensor]] | None]:
    """The loss of the last decoder layer and, where they are given, of those before; as transformers returns it.

    That is: the loss, its parts (those of layer i end in _i), and the predictions of the layers before the last.
    """
    boxes = mean_boxes(labels, last["logits"].device)
    parts = layer_losses(criterion, last, labels, boxes)
    loss = weighted(parts, weights)
    if outputs_class is None or outputs_coord is None:
        return loss, parts, None
    earlier = [
        {"logits": logits, "pred_boxes": found}
        for logits, found in zip(outputs_class[:-1], outputs_coord[:-1], strict=True)
    ]
    for number, layer in enumerate(earlier):
        of_layer = layer_losses(criterion, layer, labels, boxes)
        loss = loss + weighted(of_layer, weights)
        parts |= {f"{name}_{number}": value for name, value in of_layer.items()}
    return loss, parts, earlier
