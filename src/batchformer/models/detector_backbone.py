"""The timm backbone of a detector: load weights from a local file, restore activations that transformers drops."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from torch import Tensor, nn

from batchformer.errors import UserError, reason_of
from batchformer.hub import PRETRAINED, fetching
from batchformer.models.create import read_tensors

# torchvision's MobileNetV2 numbers its blocks consecutively, timm's by stages of so many
_STAGES_OF_MOBILENET_V2 = (1, 2, 3, 4, 3, 3, 1)


def load_backbone_weights(backbone: nn.Module, name: str, source: str) -> None:
    """Load ImageNet weights into the timm network of a detector, from a file (.pth, .pt, .safetensors).

    Accepts files of timm and of torchvision (ResNets, and MobileNetV2, whose keys are renamed); a classifier in the
    file is ignored. Frozen BatchNorm takes over statistics and scales.
    """
    if source == PRETRAINED:
        try:
            with fetching():
                weights = timm.create_model(name, pretrained=True, features_only=True).state_dict()
        except Exception as problem:  # no network, no such weights, a full disk, ...
            raise UserError(
                f"timm could not get pretrained weights of {name}: give a local file (--init-from backbone=FILE), or "
                f"none for random weights ({reason_of(problem)})."
            ) from problem
    else:
        file = Path(source)
        if not file.is_file():
            raise UserError(
                f"there is no file {file} with backbone weights: give its path, or null for random weights."
            )
        weights = read_tensors(file, "give a .pth, .pt or .safetensors file of weights, or train the run again")
        weights = named_as_in_timm(weights, backbone)
    wanted = backbone.state_dict()
    missing = [key for key in wanted if key not in weights and not key.endswith("num_batches_tracked")]
    if missing:
        raise UserError(
            f"{source} does not hold the weights of {name}: it has no {missing[0]} ({len(missing)} of {len(wanted)} "
            f"tensors are missing); give the file of this backbone, or choose the backbone of the file."
        )
    for key, tensor in wanted.items():
        if key in weights and weights[key].shape != tensor.shape:
            raise UserError(
                f"{source} does not fit {name}: {key} has the shape {tuple(weights[key].shape)} instead of "
                f"{tuple(tensor.shape)}; give the file of this backbone, or choose the backbone of the file."
            )
    backbone.load_state_dict({key: weights[key] for key in wanted if key in weights}, strict=False)


def restore_activations(backbone: nn.Module, name: str) -> None:
    """Restore the activations that transformers drops from a backbone of timm, in place; nothing is renamed.

    timm's MobileNets and EfficientNets compute BatchNorm and activation in one module. transformers' detectors put
    their frozen BatchNorm in its place, which has no activation: the network silently becomes linear. A detector loaded
    with `from_pretrained` needs this as well: `restore_activations(model.model.backbone.model, name)`.
    """
    with torch.random.fork_rng(devices=[]):
        whole = timm.create_model(name, features_only=True)
    for path, module in whole.named_modules():
        if not isinstance(module, BatchNormAct2d):
            continue
        try:
            lost = backbone.get_submodule(path)
        except AttributeError:  # behind the last feature map that this detector reads
            continue
        if isinstance(lost, FrozenBatchNormAct2d):
            continue
        frozen = CachedFrozenBatchNormAct2d(module.num_features, eps=module.eps)
        frozen.drop, frozen.act = module.drop, module.act
        frozen.load_state_dict(lost.state_dict())
        backbone.set_submodule(path, frozen)


class CachedFrozenBatchNormAct2d(FrozenBatchNormAct2d):
    """timm's frozen BatchNorm with activation, with the scale and shift of its channels cached.

    Bit-identical results. Scale and shift of a channel follow from four buffers; computing them takes five small
    kernels in every forward of every layer, a large part of the kernel launches of a small detector.
    """

    # cache key, the buffers (referenced, so that no new tensor can get the id of one of them), scale and shift
    _cached: tuple[Any, Any, Tensor, Tensor] | None = None

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel height width"]:
        buffers: tuple[Any, ...] = (self.weight, self.bias, self.running_mean, self.running_var)
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            # a compiler fuses it; tensors made in inference mode cannot be used in training
            scale, shift = self._scale_and_shift(buffers)
        else:
            of = tuple((id(buffer), buffer._version, buffer.data_ptr()) for buffer in buffers)
            if self._cached is None or self._cached[0] != of:
                self._cached = (of, buffers, *self._scale_and_shift(buffers))
            scale, shift = self._cached[2:]
        return self.act(self.drop(x * scale + shift))

    def _scale_and_shift(self, buffers: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """With timm's order of operations."""
        weight, bias, mean, variance = (buffer.reshape(1, -1, 1, 1) for buffer in buffers)
        scale = weight * (variance + self.eps).rsqrt()
        return scale, bias - mean * scale


def named_as_in_timm(weights: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """torchvision's MobileNetV2 for timm's network, under its names, without the classifier; others as they are."""
    if "features.0.0.weight" not in weights or "conv_stem.weight" not in net.state_dict():
        return dict(weights)
    place = [(stage, k) for stage, count in enumerate(_STAGES_OF_MOBILENET_V2) for k in range(count)]
    renamed = {}
    for key, tensor in weights.items():
        if found := re.fullmatch(r"features\.(0|18)\.([01])\.(.+)", key):
            parts = ("conv_stem", "bn1") if found[1] == "0" else ("conv_head", "bn2")
            renamed[f"{parts[int(found[2])]}.{found[3]}"] = tensor
        elif found := re.fullmatch(r"features\.(\d+)\.conv\.(.+)\.(\w+)", key):
            stage, block = place[int(found[1]) - 1]
            named = {"0.0": "conv_pw", "0.1": "bn1", "1.0": "conv_dw", "1.1": "bn2", "2": "conv_pwl", "3": "bn3"}
            if stage == 0:  # no expansion in the first block
                named = {"0.0": "conv_dw", "0.1": "bn1", "1": "conv_pw", "2": "bn2"}
            renamed[f"blocks.{stage}.{block}.{named[found[2]]}.{found[3]}"] = tensor
    return renamed
