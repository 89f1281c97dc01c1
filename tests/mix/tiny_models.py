"""Small models of every kind TransMix reads, and the slow way to their attention: the whole matrix, unfused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

SMALL = {"embed_dim": 48, "num_heads": 3, "depth": 2}


@dataclass(frozen=True)
class Case:
    """A timm model made small; `prefix` tokens before the image's, `query` whose attention TransMix should take."""

    name: str
    model: str
    query: str
    prefix: int = 1
    size: tuple[int, int] = (64, 64)
    grid: tuple[int, int] = (4, 4)
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = timm.create_model(self.model, num_classes=5, **self.options)
        return opinionated(model)

    def images(self, count: int = 3) -> Tensor:
        return torch.randn(count, 3, *self.size, generator=torch.Generator().manual_seed(1))


def opinionated(model: nn.Module) -> nn.Module:
    """Fresh weights attend to everything alike: these do not."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in ("qkv", "q", "k", "kv", "q_proj", "k_proj", "self_attention")):
            with torch.no_grad():
                parameter.normal_(std=0.25, generator=generator)
        if any(part in name for part in ("relative_position_bias_table", "cls_token", "q_bias", "q_norm", "k_norm")):
            with torch.no_grad():
                parameter.normal_(generator=generator)
    return model


def vit(name: str, query: str = "class", prefix: int = 1, **options: Any) -> Case:
    size = options.setdefault("img_size", 64)
    size = (size, size) if isinstance(size, int) else size
    patch = 14 if "patch14" in name else 16
    return Case(
        f"{name}-{query}",
        name,
        query,
        prefix,
        size,
        (size[0] // patch, size[1] // patch),
        {**SMALL, **options},
    )


PVT = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 2), "num_heads": (1, 2, 3, 4)}
CASES = [
    vit("deit_tiny_patch16_224"),
    vit("vit_tiny_patch16_224", img_size=(48, 96)),
    vit("deit_tiny_distilled_patch16_224", prefix=2),
    vit("deit3_small_patch16_224", img_size=(96, 32)),
    vit("vit_small_patch14_reg4_dinov2", prefix=5, img_size=56),
    vit("vit_base_patch16_siglip_gap_224", "mean", prefix=0),
    vit("vit_base_patch16_clip_224", "mean", global_pool="avg"),
    vit("beit_base_patch16_224", "mean"),
    vit("beit_base_patch16_224", "class", global_pool="token"),
    vit("eva02_tiny_patch14_224", "mean", img_size=(56, 28)),
    vit("eva02_tiny_patch14_224", "class", img_size=56, global_pool="token"),
    vit("vit_small_patch16_224", "class", qk_norm=True),
    vit("vit_base_patch16_224", "mean", qk_norm=True, global_pool="avg"),
    vit("cait_xxs24_224", depth_token_only=2),
    Case("xcit", "xcit_nano_12_p16_224", "class", 1, (32, 64), (2, 4), {"depth": 1}),
    Case("pvt", "pvt_v2_b0", "mean", 0, (64, 96), (2, 3), PVT),
    Case("pvt-linear", "pvt_v2_b2_li", "mean", 0, (64, 64), (7, 7), PVT),
]


def unfused(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


def whole_attention(model: nn.Module, images: Tensor) -> list[Tensor]:
    """What every attention layer of a stock timm model multiplies its values with, (batch, heads, queries, keys)."""
    seen: list[Tensor] = []
    hooks = [
        module.attn_drop.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        for module in unfused(model).modules()
        if hasattr(module, "attn_drop")
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return seen


def class_row(whole: Tensor, query: str, prefix: int) -> Tensor:
    """The attention TransMix should find in the whole matrix, over the image tokens, each row summing to one.

    Softmax of the mean of several queries' logits is the geometric mean of their rows, made to sum to one again.
    """
    rows = whole[:, :, 0] if query == "class" else whole[:, :, prefix:].log().mean(2).softmax(-1)
    row = rows.mean(1)[:, prefix:]
    return row / row.sum(1, keepdim=True)
