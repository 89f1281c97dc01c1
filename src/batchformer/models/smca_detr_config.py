"""The configuration of SMCA-DETR, in the way of transformers."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import DetrConfig


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
