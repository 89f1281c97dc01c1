"""A classifier cut off after its last feature map."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError


class FeatureMap(nn.Module):
    """timm's `forward_features`, as a map (batch, channels, rows, columns) whatever the model keeps its features in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Tensor:
        features = self.model.forward_features(images)  # type: ignore[operator]
        grid = getattr(getattr(self.model, "patch_embed", None), "grid_size", None)
        if features.ndim == 3 and grid:  # tokens of a transformer, after those that are no patches
            patches = features[:, getattr(self.model, "num_prefix_tokens", 0) :]
            return patches.transpose(1, 2).unflatten(2, tuple(grid))
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":
            return features.permute(0, 3, 1, 2)
        return features


def feature_map(model: nn.Module) -> nn.Module:
    """The part of a timm or torchvision classifier that ends in its last feature map, for `AttentiveCutMix`.

    timm models by `forward_features`, torchvision's by their `features`, its ResNets by everything before the pooling.
    Shares its parameters with the model given.
    """
    if hasattr(model, "forward_features"):
        return FeatureMap(model)
    if isinstance(getattr(model, "features", None), nn.Module):
        return model.features  # type: ignore[return-value]
    names = [name for name, _ in model.named_children()]
    if "avgpool" in names:
        return nn.Sequential(*list(model.children())[: names.index("avgpool")])
    raise UserError(
        f"it is not clear where the feature map of a {type(model).__name__} ends: pass AttentiveCutMix the part of it "
        f"that returns (batch, channels, rows, columns)."
    )
