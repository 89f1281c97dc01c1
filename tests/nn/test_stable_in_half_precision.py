"""variant="stable" trains in fp16 and bf16 at every insertion pattern of V2: no NaN, and the related stream learns."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F

import batchformer as bf

DEPTH, CLASSES, BATCH, STEPS = 12, 4, 16, 18
# V2's Tables 7 and 8, the classification runs on ImageNet; papers count blocks from 1
PATTERNS = {"8": [8], "8-12": [7, 8, 9, 10, 11], "4-12": list(range(3, 12)), "1-12": "all"}
PLACES = [
    pytest.param(blocks, share, id=f"{name}{'-shared' if share else ''}")
    for name, blocks in PATTERNS.items()
    for share in ([False] if len(blocks) == 1 else [False, True])
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Run(NamedTuple):
    """What a training left: the loss of each stream at its end, and how many steps the scaler skipped."""

    plain: float
    related: float
    skipped: int


def train(blocks: list[int] | str, share: bool, dtype: torch.dtype, device: str) -> Run:
    """A narrow DeiT of twelve blocks learns to tell four noisy patterns apart, by autocast and a GradScaler."""
    torch.manual_seed(0)
    vit = timm.create_model(
        "deit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=CLASSES
    ).to(device)
    attachment = bf.attach(vit, blocks=blocks, share=share, heads=2, variant="stable")
    patterns = torch.randn(CLASSES, 3, 8, 8, device=device)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    losses, skipped = [], 0
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,), device=device)
        images = patterns[labels] + 0.3 * torch.randn(BATCH, 3, 8, 8, device=device)
        with torch.autocast(device, dtype):
            logits = vit(images)
            rows = F.cross_entropy(logits, bf.repeat_targets(labels, logits), reduction="none")
        assert logits.isfinite().all()
        optimizer.zero_grad()
        scaler.scale(rows.mean()).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(torch.stack([attachment.plain(rows).mean(), attachment.related(rows).mean()]).detach())
    assert all(p.isfinite().all() for p in vit.parameters())
    plain, related = torch.stack(losses[-4:]).mean(0).tolist()
    return Run(plain, related, skipped)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("blocks", "share"), PLACES)
def test_it_trains_at_every_pattern_of_the_papers(
    blocks: list[int] | str, share: bool, dtype: torch.dtype, device: str
) -> None:
    run = train(blocks, share, dtype, device)
    assert run.plain < 0.8 * math.log(CLASSES)
    assert run.related < 1.1 * run.plain
    assert run.skipped <= 2  # the scaler starts at 65,536 and may have to come down
