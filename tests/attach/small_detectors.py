"""transformers' detectors with next to no weights, and batches for them: images of several sizes, boxes, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Labels = list[dict[str, Tensor]]
CLASSES = 3
HEIGHT, WIDTH = 64, 96
# 8 heads, because the mask head wants a width that divides by 8
SMALL = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 5,
    "num_labels": CLASSES,
    "image_size": 64,  # of the dry run
    "auxiliary_loss": True,
    "dropout": 0.0,
}


def backbone(*stages: int) -> Any:
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{k}" for k in stages],
    )


def _of_transformers(kind: str, stages: tuple[int, ...] = (1, 2, 3, 4), **config: Any) -> Callable[..., nn.Module]:
    def build(**more: Any) -> nn.Module:
        import transformers

        settings = getattr(transformers, f"{kind.split('For')[0]}Config")(
            backbone_config=backbone(*stages), **{**SMALL, **config, **more}
        )
        return _seeded(lambda: getattr(transformers, kind)(settings))

    return build


def _smca(**more: Any) -> nn.Module:
    from batchformer.models.smca_detr import SMCADetrConfig, SMCADetrForObjectDetection

    return _seeded(lambda: SMCADetrForObjectDetection(SMCADetrConfig(backbone_config=backbone(4), **{**SMALL, **more})))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
    return model


DEFORMABLE = "DeformableDetrForObjectDetection"
POINTS = {"encoder_n_points": 1, "decoder_n_points": 1}
BUILD: dict[str, Callable[..., nn.Module]] = {
    "detr": _of_transformers("DetrForObjectDetection"),
    "conditional": _of_transformers("ConditionalDetrForObjectDetection"),
    "deformable-single-scale": _of_transformers(DEFORMABLE, (4,), num_feature_levels=1, **POINTS),
    "deformable": _of_transformers(DEFORMABLE, (2, 3, 4), num_feature_levels=4, **POINTS),
    "deformable-refine": _of_transformers(DEFORMABLE, (3, 4), num_feature_levels=2, with_box_refine=True, **POINTS),
    "deformable-two-stage": _of_transformers(
        DEFORMABLE,
        (3, 4),
        num_feature_levels=2,
        with_box_refine=True,
        two_stage=True,
        two_stage_num_proposals=5,
        **POINTS,
    ),
    "segmentation": _of_transformers("DetrForSegmentation"),
    "smca": _smca,
}
FOCAL = [name for name in BUILD if name not in ("detr", "segmentation")]


def layer(kind: str, number: int = 0) -> str:
    return f"{'detr.' if kind == 'segmentation' else ''}model.encoder.layers.{number}"


def batch(kind: str = "detr", count: int = 2, objects: bool = True) -> dict[str, Any]:
    """Every second image is narrower than the canvas. As many objects in an image as there are images, for a trap."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(count, HEIGHT, WIDTH, dtype=torch.long)
    mask[1::2, :, WIDTH // 2 :] = 0
    number = count if objects else 0
    labels = []
    for _ in range(count):
        one = {
            "class_labels": torch.randint(CLASSES, (number,), generator=generator),
            "boxes": torch.rand(number, 4, generator=generator) * 0.4 + 0.3,
        }
        if kind == "segmentation":
            one["masks"] = torch.rand(number, HEIGHT, WIDTH, generator=generator).round()
        labels.append(one)
    images = torch.randn(count, 3, HEIGHT, WIDTH, generator=generator) * mask[:, None]
    return {"pixel_values": images, "pixel_mask": mask, "labels": labels}
