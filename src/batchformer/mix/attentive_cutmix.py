"""Attentive CutMix: the cells with the highest activation of a frozen network, pasted over the other image."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.attach.contexts import evaluating
from batchformer.errors import UserError, check_choice
from batchformer.mix.base import Draw, Images, Mix, Mixed, MixKeywords, SoftLabels, need_module
from batchformer.nn.inputs import autocasts, is_whole
from batchformer.nn.token_layout import patch_grids, patch_size, prefix_tokens, token_grid

_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentiveCutMix(Mix):
    """Paste the k cells of image B with the highest activation over image A (Walawalkar et al., 2020).

    Paper: the last feature map of an ImageNet-pretrained network (7 x 7 at 224 pixels) is reduced to one heatmap;
    its k = 6 highest cells of 49 are cut from one image and pasted at the same places of the other. lambda is k / 49.

    Released code (unofficial, the one TransMix compares with): ResNet-50 without pooling; of its feature map only
    the last channel is the heatmap; the network stays in training mode, so that its BatchNorm sees the single image;
    images are resized to 224 pixels and back, not normalised for it; always applied.

    Here: `channels="mean"`, as the paper reads; `"last"` is the released one. The extractor runs in eval mode
    without gradients and is no part of any model of yours: not registered, trained or saved with it. Images are resized
    to `size` for the extractor only; cells are cut from the images as they are. The partner (and `prob`) is all that is
    random: `alpha` exists for a common interface and has no effect.

    Args:
        extractor: any module that turns images into feature maps (batch, channels, rows, columns); `feature_map` makes
            one of a timm or torchvision model. It is moved to the device of the images.
        k: cells to paste; None takes 6 of 49, or as much of another grid (at least one).
        channels: how a heatmap is made of the channels, "mean" or "last".
        size: side the images are resized to for the extractor; None: not resized.
        prepare: transform of the extractor's input, `Renormalize` for example; with None it gets the images as given,
            normalised for the user's model.
        options: those of `Mix`.
    """

    def __init__(
        self,
        extractor: nn.Module,
        num_classes: int,
        *,
        k: int | None = None,
        channels: Literal["mean", "last"] = "mean",
        size: int | None = 224,
        prepare: Callable[[Tensor], Tensor] | None = None,
        **options: Unpack[MixKeywords],
    ) -> None:
        need_module("AttentiveCutMix", "an extractor", extractor)
        super().__init__(num_classes, **options)
        if k is not None and not is_whole(k):
            raise UserError(f"AttentiveCutMix: k={k!r} must be a number of cells, at least 1.")
        check_choice("AttentiveCutMix: channels", channels, ("mean", "last"))
        if size is not None and not is_whole(size):
            raise UserError(
                f"AttentiveCutMix: size={size!r} must be a whole number of pixels, 1 or more; None shows the images "
                f"as they are."
            )
        if prepare is not None and not callable(prepare):
            raise UserError(f"AttentiveCutMix: prepare={prepare!r} must be a function of images, such as Renormalize.")
        self.extractor, self.k, self.channels = extractor, k, channels
        self.size, self.prepare = size, prepare

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        height, width = images.shape[-2:]
        heat = self.heatmap(images)
        rows, columns = heat.shape[1:]
        if height < rows or width < columns:
            raise UserError(
                f"AttentiveCutMix: the extractor's map of {rows} x {columns} cells is finer than the images of "
                f"{height} x {width} pixels: choose a smaller size= or another extractor."
            )
        if rows * columns == 1:
            raise UserError(
                "AttentiveCutMix: the extractor's map is a single cell, and all of image B would be pasted: show it "
                "larger images by size=, or choose another extractor."
            )
        k = self.cells_to_paste(rows * columns)
        cells = top_cells(heat, k)[draw.partner] * (draw.share > 0)[:, None, None]
        mask = F.interpolate(cells[:, None], (height, width))  # nearest: every pixel to the cell it lies in
        mixed = torch.where(mask.bool(), images[draw.partner], images)
        part = (k / (rows * columns)) * (draw.share > 0).float().expand(len(images))
        return CellsMixed(mixed, labels, draw.partner, mask.mean((1, 2, 3)), mask, cell_share=part)

    def cells_to_paste(self, cells: int) -> int:
        k = max(1, round(6 / 49 * cells)) if self.k is None else self.k
        if k > cells:
            raise UserError(f"AttentiveCutMix: k={k} is more than the {cells} cells of the extractor's map.")
        return k

    @torch.no_grad()
    def heatmap(self, images: Images) -> Float[Tensor, "batch rows columns"]:
        """One value for each cell of the extractor's feature map: the mean over its channels, or the last one."""
        first = next(self.extractor.parameters(), None)
        if first is not None and first.device != images.device:
            self.extractor.to(images.device)
        seen = images.detach()
        if seen.dtype in (torch.float16, torch.bfloat16):  # which torch cannot resize on a CPU
            seen = seen.float()
        seen = seen if self.prepare is None else self._prepared(self.prepare, seen)
        if self.size is not None and seen.shape[-2:] != (self.size, self.size):
            seen = F.interpolate(seen, (self.size, self.size), mode="bilinear", antialias=True)
        if first is not None and first.dtype in _PRECISIONS and not autocasts(images):
            seen = seen.to(first.dtype)
        with evaluating(self.extractor):
            features = self.extractor(seen)
        if not isinstance(features, Tensor) or features.ndim != 4 or len(features) != len(images):
            got = f"a tensor {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
            raise UserError(
                f"AttentiveCutMix needs a feature map (batch, channels, rows, columns) from its extractor and got "
                f"{got}: cut the model with batchformer.mix.feature_map."
            )
        return (features.mean(1) if self.channels == "mean" else features[:, -1]).float()

    def _prepared(self, prepare: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        seen = prepare(images)
        if not isinstance(seen, Tensor) or seen.ndim != 4:
            got = f"a tensor {tuple(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
            raise UserError(
                f"AttentiveCutMix: prepare= must return images (batch, channels, height, width), and returned {got}."
            )
        return seen


@dataclass(eq=False, repr=False)
class CellsMixed(Mixed):
    """A batch mixed by cells that need not divide the image: labels go by cells, as published, `share` by pixels."""

    cell_share: Float[Tensor, " batch"] = field(kw_only=True)

    def label_share(self) -> Float[Tensor, " batch"]:
        return self.cell_share


def top_cells(heat: Float[Tensor, "batch rows columns"], k: int) -> Float[Tensor, "batch rows columns"]:
    """1 in the k highest cells of each map; ties go to the first in row-major order, on every device."""
    order: Int[Tensor, "batch cells"] = heat.flatten(1).argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(heat).flatten(1).scatter_(1, order[:, :k], 1.0).view_as(heat)


Map = Float[Tensor, "batch features rows columns"]


class _TruncatedModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class FeatureMap(_TruncatedModel):
    """timm's `forward_features` as a map (batch, channels, rows, columns), whatever the layout of its features."""

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
        grids = patch_grids(self.model, height, width)
        grid = next(((rows, columns) for rows, columns in grids if rows * columns == count), None)
        if grid is None:  # the model merges tokens
            try:
                grid = token_grid(count, height, width, patch_size(self.model))
            except (UserError, ValueError) as error:
                raise _unclear(self.model) from error
        return patches.transpose(1, 2).unflatten(2, grid)


class TokenMap(_TruncatedModel):
    """torchvision's ViT up to the end of its encoder, with the image tokens as a map."""

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


class InputTransform(nn.Module):
    """A function that a model applies to its images before its first layer, as a module."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare

    def forward(self, images: Images) -> Tensor:
        return self.prepare(images)


class CompiledAsOne(nn.Sequential):
    """An `nn.Sequential` that torch compiles as one graph; a plain one it compiles part by part."""

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
        if type(model).__name__ == "DenseNet":  # applied in its `forward`
            after.append(nn.ReLU())
        return CompiledAsOne(children["features"], *after)
    if {"conv_proj", "encoder", "heads"} <= children.keys():
        return TokenMap(model)
    if (end := _end(model, children)) is None:
        raise _unclear(model)
    parts: list[nn.Module] = []
    for child in list(children.values())[:end]:
        if "Aux" not in type(child).__name__:
            parts += child if isinstance(child, nn.ModuleList) else [child]
    if getattr(model, "transform_input", False):
        parts.insert(0, InputTransform(model._transform_input))  # type: ignore[arg-type]
    return CompiledAsOne(*parts)


def _end(model: nn.Module, children: dict[str, nn.Module]) -> int | None:
    """How many of the children come before the pooling, where they run one after the other."""
    ends = ["avgpool"]
    if type(model).__module__.startswith("torchvision.models."):  # some pool without a module
        ends += ["classifier", "fc"]
    return next((list(children).index(name) for name in ends if name in children), None)


def _unclear(model: nn.Module) -> UserError:
    return UserError(
        f"it is not clear where the feature map of a {type(model).__name__} ends: pass AttentiveCutMix the part of it "
        f"that returns (batch, channels, rows, columns)."
    )
