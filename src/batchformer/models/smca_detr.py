"""SMCA-DETR: DETR with spatially modulated co-attention (Gao et al., ICCV 2021), as a transformers model.

A single feature map, as in the row "SMCA (single scale)" of BatchFormerV2's Table 1. Backbone, encoder, position
embeddings and prediction heads are transformers' own; saving, loading, outputs, `labels` and gradient checkpointing
work as they do there, `AutoModelForObjectDetection` included once this file is imported. Images are prepared, and boxes
read from the outputs, by `DeformableDetrImageProcessor` (scores are sigmoids, there is no class for "nothing").
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForObjectDetection
from transformers.models.detr.modeling_detr import (
    DetrConvEncoder,
    DetrEncoder,
    DetrLearnedPositionEmbedding,
    DetrMLPPredictionHead,
    DetrModelOutput,
    DetrObjectDetectionOutput,
    DetrSinePositionEmbedding,
)
from transformers.utils.generic import can_return_tuple

from batchformer.models.detector_loss import focal_detection_loss
from batchformer.models.detectors import UNLIKELY_OBJECT
from batchformer.models.smca_decoder import (
    SMCADetrConfig,
    SMCADetrDecoder,
    SMCADetrPreTrainedModel,
    StartingLinear,
    image_extents,
)

__all__ = ["SMCADetrConfig", "SMCADetrForObjectDetection", "SMCADetrModel", "SMCADetrPreTrainedModel"]


@dataclass
class SMCADetrModelOutput(DetrModelOutput):
    """`reference_points`: the predicted centres before the sigmoid, (batch, query, 2), x then y."""

    reference_points: Tensor | None = None


class SMCADetrModel(SMCADetrPreTrainedModel):
    """Backbone, encoder and modulated decoder, without heads."""

    def __init__(self, config: SMCADetrConfig) -> None:
        super().__init__(config)
        self.backbone = DetrConvEncoder(config)
        learned = config.position_embedding_type == "learned"
        self.position_embedding: nn.Module = (
            DetrLearnedPositionEmbedding(config.d_model // 2)
            if learned
            else DetrSinePositionEmbedding(config.d_model // 2, normalize=True)
        )
        self.query_position_embeddings = nn.Embedding(config.num_queries, config.d_model)
        self.input_projection = nn.Conv2d(self.backbone.intermediate_channel_sizes[-1], config.d_model, kernel_size=1)
        self.encoder = DetrEncoder(config)
        self.decoder = SMCADetrDecoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Float[Tensor, "batch channels height width"],
        pixel_mask: Int[Tensor, "batch height width"] | None = None,
        **kwargs: Any,
    ) -> SMCADetrModelOutput:
        if pixel_mask is None:
            pixel_mask = torch.ones_like(pixel_values[:, 0], dtype=torch.long)
        feature_map, valid = self.backbone(pixel_values, pixel_mask)[-1]
        positions = self.position_embedding(
            shape=feature_map.shape, device=pixel_values.device, dtype=pixel_values.dtype, mask=valid
        )
        positions = positions.flatten(2).transpose(1, 2)
        encoded = self.encoder(
            inputs_embeds=self.input_projection(feature_map).flatten(2).transpose(1, 2),
            attention_mask=valid.flatten(1),
            spatial_position_embeddings=positions,
            **kwargs,
        )
        queries = self.query_position_embeddings.weight.expand(len(pixel_values), -1, -1)
        decoded = self.decoder(
            inputs_embeds=torch.zeros_like(queries),
            encoder_hidden_states=encoded.last_hidden_state,
            spatial_position_embeddings=positions,
            object_queries_position_embeddings=queries,
            extents=image_extents(pixel_mask.bool(), (valid.shape[1], valid.shape[2])),
            valid=valid,
            **kwargs,
        )
        return SMCADetrModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
            intermediate_hidden_states=decoded.intermediate_hidden_states,
            reference_points=decoded.reference_points,
        )


class SMCADetrForObjectDetection(SMCADetrPreTrainedModel):
    """Classes and boxes of each query. A box is predicted around the query's centre (the paper, section 3.2):

    (x, y, w, h) = sigmoid(MLP(D) + (c_w, c_h, 0, 0)), with the centre before its own sigmoid.
    """

    def __init__(self, config: SMCADetrConfig) -> None:
        super().__init__(config)
        self.model = SMCADetrModel(config)
        self.class_labels_classifier = StartingLinear(
            config.d_model, config.num_labels or 0, "usual", bias=UNLIKELY_OBJECT
        )
        self.bbox_predictor = DetrMLPPredictionHead(config.d_model, config.d_model, 4, num_layers=3)
        self.bbox_predictor.layers[-1] = StartingLinear(config.d_model, 4, "zero")  # boxes begin at the centres
        self.loss_function = focal_detection_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Float[Tensor, "batch channels height width"],
        pixel_mask: Int[Tensor, "batch height width"] | None = None,
        labels: list[dict[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> DetrObjectDetectionOutput:
        """`labels`: one dict per image, with `class_labels` (n,) and `boxes` (n, 4), centre and size in [0, 1]."""
        outputs = self.model(pixel_values, pixel_mask, **kwargs)
        logits, boxes = self._predict(outputs.last_hidden_state, outputs.reference_points)
        loss = loss_dict = auxiliary_outputs = None
        if labels is not None:
            every_layer: tuple[Any, Any] = (None, None)
            if self.config.auxiliary_loss:
                every_layer = self._predict(outputs.intermediate_hidden_states, outputs.reference_points)
            loss, loss_dict, auxiliary_outputs = self.loss_function(
                logits, labels, self.device, boxes, self.config, *every_layer
            )
        return DetrObjectDetectionOutput(
            loss=loss,
            loss_dict=loss_dict,
            logits=logits,
            pred_boxes=boxes,
            auxiliary_outputs=auxiliary_outputs,
            last_hidden_state=outputs.last_hidden_state,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _predict(self, states: Tensor, reference_points: Tensor) -> tuple[Any, Any]:
        prior = nn.functional.pad(reference_points, (0, 2))
        return self.class_labels_classifier(states), (self.bbox_predictor(states) + prior).sigmoid()


AutoConfig.register(SMCADetrConfig.model_type, SMCADetrConfig, exist_ok=True)
AutoModel.register(SMCADetrConfig, SMCADetrModel, exist_ok=True)
AutoModelForObjectDetection.register(SMCADetrConfig, SMCADetrForObjectDetection, exist_ok=True)
