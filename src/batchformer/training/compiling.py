"""Faster training on a GPU: compile a network in place, compute its patch embedding as a matrix product."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

_FEW_CHANNELS = 4
_COMPILED_FORMS = 64


def compile_in_place(net: nn.Module, **options: Any) -> None:
    """`net.compile` for batches of one shape; no key changes.

    torch recompiles a network for the objects that attach or TransMix put into it, keeps the code of deleted networks,
    and after eight compilations runs a class uncompiled. A comparison over many seeds needs a higher limit.
    """
    torch._dynamo.config.recompile_limit = max(_COMPILED_FORMS, torch._dynamo.config.recompile_limit)
    net.compile(dynamic=False, **options)


class PatchConv2d(nn.Conv2d):
    """A convolution whose windows tile the image, computed as patches times weights.

    The same function of the same parameters. cuDNN has no fast kernel for images of three channels: in DeiT-Ti's step
    at 224 px it spends a tenth of the time on this layer.
    """

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch features rows columns"]:
        down, right = self.kernel_size
        rows, columns = images.shape[2] // down, images.shape[3] // right
        tiled = images[:, :, : rows * down, : columns * right].unflatten(3, (columns, right)).unflatten(2, (rows, down))
        patches = tiled.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def cut_into_patches(net: nn.Module) -> list[nn.Conv2d]:
    """Compute the patch embeddings of `net` as matrix products; no key changes. Returns the changed layers."""
    kinds = (nn.Conv2d, PatchConv2d)  # a failed training may have left changed layers
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d) and type(module) in kinds]
    changed = [module for module in convolutions if _tiles_images(module)]
    for module in changed:
        module.__class__ = PatchConv2d
    return changed


def convolve_again(changed: list[nn.Conv2d]) -> None:
    for module in changed:
        module.__class__ = nn.Conv2d


def _tiles_images(conv: nn.Conv2d) -> bool:
    return (
        conv.in_channels <= _FEW_CHANNELS
        and conv.kernel_size == conv.stride
        and conv.kernel_size != (1, 1)
        and conv.padding in (0, (0, 0), "valid")
        and conv.dilation == (1, 1)
        and conv.groups == 1
    )
