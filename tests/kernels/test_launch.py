"""What was compiled is called directly, and only where it fits; a stand-in for Triton's kernel says what reaches it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from batchformer.kernels import launch
from batchformer.kernels.launch import Kernel

STREAM = 4711


class Compiled:
    function, packed_metadata = "the function", "its metadata"

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def run(self, x: int, y: int, z: int, *args: Any) -> None:
        stream, function, metadata, *hooks_and_arguments = args
        assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
        assert hooks_and_arguments[:3] == [None] * 3
        self.calls.append(("direct", (x, y, z), tuple(hooks_and_arguments[3:])))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_stream_of", lambda device: STREAM)


class Jit:
    """As Triton's: indexed by the grid, called with everything, gives what it has compiled (None if interpreted)."""

    def __init__(self, interpreted: bool = False) -> None:
        self.calls: list[Any] = []
        self.interpreted = interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Compiled | None:
            self.calls.append(("jit", grid, options))
            return None if self.interpreted else Compiled(self.calls)

        return run


def kinds(jit: Jit) -> list[str]:
    return [call[0] for call in jit.calls]


@pytest.mark.parametrize("size", [2, 4], ids=["half", "single"])
def test_all_tiles_are_ones_that_triton_takes(size: int) -> None:
    def is_power(number: int) -> bool:
        return number.bit_count() == 1

    for samples in (1, 16, 17, 32, 64, 100, 128, 129, 1024):
        for width in (16, 20, 32, 64, 96, 128, 200, 256, 512):
            found = launch.attention_tiles(samples, width, size)
            assert found.head >= width
            assert is_power(found.head)
            for tiles in (found.forward, found.backward_keys, found.backward_queries):
                assert all(is_power(side) and side >= 16 for side in (tiles.queries, tiles.keys))
                assert is_power(tiles.warps)
                assert not found.single or min(tiles.queries, tiles.keys) >= samples
    for width in (16, 40, 64, 256, 384, 512, 768, 2048, 4096):
        tiles = launch.row_tiles(width)
        assert tiles.width >= width
        assert all(map(is_power, (tiles.width, tiles.rows, tiles.warps, tiles.backward_rows, tiles.backward_warps)))
        assert tiles.programs >= 1


@pytest.fixture
def x() -> torch.Tensor:
    return torch.empty(64)


def test_the_second_launch_goes_straight_to_what_the_first_compiled(x: torch.Tensor) -> None:
    kernel = Kernel(jit := Jit())
    kernel(3, (x, None), (7, 0.5), (16, True), warps=2, stages=3)
    kernel(5, (x, None), (8, 0.5), (16, True), warps=2, stages=3)
    assert jit.calls[0] == ("jit", (3,), {"num_warps": 2, "num_stages": 3})
    assert jit.calls[1] == ("direct", (5, 1, 1), (x.data_ptr(), None, 8, 0.5, 16, True))


def test_other_types_constants_warps_and_missing_tensors_are_compiled_anew(x: torch.Tensor) -> None:
    kernel = Kernel(jit := Jit())
    for tensors, constants, warps in (
        ((x, None), (16,), 4), ((x.bfloat16(), None), (16,), 4), ((x, x), (16,), 4), ((x, None), (32,), 4),
        ((x, None), (16,), 8),
    ):  # fmt: skip
        kernel(1, tensors, (1,), constants, warps)
    assert kinds(jit) == ["jit"] * 5


def test_an_address_that_is_not_aligned_never_meets_a_kernel_for_aligned_ones(x: torch.Tensor) -> None:
    kernel = Kernel(jit := Jit())
    for tensor in (x[1:], x, x[1:], x):
        kernel(1, (tensor,), (1,), ())
    assert kinds(jit) == ["jit", "jit", "jit", "direct"]


def test_interpreted_kernels_have_nothing_to_remember(x: torch.Tensor) -> None:
    kernel = Kernel(jit := Jit(interpreted=True))
    for _ in range(2):
        kernel(1, (x,), (1,), ())
    assert kinds(jit) == ["jit", "jit"]


def test_the_launcher_of_the_triton_installed_takes_what_it_is_given() -> None:
    """A stand-in cannot tell when Triton changes its own: the first of what it takes, by name and order."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    names = list(inspect.signature(driver.CudaLauncher.__call__).parameters)
    assert names[1:6] == ["gridX", "gridY", "gridZ", "stream", "function"]
    compiled = pytest.importorskip("triton.compiler").CompiledKernel
    taken = inspect.getsource(compiled.__getitem__).replace("\n", " ")
    assert re.search(
        r"self\.run\(grid\[0\], grid\[1\], grid\[2\], stream, self\.function, self\.packed_metadata, launch_metadata,",
        taken,
    )


def test_whether_products_are_exact_is_answered_by_both_ways_torch_has() -> None:
    """In a process of its own: torch does not forget which way was used."""
    code = """
import torch
from batchformer.kernels.attention import is_exact
assert is_exact()
torch.backends.cuda.matmul.allow_tf32 = True
assert not is_exact()
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cuda.matmul.fp32_precision = "tf32"
assert not is_exact()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
