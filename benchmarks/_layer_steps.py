"""Whole training steps on one device: the plain model, with our module, and with the papers' layer in its place.

The papers' layer is put where ours was attached, so that everything else about the second stream is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._layer_timing import guarded, kernels_on, median_ms, peak_gib

KINDS = ("plain", "ours", "papers")


class PapersLayer(nn.TransformerEncoderLayer):
    """The papers' layer over the batch axis, with the interface of ours so that it can replace it."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.5) -> None:
        super().__init__(dim, heads, dim, dropout)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Step:
    """A model by name, its inputs, and one step of training it."""

    def __init__(self, name: str, kind: str, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model, self.inputs, self.loss = MODELS[name](batch, device)
        if kind != "plain":
            self._attach(name, kind, device)
        self.model.to(device).train()
        self.device = device
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device.type == "cuda")

    def _attach(self, name: str, kind: str, device: torch.device) -> None:
        import batchformer as bf

        options, heads = {"deit-s": ({"blocks": [8]}, 6), "deformable-detr": ({"encoder_layers": [0]}, 4)}.get(
            name.removesuffix("-tiny"), ({}, 4)
        )
        bf.attach(self.model, heads=heads, backend=kernels_on(device), **options)  # type: ignore[arg-type]
        if kind == "papers":
            for module in [m for m in self.model.modules() if isinstance(m, bf.BatchFormer)]:
                module.layers = nn.ModuleList([PapersLayer(module.dim, heads)])

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.model, self.inputs)
        loss.backward()
        self.optimizer.step()


Parts = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]


def _classifier(model: str, size: int, **options: Any) -> Callable[[int, torch.device], Parts]:
    def build(batch: int, device: torch.device) -> Parts:
        import timm  # type: ignore[import-untyped, import-not-found]

        import batchformer as bf

        images = torch.randn(batch, 3, size, size, device=device)
        labels = torch.randint(10, (batch,), device=device)
        criterion = bf.TwoStreamLoss(nn.functional.cross_entropy)
        return (
            timm.create_model(model, num_classes=1000, **options),
            (images, labels),
            lambda model, inputs: criterion(model(inputs[0]), inputs[1]),
        )

    return build


def _detector(size: tuple[int, int], backbone: str, **config: Any) -> Callable[[int, torch.device], Parts]:
    def build(batch: int, device: torch.device) -> Parts:
        from batchformer.models import create_detector

        model = create_detector("deformable-detr", num_labels=80, backbone=backbone, frozen_stages=2, **config)
        labels = [{"class_labels": torch.randint(80, (10,), device=device),
                   "boxes": torch.rand(10, 4, device=device) * 0.3 + 0.3} for _ in range(batch)]  # fmt: skip
        inputs = {
            "pixel_values": torch.randn(batch, 3, *size, device=device),
            "pixel_mask": torch.ones(batch, *size, dtype=torch.long, device=device),
            "labels": labels,
        }
        return model, inputs, lambda model, inputs: model(**inputs).loss

    return build


MODELS: dict[str, Callable[[int, torch.device], Parts]] = {
    "deit-s": _classifier("deit_small_patch16_224", 224),
    "resnet-50": _classifier("resnet50", 224),
    "deformable-detr": _detector((800, 1066), "resnet50"),
    # for tests
    "deit-s-tiny": _classifier("deit_tiny_patch16_224", 32, img_size=32, embed_dim=48, num_heads=6, depth=9),
    "resnet-50-tiny": _classifier("resnet10t", 32),
    "deformable-detr-tiny": _detector(
        (32, 32), "resnet10t", d_model=32, encoder_layers=1, decoder_layers=2, num_queries=12, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=4, decoder_attention_heads=4,
    ),
}  # fmt: skip
BATCHES = {"deit-s": 256, "resnet-50": 128, "deformable-detr": 4}


def rows(
    batches: dict[str, int], device: torch.device, problems: list[str], tell: Callable[[str], Any] = lambda _: None,
    rounds: int = 5, seconds: float = 0.3,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    for name, batch in batches.items():
        row: dict[str, Any] = {"model": name, "batch": batch, "dtype": "bf16", "pass": "step"}
        for kind in KINDS:
            tell(f"{name}, {kind}")
            steps: list[Step] = []

            def timed(name: str = name, kind: str = kind, batch: int = batch, steps: list[Step] = steps) -> float:
                steps.append(Step(name, kind, batch, device))
                return median_ms(steps[0], device, rounds, seconds)

            row[f"{kind}_ms"] = guarded(f"{name} {kind}_ms", timed, problems)
            row[f"{kind}_gib"] = None
            if device.type == "cuda" and row[f"{kind}_ms"] is not None:
                row[f"{kind}_gib"] = guarded(f"{name} {kind}_gib", lambda s=steps: peak_gib(s[0], device), problems)  # type: ignore[misc]
        yield row
