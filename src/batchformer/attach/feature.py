"""Width and layout of a feature: told by the layer that reads it, or by the tensor that a dry run showed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from batchformer.attach.watch import Calls
from batchformer.errors import UserError

Channels = Literal["first", "last"]


@dataclass(frozen=True)
class Feature:
    """Width of a feature, and where its channels are."""

    dim: int
    channels: Channels


def feature_from_layer(layer: nn.Module) -> Feature | None:
    """The feature a layer reads, where the layer itself tells."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise UserError(f"{type(layer).__name__} has no weights yet: run one batch through the model, then attach.")
    if isinstance(layer, nn.Linear):
        return Feature(layer.in_features, "last")
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Feature(layer.in_channels, "first")
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return Feature(layer.num_features, "first")
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
        return Feature(layer.normalized_shape[0], "last")
    if isinstance(layer, nn.Sequential) and len(layer):
        return feature_from_layer(layer[0])
    return None


def feature_from_tensor(x: Tensor, path: str) -> Feature:
    """The feature a tensor is, where its shape alone tells."""
    if x.ndim in (2, 3):
        return Feature(x.shape[-1], "last")
    raise UserError(
        f"the input of {path!r} has the shape {tuple(x.shape)}, which is not clearly one feature or a row of tokens: "
        f'say dim= and channels="first" or "last".'
    )


def feature_of_output(path: str, calls: Calls | None, dim: int | None, channels: Channels | None) -> Feature:
    """Width and layout of what a submodule gives."""
    if calls is None or not calls.begins:
        raise UserError(f"{path!r} is never called in a forward: name a submodule that is (a list of layers is not).")
    x = calls.output
    if x is None:
        raise UserError(
            f"{path!r} gives neither a tensor nor a tuple or list with one: attach after a part of it that does."
        )
    if dim is not None and channels is not None:
        return Feature(dim, channels)
    if x.ndim == 3:
        layout = channels or "last"
        return Feature(dim or x.shape[1 if layout == "first" else -1], layout)
    if x.ndim == 4:
        square = {"first": x.shape[2] == x.shape[3], "last": x.shape[1] == x.shape[2]}
        fitting = [channels] if channels else [layout for layout, fits in square.items() if fits]
        if len(fitting) == 1:
            return Feature(x.shape[1 if fitting[0] == "first" else -1], fitting[0])  # type: ignore[arg-type]
    raise UserError(
        f"the output of {path!r} has the shape {tuple(x.shape)}, which is not clearly tokens (batch, tokens, width) or "
        f'a map: say channels="first" or "last", and dim= where it is neither.'
    )


def known_layout(model: nn.Module, layer: nn.Module) -> Channels | None:
    """Where the layer's kind, or what timm's models say of their maps, tells where the channels are."""
    if isinstance(layer, nn.Conv1d | nn.BatchNorm1d | nn.Conv2d | nn.BatchNorm2d):
        return "first"
    return {"NHWC": "last", "NCHW": "first"}.get(str(getattr(model, "output_fmt", None)))  # type: ignore[return-value]


def is_signal(calls: Calls, feature: Feature) -> bool:
    """(batch, channels, length)."""
    return calls.output is not None and calls.output.ndim == 3 and feature.channels == "first"
