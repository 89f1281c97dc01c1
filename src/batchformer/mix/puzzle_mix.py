"""Puzzle-Mix: two images mixed by the mask of least energy, from the saliency of the model in training."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchformer.attach.contexts import evaluating
from batchformer.errors import UserError
from batchformer.mix.base import Draw, Images, Mix, Mixed, MixKeywords, SoftLabels, need_module, refuse_in_worker
from batchformer.mix.graph_cut import least_energy
from batchformer.mix.normalisation import both_or_none, unit_range
from batchformer.mix.puzzle_energy import cell_saliency, move_cells, puzzle_energy, transport_plan
from batchformer.nn.inputs import as_number, is_whole


@dataclass(frozen=True)
class PuzzleDraw(Draw):
    """`Draw` and the number of blocks per side of the mask: a Python number, since shapes depend on it."""

    blocks: int


class PuzzleMix(Mix):
    """x = (1 - M) T_A(x_A) + M T_B(x_B), y by the mean of M; M and T by saliency (Kim, Choo and Song, 2020).

    Paper: saliency is the norm of the loss' gradient at the input, averaged over blocks. The mask M takes `labels`
    steps from 0 to 1 per block and minimises an energy of lost saliency, smoothness of the mask, fit of the pictures at
    its seams and a prior around lambda ~ Beta(alpha, alpha); transports T move salient blocks to where M shows them.

    Released code: an extra forward and backward pass in eval mode gives sqrt(mean over channels of gradient**2);
    blocks a side drawn for each batch from 2, 4, 8, 16; three labels; beta 1.2, gamma 0.5, eta 0.2 as in
    `puzzle_energy`; alpha-beta swap on the CPU, image after image (`gco`); transport at the resolution of the blocks
    (ImageNet) or of at most 4 pixels (CIFAR), eps 0.8. Its loss is binary cross entropy on CIFAR and cross entropy on
    ImageNet; adding adversarial noise is an option there and not offered here.

    Here: the same, with one lambda and number of blocks for the batch as there; the mask by an exact batched cut
    (`least_energy`), which is never above the energy of alpha-beta swap and mostly at or a little below it. Blocks are
    drawn from those of `blocks` that divide both sides of the image; images may be rectangular, cells then are. The
    pass through the model runs in eval mode under the caller's autocast and leaves no gradients and no statistics.

    Args:
        model: the model in training; its input gradient is the saliency.
        criterion: criterion(model(images), soft targets), a mean over the batch; cross entropy by default.
        labels: steps of the mask, 3 or 2.
        transport: move blocks to where they are seen.
        transport_size: side of the blocks that are moved, in pixels, where it is smaller than those of the mask and
            divides them; None moves the mask's blocks.
        mean, std: what the images were normalised by, a number for each channel or one for all: seams are compared in
            colours from 0 to 1. Without them each image is stretched to its own range.
        options: those of `Mix`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        *,
        criterion: Callable[[Any, Tensor], Tensor] | None = None,
        blocks: int | Sequence[int] = (2, 4, 8, 16),
        labels: int = 3,
        beta: float = 1.2,
        gamma: float = 0.5,
        eta: float = 0.2,
        neighbourhood: int = 4,
        transport: bool = True,
        transport_size: int | None = None,
        transport_eps: float = 0.8,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        **options: Unpack[MixKeywords],
    ) -> None:
        need_module("PuzzleMix", "the model in training", model)
        super().__init__(num_classes, **options)
        counts = tuple(blocks) if isinstance(blocks, Iterable) else (blocks,)
        if not counts or not all(is_whole(count) and count > 1 for count in counts):
            raise UserError(f"PuzzleMix: blocks={blocks!r} must be whole numbers of at least 2.")
        self.blocks = tuple(map(int, counts))
        if not is_whole(labels) or labels not in (2, 3):
            raise UserError(f"PuzzleMix: labels={labels!r} must be 2 or 3.")
        for name, value in {"beta": beta, "gamma": gamma, "eta": eta, "transport_eps": transport_eps}.items():
            if not 0 <= as_number(value) < math.inf:
                raise UserError(f"PuzzleMix: {name}={value!r} must be a number not below 0.")
        for name, size in {"neighbourhood": neighbourhood, "transport_size": transport_size}.items():
            if size is not None and not is_whole(size):
                raise UserError(f"PuzzleMix: {name}={size!r} must be a number of pixels, at least 1.")
        if criterion is not None and not callable(criterion):
            raise UserError(
                f"PuzzleMix: criterion={criterion!r} must be a function of what the model gives and targets."
            )
        self.model = model
        self.criterion = criterion or cross_entropy
        weights = {"beta": beta, "gamma": gamma, "eta": eta}
        self.energy_options: dict[str, Any] = {"labels": labels, "neighbourhood": neighbourhood, **weights}
        self.transport, self.transport_size, self.transport_eps = transport, transport_size, transport_eps
        self.mean, self.std = both_or_none("PuzzleMix", mean, std)

    def check(self, images: Tensor, targets: Tensor) -> None:
        super().check(images, targets)
        refuse_in_worker("PuzzleMix")

    def draw(self, images: Images) -> PuzzleDraw:
        height, width = images.shape[-2:]
        fitting = [count for count in self.blocks if height % count == 0 and width % count == 0]
        if not fitting:
            raise UserError(
                f"PuzzleMix cuts images into a whole number of blocks, and none of blocks={self.blocks} divides "
                f"{height} x {width} pixels: resize the images or pass other blocks."
            )
        drawn = super().draw(images)
        at = self.generator.device if self.generator is not None else torch.device("cpu")
        which = int(torch.randint(len(fitting), (), generator=self.generator, device=at))
        return PuzzleDraw(**{f.name: getattr(drawn, f.name) for f in fields(Draw)}, blocks=fitting[which])

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        if not isinstance(draw, PuzzleDraw):
            raise UserError("PuzzleMix.apply needs a draw with the number of blocks: pass what PuzzleMix.draw gives.")
        height, width = images.shape[-2:]
        if self.prob < 1 and not draw.share.any():  # a host synchronisation that saves a pass through the model
            nothing = images.new_zeros(1, 1, height, width)
            return Mixed(images, labels, draw.partner, labels.new_zeros(len(images)), nothing)
        saliency = self.saliency(images, labels)
        with torch.no_grad():
            pictures = unit_range(images, self.mean, self.std)
            energy = puzzle_energy(
                saliency, pictures, draw.partner, draw.share, blocks=draw.blocks, **self.energy_options
            )
            steps = energy.unary.shape[1] - 1
            mask = least_energy(energy).float() / steps * (draw.share > 0)[:, None, None]
            own, other = images, images[draw.partner]
            if self.transport:
                own, other = self._moved(own, other, mask, saliency, draw)
            full = _enlarge(mask, height, width)[:, None]
            mixed = torch.lerp(own, other, full.to(images.dtype))
            return Mixed(mixed, labels, draw.partner, mask.mean((1, 2)), full)

    def saliency(self, images: Images, labels: SoftLabels) -> Float[Tensor, "batch height width"]:
        """Norm over channels of the loss' gradient at each pixel; the model is left as it was."""
        # a DDP wrapper would broadcast buffers, and other processes may not be mixing this batch
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        clean = (labels - self.label_smoothing / self.num_classes) / (1 - self.label_smoothing)
        with evaluating(model), torch.enable_grad():
            seen = images.detach().requires_grad_()
            # each image's own loss, not its part of a mean, so that half precision does not round small gradients to 0
            loss = self.criterion(model(seen), clean)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise UserError(
                    "PuzzleMix needs the gradient of the loss, and what criterion= returned has none: let it return "
                    "the mean of the batch as one number, computed from what the model gives."
                )
            (gradient,) = torch.autograd.grad(loss * len(images), seen)
        return gradient.float().square().mean(1).sqrt()

    def _moved(
        self, own: Tensor, other: Tensor, mask: Tensor, saliency: Tensor, draw: PuzzleDraw
    ) -> tuple[Tensor, Tensor]:
        height, width = own.shape[-2:]
        rows, columns = self._transport_grid(height, width, draw.blocks)
        salient = cell_saliency(saliency, rows, columns)
        shown = _enlarge(mask, rows, columns)
        plan: Int[Tensor, "batch cells"] = transport_plan(salient, shown < 1, eps=self.transport_eps)
        other_plan = transport_plan(salient[draw.partner], shown > 0, eps=self.transport_eps)
        return move_cells(own, plan, rows, columns), move_cells(other, other_plan, rows, columns)

    def _transport_grid(self, height: int, width: int, blocks: int) -> tuple[int, int]:
        size, high, wide = self.transport_size, height // blocks, width // blocks
        if size is None or size >= min(high, wide) or high % size or wide % size:
            return blocks, blocks
        rows, columns = height // size, width // size
        if rows * columns > 1024:
            raise UserError(
                f"PuzzleMix: transport_size={size} makes {rows * columns} cells of an image of {height} x {width} "
                f"pixels, and a plan over more than 1024 is too large: choose larger blocks, or None."
            )
        return rows, columns


def cross_entropy(outputs: Any, targets: SoftLabels) -> Tensor:
    """Mean cross entropy of logits, or of a transformers output that has logits."""
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.shape != targets.shape:
        got = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UserError(
            f"PuzzleMix: the model gives {got} and num_classes needs logits of {tuple(targets.shape)}: let "
            f"num_classes be the number of its classes, or pass a criterion= for what it gives."
        )
    return F.cross_entropy(logits.float(), targets)


def _enlarge(mask: Float[Tensor, "batch rows columns"], height: int, width: int) -> Tensor:
    return mask.repeat_interleave(height // mask.shape[1], 1).repeat_interleave(width // mask.shape[2], 2)
