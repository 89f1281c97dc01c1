"""The layer done again by C++, with interpreted kernels: bit for bit what Python does, and Python wherever it must be.

The C++ library is built as it is on a machine with a GPU; where that would have the driver start a kernel, it calls
back here, and the kernel is interpreted on the memory it was given.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import threading
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from batchformer.kernels import blocks, host, host_library, launch, record, run
from batchformer.nn.encoder import BatchEncoderLayer

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
HANDLE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_bool)
SET_MATH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
GEMM = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 5, ctypes.POINTER(ctypes.c_float),
    *[ctypes.c_void_p, ctypes.c_int, ctypes.c_int] * 2, ctypes.POINTER(ctypes.c_float),
    ctypes.c_void_p, *[ctypes.c_int] * 4,
)  # fmt: skip
NO_CONTEXT = 201
EXTRA = 2  # arguments that Triton adds to those of a kernel


class Driver:
    """Stands for the driver: a function is the number of a launch that was recorded."""

    def __init__(self) -> None:
        self.launches: list[launch.Launch] = []
        self.started = 0
        self.callback = LAUNCH(self._start)
        self.fails = False
        self.known: set[int] = set()

    @property
    def address(self) -> int:
        return ctypes.cast(self.callback, ctypes.c_void_p).value or 0

    def start_of(self, launched: launch.Launch) -> tuple[int, int, int, int]:
        self.launches.append(launched)
        given = [*(t for t in launched.tensors if t is not None), *launched.numbers]
        return len(self.launches), 128, 0, len(given) + EXTRA

    def _start(self, function, programs, *rest) -> int:
        self.started += 1
        if self.fails:
            return 700
        if threading.get_ident() not in self.known:  # the driver does not know a thread before its first call of torch
            self.known.add(threading.get_ident())
            return NO_CONTEXT
        asked, arguments = self.launches[function - 1], rest[7]
        assert programs == asked.programs
        words = iter(range(len(asked.tensors) + len(asked.numbers) + EXTRA))
        tensors = [None if t is None else at(arguments[next(words)], t) for t in asked.tensors]
        numbers = [type(n)(read(arguments[next(words)], type(n))) for n in asked.numbers]
        with torch.no_grad():
            asked.kernel.jit[(programs,)](*tensors, *numbers, *asked.constants)
        assert [read(arguments[next(words)], int) for _ in range(EXTRA)] == [0, 0]
        return 0


class Blas:
    """Stands for cuBLAS: matrices lie column after column, the types are bfloat16 and sums float32."""

    HANDLE, TRANSPOSED, BFLOAT16, IN_FLOAT32, TENSOR_CORES = 77, 1, 14, 68, 99

    def __init__(self) -> None:
        self.handles, self.products, self.status = 0, [], 0
        self.problems: list[BaseException] = []
        self.callbacks = HANDLE(self._handle), SET_MATH(self._set_math), GEMM(self._gemm)

    @property
    def addresses(self) -> list[int]:
        return [ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self.callbacks]

    def _handle(self, sets_up: bool) -> int:
        assert sets_up
        self.handles += 1
        return self.HANDLE

    def _set_math(self, handle: int, mode: int) -> int:
        return 0 if (handle, mode) == (self.HANDLE, 0) else 7

    def _gemm(self, *given) -> int:
        try:  # a callback cannot raise
            self._multiply(*given)
        except BaseException as problem:
            self.problems.append(problem)
            return 14
        return self.status

    def _multiply(
        self, handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, *how
    ) -> None:
        assert (handle, *how) == (self.HANDLE, self.IN_FLOAT32, self.TENSOR_CORES)
        assert (a_type, b_type, c_type) == (self.BFLOAT16,) * 3
        assert alpha[0] == 1.0
        # as torch has it: transposed, and so in the other order
        left, right = self._matrix(b, op_b, k, n, ldb).t(), self._matrix(a, op_a, m, k, lda).t()
        into = self._matrix(c, 0, m, n, ldc).t()
        into.copy_(left @ right) if beta[0] == 0.0 else into.addmm_(left, right)
        self.products.append((n, m, k, beta[0] == 1.0))

    def _matrix(self, address: int, operation: int, rows: int, columns: int, leading: int) -> Tensor:
        if operation == self.TRANSPOSED:
            return self._matrix(address, 0, columns, rows, leading).t()
        assert leading >= rows
        count = leading * (columns - 1) + rows
        memory = torch.frombuffer((ctypes.c_byte * (2 * count)).from_address(address), dtype=torch.bfloat16)
        return memory.as_strided((rows, columns), (1, leading))


def read(address: int, kind: type) -> float:
    return (ctypes.c_float if kind is float else ctypes.c_int64).from_address(address).value


def at(word: int, like: Tensor) -> Tensor:
    """The tensor whose address stands in a word."""
    address = read(word, int)
    if not like.numel():
        assert address == 0
        return like
    memory = (ctypes.c_byte * (like.numel() * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


@pytest.fixture(scope="module")
def library():
    problem = host_library.build()
    assert problem is None, problem
    assert host_library.is_ready()


@pytest.fixture
def blas():
    blas = Blas()
    yield blas
    assert not blas.problems


@pytest.fixture
def driver(library, blas, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(host, "blas", lambda: blas.addresses)
    monkeypatch.setattr(host, "launcher", lambda: driver.address)
    monkeypatch.setattr(record, "start_of", driver.start_of)
    monkeypatch.setattr(host, "_recorded", {})
    monkeypatch.setattr(host, "SEEN", 1)
    return driver


def make(dim: int = 32, dropout: float = 0.5, **options) -> BatchEncoderLayer:
    torch.manual_seed(0)
    layer = BatchEncoderLayer(dim, 2, None, dropout, backend="triton", **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def by(way: str, layer: BatchEncoderLayer, x: Tensor, valid: Tensor | None = None, **options) -> list[Tensor]:
    """Output and gradients after the same seed: by C++, or by Python."""
    torch.manual_seed(7)
    x = x.detach().clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", host.replay if way == "c++" else lambda *_: None)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
            out = layer(x, valid)
        assert is_of_python(out) == (way == "python"), out.grad_fn
        after = torch.rand(1)  # the generator stands where it would
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
        return [out, after, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()])]


def is_of_python(out: Tensor) -> bool:
    assert out.grad_fn is not None
    return out.grad_fn.name() in ("FastLayerBackward", "LeanLayerBackward")


def equal(layer: BatchEncoderLayer, x: Tensor, valid: Tensor | None = None, **options) -> None:
    for one, other in zip(by("c++", layer, x, valid, **options), by("python", layer, x, valid, **options), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("batch", "masked", "options"),
    [
        (5, False, {}),
        (5, True, {}),
        (5, True, {"dropout": 0.0}),
        (40, True, {}),  # more than one tile
        (7, True, {"group_size": 3, "dropout": 0.3}),
        (37, False, {"dim": 48}),
        (5, False, {"memory": "lean"}),
        (5, True, {"memory": "lean"}),
        (7, False, {"memory": "lean", "group_size": 3, "dropout": 0.3}),
    ],
)
def test_the_same_bits_come_out(driver: Driver, batch: int, masked: bool, options: dict) -> None:
    layer = make(**options)
    positions = 3 if batch < 16 else 2
    x = torch.randn(batch, positions, layer.self_attn.dim)
    valid = torch.rand(batch, positions) < 0.6 if masked else None
    equal(layer, x, valid)
    assert driver.started


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_work_done_in_pieces(driver: Driver, monkeypatch: pytest.MonkeyPatch, memory: str, masked: bool) -> None:
    monkeypatch.setattr(blocks, "FAST_ELEMENTS", 5 * 32 * 2)  # ten rows at once, in fact sixteen
    monkeypatch.setattr(blocks, "LEAN_ELEMENTS", 5 * 32 * 2)  # two positions
    equal(make(memory=memory), torch.randn(5, 5, 32), torch.rand(5, 5) < 0.6 if masked else None)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_products_in_bfloat16_go_to_cublas_as_they_lie(driver: Driver, blas: Blas, memory: str, autocast: bool) -> None:
    layer = make(memory=memory)
    x = torch.randn(6, 3, 32)
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()
    equal(layer, x, autocast=autocast)
    assert blas.handles == 2  # one for all products of a pass
    # Twelve, and three again in lean; not the one with a bias. Two are added to what is there: gradients of the inputs
    # of the layer, where the types allow, and of its second half.
    assert len(blas.products) == {"fast": 11, "lean": 14}[memory]
    assert sum(adds for *_, adds in blas.products) == 2 - autocast
    assert {(18, 32, 32, False), (32, 32, 18, False), (18, 32, 96, not autocast)} <= set(blas.products)


def test_products_in_pieces_go_to_cublas_too(driver: Driver, blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "FAST_ELEMENTS", 5 * 32 * 2)  # ten rows at once, in fact sixteen
    equal(make().bfloat16(), torch.randn(5, 5, 32).bfloat16())
    assert {(16, 32, 32, True), (9, 32, 32, True), (32, 32, 9, True)} <= set(blas.products)


def test_products_of_vectors_are_left_to_torch(driver: Driver, blas: Blas) -> None:
    equal(make(dropout=0.0).bfloat16(), torch.randn(1, 1, 32).bfloat16())
    assert not blas.products


@pytest.mark.parametrize("why", ["exact sums", "deterministic", "single precision"])
def test_products_are_left_to_torch_where_it_would_do_them_in_another_way(driver: Driver, blas: Blas, why: str) -> None:
    dtype = torch.float32 if why == "single precision" else torch.bfloat16
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = why != "exact sums"
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        equal(make().to(dtype), torch.randn(6, 3, 32, dtype=dtype))
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True
        torch.use_deterministic_algorithms(False)
    assert not blas.products


def test_a_product_that_does_not_start_is_an_error(driver: Driver, blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "run_layer", host.replay)
    blas.status = 13
    with pytest.raises(RuntimeError, match=r"product could not be started .*13"):
        make().bfloat16()(torch.randn(6, 2, 32, dtype=torch.bfloat16, requires_grad=True))


def test_cublas_is_found_and_can_be_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    found = {}
    for way in ("", "torch"):
        monkeypatch.setenv("BATCHFORMER_HOST", way)
        host.blas.cache_clear()
        found[way] = host.blas()
    host.blas.cache_clear()
    assert found["torch"] == []
    assert len(set(found[""])) == 3
    assert all(found[""])


def test_without_cublas_all_products_are_torchs(driver: Driver, blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "blas", list)
    equal(make().bfloat16(), torch.randn(6, 3, 32).bfloat16())
    assert not blas.products


@pytest.mark.parametrize("count", [0, 1, 7, 25, 201_728])
def test_pieces_of_rows_start_where_kernels_read_fastest(count: int) -> None:
    """At multiples of 16 bytes, also of what has 8 bytes in a row: equal pieces of 25 rows (nine), or of DeiT-Ti's
    201,728 (67,243), do not."""
    at_once = 10 * 192 if count < 100 else blocks.FAST_ELEMENTS
    length = blocks.piece_length(count, 192, at_once, blocks.ALIGNED_ROWS)
    assert 1 <= length <= max(count, 1)
    assert length >= count or length * 8 % 16 == 0
    assert (length < count) == (count * 192 > at_once)  # cut where there is too much for one go, and only there


def test_what_is_kept_serves_a_second_backward_only_where_that_was_asked_for(driver: Driver) -> None:
    layer, x = make(dropout=0.0), torch.randn(6, 2, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", host.replay)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        loss = out.square().sum()
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (second,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaf)


def test_what_is_kept_is_let_go_during_the_backward(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most memory that forward and backward take: less where what was kept need not serve another one."""
    monkeypatch.setattr(host, "run_layer", host.replay)
    # kernels that do nothing: those of the interpreter take memory of their own
    nothing = LAUNCH(lambda *_: 0)
    monkeypatch.setattr(host, "launcher", lambda: ctypes.cast(nothing, ctypes.c_void_p).value)
    layer, x = make(32, dropout=0.0), torch.randn(150, 2, 32)
    activation = x.numel() * x.element_size()

    def most(keeps: bool) -> int:
        leaf, grad = x.clone().requires_grad_(), torch.ones_like(x)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            out = layer(leaf)
            out.backward(grad, retain_graph=keeps)
        assert not is_of_python(out)
        changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        return max(accumulate(event.nbytes() for event in changes))

    most(True)  # the first is written down, too
    assert most(False) <= most(True) - 2 * activation


def test_hooks_on_saved_tensors_see_all_that_is_kept(driver: Driver) -> None:
    layer, x = make(), torch.randn(6, 2, 32)

    def run(way: str) -> tuple[int, list[Tensor]]:
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            got = by(way, layer, x)
        return sum(t.numel() for t in packed), got

    (seen, ours), (expected, theirs) = run("c++"), run("python")
    assert all(map(torch.equal, ours, theirs))
    assert seen == expected


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("ways", [("python", "c++"), ("c++", "python")])
def test_a_checkpoint_may_go_forward_by_one_and_again_by_the_other(
    driver: Driver, ways: tuple[str, str], memory: str
) -> None:
    layer, x = make(memory=memory), torch.randn(6, 2, 32)

    def gradients(ways: tuple[str, str]) -> tuple[Tensor, ...]:
        turn = iter(ways)
        leaf = x.clone().requires_grad_()

        def once(*given) -> Tensor | None:
            return host.replay(*given) if next(turn) == "c++" else None

        torch.manual_seed(7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "run_layer", once)
            loss = checkpoint(layer, leaf, use_reentrant=False).square().sum()
            return torch.autograd.grad(loss, [leaf, *layer.parameters()])

    assert all(map(torch.equal, gradients(ways), gradients(("python", "python"))))


def test_a_backward_under_autocast_keeps_the_types_of_its_forward(driver: Driver) -> None:
    layer, x = make(dropout=0.0), torch.randn(6, 2, 32)
    expected = by("python", layer, x)[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", host.replay)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        with torch.autocast("cpu", torch.bfloat16):
            (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
    assert torch.equal(gradient, expected)


def test_tied_weights_are_left_to_python_and_do_not_mislead_layers_after_them(driver: Driver) -> None:
    tied = make()
    tied.norm2 = tied.norm1
    x = torch.randn(6, 2, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", host.replay)
        assert is_of_python(tied(x.clone().requires_grad_()))
    equal(make(), x)


def test_strides_of_a_single_position_do_not_matter(driver: Driver) -> None:
    layer = make(dropout=0.0)
    x = torch.randn(1, 6, 32).transpose(0, 1)
    assert x.is_contiguous()
    assert x.stride() == (32, 192, 1)

    def unpack(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack), pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", host.replay)
        leaf = x.detach().requires_grad_()
        out = layer(leaf)
        assert not is_of_python(out)
        (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    (expected,) = torch.autograd.grad(make(dropout=0.0)(leaf).square().sum(), leaf)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("full"), KeyError("ptx")])
def test_what_goes_wrong_while_it_is_written_down_does_not_stop_the_training(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def refuse(launched: launch.Launch) -> tuple[int, int, int, int]:
        raise problem

    monkeypatch.setattr(record, "start_of", refuse)
    monkeypatch.setattr(host, "run_layer", host.replay)
    unexpected = isinstance(problem, KeyError)
    with pytest.warns(UserWarning, match="go on by Python") if unexpected else contextlib.nullcontext():
        assert is_of_python(make()(torch.randn(6, 2, 32, requires_grad=True)))
    assert is_of_python(make()(torch.randn(6, 2, 32, requires_grad=True)))


def test_without_a_home_all_is_left_to_python(library, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(host_library, "path", nowhere)
    monkeypatch.setattr(host_library, "_ready", None)
    assert not host_library.is_ready()


def test_kinds_that_come_once_are_not_written_down_and_soon_forgotten(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SEEN", 3)
    monkeypatch.setattr(host, "MOST_KINDS", 4)
    monkeypatch.setattr(host, "run_layer", host.replay)
    layer = make()

    def call(batch: int) -> bool:
        return is_of_python(layer(torch.randn(batch, 1, 32, requires_grad=True)))

    assert [call(2) for _ in range(4)] == [True, True, False, False]
    assert all(call(batch) for batch in range(3, 12))
    assert len(host._recorded) <= 4
    assert not call(2), "what was written down stays"


def test_other_inputs_and_other_weights_of_the_same_kind(driver: Driver) -> None:
    equal(make(), torch.randn(6, 2, 32))
    recorded = len(driver.launches)
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.7)
    equal(other, torch.randn(6, 2, 32))
    assert len(driver.launches) == recorded, "what was written down serves all layers of a kind"


def test_under_autocast_weights_of_single_precision_get_gradients_of_their_type(driver: Driver) -> None:
    equal(make(), torch.randn(6, 2, 32), autocast=True)


def test_a_gradient_that_is_expanded_or_starts_at_an_odd_place(driver: Driver) -> None:
    layer, x = make(), torch.randn(6, 2, 32)

    def gradient(way: str, odd: bool) -> Tensor:
        torch.manual_seed(7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "run_layer", host.replay if way == "c++" else lambda *_: None)
            leaf = x.clone().requires_grad_()
            out = layer(leaf)
            if odd:
                out.backward(torch.arange(1.0, 1 + out.numel() + 1)[1:].view(out.shape))
            else:
                out.sum().backward()
            assert leaf.grad is not None
            return leaf.grad

    for odd in (False, True):
        assert torch.equal(gradient("c++", odd), gradient("python", odd))


def test_backward_twice_and_through_a_checkpoint(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "run_layer", host.replay)
    layer, x = make(dropout=0.0), torch.randn(6, 2, 32, requires_grad=True)
    out = layer(x)
    first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out.square().sum(), x)[0])
    for reentrant in (False, True):
        x.grad = None
        checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(first[0], x.grad)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_what_comes_out_may_be_changed_in_place(driver: Driver, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    monkeypatch.setattr(host, "run_layer", host.replay)
    layer, x = make(dropout=0.0, memory=memory), torch.randn(6, 2, 32, requires_grad=True)
    assert not is_of_python(layer(x))
    (apart,) = torch.autograd.grad(layer(x).relu().square().sum(), x)
    (in_place,) = torch.autograd.grad(layer(x).relu_().square().sum(), x)
    assert torch.equal(apart, in_place)


def test_an_input_changed_before_the_backward_is_noticed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "run_layer", host.replay)
    layer, leaf = make(), torch.randn(6, 2, 32, requires_grad=True)
    x = leaf * 1.0
    out = layer(x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused_when_they_are_asked_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "run_layer", host.replay)
    x = torch.randn(6, 2, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(make()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()


def test_a_kernel_that_does_not_start_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "run_layer", host.replay)
    driver.fails = True
    with pytest.raises(RuntimeError, match=r"could not be started .*700"):
        make()(torch.randn(6, 2, 32, requires_grad=True))


@pytest.mark.parametrize("what", ["frozen", "strided", "watched"])
def test_python_does_what_does_not_fit(driver: Driver, what: str) -> None:
    layer, x = make(), torch.randn(6, 2, 32, requires_grad=True)
    weights_of: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", lambda *given: weights_of.append(given))
        layer(x)
    x, weights, settings, valid, _ = weights_of[0]
    assert host.replay(x, weights, settings, valid) is not None
    if what == "frozen":
        assert host.replay(x, weights._replace(bias1=weights.bias1.detach()), settings, valid) is None
    elif what == "strided":
        assert host.replay(x.transpose(0, 1).contiguous().transpose(0, 1), weights, settings, valid) is None
    else:
        with FlopCounterMode(display=False):
            assert host.replay(x, weights, settings, valid) is None
        with compiled_autograd._enable(lambda graph: graph):
            assert host.replay(x, weights, settings, valid) is None


def test_what_cannot_be_written_down_is_left_to_python(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(launched: launch.Launch) -> tuple[int, int, int, int]:
        raise record.NotRecordable("not this one")

    monkeypatch.setattr(record, "start_of", refuse)
    monkeypatch.setattr(host, "run_layer", host.replay)
    out = make()(torch.randn(6, 2, 32, requires_grad=True))
    assert is_of_python(out)
    assert launch._watcher is None


def test_of_small_inputs_on_a_device_only(driver: Driver) -> None:
    given: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run_layer", lambda *these: given.append(these))
        make()(torch.randn(6, 2, 32, requires_grad=True))
    assert host.run_layer(*given[0]) is None  # on the CPU
    assert run.host is host
