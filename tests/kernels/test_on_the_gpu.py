"""The kernels as compiled for a GPU, at sizes people train with: against torch in single precision, on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchformer.nn import batch_attention
from batchformer.nn.encoder import BatchEncoderLayer

pytest.importorskip("triton")
from batchformer.kernels.random_bits import Drop, Site

from .definition import keep_mask

pytestmark = pytest.mark.gpu

SHAPES = {
    "deformable-detr": (24, 13294, 256, 4),
    "deit-ti": (1024, 197, 192, 3),
    "deit-s": (128, 197, 384, 6),
    "detr": (16, 950, 256, 4),
    "batchformer": (128, 1, 2048, 4),
    "odd": (37, 51, 144, 3),
    "one": (1, 5, 64, 2),
    "wide heads": (300, 7, 512, 4),
}


def results(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = function(x)
    weight = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(5), device=out.device)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], weight.to(out.dtype))]


def relative(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-12)).item()


def make(dim: int, heads: int, dropout: float = 0.0, **options) -> BatchEncoderLayer:
    torch.manual_seed(0)
    layer = BatchEncoderLayer(dim, heads, dropout=dropout, backend="triton", **options).cuda()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return layer


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outputs_and_gradients_agree_with_single_precision(name: str, dtype: torch.dtype, memory: str) -> None:
    batch, positions, dim, heads = SHAPES[name]
    if dtype == torch.float32:
        if dim // heads > 256:
            pytest.skip("heads as wide as these are for half precision")
        positions = min(positions, 300)
    layer = make(dim, heads, memory=memory).to(dtype)
    if dtype == torch.float32:
        # Hidden units that are clearly on or off: of millions some lie so near to zero that one order of summing has
        # them on and another off, which changes gradients by up to 1e-3, in torch too.
        with torch.no_grad():
            layer.linear1.bias.copy_(torch.tensor([8.0, -8.0]).repeat(layer.linear1.bias.numel() // 2))
    x = torch.randn(batch, min(positions, 4000), dim, device="cuda").to(dtype)
    assert layer.backend_used(x).fused
    ours = results(layer, layer, x)
    exact = copy.deepcopy(layer).float()
    for module in (layer, exact):
        module.self_attn.backend, module.memory = "sdpa", "fast"
    # A value near zero may round to the other side of the ReLU: the measure is what torch makes of the same precision.
    little = 2e-5 if dtype == torch.float32 else 1e-3 + 3 * x.numel() ** -0.5
    plain = results(layer, layer, x)
    for mine, torchs, right in zip(ours, plain, results(exact, exact, x.float()), strict=True):
        assert mine.isfinite().all()
        assert relative(mine, right) < 2 * relative(torchs, right) + little


@pytest.mark.parametrize(("batch", "group", "masked"), [(24, None, True), (130, 50, False), (1000, 300, True)])
def test_dropout_groups_and_masks_agree_with_torch_given_the_same_mask(
    batch: int, group: int | None, masked: bool
) -> None:
    from batchformer.kernels.dispatch import batch_attention as by_kernels

    heads, width, positions, drop = 2, 64, 3, Drop.of(0.5)
    qkv = torch.randn(batch, positions, 3 * heads * width, device="cuda")
    valid = torch.rand(batch, positions, device="cuda") < 0.7 if masked else None
    seed = torch.tensor([1234567890123456789], device="cuda")
    size = group or batch
    index = torch.arange(batch, device="cuda")
    keep = keep_mask(seed, Site.ATTENTION, drop, positions * heads, batch, size)[..., index % size]
    factor = keep.reshape(positions, heads, batch, batch) * drop.scale
    allowed = (index[:, None] // size == index[None] // size).expand(positions, 1, batch, batch)
    if valid is not None:
        allowed = allowed & (valid.T[:, None, None, :] | torch.eye(batch, dtype=torch.bool, device="cuda"))

    def slowly(t: Tensor) -> Tensor:
        q, k, v = (u.reshape(batch, positions, heads, width) for u in t.double().chunk(3, dim=-1))
        scores = torch.einsum("inhd,jnhd->nhij", q, k) / width**0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1) * factor
        return torch.einsum("nhij,jnhd->inhd", weights, v).flatten(2)

    nothing = nn.Module()
    ours = results(lambda t: by_kernels(t, heads, 0.5, group, valid, seed), nothing, qkv)
    for one, other in zip(ours, results(slowly, nothing, qkv), strict=True):
        assert relative(one, other) < 1e-4


def test_more_sequences_than_a_fused_call_of_torch_takes() -> None:
    qkv = torch.randn(4, 70_001, 3 * 32, device="cuda", dtype=torch.bfloat16)
    from batchformer.kernels.dispatch import batch_attention as by_kernels

    q, k, v = (t.reshape(4, -1, 2, 16) for t in qkv.float().chunk(3, dim=-1))
    assert relative(by_kernels(qkv, 2), batch_attention(q, k, v).flatten(2)) < 1e-2


def test_more_elements_than_32_bits_count() -> None:
    """The last positions of an input of more than 2^31 elements are attended to like those of a small one."""
    from batchformer.kernels.dispatch import batch_attention as by_kernels

    batch, dim = 16, 256
    positions = 2**31 // (batch * 3 * dim) + 100
    qkv = torch.empty(batch, positions, 3 * dim, device="cuda", dtype=torch.bfloat16).normal_()
    tail = qkv[:, -50:].contiguous()
    assert torch.equal(by_kernels(qkv, 4)[:, -50:], by_kernels(tail, 4))


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_the_same_seed_gives_the_same_bits_forward_and_backward(memory: str) -> None:
    layer = make(256, 4, 0.5, memory=memory).bfloat16()
    x = torch.randn(24, 500, 256, device="cuda", dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(results(layer, layer, x))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_compiled_without_a_break(memory: str) -> None:
    layer = make(256, 4, memory=memory)
    x = torch.randn(24, 50, 256, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        pairs = zip(results(layer, layer, x), results(compiled, layer, x), strict=True)
        for one, other in pairs:
            assert relative(one, other) < 2e-2


def test_a_cuda_graph_draws_new_masks_at_every_replay_and_the_right_ones_backward() -> None:
    layer = make(64, 2, 0.5)
    x = torch.randn(24, 30, 64, device="cuda", requires_grad=True)
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        for _ in range(2):
            layer(x).sum().backward()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        out = layer(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    torch.manual_seed(11)
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append((out.clone(), grad.clone()))
    assert not torch.equal(replayed[0][0], replayed[1][0])
    assert all(o.isfinite().all() and g.abs().sum() > 0 for o, g in replayed)


def test_the_kernels_are_what_auto_chooses_here() -> None:
    layer = BatchEncoderLayer(256, 4).cuda()
    x = torch.randn(8, 5, 256, device="cuda")
    assert layer.backend_used(x).backend == "sdpa"
    with torch.autocast("cuda", torch.bfloat16):
        assert layer.backend_used(x).fused
    assert layer.double().backend_used(x.double()).backend == "sdpa"


@pytest.mark.parametrize("size", [1e4, 1e18])
def test_large_scores_do_not_overflow(size: float) -> None:
    from batchformer.kernels.dispatch import batch_attention as by_kernels

    for batch in (24, 32, 300, 512):  # one tile and several, full or not
        for dtype in (torch.float32, torch.bfloat16):
            qkv = torch.randn(batch, 2, 3 * 64, device="cuda", dtype=dtype)
            qkv[..., :128] *= size**0.5
            out, grad = results(lambda t: by_kernels(t, 1), nn.Module(), qkv)
            assert out.isfinite().all()
            assert grad.isfinite().all()


def test_the_papers_layer_and_ours_are_one_function() -> None:
    ours = make(256, 4)
    papers = nn.TransformerEncoderLayer(256, 4, 256, 0.0).cuda()
    papers.load_state_dict(ours.state_dict())
    x = torch.randn(24, 40, 256, device="cuda")
    expected = F.layer_norm(papers(x), (256,))
    torch.testing.assert_close(F.layer_norm(ours(x), (256,)), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_cuda_graph_replays_forward_and_backward_with_new_inputs(memory: str) -> None:
    layer = make(256, 4, memory=memory).bfloat16()
    x, other = (torch.randn(16, 50, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, given = torch.randn_like(x), x.clone().requires_grad_()

    def all_of(leaf: Tensor) -> list[Tensor]:
        out = layer(leaf)
        return [out, *torch.autograd.grad(out, [leaf, *layer.parameters()], weight)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            all_of(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_of(given)
    with torch.no_grad():
        given.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    for one, two in zip(captured, all_of(other.requires_grad_()), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("name", ["detr", "odd"])
def test_another_stream_gives_the_same_bits(name: str, memory: str) -> None:
    batch, positions, dim, heads = SHAPES[name]
    layer = make(dim, heads, dropout=0.5, memory=memory).bfloat16()
    x = torch.randn(batch, positions, dim, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def seeded() -> list[Tensor]:
        torch.manual_seed(3)
        return results(layer, layer, x)

    expected = seeded()
    side.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(side):
        elsewhere = seeded()
    torch.cuda.synchronize()
    for one, other in zip(elsewhere, expected, strict=True):
        assert torch.equal(one, other)
