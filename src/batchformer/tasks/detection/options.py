"""The options of detection: where the module goes in a detector, and the optimiser its papers use."""

from dataclasses import dataclass, field
from typing import Any, Literal

from batchformer.errors import UserError
from batchformer.training.optimizers import refuse_bad_betas, refuse_negative_rates
from batchformer.training.options import InnerModuleOptions
from batchformer.training.schedules import ScheduleOptions


@dataclass
class DetectorModuleOptions(InnerModuleOptions):
    """How and where BatchFormerV2 is attached to a detector.

    Args:
        encoder_layers: numbers of the encoder layers to insert the module after, counted from 0, or "all". The paper
            counts from 1: its L1 is 0, its L3-6 are 2, 3, 4, 5.
        mask_padding: padded positions of smaller images take no part; as published they do.
        layer_scale: start of a learnt factor on both branches.
    """

    encoder_layers: list[int] | Literal["all"] = field(default_factory=lambda: [0])
    mask_padding: bool = False
    layer_scale: float | None = None

    def keywords(self) -> dict[str, Any]:
        if not self.encoder_layers:
            raise UserError(
                'model.batchformer.encoder_layers names no layer: give their numbers, as in [0], or "all"; without the '
                "module it is model.method=baseline."
            )
        return super().keywords()


@dataclass
class DetectorOptimizerOptions:
    """AdamW with the groups of the released code. Every parameter is decayed, as there.

    Args:
        lr: of encoder, decoder and heads.
        backbone_lr: of what is trained of the backbone.
        sampling_lr: of sampling offsets and reference points (Deformable DETR); null: a tenth of lr, as published.
        weight_decay: of all.
        module_lr_factor: the module's learning rate is this times lr (released: 1).
        betas: of AdamW.
    """

    lr: float = 1e-4
    backbone_lr: float = 1e-5
    sampling_lr: float | None = None
    weight_decay: float = 1e-4
    module_lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)

    def check(self) -> None:
        if self.lr <= 0:
            raise UserError(f"model.optimizer.lr={self.lr} must be more than 0.")
        refuse_negative_rates(self)
        refuse_bad_betas(self.betas)


def detector_schedule() -> ScheduleOptions:
    """A tenth of the learning rate from epoch 40 on, as all but DETR have it in 50 epochs."""
    return ScheduleOptions(name="step", milestones=[40])
