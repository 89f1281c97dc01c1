"""The fused layer, interpreted, against eq. 1 and 2 in double precision, and through the module that chooses it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from batchformer.kernels import blocks, dispatch, random_bits, rows
from batchformer.kernels.launch import RowTiles, padded
from batchformer.kernels.random_bits import Drop, Site
from batchformer.nn.batchformer_v2 import BatchFormerV2
from batchformer.nn.encoder import BatchEncoderLayer

from .. import definition

SEED = torch.tensor([987654321012345678])


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer drops by the same seed, whatever torch's generator says."""
    monkeypatch.setattr(dispatch, "draw_seed", lambda device: SEED.to(device))


def make(
    dim: int = 32, heads: int = 2, hidden: int | None = None, dropout: float = 0.5, **options
) -> BatchEncoderLayer:
    torch.manual_seed(0)
    layer = BatchEncoderLayer(dim, heads, hidden, dropout, backend="triton", **options)
    with torch.no_grad():
        for parameter in layer.parameters():  # biases start at zero and norms at one: nothing would notice them
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def results(function, layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = function(x)
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()])]


def agree(layer: BatchEncoderLayer, x: Tensor, valid: Tensor | None = None, tolerance: float = 1e-5) -> None:
    exact = copy.deepcopy(layer).double()
    ours = results(lambda t: layer(t, valid), layer, x)
    theirs = results(lambda t: definition.layer(exact, t, SEED, valid), exact, x.double())
    for one, other in zip(ours, theirs, strict=True):
        size = other.abs().max().item()
        torch.testing.assert_close(one.double(), other, atol=tolerance * max(size, 1.0), rtol=0)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9),
    positions=st.integers(1, 3),
    sizes=st.sampled_from([(32, 2, 32), (48, 3, 20), (40, 1, 64)]),
    dropout=st.sampled_from([0.0, 0.5, 0.3]),
    group=st.one_of(st.none(), st.integers(2, 6)),
    masked=st.booleans(),
    lean=st.booleans(),
)
def test_outputs_and_gradients_agree_with_the_definition(
    batch: int, positions: int, sizes: tuple[int, int, int], dropout: float, group: int | None, masked: bool, lean: bool
) -> None:
    layer = make(*sizes, dropout, group_size=group, memory="lean" if lean else "fast")
    x = torch.randn(batch, positions, sizes[0], generator=torch.Generator().manual_seed(batch))
    valid = torch.rand(batch, positions) < 0.6 if masked else None
    assert layer.backend_used(x).fused
    agree(layer, x, valid)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_work_done_in_pieces_by_several_programs_gives_the_same(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    monkeypatch.setattr(blocks, "FAST_ELEMENTS", 5 * 40 * 2)  # ten rows at once
    monkeypatch.setattr(blocks, "LEAN_ELEMENTS", 5 * 40 * 2)  # two positions
    # Tiles far smaller than any real one: the last of several programs has fewer rows, backward all take several turns.
    monkeypatch.setattr(rows, "row_tiles", lambda width: RowTiles(padded(width), 8, 1, 2, 1, 3))
    agree(make(40, 1, memory=memory), torch.randn(5, 5, 40), torch.rand(5, 5) < 0.7)


def test_fast_and_lean_drop_the_same() -> None:
    x, fast, lean = torch.randn(5, 3, 32), make(), make(memory="lean")
    for one, other in zip(results(fast, fast, x), results(lean, lean, x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "vectors"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dim", [40, 64])
def test_a_sum_found_in_the_gradient_kernel_is_the_one_that_was_stored(
    dim: int, dropout: float, dtype: torch.dtype, vectors: torch.dtype
) -> None:
    torch.manual_seed(0)
    count, drop, site = 7, Drop.of(dropout), Site.MLP
    branch, residual, grad = (torch.randn(count, dim, dtype=dtype) for _ in range(3))
    bias, weight, shift = (torch.randn(dim, dtype=vectors) for _ in range(3))
    seed, piece = (SEED if dropout else None), rows.whole(count)
    total, statistics = branch.clone(), torch.empty(count, 2)
    rows.add_norm(total, residual, bias, weight, shift, 1e-5, drop, site, seed, piece, torch.empty_like(branch),
                  statistics)  # fmt: skip

    def gradients(summed: Tensor, known: Tensor | rows.Added) -> list[Tensor]:
        into = torch.empty_like(grad)
        of_branch, lines = rows.add_norm_gradients(grad, summed, known, weight, drop, site, seed, piece, into)
        return [into, of_branch, lines]

    stored = gradients(total, statistics)
    for one, other in zip(gradients(branch, rows.Added(residual, bias, 1e-5)), stored, strict=True):
        assert torch.equal(one, other)


def test_weights_that_are_tensors_and_not_parameters() -> None:
    """FSDP puts views in the place of parameters."""
    layer, x = make(), torch.randn(5, 2, 32)
    expected = layer(x)
    for part in (layer.linear1, layer.norm2, layer.self_attn.out_proj):
        for name in ("weight", "bias"):
            value = getattr(part, name).detach().clone()
            delattr(part, name)
            setattr(part, name, value)
    assert layer.backend_used(x).fused
    assert torch.equal(layer(x), expected)


def test_rows_that_are_not_there_do_not_spoil_sums_where_nothing_bounds_the_variance() -> None:
    for memory in ("fast", "lean"):
        layer = make(dim=32, memory=memory, dropout=0.0)  # three rows, and tiles of eight
        layer.norm2.eps = 0.0
        with torch.no_grad():
            layer.linear2.bias.zero_()
        assert all(gradient.isfinite().all() for gradient in results(layer, layer, torch.randn(3, 1, 32)))


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_autocast_casts_the_products_and_leaves_the_types_of_the_unfused_layer(memory: str) -> None:
    layer, x = make(dropout=0.0, memory=memory), torch.randn(5, 2, 32)
    with torch.autocast("cpu", torch.float16):
        assert layer.backend_used(x).fused
        ours = results(layer, layer, x)
        layer.self_attn.backend = "sdpa"
        theirs = results(layer, layer, x)
    exact = results(layer, layer, x)
    for mine, stock, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == stock.dtype
        assert (mine - right).abs().max() < 5e-3 * right.abs().max() + 5e-3
    assert not torch.equal(ours[0], exact[0])  # else nothing was cast


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_half_precision_weights_and_input(memory: str) -> None:
    layer = make(memory=memory).half()
    agree(layer, torch.randn(5, 2, 32).half(), tolerance=1e-2)


@pytest.mark.parametrize("options", [{}, {"memory": "lean"}, {"norm": "pre"}, {"norm": "relative"}], ids=str)
def test_compiled_without_a_break_it_gives_the_numbers_of_eager(options: dict) -> None:
    layer, x = make(**options), torch.randn(5, 2, 32)
    valid = torch.rand(5, 2) < 0.7
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    eager_and_compiled = (results(lambda t, f=f: seeded(f, t, valid), layer, x) for f in (layer, compiled))
    for one, other in zip(*eager_and_compiled, strict=True):
        # not to the bit: the gradient of one bias is summed by torch there and by the kernels here
        torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-6)


def seeded(function, *inputs: Tensor) -> Tensor:
    """Where a layer is not fused, torch drops what the kernels do not."""
    torch.manual_seed(1)
    return function(*inputs)


def test_checkpointing_draws_the_same_masks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "draw_seed", random_bits.draw_seed)
    layer, x = make(), torch.randn(5, 2, 32)
    plain = results(lambda t: seeded(layer, t), layer, x)
    again = results(lambda t: seeded(lambda u: checkpoint(layer, u, use_reentrant=False), t), layer, x)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_backward_twice_gives_the_same_gradients() -> None:
    """In-place sums must not reach what is saved for the next backward."""
    layer, x = make(), torch.randn(5, 2, 32, requires_grad=True)
    out = layer(x)
    inputs = [x, *layer.parameters()]
    first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out.square().sum(), inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_gradient_that_is_expanded_or_not_aligned(memory: str) -> None:
    layer, x = make(memory=memory), torch.randn(5, 2, 32)

    def gradient(grad: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(layer(leaf), leaf, grad)[0]

    numbers = torch.arange(0.0, 1 + x.numel())
    assert torch.equal(gradient(numbers[1:].view(x.shape)), gradient(numbers[1:].clone().view(x.shape)))
    assert torch.equal(gradient(torch.ones(()).expand(x.shape)), gradient(torch.ones_like(x)))


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_an_input_changed_before_the_backward_is_an_error(memory: str) -> None:
    leaf = torch.randn(5, 2, 32, requires_grad=True)
    x = leaf * 1.0
    out = make(memory=memory)(x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_second_derivatives_are_refused(memory: str) -> None:
    x = torch.randn(5, 2, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(make(memory=memory)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("count", [0, 1, 7, 25, 201_728])
def test_pieces_of_rows_start_at_multiples_of_16_bytes(count: int) -> None:
    """Also of what has 8 bytes in a row: equal pieces of 25 rows (nine), or of DeiT-Ti's 201,728 (67,243), do not."""
    at_once = 10 * 192 if count < 100 else blocks.FAST_ELEMENTS
    length = blocks.piece_length(count, 192, at_once, blocks.ALIGNED_ROWS)
    assert 1 <= length <= max(count, 1)
    assert length >= count or length * 8 % 16 == 0
    assert (length < count) == (count * 192 > at_once)  # cut where there is too much for one piece, and only there


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_what_comes_out_may_be_changed_in_place(backend: str, memory: str) -> None:
    """A ReLU behind the module may be `inplace=True`, whoever computes the layer."""
    torch.manual_seed(0)
    module = BatchFormerV2(32, heads=2, dropout=0.0, streams="single", backend=backend, memory=memory)
    for x in (torch.randn(3, 4, 32), torch.randn(3, 32, 2, 2)):
        x.requires_grad_()
        apart = torch.autograd.grad(module(x).relu().square().sum(), [x, *module.parameters()])
        in_place = torch.autograd.grad(module(x).relu_().square().sum(), [x, *module.parameters()])
        for one, other in zip(apart, in_place, strict=True):
            assert torch.equal(one, other)


def test_an_input_without_gradient_and_frozen_weights() -> None:
    layer = make()
    layer.linear1.requires_grad_(False)
    x = torch.randn(5, 2, 32)
    with torch.no_grad():
        expected = layer(x)
    out = layer(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert layer.linear1.weight.grad is None
    assert layer.self_attn.in_proj_weight.grad.abs().max() > 0


def test_in_eval_nothing_is_dropped() -> None:
    layer, x = make().eval(), torch.randn(5, 2, 32)
    ours = layer(x)
    layer.self_attn.backend = "reference"
    torch.testing.assert_close(ours, layer(x), atol=1e-5, rtol=1e-5)


def test_a_part_that_is_watched_or_replaced_is_called() -> None:
    layer, x, seen = make(), torch.randn(5, 2, 32), []
    handle = layer.self_attn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert not layer.backend_used(x).fused
    assert "hooks" in layer.backend_used(x).why
    layer(x)
    assert len(seen) == 1
    handle.remove()
    assert layer.backend_used(x).fused
    layer.linear1 = nn.Sequential(layer.linear1)
    assert not layer.backend_used(x).fused


def test_a_wrapped_attention_and_parts_without_a_bias_are_not_fused() -> None:
    x = torch.randn(5, 2, 32)
    wrapped = make(dropout=0.0)
    expected = wrapped(x)
    wrapped.self_attn = checkpoint_wrapper(wrapped.self_attn)
    torch.testing.assert_close(wrapped(x), expected)
    for part, other in (("linear2", nn.Linear(32, 32, bias=False)), ("norm1", nn.LayerNorm(32, bias=False))):
        layer = make()
        setattr(layer, part, other)
        assert not layer.backend_used(x).fused
        layer(x.clone().requires_grad_()).sum().backward()


def test_operators_declare_what_they_do() -> None:
    """torch's own check of schema, aliasing, fake tensors and gradients, with and without a seed."""
    from batchformer.kernels.operators import attention_operator

    qkv = torch.randn(5, 2, 3 * 16, requires_grad=True)
    for seed, dropout in ((None, 0.0), (SEED, 0.5)):
        torch.library.opcheck(attention_operator, (qkv, None, seed, 1, 0, dropout))


def test_auto_never_runs_the_interpreter() -> None:
    layer, x = make(), torch.randn(5, 2, 32)
    layer.self_attn.backend = "auto"
    assert layer.backend_used(x).backend == "sdpa"


def test_parts_of_very_many_lines_are_summed_as_short_ones_are() -> None:
    parts = [torch.randn(rows._MANY_LINES + 1, 5), torch.randn(3, 7)]
    for found, part in zip(rows.sum_lines(parts, [5, 7], torch.float32), parts, strict=True):
        torch.testing.assert_close(found, part.sum(0))
