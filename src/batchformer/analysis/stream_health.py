"""Health of the related stream: statistics at every insertion and every block, on one batch.

V2 reports that training with insertions at many depths can collapse and leaves the reason open. Measured
here: whether related tokens keep their norm and still differ between samples, whether they are the same under
another dropout mask (what is not cannot be learnt from), what each insertion changes and how much of that comes from
other samples, how its attention is spread, and which gradient each stream sends into the shared blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.analysis.batch_attention import attention_weights, on_itself, relative_entropy
from batchformer.analysis.features import TokenStats, mean_cosine, relative_change, sample_signal, token_stats
from batchformer.analysis.gradient_influence import (
    GradientOnOthers,
    RowLosses,
    cross_entropy_rows,
    gradient_on_others,
    loss_scale,
)
from batchformer.analysis.recorded_forward import (
    InsertionCall,
    RecordedForward,
    attachment_or_error,
    record_forward,
    sibling_blocks,
)
from batchformer.attach import Attachment
from batchformer.attach.contexts import set_mode, temporary_attributes, untouched
from batchformer.errors import UserError
from batchformer.files import finite, write_json
from batchformer.nn.streams import plain_count, repeat_targets


@dataclass
class LayerAttention:
    """Per head of one layer: entropy relative to its largest value, and the attention of a sample to itself."""

    entropy: list[float]
    on_itself: list[float]


@dataclass
class PointHealth:
    """Statistics of one insertion.

    `change`: |module(x) - x| / |x| of the related tokens, dropout as in training; `change_quiet`: without dropout.
    `from_others`: |module(x) - module(each sample by itself)| / |x|, without dropout: what other samples do to a token.
    `direction_kept`: cosine between what leaves and what enters, without dropout (post-LN also rescales).
    `reproducible`: cosine between the related tokens that leave in two forwards with different dropout masks;
    `signal`: the same of what tells samples apart (tokens minus their mean over the batch): the share that survives.
    `..._plain`: of the plain tokens (below 1 only through the model's own dropout).
    `gradient`: norm of the gradient of the related loss at the parameters of the module.
    """

    path: str
    plain: TokenStats | None
    related_in: TokenStats
    related_out: TokenStats
    change: float
    change_quiet: float
    from_others: float
    direction_kept: float
    reproducible: float
    reproducible_plain: float | None
    signal: float
    signal_plain: float | None
    attention: list[LayerAttention]
    gradient: float | None


@dataclass
class BlockGradients:
    """Norm of the gradient of the mean loss of each stream at some parameters, and the cosine between both."""

    plain: float | None
    related: float | None
    cosine: float | None


@dataclass
class BlockHealth:
    """Statistics of one block: its output tokens in each stream (behind an insertion there), its gradients.

    `signal`: as of the insertions, of the related tokens.
    """

    path: str
    plain: TokenStats | None
    related: TokenStats | None
    signal: float | None
    gradient: BlockGradients


@dataclass
class StreamHealth:
    """`chance`: the loss of a uniform guess, log(classes). `gradient_on_others`: in training mode, and quiet."""

    batch: int
    positions: int | None
    streams: str
    plain_loss: float | None
    related_loss: float | None
    chance: float | None
    points: list[PointHealth]
    blocks: list[BlockHealth]
    gradient_on_others: dict[str, GradientOnOthers]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None where a number is not finite."""
        return finite(asdict(self))

    def save(self, path: str | Path) -> None:
        write_json(Path(path), self.as_dict())


def stream_health(
    model: nn.Module,
    inputs: Tensor,
    targets: Any,
    *,
    blocks: Sequence[str] | None = None,
    row_losses: RowLosses | None = None,
    positions: int | None = 16,
    samples: int = 8,
    seed: int = 0,
) -> StreamHealth:
    """Measure the streams of an attached model on one batch; model, gradients and random state are unchanged.

    Call it under autocast to measure in that precision.

    Args:
        blocks: submodules whose gradients and tokens are measured; None: those beside the insertions.
        row_losses: losses per row from (outputs, targets); None: cross entropy with class ids or soft labels.
        positions: token positions that are measured, evenly spread from the first; None: all of them.
        samples: for the gradient on other samples: one backward each, in training mode and quiet; 0 leaves it out.
    """
    attachment = attachment_or_error(model)
    row_losses = row_losses or cross_entropy_rows
    _check(attachment, len(inputs), positions, samples)
    paths = sibling_blocks(attachment) if blocks is None else [blocks] if isinstance(blocks, str) else list(blocks)
    if unknown := [path for path in paths if path not in dict(attachment.model.named_modules())]:
        raise UserError(f"blocks=: there is no submodule {unknown[0]!r}: model.named_modules() lists all.")
    with untouched(attachment.model, seed):
        set_mode(attachment.model, "train")
        seen = record_forward(attachment, inputs, paths, positions)
        with torch.no_grad():
            again = record_forward(attachment, inputs, paths, positions)
        losses = row_losses(seen.outputs, repeat_targets(targets, seen.outputs))
        plain = plain_count(len(losses), attachment.points[0].module.streams)
        plain_loss = losses[:plain].mean() if plain else None
        related_loss = losses[plain:].mean()
        of_points, of_blocks = _gradients(attachment, paths, plain_loss, related_loss)
        with torch.no_grad():
            set_mode(attachment.model, "quiet")
            points = [
                _point(call, other, gradient.related)
                for call, other, gradient in zip(seen.calls, again.calls, of_points, strict=True)
            ]
    shares = {
        mode: gradient_on_others(model, inputs, targets, mode=mode, samples=samples, row_losses=row_losses, seed=seed)
        for mode in (("train", "quiet") if samples else ())
    }
    first = seen.outputs[0] if isinstance(seen.outputs, tuple | list) else seen.outputs
    logits = getattr(first, "logits", first)
    return StreamHealth(
        batch=len(inputs),
        positions=positions,
        streams=attachment.points[0].module.streams,
        plain_loss=None if plain_loss is None else plain_loss.item(),
        related_loss=related_loss.item(),
        chance=math.log(logits.shape[1]) if isinstance(logits, Tensor) and logits.ndim == 2 else None,
        points=points,
        blocks=[_block(path, seen, again, gradient) for path, gradient in zip(paths, of_blocks, strict=True)],
        gradient_on_others=shares,  # type: ignore[arg-type]
    )


def _check(attachment: Attachment, images: int, positions: int | None, samples: int) -> None:
    split = attachment.points[0].module.streams == "split"  # half of the images are related
    if images < (4 if split else 2):
        raise UserError(f"the health of the streams needs a batch of {'four' if split else 'two'} images or more.")
    if positions is not None and positions < 1:
        raise UserError(f"positions={positions}: look at one or more, or at all with None.")
    if samples < 0:
        raise UserError(f"samples={samples}: give the number of samples, or 0 to leave the gradient on others out.")


def _gradients(
    attachment: Attachment, paths: list[str], plain: Tensor | None, related: Tensor
) -> tuple[list[BlockGradients], list[BlockGradients]]:
    """Gradients at the parameters of each insertion, and of each block without those of the insertions."""
    own = {id(p) for p in attachment.parameters()}
    groups = [[p for p in point.module.parameters() if p.requires_grad] for point in attachment.points]
    for path in paths:
        block = attachment.model.get_submodule(path)
        groups.append([p for p in block.parameters() if p.requires_grad and id(p) not in own])
    found = gradients_by_stream(plain, related, groups)
    return found[: len(attachment.points)], found[len(attachment.points) :]


def _point(call: InsertionCall, again: InsertionCall, gradient: float | None) -> PointHealth:
    quiet = call.module.relate(call.related_in)
    with temporary_attributes({layer.self_attn: {"group_size": 1} for layer in call.module.layers}):
        alone = call.module.relate(call.related_in)  # each sample attends to itself
    return PointHealth(
        path=call.path,
        plain=None if call.plain is None else token_stats(call.plain),
        related_in=token_stats(call.related_in),
        related_out=token_stats(call.related_out),
        change=relative_change(call.related_out, call.related_in),
        change_quiet=relative_change(quiet, call.related_in),
        from_others=((quiet.float() - alone.float()).norm() / call.related_in.float().norm()).item(),
        direction_kept=mean_cosine(quiet, call.related_in),
        reproducible=mean_cosine(call.related_out, again.related_out),
        reproducible_plain=_between(mean_cosine, call.plain, again.plain),
        signal=sample_signal(call.related_out, again.related_out),
        signal_plain=_between(sample_signal, call.plain, again.plain),
        attention=[_attention(*entered) for entered in call.attention],
        gradient=gradient,
    )


def _attention(attention: Any, x: Tensor, valid: Tensor | None) -> LayerAttention:
    weights = attention_weights(attention, x, valid)
    return LayerAttention(relative_entropy(weights, attention.group_size).tolist(), on_itself(weights).tolist())


def _block(path: str, seen: RecordedForward, again: RecordedForward, gradient: BlockGradients) -> BlockHealth:
    plain, related = seen.leaving.get(path, (None, None))
    stats = [None if tokens is None else token_stats(tokens) for tokens in (plain, related)]
    signal = _between(sample_signal, related, again.leaving.get(path, (None, None))[1])
    return BlockHealth(path, stats[0], stats[1], signal, gradient)


def _between(measure: Callable[[Tensor, Tensor], float], one: Tensor | None, other: Tensor | None) -> float | None:
    return None if one is None or other is None else measure(one, other)


def gradients_by_stream(
    plain_loss: Tensor | None, related_loss: Tensor | None, parameters: Sequence[Sequence[nn.Parameter]]
) -> list[BlockGradients]:
    """Gradient norms of both losses for each group of parameters; `.grad` stays as it is.

    None where a loss does not reach the group.
    """
    flat = [p for group in parameters for p in group]
    scale = loss_scale(flat[0].device) if flat else 1.0
    by_stream: list[list[Tensor | None]] = []
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
    squares = [[g.double().square().sum() for g in grads if g is not None] for grads in (plain, related)]
    norms = [torch.stack(found).sum().sqrt().item() if found else None for found in squares]
    pairs = [(a, b) for a, b in zip(plain, related, strict=True) if a is not None and b is not None]
    dot = sum((a.double() * b.double()).sum().item() for a, b in pairs)
    both = None not in norms and norms[0] > 0 and norms[1] > 0  # type: ignore[operator]
    return BlockGradients(norms[0], norms[1], dot / (norms[0] * norms[1]) if both else None)  # type: ignore[operator]
