"""Spatially modulated co-attention: where each object query looks (Gao et al. 2021, section 3.2). Only torch."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

_SMALLEST_SQUARED_SCALE = 1e-2  # a tenth of a cell: a map of one cell already, and nothing is divided by zero


class StartingLinear(nn.Linear):
    """A linear layer that says itself where it begins: with these weights and all biases at one number."""

    def __init__(self, dim: int, out: int, weights: Literal["zero", "xavier", "usual"], bias: float = 0.0) -> None:
        self.start = weights, bias
        super().__init__(dim, out)

    def reset_parameters(self) -> None:
        weights, bias = self.start
        if weights == "xavier":
            nn.init.xavier_uniform_(self.weight)
        elif weights == "zero":
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=0.02)
        nn.init.constant_(self.bias, bias)


class SpatialModulation(nn.Module):
    """From object queries to the logarithm of their weight maps, one per head, to be added to co-attention's scores.

    The paper: a query predicts the centre (c_w, c_h) of its object once (before the first layer) and, in every layer, a
    scale (s_w, s_h) and for each head an offset of the centre. Over the cells (i, j) of the feature map

        G(i, j) = exp(-(i - c_w)^2 / (beta s_w^2) - (j - c_h)^2 / (beta s_h^2)),   scores + log G before the softmax.

    Released code multiplies by the squared scale instead of dividing (`form="rate"`) and counts cells from their
    corners; here a cell is at its middle, so that 0.5 of an image is its middle.

    Args:
        heads: of the co-attention.
        separate: a map for each head, or one for all.
        scale: numbers per map, see `SMCADetrConfig`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        separate: bool = True,
        scale: Literal["independent", "single", "fixed"] = "independent",
        beta: float = 8.0,
        form: Literal["width", "rate"] = "width",
    ) -> None:
        super().__init__()
        self.maps, self.beta, self.form = heads if separate else 1, beta, form
        self.norm = nn.LayerNorm(dim)
        self.offset = StartingLinear(dim, 2 * heads, "xavier") if separate else None
        numbers = {"independent": 2, "single": 1, "fixed": 0}[scale]
        self.scale = StartingLinear(dim, numbers * self.maps, "zero", bias=1.0) if numbers else None

    def forward(
        self,
        queries: Float[Tensor, "batch query dim"],
        centres: Float[Tensor, "batch query 2"],
        extents: Float[Tensor, "batch 2"],
        valid: Bool[Tensor, "batch height width"],
    ) -> Float[Tensor, "batch heads query height*width"]:
        """`centres` in parts of the image, `extents` its width and height in cells (padding not counted)."""
        batch, count, _ = queries.shape
        state = self.norm(queries)
        points = (centres * extents[:, None]).float()[:, :, None].expand(-1, -1, self.maps, -1)
        if self.offset is not None:
            points = points + self.offset(state).float().reshape(batch, count, self.maps, 2)
        squared = torch.ones((), device=queries.device)
        if self.scale is not None:
            squared = self.scale(state).float().square().reshape(batch, count, self.maps, -1)
        rate = squared if self.form == "rate" else 1 / squared.clamp(min=_SMALLEST_SQUARED_SCALE)
        rate = (rate / self.beta).expand_as(points)
        height, width = valid.shape[1:]
        # The exponent is a sum over both axes: squares of W + H numbers per map instead of W x H.
        across, down = (
            -rate[..., axis, None] * (cell_middles(size, points) - points[..., axis, None]).square()
            for axis, size in enumerate((width, height))
        )
        log_weights = (down[..., :, None] + across[..., None, :]).flatten(-2).transpose(1, 2)
        return _without_padding(log_weights, valid.flatten(1))


def cell_middles(count: int, like: Tensor) -> Float[Tensor, " count"]:
    return torch.arange(count, device=like.device, dtype=like.dtype) + 0.5


def _without_padding(log_weights: Tensor, valid: Tensor) -> Tensor:
    """Padding out of sight, and the largest weight of each query at 1.

    A softmax does not see the second; but however far an offset has led a head away from the image, something is left
    of its scores in half precision.
    """
    lowest = torch.finfo(log_weights.dtype).min
    seen = torch.where(valid[:, None, None], log_weights, lowest)
    peak = seen.detach().amax(-1, keepdim=True)
    return torch.where(valid[:, None, None], log_weights - peak, lowest)


def image_extents(
    pixel_mask: Bool[Tensor, "batch image_height image_width"], cells: tuple[int, int]
) -> Float[Tensor, "batch 2"]:
    """Width and height of each image, without its padding, in cells of a feature map of `cells` (height, width)."""
    height, width = (pixel_mask.any(dim).sum(1) for dim in (2, 1))
    canvas = pixel_mask.shape[1:]
    return torch.stack([width * (cells[1] / canvas[1]), height * (cells[0] / canvas[0])], dim=-1)
