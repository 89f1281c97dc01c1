"""SMCA-DETR's decoder: transformers' DETR decoder whose co-attention is told where to look."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
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

from batchformer.models.smca_detr_config import SMCADetrConfig
from batchformer.models.smca_detr_modulation import SpatialModulation, StartingLinear


class SMCADetrPreTrainedModel(DetrPreTrainedModel):
    """How weights begin, are saved and loaded: as transformers' DETR."""

    config: SMCADetrConfig
    _no_split_modules: ClassVar = ["DetrConvEncoder", "DetrEncoderLayer", "SMCADetrDecoderLayer"]
    # Scores get a learnt number for each query and key, which only these implementations of attention can add.
    _supports_flash_attn = False
    _supports_flex_attn = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StartingLinear):
            module.reset_parameters()


class SMCADetrDecoderLayer(DetrDecoderLayer):
    """DETR's layer; the weight maps are made inside, so that gradient checkpointing keeps none of them."""

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
    """Centres from the object queries by an MLP, once; then the layers, which look around them.

    The paper predicts the centre from the query; released code does so before the first layer and keeps it for all.
    """

    _can_record_outputs: ClassVar = {
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
