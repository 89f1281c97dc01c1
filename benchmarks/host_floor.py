"""What the host needs for a layer called eagerly, however fast the device: its parts one by one, and the layer whole.

    python benchmarks/host_floor.py [--out benchmarks/results]

Each row is the time of the host alone (nothing waits for the device), in microseconds, and how often the layer does
that in a forward and a backward. "node" is an autograd node with as many inputs as the layer whose backward makes empty
gradients: what autograd takes, its hop to the thread of the device and back included; "node, one thread" is the same
without the hop, which a user can have by `torch.autograd.set_multithreading_enabled(False)`. "one of eight" is a layer
in a chain of eight, as in a network: there the hop is shared. Layers run as they do for a user, started by C++ where
that could be built (`batchformer.kernels.host`), and beside it by Python; the parts are those of the latter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import write
from torch import Tensor, nn

from batchformer.kernels import host, host_library, rows
from batchformer.kernels.bench import one_call
from batchformer.kernels.random_bits import Drop, Site
from batchformer.nn.encoder import BatchEncoderLayer

INPUTS = 13  # the input of the layer and its twelve parameters
SHAPES = {"(16, 950, 256), 4 heads": (16, 950, 256), "(128, 1, 2048), 4 heads": (128, 1, 2048)}


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def host_us(step: Callable[[], Any], repeats: int = 300, rounds: int = 7) -> float:
    """The median over rounds; the device catches up between them."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        times.append((time.perf_counter() - begin) * 1e6 / repeats)
    return sorted(times[1:])[rounds // 2]


def parts() -> dict[str, tuple[int, Callable[[], Any]]]:
    """Every part on small tensors: how often the layer takes it, and a call."""
    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias, seed = a[0].clone(), torch.tensor([7], device="cuda")
    leaves = [torch.randn(64, device="cuda", requires_grad=True) for _ in range(INPUTS)]
    grad, drop, piece = torch.randn(64, device="cuda"), Drop.of(0.5), rows.whole(64)

    def node() -> None:
        Node.apply(*leaves).backward(grad)
        for leaf in leaves:
            leaf.grad = None

    def node_in_one_thread() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            node()

    return {
        "matrix product": (11, lambda: torch.mm(a, b)),
        "matrix product with bias": (1, lambda: torch.addmm(bias, a, b)),
        "kernel of ours": (9, lambda: rows.relu_(a, bias, drop, Site.HIDDEN, seed, piece)),
        "empty tensor": (15, lambda: torch.empty_like(a)),
        "view": (17, lambda: a.view(32, 128)),
        "seed": (1, lambda: torch.randint(1 << 62, (1,), device="cuda")),
        "node": (1, node),
        "node, one thread": (0, node_in_one_thread),
    }


def step_of(layers: int, x: Tensor, grad: Tensor) -> Callable[[], Any]:
    chain = nn.Sequential(*(BatchEncoderLayer(x.shape[2], 4, dropout=0.5, backend="triton") for _ in range(layers))).to(
        x.device, x.dtype
    )
    return one_call(chain, chain, x.detach().requires_grad_(), grad, "fwd+bwd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    found = [{"part": name, "us": host_us(call), "times": times} for name, (times, call) in parts().items()]
    found.append({"part": "sum of the parts", "us": sum(row["us"] * row["times"] for row in found), "times": 1})  # type: ignore[operator, misc]
    starters: dict[str, Any] = {"Python": lambda *_: None}
    if host_library.wait_until_built():
        starters["C++"] = host.run_layer
    for name, shape in SHAPES.items():
        x, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for starter, run_layer in starters.items():
            host.run_layer = run_layer
            step = step_of(1, x, grad)
            found.append({"part": f"layer, {name}, by {starter}", "us": host_us(step, 100), "times": 1})
            with torch.autograd.set_multithreading_enabled(False):
                found.append({"part": f"layer, {name}, by {starter}, one thread", "us": host_us(step, 100), "times": 1})
            eight = host_us(step_of(8, x, grad), 30) / 8
            found.append({"part": f"layer, {name}, by {starter}, one of eight", "us": eight, "times": 1})
    write("host_floor", {"benchmark": "host_floor", "dtype": "bf16", "rows": found}, args.out)


if __name__ == "__main__":
    main()
