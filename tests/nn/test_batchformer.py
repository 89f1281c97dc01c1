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
        ({"dim": 10, "heads": 4}, "dim=10 does not divide by heads=4"),
        ({"dim": 8, "norm": "middle"}, "norm='middle'"),
        ({"dim": 8, "streams": "triple"}, "streams='triple'"),
        ({"dim": 8, "layers": 0}, "layers=0"),
        ({"dim": 8, "dropout": 1.5}, "dropout=1.5"),
        ({"dim": 8, "group_size": 0}, "group_size=0"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        bf.BatchFormer(**arguments)


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(UserError, match=r"dim=8.*\(3, 9\)"):
        bf.BatchFormer(8).relate(torch.randn(3, 9))
