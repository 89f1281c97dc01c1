"""How time and memory of the layer grow with the batch and with the positions, and where attention overtakes the rest.

python benchmarks/layer_bench.py [--dim 256] [--heads 4] [--tokens 4194304] [--out benchmarks/results]

The layer beside the papers' own at named shapes is `batchformer bench`. Here: B = 16 ... 4096, N = 1 ... 50,000 with
B x N up to `--tokens`; forward and backward, bf16, dropout 0.5. "attention_ms" is attention alone, "products_ms" the
matrix products of the layer alone: attention grows with B x B x N, they grow with B x N.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _common import write
from torch import nn

from batchformer.kernels.bench import guarded, median_ms, one_call, peak_gib
from batchformer.kernels.run import batch_attention
from batchformer.nn.encoder import BatchEncoderLayer

BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
POSITIONS = (1, 16, 197, 1000, 4000, 13294, 50_000)
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


class Products(nn.Module):
    """The four matrix products of the layer and nothing between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(dim, width, bias=False) for width in (3 * dim, dim, dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        into, *rest = self.parts
        x = into(x)[..., : x.shape[-1]]
        for part in rest:
            x = part(x)
        return x


def measure(batch: int, positions: int, dim: int, heads: int, problems: list[str]) -> dict[str, Any]:
    x = torch.randn(batch, positions, dim, device=DEVICE, dtype=DTYPE, requires_grad=True)
    grad = torch.randn_like(x)
    row: dict[str, Any] = {"shape": [batch, positions, dim], "heads": heads, "dtype": "bf16", "dropout": 0.5}
    timed = (DEVICE, 3, 0.02)
    for memory in ("fast", "lean"):
        layer = BatchEncoderLayer(dim, heads, memory=memory).to(DEVICE, DTYPE)  # type: ignore[arg-type]
        step, label = one_call(layer, layer, x, grad, "fwd+bwd"), f"{batch} x {positions} {memory}"
        row[f"{memory}_ms"] = guarded(label, lambda step=step: median_ms(step, *timed), problems)
        row[f"{memory}_gib"] = guarded(label, lambda step=step: peak_gib(step, DEVICE), problems)
    products = Products(dim).to(DEVICE, DTYPE)
    step = one_call(products, products, x, grad, "fwd+bwd")
    row["products_ms"] = guarded("products", lambda: median_ms(step, *timed), problems)
    qkv = torch.randn(batch, positions, 3 * dim, device=DEVICE, dtype=DTYPE, requires_grad=True)
    alone = one_call(lambda t: batch_attention(t, heads, 0.5), nn.Module(), qkv, grad, "fwd+bwd")
    row["attention_ms"] = guarded("attention", lambda: median_ms(alone, *timed), problems)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2**22)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for positions in POSITIONS:
        for batch in BATCHES:
            if batch * positions > args.tokens:
                continue
            row = measure(batch, positions, args.dim, args.heads, problems)
            rows.append(row)
            print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
            write(
                "layer_growth", {"benchmark": "layer_growth", "rows": rows, "problems": problems}, args.out, show=False
            )


if __name__ == "__main__":
    main()
