"""timm's frozen BatchNorm with activation, which does not compute anew what does not change."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.layers import FrozenBatchNormAct2d
from torch import Tensor


class RememberingFrozenBatchNormAct2d(FrozenBatchNormAct2d):
    """The same numbers to the bit. Scale and shift of a channel follow from four buffers; computing them takes five
    small kernels in every forward of every layer, which for a small detector is much of what a step starts."""

    # what it is of, the buffers (kept, so that no other tensor can be taken for one of them), scale and shift
    _remembered: tuple[Any, Any, Tensor, Tensor] | None = None

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        scale, shift = self._scale_and_shift()
        return self.act(self.drop(x * scale + shift))

    def _scale_and_shift(self) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._compute()  # a compiler fuses it; what is made in inference mode is of no use to training
        buffers: tuple[Any, ...] = (self.weight, self.bias, self.running_mean, self.running_var)
        of = tuple((id(buffer), buffer._version, buffer.data_ptr()) for buffer in buffers)
        if self._remembered is None or self._remembered[0] != of:
            self._remembered = (of, buffers, *self._compute())
        return self._remembered[2:]

    def _compute(self) -> tuple[Tensor, Tensor]:
        """In timm's order."""
        buffers: tuple[Any, ...] = (self.weight, self.bias, self.running_mean, self.running_var)
        weight, bias, mean, variance = (buffer.reshape(1, -1, 1, 1) for buffer in buffers)
        scale = weight * (variance + self.eps).rsqrt()
        return scale, bias - mean * scale
