"""A training step of DeiT with BatchFormerV2 after one block: against the plain model and the papers' layer there.

    python -m benchmarks.deit_step [--model deit_small_patch16_224] [--batch 256] [--block 8] [--compile] [--out DIR]

With the module after block 8 of 12 nine blocks see B rows and three see 2B: the rows alone cost 15/12 = 1.25 times.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from benchmarks._common import in_turns, peak_gib, write


class PapersLayer(nn.Module):
    """What the papers write: the batch doubled, the second half through torch's layer over the batch axis."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(dim, heads, dim, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layer(x)]) if self.training else x


def build(kind: str, args: argparse.Namespace) -> nn.Module:
    model: Any = timm.create_model(args.model, num_classes=1000)
    heads = model.blocks[args.block].attn.num_heads
    if kind.startswith("ours"):
        bf.attach(model, blocks=[args.block], heads=heads, variant="stable" if kind.endswith("stable") else "published")
    elif kind == "papers layer":
        model.blocks[args.block] = nn.Sequential(model.blocks[args.block], PapersLayer(model.embed_dim, heads))
    return model.cuda().train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    images = torch.randn(args.batch, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (args.batch,), device="cuda")
    criterion = bf.TwoStreamLoss(F.cross_entropy)
    steps, memory = {}, {}
    for kind in ("plain", "ours", "ours, stable", "papers layer"):
        model = build(kind, args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if args.compile:
            model.compile(dynamic=False)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()

        for _ in range(5):
            step()
        memory[kind] = peak_gib(step)
        steps[kind] = step
    median = in_turns(steps, repeats=10)
    rows = [
        {"step": kind, "ms": median[kind], "of_plain": median[kind] / median["plain"], "activations_gib": memory[kind]}
        for kind in steps
    ]
    settings = {"model": args.model, "batch": args.batch, "block": args.block, "dtype": "bf16", "compile": args.compile}
    write(
        "deit_step_compiled" if args.compile else "deit_step",
        {"benchmark": "deit_step", **settings, "rows": rows},
        args.out,
    )


if __name__ == "__main__":
    main()
