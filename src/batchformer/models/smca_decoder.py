"""SMCA-DETR's decoder: transformers' DETR decoder with spatially modulated co-attention (Gao et al., section 3.2)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import DetrConfig
from transformers.models.detr.modeling_detr import (
    DetrCrossAttention,
    DetrDecoderLayer,
    DetrDecoderOutput,
    DetrMLPPredictionHead,
    DetrPreTrainedModel,
    DetrSelfAttention,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

_SMALLEST_SQUARED_SCALE = 1e-2  # a tenth of a cell, which is a map of one cell; avoids division by zero


@strict
class SMCADetrConfig(DetrConfig):
    """`DetrConfig` and what spatially modulated co-attention adds to it.

    Defaults are those of the paper (Gao et al., ICCV 2021, single scale): 300 queries, a focal loss with the weights
    class 2, L1 5, GIoU 2 and auxiliary losses after every decoder layer.

    Args:
        modulation: "separate" gives every head a centre of its own (the object's plus an offset) and its own scale
            (the paper's "multi-head modulation"); "shared" gives all heads one weight map.
        modulation_scale: "independent", two numbers per map, for width and height; "single", one number; "fixed", 1.
        modulation_beta: the bandwidth beta of the weight maps. The paper tunes it by hand; released code takes 8.
        modulation_form: "width", as in the paper: distances are divided by the squared scale; "rate", as in the
            released code: multiplied by it. Both begin with a scale of 1.
        cls_loss_coefficient: weight of the classification in the loss (and `class_cost` in the matching).
        focal_alpha: of the focal loss.
    """

    model_type = "smca_detr"

    num_queries: int = 300
    auxiliary_loss: bool = True
    class_cost: int = 2
    cls_loss_coefficient: float | int = 2
    focal_alpha: float = 0.25
    modulation: Literal["separate", "shared"] = "separate"
    modulation_scale: Literal["independent", "single", "fixed"] = "independent"
    modulation_beta: float | int = 8.0
    modulation_form: Literal["width", "rate"] = "width"


class StartingLinear(nn.Linear):
    """A linear layer with its own initialisation: these weights, and one constant for all biases."""

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
    """Log weight maps of object queries, one per head, to be added to the scores of the co-attention.

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
            -rate[..., axis, None] * (torch.arange(size, device=points.device) + 0.5 - points[..., axis, None]).square()
            for axis, size in enumerate((width, height))  # from the middles of the cells
        )
        log_weights = (down[..., :, None] + across[..., None, :]).flatten(-2).transpose(1, 2)
        return _without_padding(log_weights, valid.flatten(1))


def _without_padding(log_weights: Tensor, valid: Tensor) -> Tensor:
    """Mask the padding, and scale the largest weight of each query to 1.

    The scaling does not change the softmax, but keeps scores from underflowing in half precision where an offset has
    moved a head's centre far out of the image.
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


class SMCADetrPreTrainedModel(DetrPreTrainedModel):
    """Base class for initialisation, saving and loading: as transformers' DETR."""

    config: SMCADetrConfig
    _no_split_modules: ClassVar = ["DetrConvEncoder", "DetrEncoderLayer", "SMCADetrDecoderLayer"]  # type: ignore[misc]
    # Scores get a learnt bias for each query and key, which only some implementations of attention support.
    _supports_flash_attn = False
    _supports_flex_attn = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StartingLinear):
            module.reset_parameters()


class SMCADetrDecoderLayer(DetrDecoderLayer):
    """DETR's layer; the weight maps are computed inside it, so that gradient checkpointing does not store them."""

    def __init__(self, config: SMCADetrConfig) -> None:
        super().__init__(config)
        self.modulation = SpatialModulation(
            config.d_model,
            config.decoder_attention_heads,
            separate=config.modulation == "separate",
            scale=config.modulation_scale,
            beta=config.modulation_beta,
            form=config.modulation_form,
        )

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        spatial_position_embeddings: Tensor,
        object_queries_position_embeddings: Tensor,
        encoder_hidden_states: Tensor,
        centres: Tensor,
        extents: Tensor,
        valid: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        log_weights = self.modulation(hidden_states + object_queries_position_embeddings, centres, extents, valid)
        if not torch.is_autocast_enabled(hidden_states.device.type):
            log_weights = log_weights.to(hidden_states.dtype)
        return super().forward(
            hidden_states,
            attention_mask,
            spatial_position_embeddings,
            object_queries_position_embeddings,
            encoder_hidden_states,
            encoder_attention_mask=log_weights,
            **kwargs,
        )


@dataclass
class SMCADetrDecoderOutput(DetrDecoderOutput):
    """`reference_points`: the predicted centres before the sigmoid, (batch, query, 2), x then y."""

    reference_points: Tensor | None = None


class SMCADetrDecoder(SMCADetrPreTrainedModel):
    """Predict centres from the object queries by an MLP, once; then the layers, with attention around them.

    The paper predicts the centre from the query; released code does so before the first layer and keeps it for all.
    """

    _can_record_outputs: ClassVar = {  # type: ignore[misc]
        "hidden_states": SMCADetrDecoderLayer,
        "attentions": DetrSelfAttention,
        "cross_attentions": DetrCrossAttention,
    }

    def __init__(self, config: SMCADetrConfig) -> None:
        super().__init__(config)
        self.query_norm = nn.LayerNorm(config.d_model)
        self.centre_head = DetrMLPPredictionHead(config.d_model, config.d_model, 2, num_layers=3)
        self.layers = nn.ModuleList(SMCADetrDecoderLayer(config) for _ in range(config.decoder_layers))
        self.layernorm = nn.LayerNorm(config.d_model)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        inputs_embeds: Tensor,
        encoder_hidden_states: Tensor,
        spatial_position_embeddings: Tensor,
        object_queries_position_embeddings: Tensor,
        extents: Tensor,
        valid: Tensor,
        **kwargs: Any,
    ) -> SMCADetrDecoderOutput:
        reference_points = self.centre_head(self.query_norm(inputs_embeds + object_queries_position_embeddings))
        centres = reference_points.sigmoid()
        hidden_states, intermediate = inputs_embeds, []
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                None,
                spatial_position_embeddings,
                object_queries_position_embeddings,
                encoder_hidden_states,
                centres,
                extents,
                valid,
                **kwargs,
            )
            intermediate.append(self.layernorm(hidden_states))
        every_layer: Any = torch.stack(intermediate) if self.config.auxiliary_loss else None
        return SMCADetrDecoderOutput(
            last_hidden_state=intermediate[-1],
            intermediate_hidden_states=every_layer,
            reference_points=reference_points,
        )
