"""A classifier cut off after its last feature map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.mix.token_grid import patch_size, prefix_tokens, token_grid

Images = Float[Tensor, "batch channels height width"]
Map = Float[Tensor, "batch features rows columns"]


class _Cut(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class FeatureMap(_Cut):
    """timm's `forward_features`, as a map (batch, channels, rows, columns) whatever the model keeps its features in."""

    def forward(self, images: Images) -> Map:
        features = self.model.forward_features(images)  # type: ignore[operator]
        if isinstance(features, Tensor) and features.ndim == 3:  # tokens of a transformer
            return self._map_of_tokens(features, images)
        if not isinstance(features, Tensor) or features.ndim != 4:
            raise _unclear(self.model)
        return features.permute(0, 3, 1, 2) if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else features

    def _map_of_tokens(self, tokens: Float[Tensor, "batch tokens features"], images: Tensor) -> Tensor:
        patches = tokens[:, prefix_tokens(self.model)[1] :]
        count, (height, width) = patches.shape[1], images.shape[-2:]
        grid = getattr(getattr(self.model, "patch_embed", None), "grid_size", None) or (0, 0)
        if grid[0] * grid[1] != count:  # it merges tokens, or takes images of any size
            try:
                grid = token_grid(count, height, width, patch_size(self.model))
            except (UserError, ValueError) as error:
                raise _unclear(self.model) from error
        return patches.transpose(1, 2).unflatten(2, tuple(grid))


class TokenMap(_Cut):
    """torchvision's ViT up to its encoder, the tokens of the image as a map."""

    def forward(self, images: Images) -> Map:
        model: Any = self.model
        if images.shape[-2:] != (model.image_size, model.image_size):
            raise UserError(
                f"this {type(model).__name__} takes images of {model.image_size} x {model.image_size} pixels and got "
                f"{images.shape[-2]} x {images.shape[-1]}: AttentiveCutMix resizes them with size={model.image_size}."
            )
        patches = model._process_input(images)
        tokens = model.encoder(torch.cat([model.class_token.expand(len(images), -1, -1), patches], dim=1))
        side = model.image_size // model.patch_size
        return tokens[:, 1:].transpose(1, 2).unflatten(2, (side, side))


class InputOf(nn.Module):
    """What a model does to its images before its first layer."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare

    def forward(self, images: Images) -> Tensor:
        return self.prepare(images)


class InTurn(nn.Sequential):
    """Its parts one after the other: torch compiles this as one, and of a plain `nn.Sequential` every part alone."""

    def forward(self, images: Images) -> Tensor:
        for part in self:
            images = part(images)
        return images


def feature_map(model: nn.Module) -> nn.Module:
    """The part of a timm or torchvision classifier that ends in its last feature map, for `AttentiveCutMix`.

    timm models by `forward_features`, torchvision's by their `features` or by everything before the pooling or the
    classifier, auxiliary ones left out, its ViT by the tokens. Shares its parameters with the model given.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"feature_map takes a model, an nn.Module, and got a {type(model).__name__}.")
    if hasattr(model, "forward_features"):
        return FeatureMap(model)
    children = dict(model.named_children())
    if "features" in children:
        # torchvision's Swin has its channels last until here
        after = [children[name] for name in ("norm", "permute") if name in children] if "permute" in children else []
        if type(model).__name__ == "DenseNet":  # whose `forward` has it
            after.append(nn.ReLU())
        return InTurn(children["features"], *after)
    if {"conv_proj", "encoder", "heads"} <= children.keys():
        return TokenMap(model)
    if (end := _end(model, children)) is None:
        raise _unclear(model)
    parts: list[nn.Module] = []
    for child in list(children.values())[:end]:
        if "Aux" not in type(child).__name__:
            parts += child if isinstance(child, nn.ModuleList) else [child]
    if getattr(model, "transform_input", False):
        parts.insert(0, InputOf(model._transform_input))  # type: ignore[arg-type]
    return InTurn(*parts)


def _end(model: nn.Module, children: dict[str, nn.Module]) -> int | None:
    """How many of the children come before the pooling, where they run one after the other."""
    ends = ["avgpool"]
    if type(model).__module__.startswith("torchvision.models."):  # some of which pool without a layer
        ends += ["classifier", "fc"]
    return next((list(children).index(name) for name in ends if name in children), None)


def _unclear(model: nn.Module) -> UserError:
    return UserError(
        f"it is not clear where the feature map of a {type(model).__name__} ends: pass AttentiveCutMix the part of it "
        f"that returns (batch, channels, rows, columns)."
    )
