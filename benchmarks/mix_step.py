"""A training step of a vision transformer under every mixing method, side by side in one run.

    python -m benchmarks.mix_step [--model deit_small_patch16_224] [--batch 256] [--size 224] [--compile] [--out DIR]
    python -m benchmarks.mix_step --device cpu --batch 8 --size 32 --model vit_tiny_patch16_224 --repeats 1

Beside TransMix as it is here (one row of attention, fused attention stays) runs one that asks the layers for their
attention, as the released code: in the last block alone, and in all blocks (rows "full attention"). A method that fails
is printed and left out; the file is written after every round.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.mix.graph_cut import GridEnergy, least_energy
from batchformer.mix.puzzle_energy import puzzle_energy
from benchmarks._common import RESULTS, machine, milliseconds, peak_gib

CLASSES = 1000
METHODS = (
    "no mix",
    "cutmix",
    "transmix",
    "transmix, full attention",
    "transmix, full attention in all blocks",
    "saliencymix",
    "puzzlemix",
    "puzzlemix, no transport",
    "puzzlemix, 16 blocks",
    "attentive-cutmix, resnet50",
)


class FullAttention(bf.mix.CutMix):
    """TransMix the plain way: the layer computes its whole attention matrix and hands it over."""

    def __init__(self, model: nn.Module, num_classes: int, all_blocks: bool) -> None:
        super().__init__(num_classes)
        blocks: Any = model.blocks
        for block in blocks if all_blocks else blocks[-1:]:
            block.attn.fused_attn = False
        blocks[-1].attn.attn_drop.register_forward_pre_hook(self._keep)
        self.grid = model.patch_embed.grid_size  # type: ignore[union-attr]

    def _keep(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.attention = arguments[0].detach()

    def targets(self, mixed: Any) -> Tensor:
        rows = self.attention.mean(1)[:, 0, 1:].float()
        mask = F.interpolate(mixed.mask, self.grid).flatten(1)  # type: ignore[arg-type]
        share = (mixed.share + (mask * rows).sum(1) / rows.sum(1)) / 2
        return torch.lerp(mixed.labels, mixed.labels[mixed.partner], share[:, None])


def build(kind: str, model: nn.Module, device: torch.device) -> Any:
    if kind == "no mix":
        return None
    if kind == "cutmix":
        return bf.mix.CutMix(CLASSES)
    if kind == "transmix":
        return bf.mix.TransMix(model, CLASSES)
    if kind.startswith("transmix, full attention"):
        return FullAttention(model, CLASSES, all_blocks=kind.endswith("all blocks"))
    if kind == "saliencymix":
        return bf.mix.SaliencyMix(CLASSES, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    if kind.startswith("puzzlemix"):
        return bf.mix.PuzzleMix(
            model,
            CLASSES,
            blocks=16 if kind.endswith("16 blocks") else (2, 4, 8, 16),
            transport=not kind.endswith("no transport"),
            mean=(0.5, 0.5, 0.5),
            std=(0.2, 0.2, 0.2),
        )
    extractor = bf.mix.feature_map(timm.create_model("resnet50").to(device))
    return bf.mix.AttentiveCutMix(extractor, CLASSES)


def make_step(kind: str, images: Tensor, labels: Tensor, args: argparse.Namespace) -> Callable[[], None]:
    model = timm.create_model(args.model, num_classes=CLASSES, img_size=args.size).to(images.device).train()
    mix = build(kind, model, images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=images.is_cuda)
    if args.compile:
        model.compile(dynamic=False)
    plain = F.one_hot(labels, CLASSES).float()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16):
            mixed = mix(images, labels) if mix is not None else None
            logits = model(images if mixed is None else mixed.images)
            if mixed is None:
                targets = plain
            else:
                targets = mix.targets(mixed) if isinstance(mix, FullAttention) else mixed.targets()
            loss = F.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], Any], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        return milliseconds(step, repeats=repeats, rounds=1)
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return 1000 * (time.perf_counter() - begin) / repeats


def parts(images: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The pieces alone: saliency maps, and the cut of a batch against one image at a time on the CPU."""
    device, rows = images.device, []
    pictures = images.sigmoid()
    partner = torch.randperm(len(images), device=device)
    share = torch.rand(len(images), device=device)

    def row(name: str, step: Callable[[], Any]) -> None:
        try:
            step()
            step()
            rows.append({"part": name, "ms": sorted(timed(step, args.repeats, device) for _ in range(3))[1]})
        except Exception:
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)

    row("saliency maps of the batch", lambda: bf.mix.fine_grained_saliency(pictures))
    saliency = torch.randn(len(images), *images.shape[2:], device=device).exp()
    for blocks in (2, 4, 8, 16):
        if args.size % blocks:
            continue
        energy = puzzle_energy(saliency, pictures, partner, share, blocks=blocks)
        row(f"graph cut of the batch, {blocks} x {blocks}", lambda energy=energy: least_energy(energy))
        row(f"swap by scipy on the CPU, one image, {blocks} x {blocks}", one_by_scipy(energy, blocks))
    return rows


def one_by_scipy(energy: GridEnergy, blocks: int) -> Callable[[], Any]:
    from tests.mix.slow_graph_cut import swap

    scale = 1000 * blocks**2  # that of the released code
    unary = (4 * scale * energy.unary[0]).long().cpu().numpy()
    edges = [(scale * edge[0]).long().cpu().numpy() for edge in (energy.right, energy.down)]
    return lambda: swap(unary, *edges)


def summary(times: dict[str, list[float]], memory: dict[str, float]) -> list[dict[str, Any]]:
    median = {kind: sorted(values)[len(values) // 2] for kind, values in times.items() if values}
    base = median.get("cutmix")
    return [
        {"step": kind, "ms": ms, "of_cutmix": ms / base if base else None, "activations_gib": memory.get(kind)}
        for kind, ms in median.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    images = torch.randn(args.batch, 3, args.size, args.size, device=device)
    labels = torch.randint(CLASSES, (args.batch,), device=device)
    folder = args.out or RESULTS
    path = folder / ("mix_step_compiled.json" if args.compile else "mix_step.json")
    settings = {key: getattr(args, key) for key in ("model", "batch", "size", "compile")}
    steps: dict[str, Callable[[], None]] = {}
    memory: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}

    def save(pieces: list[dict[str, Any]]) -> None:
        result = {"benchmark": "mix_step", **settings, "dtype": "bf16", "rows": summary(times, memory)}
        result |= {"parts": pieces, "failed": failed}
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")

    def attempt(kind: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            print(f"{kind}: failed\n{traceback.format_exc()}", flush=True)
            failed[kind] = f"{type(error).__name__}: {error}"
            steps.pop(kind, None)
            return None

    for kind in args.methods:

        def prepare(kind: str = kind) -> None:
            step = make_step(kind, images, labels, args)
            for _ in range(8 if device.type == "cuda" else 1):  # PuzzleMix meets every number of blocks once
                step()
            if device.type == "cuda":
                memory[kind] = peak_gib(step)
            steps[kind], times[kind] = step, []

        attempt(kind, prepare)
    pieces = attempt("parts", lambda: parts(images, args)) or []
    for _ in range(args.rounds):  # in turns, so that the clock of the card treats all alike
        for kind in list(steps):
            ms = attempt(kind, lambda kind=kind: timed(steps[kind], args.repeats, device))
            if ms is not None:
                times[kind].append(ms)
        save(pieces)
    print(path.read_text())


if __name__ == "__main__":
    main()
