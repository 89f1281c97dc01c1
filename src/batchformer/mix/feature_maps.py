"""A classifier cut off after its last feature map."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.mix.class_attention_find import patch_size, prefix_tokens
from batchformer.mix.transmix import token_grid


class FeatureMap(nn.Module):
    """timm's `forward_features`, as a map (batch, channels, rows, columns) whatever the model keeps its features in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch features rows columns"]:
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


class InputOf(nn.Module):
    """What a model does to its images before its first layer."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Tensor:
        return self.prepare(images)


class InTurn(nn.Sequential):
    """Its parts one after the other: torch compiles this as one, and of a plain `nn.Sequential` every part alone."""

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Tensor:
        for part in self:
            images = part(images)
        return images


def feature_map(model: nn.Module) -> nn.Module:
    """The part of a timm or torchvision classifier that ends in its last feature map, for `AttentiveCutMix`.

    timm models by `forward_features`, torchvision's by their `features`, its ResNets and Inceptions by everything
    before the pooling, auxiliary classifiers left out. Shares its parameters with the model given.
    """
    if hasattr(model, "forward_features"):
        return FeatureMap(model)
    children = dict(model.named_children())
    if "features" in children:
        # torchvision's Swin has its channels last until here
        after = [children[name] for name in ("norm", "permute") if name in children] if "permute" in children else []
        return InTurn(children["features"], *after)
    if "avgpool" in children:
        names = list(children)
        parts = [child for name, child in children.items() if names.index(name) < names.index("avgpool")]
        parts = [part for part in parts if "Aux" not in type(part).__name__]
        if getattr(model, "transform_input", False):
            parts.insert(0, InputOf(model._transform_input))  # type: ignore[arg-type]
        return InTurn(*parts)
    raise _unclear(model)


def _unclear(model: nn.Module) -> UserError:
    return UserError(
        f"it is not clear where the feature map of a {type(model).__name__} ends: pass AttentiveCutMix the part of it "
        f"that returns (batch, channels, rows, columns)."
    )
