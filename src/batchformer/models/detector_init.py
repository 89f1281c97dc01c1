"""Where a detector begins: as in the code its authors released, where transformers begins elsewhere.

transformers loads trained detectors, and begins untrained ones with N(0, 0.02) everywhere. Trained from scratch that
costs many epochs; what the authors do is here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

PRIOR = 0.01  # probability of an object at the start, with a focal loss
_OBJECT_LOGIT = -math.log((1 - PRIOR) / PRIOR)


@torch.no_grad()
def begin_as_published(model: Any, focal: bool) -> None:
    """Initial weights of everything but the backbone.

    - encoder and decoder: Xavier, all of their matrices (DETR and successors); biases 0, norms 1;
    - object queries: N(0, 1), as `nn.Embedding` begins; heads and projections as torch's own layers begin;
    - a focal loss: all classes begin at a probability of 0.01, boxes at their reference points (last layer 0; in
      Deformable DETR with widths and heights before the sigmoid of -2);
    - Deformable DETR: what transformers does for sampling offsets, reference points and levels is as published; its
      projections of the feature maps are Xavier.

    SMCA's modulation sets its own start, which is kept.
    """
    from batchformer.models.smca_detr_modulation import StartingLinear

    base = model.model
    for part in (base.encoder, base.decoder):
        for name, module in part.named_modules():
            if isinstance(module, StartingLinear) or "embed" in name:  # the heads of a refining decoder: below
                continue
            if isinstance(module, nn.Linear) and "sampling_offsets" not in name and "attention_weights" not in name:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
    for name in ("enc_output", "pos_trans"):  # two-stage
        if hasattr(base, name):
            nn.init.xavier_uniform_(getattr(base, name).weight)
            nn.init.zeros_(getattr(base, name).bias)
    if hasattr(base, "query_position_embeddings"):
        nn.init.normal_(base.query_position_embeddings.weight)
    _projections(base)
    if hasattr(model, "class_embed"):
        _heads(list(model.class_embed), list(model.bbox_embed), focal, first_size=-2.0)
        if model.config.two_stage:
            for head in model.bbox_embed:
                nn.init.zeros_(head.layers[-1].bias[2:])
    else:
        _heads([model.class_labels_classifier], [model.bbox_predictor], focal)


def _projections(base: Any) -> None:
    if hasattr(base, "input_proj"):
        for module in base.input_proj.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    else:
        base.input_projection.reset_parameters()


def _heads(classifiers: list[Any], boxes: list[Any], focal: bool, first_size: float = 0.0) -> None:
    for classifier in classifiers:
        nn.Linear.reset_parameters(classifier)
        if focal:
            nn.init.constant_(classifier.bias, _OBJECT_LOGIT)
    for head in boxes:
        for layer in head.layers:
            nn.Linear.reset_parameters(layer)
        if focal:
            nn.init.zeros_(head.layers[-1].weight)
            nn.init.zeros_(head.layers[-1].bias)
    if focal and first_size:
        nn.init.constant_(boxes[0].layers[-1].bias[2:], first_size)
