"""A training step of Deformable DETR (ResNet-50, 800 px): plain, with BatchFormerV2, with the papers' layer.

    python -m benchmarks.detection_step [--batches 4 8] [--size 800 1066] [--layer 0] [--backend auto] [--out DIR]

bf16 autocast, AdamW, ten objects an image, matching and auxiliary losses included, backward on the calling thread as in
`batchformer fit`. The file is written after each batch size. Time of a step is the median over
rounds in turns, peak memory what a step needs above the weights. The share of the module is the time of its own forward
and backward, measured by itself on as many tokens in the same dtype, over that of the step; the rest of what the second
stream costs is the encoder and decoder on twice the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import batchformer as bf
from batchformer.models import create_detector
from benchmarks._common import in_turns, milliseconds, peak_gib, write
from benchmarks._layer_steps import PapersLayer
from benchmarks._layer_timing import on_this_thread

HEADS, DROPOUT = 4, 0.5


def build(kind: str, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = create_detector("deformable-detr", num_labels=80, backbone="resnet50", frozen_stages=2)
    if kind != "plain":
        options = {} if kind == "papers layer" else {"backend": args.backend, "memory": args.memory}
        attachment = bf.attach(model, encoder_layers=[args.layer], heads=HEADS, dropout=DROPOUT, **options)
        if kind == "papers layer":
            module = attachment.points[0].module
            module.layers = nn.ModuleList([PapersLayer(model.config.d_model, HEADS, DROPOUT)])
    return model.cuda().train()


def images_and_boxes(batch: int, size: tuple[int, int]) -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    labels = [
        {
            "class_labels": torch.randint(80, (10,), device="cuda", generator=generator),
            "boxes": torch.rand(10, 4, device="cuda", generator=generator) * 0.3 + 0.3,
        }
        for _ in range(batch)
    ]
    pixels = torch.randn(batch, 3, *size, device="cuda", generator=generator)
    return {
        "pixel_values": pixels,
        "pixel_mask": torch.ones(batch, *size, dtype=torch.long, device="cuda"),
        "labels": labels,
    }


def module_ms(model: Any, batch: int, tokens: int) -> float:
    """Forward and backward of the module alone, on the rows of one stream, as it gets them."""
    module = next(iter(model.batchformer))
    rows = torch.randn(batch, tokens, 256, device="cuda", requires_grad=True)

    def call() -> None:
        x = rows
        with torch.autocast("cuda", torch.bfloat16):
            for layer in module.layers:
                x = layer(x)
        x.float().sum().backward()

    for _ in range(5):
        call()
    return milliseconds(call, repeats=20)


def count_tokens(model: Any, inputs: dict[str, Any]) -> int:
    seen: list[int] = []
    layer = model.model.encoder.layers[0]
    handle = layer.register_forward_hook(
        lambda _, given, out: seen.append((out[0] if isinstance(out, tuple) else out).shape[1])
    )
    with torch.no_grad():
        model.eval()(inputs["pixel_values"][:1], inputs["pixel_mask"][:1])
    handle.remove()
    model.train()
    return seen[0]


def measure(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    inputs, steps, memory, alone = images_and_boxes(batch, tuple(args.size)), {}, {}, {}
    for kind in ("plain", "ours", "papers layer"):
        print(f"... batch {batch}, {kind}", file=sys.stderr, flush=True)
        model = build(kind, args)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-6, fused=True)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()

        for _ in range(4):
            step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        memory[kind] = peak_gib(step)
        if kind != "plain":
            alone[kind] = module_ms(model, batch, count_tokens(model, inputs))
        steps[kind] = step
    median = in_turns(steps, repeats=4)
    return [
        {
            "batch": batch,
            "step": kind,
            "ms": median[kind],
            "of_plain": median[kind] / median["plain"],
            "peak_gib": memory[kind],
            "module_ms": alone.get(kind),
            "module_share": alone[kind] / median[kind] if kind in alone else None,
        }
        for kind in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--size", type=int, nargs=2, default=[800, 1066], help="height and width of the images")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--memory", default="fast")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    settings = {"model": "deformable-detr, resnet50", "size": " x ".join(map(str, args.size)), "layer": args.layer,
                "dtype": "bf16", "backend": args.backend, "memory": args.memory}  # fmt: skip
    for batch in args.batches:
        with on_this_thread():
            rows += measure(batch, args)
        content = {"benchmark": "detection_step", **settings, "rows": rows}
        write("detection_step", content, args.out, show=batch == args.batches[-1])


if __name__ == "__main__":
    main()
