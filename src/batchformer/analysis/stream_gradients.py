"""Where the gradients of both streams go: into the shared blocks, and onto the other samples of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchformer.attach import Attachment, attachment_of
from batchformer.attach.contexts import Mode, set_mode, untouched
from batchformer.errors import UserError
from batchformer.nn.streams import plain_count, repeat_targets

RowLosses = Callable[[Any, Any], Tensor]


@dataclass
class GradientOnOthers:
    """The mean over the samples looked at of: the share of the gradient of a related row's loss on other samples.

    `norm_share`: sum over j != i of |g_ij| / sum over all j of |g_ij|. `squared_share`: the same of |g_ij|^2, the part
    of the gradient's energy. g_ij is the gradient of the loss of sample i's related row at sample j's tokens (or
    pixels). Many small gradients add up in the first and hardly count in the second: say which one you quote.
    """

    norm_share: float
    squared_share: float
    samples: int


def gradient_on_others(
    model: nn.Module,
    inputs: Tensor,
    targets: Any,
    *,
    wrt: Literal["tokens", "images"] = "tokens",
    mode: Mode = "train",
    samples: int = 8,
    row_losses: RowLosses | None = None,
    seed: int = 0,
) -> GradientOnOthers:
    """How much of the gradient of one sample's loss falls on the other samples of its batch (paper, eq. 3).

    Args:
        wrt: at the tokens that enter the first insertion, or at the pixels.
        mode: "train" has dropout on and BatchNorm on the statistics of the batch (which relates samples, too);
            "quiet" has neither: what is on others then came through the insertions.
        samples: for so many samples, spread evenly over the related rows; each costs one backward.
        row_losses: losses per row from (outputs, targets); None: cross entropy with class ids or soft labels.
    """
    attachment = handle_of(model)
    row_losses = row_losses or cross_entropy_rows
    if len(inputs) < 2:
        raise UserError("the gradient on other samples needs a batch of two images or more.")
    if wrt not in ("tokens", "images"):
        raise UserError(f"wrt={wrt!r} is not known: say 'tokens' or 'images'.")
    if samples < 1:
        raise UserError(f"samples={samples}: the gradient is that of one sample or more.")
    entered: list[Tensor] = []

    def as_leaf(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if entered:
            return None
        entered.append(args[0].detach().requires_grad_())
        return (entered[0], *args[1:])

    with untouched(attachment.model, seed):
        set_mode(attachment.model, mode)
        if wrt == "images":
            entered.append(inputs.detach().clone().requires_grad_())
        handle = attachment.points[0].module.register_forward_pre_hook(as_leaf)
        try:
            outputs = attachment.model(entered[0] if wrt == "images" else inputs)
        finally:
            handle.remove()
        losses = row_losses(outputs, repeat_targets(targets, outputs))
        plain = plain_count(len(losses), attachment.points[0].module.streams)
        # Row `plain + i` is image i where the batch was doubled, and image `plain + i` where it was split.
        first_image = 0 if attachment.points[0].module.streams == "duplicate" else plain
        related = losses[plain:] * loss_scale(inputs.device)
        chosen = torch.arange(min(samples, len(related))) * len(related) // min(samples, len(related))
        norm_shares, squared_shares = [], []
        for i in chosen.tolist():
            (gradient,) = torch.autograd.grad(related[i], entered[0], retain_graph=True)
            norms = gradient[: len(inputs)].flatten(1).double().norm(dim=1)
            own = norms[first_image + i]
            norm_shares.append(1 - own / norms.sum())
            squared_shares.append(1 - own.square() / norms.square().sum())
    return GradientOnOthers(
        torch.stack(norm_shares).mean().item(), torch.stack(squared_shares).mean().item(), len(norm_shares)
    )


@dataclass
class BlockGradients:
    """Norm of the gradient of the mean loss of each stream at some parameters, and the cosine between both."""

    plain: float | None
    related: float | None
    cosine: float | None


def gradients_by_stream(
    plain_loss: Tensor | None, related_loss: Tensor | None, parameters: Sequence[Sequence[nn.Parameter]]
) -> list[BlockGradients]:
    """For each group of parameters. `.grad` is not touched; None where a loss does not reach the group."""
    flat = [p for group in parameters for p in group]
    scale = loss_scale(flat[0].device) if flat else 1.0
    by_stream = []
    for loss in (plain_loss, related_loss):
        if loss is None or not flat:
            by_stream.append([None] * len(flat))
        else:
            grads = torch.autograd.grad(loss * scale, flat, retain_graph=True, allow_unused=True)
            by_stream.append([None if g is None else g / scale for g in grads])
    found, start = [], 0
    for group in parameters:
        part = slice(start, start + len(group))
        found.append(_compare(by_stream[0][part], by_stream[1][part]))
        start += len(group)
    return found


def _compare(plain: Sequence[Tensor | None], related: Sequence[Tensor | None]) -> BlockGradients:
    norms = [_norm(grads) for grads in (plain, related)]
    pairs = [(a, b) for a, b in zip(plain, related, strict=True) if a is not None and b is not None]
    dot = sum((a.double() * b.double()).sum().item() for a, b in pairs)
    both = None not in norms and norms[0] > 0 and norms[1] > 0  # type: ignore[operator]
    return BlockGradients(norms[0], norms[1], dot / (norms[0] * norms[1]) if both else None)  # type: ignore[operator]


def _norm(gradients: Sequence[Tensor | None]) -> float | None:
    found = [g.double().square().sum() for g in gradients if g is not None]
    return torch.stack(found).sum().sqrt().item() if found else None


def loss_scale(device: torch.device) -> float:
    """Under float16 autocast gradients of single rows underflow: scale the loss, as training does."""
    half = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
    return 2.0**12 if half else 1.0


def cross_entropy_rows(outputs: Any, targets: Tensor) -> Tensor:
    """Losses per row of logits, of an output with `.logits`, or the mean over a tuple of logits (distilled DeiT)."""
    if isinstance(outputs, tuple | list):
        return torch.stack([cross_entropy_rows(o, targets) for o in outputs]).mean(0)
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(targets, Tensor):
        raise UserError(
            "the losses of rows are those of logits (rows, classes) and a tensor of class ids or soft labels: for any "
            "other model give row_losses=."
        )
    return F.cross_entropy(logits.float(), targets, reduction="none")


def handle_of(model: nn.Module) -> Attachment:
    attachment = attachment_of(model)
    if attachment is None:
        raise UserError(f"nothing is attached to this {type(model).__name__}: call attach first.")
    if not all(point.module.enabled for point in attachment.points):
        raise UserError("the module is disabled here: look at it outside of `disabled()`.")
    return attachment
