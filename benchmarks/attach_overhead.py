"""What attaching BatchFormer costs: a training step and a forward pass of ResNet-50, with and without, side by side.

python -m benchmarks.attach_overhead [--batch 128] [--size 224] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

import batchformer as bf
from benchmarks._common import in_turns, write


def operations(model: torch.nn.Module, images: torch.Tensor) -> list[str]:
    program = torch.export.export(model, (images,), strict=False)
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    images = torch.randn(args.batch, 3, args.size, args.size, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch,), device="cuda")
    criterion = bf.TwoStreamLoss(F.cross_entropy)
    models, steps = {}, {}
    for name in ("plain", "attached"):
        model: Any = timm.create_model("resnet50", num_classes=1000)
        model = model.cuda().to(memory_format=torch.channels_last).train()
        if name == "attached":
            bf.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()

        models[name], steps[name] = model, step
        for _ in range(10):
            step()
    training = in_turns(steps, repeats=10)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for model in models.values():
            model.eval()
        inference = in_turns({name: partial(model, images) for name, model in models.items()}, repeats=10)
    same = operations(models["plain"], images[:2]) == operations(models["attached"], images[:2])
    rows: list[dict[str, Any]] = [
        {"pass": name, "plain_ms": times["plain"], "attached_ms": times["attached"]}
        for name, times in (("training step", training), ("inference", inference))
    ]
    for row in rows:
        row["overhead"] = row["attached_ms"] / row["plain_ms"] - 1
    settings = {"model": "resnet50", "batch": args.batch, "size": args.size, "dtype": "bf16"}
    write(
        "attach_overhead",
        {"benchmark": "attach_overhead", **settings, "same_inference_graph": same, "rows": rows},
        args.out,
    )


if __name__ == "__main__":
    main()
