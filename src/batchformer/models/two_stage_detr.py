"""Two-stage Deformable DETR with trained proposals: transformers' class plus the proposal loss it lacks."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection
from transformers.models.deformable_detr.modeling_deformable_detr import DeformableDetrObjectDetectionOutput
from transformers.utils.generic import can_return_tuple

from batchformer.errors import UserError
from batchformer.models.detector_criterion import Parts
from batchformer.models.detector_loss import focal_detection_loss, proposal_loss

__all__ = ["TwoStageDeformableDetr"]


class TwoStageDeformableDetr(DeformableDetrForObjectDetection):
    """`DeformableDetrForObjectDetection` with `two_stage=True` and the loss that trains its proposals.

    Deformable DETR, appendix A.4: a head on the encoder's output scores a proposal in each of its cells, and the
    decoder starts from the best of them; the head is trained by a Hungarian loss of its own, added to the decoder's
    (`detector_loss.proposal_loss`). transformers has the head but not its loss, so the choice of proposals is not
    trained there. Weights and configuration have the same names as in transformers, in both directions: what this class
    saves, `DeformableDetrForObjectDetection.from_pretrained` loads. The decoder's loss is
    `detector_loss.focal_detection_loss`, with the published weights.
    """

    def __init__(self, config: DeformableDetrConfig) -> None:
        if not config.two_stage:
            raise UserError(
                f"{type(self).__name__} is for configurations with two_stage=True: for others take transformers' "
                f"DeformableDetrForObjectDetection."
            )
        super().__init__(config)
        self.loss_function = focal_detection_loss

    @can_return_tuple
    def forward(
        self,
        pixel_values: Float[Tensor, "batch channels height width"],
        pixel_mask: Int[Tensor, "batch height width"] | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: list[dict[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> DeformableDetrObjectDetectionOutput:
        """As in transformers; `loss` and `loss_dict` hold those of the proposals too, whose names end in _enc."""
        outputs = super().forward(
            pixel_values,
            pixel_mask=pixel_mask,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            labels=labels,
            return_dict=True,
            **kwargs,
        )
        if labels is not None:
            loss, parts = self.proposal_loss(outputs.enc_outputs_class, labels, outputs.enc_outputs_coord_logits)
            outputs.loss = outputs.loss + loss
            outputs.loss_dict = {**outputs.loss_dict, **parts}
        return outputs

    def proposal_loss(
        self,
        logits: Float[Tensor, "batch cells classes"],
        labels: list[dict[str, Tensor]],
        box_logits: Float[Tensor, "batch cells 4"],
    ) -> tuple[Tensor, Parts]:
        """The loss of the proposals. A method, because `bf.attach` calls it per stream, as it does `loss_function`."""
        return proposal_loss(logits, labels, box_logits, self.config)
