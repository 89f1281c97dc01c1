"""How the related stream starts, by depth: a tiny ViT on the embedded digits with a module after every block. CPU.

    python -m benchmarks.stability_depth [--depths 6 12 24 48] [--seeds 0 1 2] [--out benchmarks/results]

Mean loss of the plain and of the related rows over windows of 50 steps; docs/stability.md shows it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

import batchformer as bf
from batchformer.data import DigitsLT
from batchformer.data.loading.epoch_loader import images_and_labels
from benchmarks._common import write

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "published, dropout 0.1": {"dropout": 0.1},
    "stable": {"variant": "stable"},
}
STEPS, WINDOW, WARM_UP, LR, BATCH = 300, 50, 100, 1e-3, 64


def losses(depth: int, form: str, seed: int) -> torch.Tensor:
    """(steps, 2): the mean loss of the plain and of the related rows."""
    data = DigitsLT(imbalance=1.0, batch_size=BATCH, seed=seed, augment="none")
    data.setup()
    loader = data.train_dataloader()
    torch.manual_seed(seed)
    tiny: dict[str, Any] = {"img_size": data.image_size, "patch_size": 4, "embed_dim": 64, "num_heads": 4}
    model = timm.create_model("deit_tiny_patch16_224", **tiny, depth=depth, num_classes=data.num_classes).train()
    attachment: Any = bf.attach(model, blocks="all", heads=4, **FORMS[form])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    found: list[list[float]] = []
    for epoch in range(STEPS):
        loader.set_epoch(epoch)
        for images, labels in map(images_and_labels, loader):
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (len(found) + 1) / WARM_UP)
            logits = model(images)
            rows = F.cross_entropy(logits, bf.repeat_targets(labels, logits), reduction="none")
            optimizer.zero_grad()
            rows.mean().backward()
            optimizer.step()
            found.append([attachment.plain(rows).mean().item(), attachment.related(rows).mean().item()])
            if len(found) == STEPS:
                return torch.tensor(found)
    raise AssertionError("the loader gave no batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for depth in args.depths:
        for form in args.forms:
            for seed in args.seeds:
                windows = losses(depth, form, seed).reshape(-1, WINDOW, 2).mean(1)
                for k, (plain, related) in enumerate(windows.tolist(), start=1):
                    row = {"depth": depth, "form": form, "seed": seed, "steps": k * WINDOW}
                    rows.append({**row, "plain_loss": plain, "related_loss": related})
                print(depth, form, seed, [f"{p:.2f}/{r:.2f}" for p, r in windows.tolist()], flush=True)
                settings = {"data": "digits", "batch": BATCH, "lr": LR, "warmup_steps": WARM_UP, "classes": 10}
                write(
                    "stability_depth", {"benchmark": "stability_depth", **settings, "rows": rows}, args.out, show=False
                )


if __name__ == "__main__":
    main()
