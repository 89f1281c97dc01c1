"""The kernels of a layer compile for GPUs that are not here: all that a forward and a backward start, as they would."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from batchformer.kernels import blocks, dispatch  # noqa: E402
from batchformer.kernels.blocks import LayerSettings, LayerWeights  # noqa: E402
from batchformer.kernels.launch import Kernel  # noqa: E402

from ..selection import others_slow  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64",
            torch.bool: "*i1"}  # fmt: skip
HOPPER, DESK = 90, 86  # cards of data centres, and for desks
SHARED = {HOPPER: 232_448, DESK: 101_376}  # bytes a program may have


class NoProducts(TorchDispatchMode):
    """Matrix products of nothing in particular: a CPU takes a minute for those of 2048 features in bfloat16."""

    def __torch_dispatch__(self, function: Any, types: Any, given: tuple = (), options: dict | None = None) -> Any:
        aten, options = torch.ops.aten, options or {}
        if function in (aten.mm.default, aten.addmm.default):
            left, right = given[-2:]
            return left.new_empty(len(left), right.shape[1])
        if function in (aten.addmm_.default, aten.baddbmm_.default):
            return given[0]
        return function(*given, **options)


def launches(
    monkeypatch: pytest.MonkeyPatch, batch: int, dim: int, heads: int, dtype: torch.dtype, masked: bool,
    is_lean: bool = False,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """What a layer starts, forward and backward; nothing of it runs."""
    seen: list[tuple[Any, ...]] = []

    def note(
        self: Kernel, programs: int, tensors: Any, numbers: Any, constants: Any, warps=4, stages=1, registers=None
    ) -> None:
        # else Triton looks the kernel up at every launch
        assert all(t is None or t.data_ptr() % 16 == 0 for t in tensors), self.jit
        kinds = tuple(None if t is None else POINTERS[t.dtype] for t in tensors)
        numbers = tuple("fp32" if isinstance(n, float) else "i32" for n in numbers)
        seen.append((self.jit, kinds, numbers, constants, warps, stages, registers))

    monkeypatch.setattr(Kernel, "__call__", note)
    x = torch.randn(batch, 2, dim, dtype=dtype, requires_grad=True)
    matrices = {"in_weight": 3 * dim, "out_weight": dim, "weight1": dim, "weight2": dim}
    sizes = {name: (matrices[name], dim) if name in matrices else (3 * dim if name == "in_bias" else dim,)
             for name in LayerWeights._fields}  # fmt: skip
    weights = LayerWeights(**{name: torch.randn(size, dtype=dtype, requires_grad=True) for name, size in sizes.items()})
    settings = LayerSettings(heads, None, 0.5, 1e-5, 1e-5, dtype, dtype)
    valid = torch.ones(batch, 2, dtype=torch.bool) if masked else None
    with NoProducts():
        dispatch.encoder_layer(x, weights, settings, valid, is_lean).sum().backward()
    return list(dict.fromkeys(seen))


def compiled(launch: tuple[Any, ...], architecture: int) -> Any:
    kernel, tensors, numbers, constants, warps, stages, registers = launch
    given = (*tensors, *numbers, *constants)
    first_constant = len(tensors) + len(numbers)
    names = kernel.arg_names
    assert len(given) == len(names)
    is_constant = [k >= first_constant or value is None for k, value in enumerate(given)]
    signature = {name: "constexpr" if is_constant[k] else given[k] for k, name in enumerate(names)}
    source = ASTSource(
        kernel,
        signature,
        {(k,): given[k] for k, constant in enumerate(is_constant) if constant},
        {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(tensors) if kind is not None},
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(
        source, target=target, options={"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    )


def complaints(ptx: str, folder: Path) -> list[str]:
    """What the assembler says about lost speed: registers that spill, matrix products that wait for each other."""
    (folder / "kernel.ptx").write_text(ptx)
    said = subprocess.run([PTXAS, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"], cwd=folder,
                          capture_output=True, text=True, check=True).stderr  # fmt: skip
    spilt = [int(bytes_) for bytes_ in re.findall(r"(\d+) bytes spill stores", said)]
    waits = [line for line in said.splitlines() if "serialized" in line]
    return waits + ([f"{sum(spilt)} bytes spilt"] if sum(spilt) > 256 else [])


@pytest.mark.parametrize(
    ("batch", "dim", "heads"),
    others_slow([(24, 256, 4), (128, 384, 6), (1024, 192, 3), (300, 256, 2), (128, 2048, 4)], [(128, 384, 6)]),
)
def test_for_cards_of_data_centres_and_without_lost_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch: int, dim: int, heads: int
) -> None:
    found = launches(monkeypatch, batch, dim, heads, torch.bfloat16, masked=False)
    assert len(found) >= 7
    for launch in found:
        kernel = compiled(launch, HOPPER)
        assert kernel.metadata.shared <= SHARED[HOPPER], launch
        assert not complaints(kernel.asm["ptx"], tmp_path), launch


@pytest.mark.parametrize(("dim", "heads"), others_slow([(256, 4), (384, 6), (2048, 4)], [(256, 4)]))
def test_of_a_lean_layer_that_works_in_pieces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dim: int, heads: int
) -> None:
    monkeypatch.setattr(blocks, "LEAN_ELEMENTS", 24 * dim)  # one position
    found = launches(monkeypatch, 24, dim, heads, torch.bfloat16, masked=False, is_lean=True)
    assert "take_piece" in [launch[0].__name__ for launch in found]
    for launch in found:
        assert not complaints(compiled(launch, HOPPER).asm["ptx"], tmp_path), launch


def test_a_backward_in_pieces_starts_the_kernels_of_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = launches(monkeypatch, 13, 256, 4, torch.bfloat16, masked=False)
    monkeypatch.setattr(blocks, "FAST_ELEMENTS", 10 * 256)  # of 26 rows: nine at once would start at odd places
    assert launches(monkeypatch, 13, 256, 4, torch.bfloat16, masked=False) == whole


@pytest.mark.parametrize(
    ("batch", "dim", "heads", "dtype"),
    others_slow([(300, 64, 1, torch.float16), (37, 96, 2, torch.float32)], [(37, 96, 2, torch.float32)]),
)
def test_for_cards_for_desks(
    monkeypatch: pytest.MonkeyPatch, batch: int, dim: int, heads: int, dtype: torch.dtype
) -> None:
    for launch in launches(monkeypatch, batch, dim, heads, dtype, masked=True):
        assert compiled(launch, DESK).metadata.shared <= SHARED[DESK], launch
