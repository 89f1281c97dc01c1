"""transformers' detectors by the names of the papers, with the authors' configuration and initialisation.

transformers initialises untrained detectors with N(0, 0.02) everywhere. Trained from scratch that costs many epochs;
`begin_as_published` initialises as the authors' released code does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from batchformer.errors import UserError, reason_of

FrozenStages = int | Literal["all"]
PUBLISHED_FROZEN = 2  # stages: a ResNet's stem and its first layer
UNLIKELY_OBJECT = math.log(0.01 / 0.99)  # logit of an object at the start, with a focal loss: probability 0.01
_SAMPLING = ("sampling_offsets", "reference_points")


@dataclass(frozen=True)
class _Kind:
    """Class and configuration in transformers (SMCA: here), and the papers' settings that differ from its defaults."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    focal: bool = True


# With a focal loss the class weighs 2 in the loss and in the matching (transformers: 1). 100 and 300 queries are
# transformers' own numbers. The auxiliary losses of all decoder layers are on in every paper (transformers: off).
_DEFORMABLE: dict[str, Any] = {"class_cost": 2, "cls_loss_coefficient": 2}
_KINDS = {
    "detr": _Kind("Detr", focal=False),
    "conditional-detr": _Kind("ConditionalDetr"),
    "smca-detr": _Kind("SMCADetr"),
    "deformable-detr": _Kind("DeformableDetr", _DEFORMABLE),
    "deformable-detr-single-scale": _Kind("DeformableDetr", {**_DEFORMABLE, "num_feature_levels": 1}),
    "deformable-detr-refine": _Kind("DeformableDetr", {**_DEFORMABLE, "with_box_refine": True}),
    "deformable-detr-two-stage": _Kind(
        "TwoStageDeformableDetr", {**_DEFORMABLE, "with_box_refine": True, "two_stage": True}
    ),
}
#: the names that `create_detector` takes
DETECTORS = tuple(_KINDS)


def create_detector(
    name: str,
    *,
    num_labels: int,
    id2label: Mapping[int, str] | None = None,
    backbone: str = "resnet50",
    backbone_weights: str | None = None,
    frozen_stages: FrozenStages | None = None,
    **config: Any,
) -> Any:
    """A detector of transformers (or `SMCADetrForObjectDetection`), to be trained from an ImageNet backbone.

    It is the stock class (two-stage: `TwoStageDeformableDetr`, which adds the loss of the proposals to it), so
    `from_pretrained`, `save_pretrained` and `bf.attach` work as usual. What differs from building it from its default
    configuration, in order to start and train as published: auxiliary losses are on; with a focal loss the class weighs
    2 in loss and matching; `loss_function` is set so that it does, so that losses are in full precision under autocast,
    and so that they are divided by the number of boxes of all processes; initial weights (`begin_as_published`); frozen
    stages and the activations of some networks, both of which transformers drops for backbones of timm. What stays as
    in transformers: Deformable DETR with refinement, but not the two-stage one, uses one classifier for all decoder
    layers (released: one each).

    Args:
        name: one of `DETECTORS`.
        num_labels: classes; labels are 0 .. num_labels - 1.
        id2label: their names.
        backbone: any name that timm can build with features_only=True; its BatchNorm is frozen, as published.
        backbone_weights: a local file (timm or torchvision), "pretrained" for what timm downloads, or None: random.
            With frozen BatchNorm a random backbone is good for tests and for weights that are loaded afterwards.
        frozen_stages: how many of the backbone's stages are not trained, or "all"; None: 2 with weights (a ResNet's
            stem and first layer, as published), 0 without.
        config: any field of the detector's configuration: num_queries, encoder_layers, d_model, dropout, ...
    """
    if name not in _KINDS:
        raise UserError(f"there is no detector {name!r}: there are {', '.join(DETECTORS)}.")
    kind = _KINDS[name]
    model_class, config_class = _classes(kind.family)
    from huggingface_hub.errors import StrictDataclassError

    names = {"id2label": dict(id2label)} if id2label is not None else {}
    settings: dict[str, Any] = {"auxiliary_loss": True, **kind.config, **config}
    if settings.get("two_stage") and "num_queries" in settings:  # each proposal becomes a query
        settings.setdefault("two_stage_num_proposals", settings["num_queries"])
    known = dir(config_class())  # transformers silently accepts a misspelt one
    if unknown := [key for key in settings if key not in known and key not in ("cls_loss_coefficient", "image_size")]:
        raise UserError(
            f"{config_class.__name__} has no {unknown[0]!r}; its fields are in transformers' documentation."
        )
    if "backbone_config" not in settings:
        settings["backbone"] = backbone
    try:
        full_config = config_class(num_labels=num_labels, **names, **settings)
        _check_sizes(full_config)
        model = model_class(full_config)
    except RuntimeError as problem:  # timm's answer to an unknown name
        raise UserError(
            f"backbone {backbone!r}: {reason_of(problem)}; timm.list_models() lists those there are."
        ) from problem
    except (ValueError, StrictDataclassError) as problem:  # sizes that do not fit together, a word for a number, ...
        raise UserError(f"{name} with these settings: {' '.join(str(problem).split())}") from problem
    begin_as_published(model, kind.focal)
    from batchformer.models.detector_backbone import load_backbone_weights, restore_activations
    from batchformer.models.detector_loss import detection_loss, focal_detection_loss

    model.loss_function = focal_detection_loss if kind.focal else detection_loss
    body = model.model.backbone.model
    if "backbone_config" not in settings:
        restore_activations(body, backbone)
    if backbone_weights is not None:
        load_backbone_weights(body, backbone, backbone_weights)
    frozen = (0 if backbone_weights is None else PUBLISHED_FROZEN) if frozen_stages is None else frozen_stages
    if frozen:
        if not hasattr(body, "feature_info"):
            raise UserError("frozen_stages needs a backbone of timm: name one with backbone=.")
        freeze_stages(body, [stage["module"] for stage in body.feature_info.info], frozen)
    return model


def parameter_groups(
    model: nn.Module, lr: float, backbone_lr: float, sampling_lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups for AdamW, as released: backbone, sampling points of deformable attention, and the rest.

    All of them are decayed, biases too, as released. A group that would be empty is left out, so plain DETR has two.
    """
    groups: dict[str, list[nn.Parameter]] = {"rest": [], "backbone": [], "sampling": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts = name.split(".")
            group = "backbone" if "backbone" in parts else "sampling" if set(_SAMPLING) & set(parts) else "rest"
            groups[group].append(parameter)
    rates = {"rest": lr, "backbone": backbone_lr, "sampling": sampling_lr}
    return [
        {"name": group, "params": parameters, "lr": rates[group], "weight_decay": weight_decay}
        for group, parameters in groups.items()
        if parameters
    ]


def _check_sizes(config: Any) -> None:
    """Check sizes that transformers would reject only in the first forward, with an error about tensor shapes."""
    for key in ("num_queries", "encoder_layers", "decoder_layers", "d_model"):
        if getattr(config, key) < 1:
            raise UserError(f"{key}={getattr(config, key)} must be at least 1.")
    for key in ("encoder_attention_heads", "decoder_attention_heads"):
        if config.d_model % max(1, getattr(config, key)) or config.d_model % 4:
            raise UserError(
                f"d_model={config.d_model} must divide by 4 and by {key}={getattr(config, key)}: choose others."
            )


def _classes(family: str) -> tuple[Any, Any]:
    if family == "SMCADetr":
        from batchformer.models.smca_detr import SMCADetrConfig, SMCADetrForObjectDetection

        return SMCADetrForObjectDetection, SMCADetrConfig
    import transformers

    if family == "TwoStageDeformableDetr":
        from batchformer.models.two_stage_detr import TwoStageDeformableDetr

        return TwoStageDeformableDetr, transformers.DeformableDetrConfig
    return getattr(transformers, f"{family}ForObjectDetection"), getattr(transformers, f"{family}Config")


def freeze_stages(backbone: nn.Module, stages: list[str], frozen: FrozenStages) -> None:
    """Freeze the first `frozen` of the `stages` (names of submodules, in the order of the forward).

    Whatever comes before a stage, its stem, is frozen with it. DETR and its successors freeze a ResNet's stem and its
    first layer: 2 of timm's five stages.
    """
    if frozen != "all" and not 0 <= frozen <= len(stages):
        raise UserError(f'frozen_stages={frozen} must be "all" or between 0 and {len(stages)}, the stages there are.')
    if frozen == "all":
        backbone.requires_grad_(False)
    elif frozen:
        names = [name for name, _ in backbone.named_modules()]
        last = stages[frozen - 1]
        end = max(k for k, name in enumerate(names) if name == last or name.startswith(f"{last}."))
        for name in names[: end + 1]:
            for parameter in backbone.get_submodule(name).parameters(recurse=False):
                parameter.requires_grad_(False)


@torch.no_grad()
def begin_as_published(model: Any, focal: bool) -> None:
    """Initialise everything but the backbone as the papers' released code does.

    - encoder and decoder: Xavier, all of their matrices (DETR and successors); biases 0, norms 1;
    - object queries: N(0, 1), as `nn.Embedding` begins; heads and projections as torch's own layers begin;
    - a focal loss: all classes begin at a probability of 0.01, boxes at their reference points (last layer 0; in
      Deformable DETR with widths and heights before the sigmoid of -2);
    - Deformable DETR: what transformers does for sampling offsets, reference points and levels is as published; its
      projections of the feature maps are Xavier.

    SMCA's modulation initialises itself, and is left as it is.
    """
    from batchformer.models.smca_decoder import StartingLinear

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
    if hasattr(base, "input_projection"):
        base.input_projection.reset_parameters()
    for module in base.input_proj.modules() if hasattr(base, "input_proj") else ():
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if hasattr(model, "class_embed"):
        _heads(list(model.class_embed), list(model.bbox_embed), focal, first_size=-2.0)
        if model.config.two_stage:
            for head in model.bbox_embed:
                nn.init.zeros_(head.layers[-1].bias[2:])
    else:
        _heads([model.class_labels_classifier], [model.bbox_predictor], focal)


def _heads(classifiers: list[Any], boxes: list[Any], focal: bool, first_size: float = 0.0) -> None:
    for classifier in classifiers:
        nn.Linear.reset_parameters(classifier)
        if focal:
            nn.init.constant_(classifier.bias, UNLIKELY_OBJECT)
    for head in boxes:
        for layer in head.layers:
            nn.Linear.reset_parameters(layer)
        if focal:
            nn.init.zeros_(head.layers[-1].weight)
            nn.init.zeros_(head.layers[-1].bias)
    if focal and first_size:
        nn.init.constant_(boxes[0].layers[-1].bias[2:], first_size)
