"""BatchFormer against the papers' own layer, and the shapes and numbers it must take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import batchformer as bf
from batchformer.errors import UserError


def papers_layer(dim: int, heads: int, hidden: int, norm: str) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(dim, heads, hidden, dropout=0.0, norm_first=norm == "pre")


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("shape", [(9, 1, 16), (5, 7, 16)], ids=["features", "tokens"])
def test_outputs_and_gradients_are_those_of_the_papers_layer(norm: str, shape: tuple[int, ...]) -> None:
    theirs = papers_layer(16, 4, 24, norm)
    ours = bf.BatchFormer(16, heads=4, hidden_dim=24, dropout=0.0, norm=norm)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [theirs(inputs[0]), ours.relate(inputs[1])]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    for output in outputs:
        (output * torch.arange(output.numel()).reshape(shape).sin()).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-5, rtol=1e-5)
    own = dict(ours.layers[0].named_parameters())
    assert own.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_stack_of_layers_has_the_state_dict_of_torchs_encoder() -> None:
    theirs = nn.TransformerEncoder(papers_layer(8, 2, 8, "post"), num_layers=3, enable_nested_tensor=False)
    ours = bf.BatchFormer(8, heads=2, layers=3, dropout=0.0)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(6, 1, 8)
    torch.testing.assert_close(ours.relate(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_training_stacks_plain_and_related_and_repeats_the_targets() -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.0)
    x, y = torch.randn(5, 8), torch.arange(5)
    both, targets = module(x, y)
    assert torch.equal(both[:5], x)
    torch.testing.assert_close(both[5:], module.relate(x))
    assert targets.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert torch.equal(module(x), both)


def test_in_eval_mode_the_very_same_objects_come_back() -> None:
    module = bf.BatchFormer(8).eval()
    x, y = torch.randn(5, 8), torch.arange(5)
    same_x, same_y = module(x, y)
    assert same_x is x
    assert same_y is y
    assert module(x) is x


def test_a_sample_is_related_to_its_group_only() -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.0, group_size=3)
    x = torch.randn(7, 8)
    related = module.relate(x)
    parts = torch.cat([module.relate(x[:3]), module.relate(x[3:6]), module.relate(x[6:])])
    torch.testing.assert_close(related, parts)


@pytest.mark.parametrize("streams", ["split", "single"])
def test_split_and_single_keep_the_number_of_rows(streams: str) -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.0, streams=streams)
    x, y = torch.randn(5, 8), torch.arange(5)
    out, targets = module(x, y)
    assert targets is y
    plain = 3 if streams == "split" else 0
    assert torch.equal(out[:plain], x[:plain])
    torch.testing.assert_close(out[plain:], module.relate(x[plain:]))


def test_a_batch_of_one_and_a_strided_batch_work() -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.0)
    assert module(torch.randn(1, 8)).shape == (2, 8)
    strided = torch.randn(8, 12).T[::2]
    assert not strided.is_contiguous()
    torch.testing.assert_close(module(strided), module(strided.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half_module", [True, False])
def test_half_precision_features_come_out_in_half_precision(dtype: torch.dtype, half_module: bool) -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.0)
    x = torch.randn(6, 8)
    expected = module(x)
    out = (module.to(dtype) if half_module else module)(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.05)


def test_dropout_acts_in_training_only() -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.5)
    x = torch.randn(6, 8)
    assert not torch.equal(module.relate(x), module.relate(x))
    module.eval()
    assert torch.equal(module.relate(x), module.relate(x))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dim": 10, "heads": 4}, "dim=10 is not divisible by heads=4"),
        ({"dim": 0}, "dim=0 must be the width"),
        ({"dim": 8, "norm": "middle"}, "norm='middle'"),
        ({"dim": 8, "streams": "triple"}, "streams='triple'"),
        ({"dim": 8, "layers": 0}, "layers=0"),
        ({"dim": 8, "dropout": 1.5}, "dropout=1.5"),
        ({"dim": 8, "layer_scale": -0.1}, "layer_scale=-0.1 must be 0 or more"),
        ({"dim": 8, "group_size": 0}, "group_size=0"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        bf.BatchFormer(**arguments)


def test_whole_numbers_are_refused_as_features_because_they_would_be_cut_again() -> None:
    with pytest.raises(UserError, match=r"torch\.int64"):
        bf.BatchFormer(8)(torch.ones(3, 8, dtype=torch.long))


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(UserError, match=r"dim=8.*\(3, 9\)"):
        bf.BatchFormer(8).relate(torch.randn(3, 9))


def relative_layer_slowly(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Token by token: each branch is a fraction of the token's own size, and the size stays."""
    for norm, scale, branch in (
        (layer.norm1, layer.scale1, layer.self_attn),
        (layer.norm2, layer.scale2, lambda t: layer.linear2(torch.relu(layer.linear1(t)))),
    ):
        sizes = torch.stack([torch.stack([token.square().mean().sqrt() for token in row]) for row in x])
        change = norm(branch(x / sizes[..., None])) * scale
        mixed = torch.stack(
            [
                torch.stack([t + s * c for t, s, c in zip(*row, strict=True)])
                for row in zip(x, sizes, change, strict=True)
            ]
        )
        x = torch.stack(
            [
                torch.stack([m * s / m.square().mean().sqrt() for m, s in zip(*r, strict=True)])
                for r in zip(mixed, sizes, strict=True)
            ]
        )
    return x


def test_relative_norm_is_its_definition_with_gradients() -> None:
    module = bf.BatchFormer(8, heads=2, dropout=0.0, norm="relative", layer_scale=0.3).double()
    x = (torch.randn(4, 3, 8) * torch.tensor([1e-1, 1.0, 1e2])[:, None]).double().requires_grad_()
    weight = torch.randn(4, 3, 8).double()
    fast, slow = module.relate(x), relative_layer_slowly(x, module.layers[0])
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-9)
    names = [name for name, _ in module.named_parameters()]
    ours = torch.autograd.grad((fast * weight).sum(), [x, *module.parameters()])
    theirs = torch.autograd.grad((slow * weight).sum(), [x, *module.parameters()])
    for name, a, b in zip(["x", *names], ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relative_norm_keeps_the_size_of_every_token_and_changes_it_by_its_scale(dtype: torch.dtype) -> None:
    module = bf.BatchFormer(64, variant="stable", layer_scale=0.1).to(dtype)
    x = (torch.randn(16, 5, 64) * torch.logspace(-2, 2, 5)[:, None]).to(dtype)  # squares of 100 overflow in float16
    related = module.relate(x).float()
    sizes = x.float().norm(dim=-1)
    torch.testing.assert_close(related.norm(dim=-1), sizes, rtol=2e-2, atol=0)
    change = (related - x.float()).norm(dim=-1) / sizes
    assert (change > 0.05).all()
    assert (change < 0.3).all()


def test_the_stable_variant_is_a_name_for_the_relative_norm_unless_told_otherwise() -> None:
    assert bf.BatchFormer(8, variant="stable").layers[0].norm == "relative"
    assert bf.BatchFormer(8, variant="stable", norm="pre").layers[0].norm == "pre"
    assert bf.BatchFormer(8).layers[0].norm == "post"


def test_what_tells_samples_apart_survives_twelve_stable_modules_and_not_twelve_published_ones() -> None:
    """docs/stability.md: the part of the related tokens that is the same under another dropout mask."""

    def signal(variant: str) -> float:
        torch.manual_seed(0)
        x = torch.randn(32, 4, 64)
        twelve = nn.ModuleList(bf.BatchFormer(64, variant=variant) for _ in range(12))
        first, second = x, x
        for module in twelve:
            first, second = module.relate(first), module.relate(second)
        return torch.cosine_similarity(first - first.mean(0), second - second.mean(0), dim=-1).mean().item()

    assert signal("stable") > 0.7
    assert signal("published") < 0.3
