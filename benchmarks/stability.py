"""Why the related stream dies, and what keeps it alive: measured before any training, depth by depth.

    python -m benchmarks.stability --data-root DIR [--batch 128] [--out benchmarks/results]

A small ViT (DeiT-Ti with patches of 4) with BatchFormerV2 after all twelve blocks, on one batch of CIFAR-100, at its
initial weights: what each form of the module does to what tells samples apart. After training the same numbers are in
the result file of each run (`stream_health`). docs/stability.md is written from both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timm
import torch

import batchformer as bf
from batchformer.analysis import stream_health
from batchformer.data import CIFAR100
from batchformer.data.loading.epoch_loader import images_and_labels
from benchmarks._common import write

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "published, dropout 0.1": {"dropout": 0.1},
    "published, no dropout": {"dropout": 0.0},
    "pre-LN": {"norm": "pre"},
    "pre-LN, layer scale 0.1": {"norm": "pre", "layer_scale": 0.1},
    "stable": {"variant": "stable"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = CIFAR100(root=args.data_root, batch_size=args.batch, augment="crop-flip")
    data.setup()
    images, labels = (tensor.to(device) for tensor in images_and_labels(next(iter(data.train_dataloader()))))
    rows: list[dict[str, Any]] = []
    for form, keywords in FORMS.items():
        torch.manual_seed(0)
        model = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=data.num_classes)
        bf.attach(model, blocks="all", heads=3, **keywords)
        health = stream_health(model.to(device).train(), images, labels)
        for depth, (point, block) in enumerate(zip(health.points, health.blocks, strict=True), start=1):
            assert point.plain is not None
            rows.append(
                {
                    "form": form,
                    "depth": depth,
                    "signal": point.signal,
                    "between_samples": point.related_out.between_samples,
                    "effective_rank": point.related_out.effective_rank,
                    "norm_of_plain": point.related_out.norm / point.plain.norm,
                    "change": point.change,
                    "from_others": point.from_others,
                    "attention_entropy": sum(e for a in point.attention for e in a.entropy)
                    / sum(len(a.entropy) for a in point.attention),
                    "gradient_plain": block.gradient.plain,
                    "gradient_related": block.gradient.related,
                }
            )
        print(form, [round(row["signal"], 3) for row in rows[-12:]], flush=True)
    settings = {"model": "deit_tiny_patch16_224", "size": 32, "patch": 4, "batch": args.batch, "data": "CIFAR-100"}
    write("stability_start", {"benchmark": "stability_start", **settings, "rows": rows}, args.out, show=False)


if __name__ == "__main__":
    main()
