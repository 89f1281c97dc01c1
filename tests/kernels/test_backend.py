"""Which way runs, said before it runs; and everything without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

from batchformer.errors import UserError
from batchformer.kernels import backend as room
from batchformer.kernels.backend import Choice, choose_backend
from batchformer.nn.attention import BatchAttention, reference_batch_attention
from batchformer.nn.encoder import BatchEncoderLayer

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(room, "_HAS_TRITON", True)
    monkeypatch.setattr(room, "_INTERPRETED", False)


@pytest.mark.usefixtures("hopper")
def test_auto_takes_the_kernels_on_a_gpu_and_torchs_elsewhere() -> None:
    assert choose_backend("auto", CUDA, torch.bfloat16, 256, 4).backend == "triton"
    assert choose_backend("auto", CPU, torch.float32, 256, 4) == ("sdpa", "the input is on the CPU", False)
    assert choose_backend("auto", CUDA, torch.bfloat16, 2048, 4).backend == "triton"
    assert choose_backend("sdpa", CUDA, torch.bfloat16, 256, 4).backend == "sdpa"


@pytest.mark.usefixtures("hopper")
def test_auto_leaves_kernels_alone_that_are_not_known_to_be_faster() -> None:
    choice = choose_backend("auto", CUDA, torch.float32, 256, 4)
    assert choice.backend == "sdpa"
    assert "single precision" in choice.why
    assert choose_backend("triton", CUDA, torch.float32, 256, 4).backend == "triton"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("device", "dtype", "dim", "heads", "reason"),
    [
        (CUDA, torch.float64, 256, 4, "float64"),
        (CUDA, torch.bfloat16, 32, 4, "width 8"),
        (CUDA, torch.bfloat16, 2048, 2, "width 1024"),
        (CUDA, torch.float32, 2048, 4, "width 512 need half precision"),
        (torch.device("mps"), torch.float32, 256, 4, "mps"),
    ],
)
def test_what_the_kernels_cannot_do_falls_back_and_says_why(device, dtype, dim: int, heads: int, reason: str) -> None:
    choice = choose_backend("auto", device, dtype, dim, heads)
    assert choice.backend == "sdpa"
    assert reason in choice.why


@pytest.mark.usefixtures("hopper")
def test_without_triton_and_on_old_devices_torchs_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_capability", lambda device: (8, 9))
    assert "shared memory" in choose_backend("auto", CUDA, torch.float16, 2048, 4).why
    monkeypatch.setattr(room, "_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    assert "an old card" in choose_backend("auto", CUDA, torch.float16, 256, 4).why
    monkeypatch.setattr(room, "_HAS_TRITON", False)
    assert choose_backend("auto", CUDA, torch.float16, 256, 4).why == "Triton is not installed"


def test_the_kernels_asked_for_where_they_cannot_run_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_INTERPRETED", False)
    layer = BatchEncoderLayer(32, 2, backend="triton")
    with pytest.raises(UserError, match=r"triton.*CPU.*auto"):
        layer(torch.randn(3, 2, 32))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="backend='cuda'"):
        BatchAttention(32, 2, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="memory='small'"):
        BatchEncoderLayer(32, 2, memory="small")  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["post", "pre", "relative"])
def test_lean_without_kernels_gives_the_same_bits(norm: str) -> None:
    x = torch.randn(5, 3, 32)
    gradients = []
    for memory in ("fast", "lean"):
        torch.manual_seed(0)
        layer = BatchEncoderLayer(32, 2, norm=norm, memory=memory)  # type: ignore[arg-type]
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(layer(leaf).square().sum(), [leaf, *layer.parameters()]))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_lean_without_kernels_stores_less() -> None:
    stored = {}
    for memory in ("fast", "lean"):
        layer, numbers = BatchEncoderLayer(32, 2, memory=memory), []  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numbers: (n.append(t.numel()), t)[1], lambda t: t):
            layer(torch.randn(5, 3, 32))
        stored[memory] = sum(numbers)
    assert stored["lean"] < stored["fast"] / 4


def test_the_reference_backend_drops_weights() -> None:
    attention = BatchAttention(32, 2, dropout=0.5, backend="reference")
    x = torch.randn(4, 2, 32)
    assert not torch.equal(attention(x), attention(x))
    torch.testing.assert_close(attention.eval()(x), BatchAttention.forward(_as(attention, "sdpa"), x))


def _as(attention: BatchAttention, backend: str) -> BatchAttention:
    attention.backend = backend  # type: ignore[assignment]
    return attention


def test_gradcheck_of_the_reference() -> None:
    q, k, v = (torch.randn(4, 2, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    valid = torch.tensor([[True, False], [True, False], [False, False], [True, False]])
    factor = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: reference_batch_attention(*t, 3, valid, factor), (q, k, v))


def test_import_brings_no_triton() -> None:
    code = (
        "import sys, torch, batchformer as bf; bf.BatchFormer(32)(torch.randn(4, 32));"
        "assert not [m for m in sys.modules if m.startswith('batchformer.kernels.') and not m.endswith('backend')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_auto_leaves_alone_what_wants_to_see_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms, forward-mode derivatives and subclasses of tensors go by torch, which knows them all."""
    monkeypatch.setattr("batchformer.nn.attention.choose_backend", lambda *_: Choice("triton", "say"))
    attention, x, whys = BatchAttention(32, 2), torch.randn(4, 3, 32), []

    def ask(x: torch.Tensor) -> torch.Tensor:
        whys.append(attention.backend_used(x))
        return x.sum()

    ask(x)
    torch.func.grad(ask)(x)
    with forward_ad.dual_level():
        ask(forward_ad.make_dual(x, x))
    ask(x.as_subclass(Special))
    assert [why.backend for why in whys] == ["triton", "sdpa", "sdpa", "sdpa"]
    assert all(
        word in why.why for word, why in zip(("say", "torch.func", "forward-mode", "Special"), whys, strict=True)
    )
    attention.backend = "triton"  # whoever asks for them gets them, and torch's own words where that fails
    ask(x.as_subclass(Special))
    assert whys[-1].backend == "triton"


class Special(torch.Tensor):
    pass
