"""BatchFormerV2: tokens and maps, padding, first and later insertions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchformer as bf
from batchformer.errors import UserError


def module(**keywords) -> bf.BatchFormerV2:
    return bf.BatchFormerV2(8, **{"heads": 2, "dropout": 0.0, **keywords})


def test_every_position_is_a_sequence_of_its_own_for_the_papers_layer() -> None:
    theirs = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
    ours = module()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 3, 8)
    out = ours(x)
    assert torch.equal(out[:5], x)
    for n in range(3):
        torch.testing.assert_close(out[5:, n], theirs(x[:, n : n + 1])[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("channels", ["first", "last"])
def test_maps_are_tokens_in_another_layout(channels: str) -> None:
    ours = module(channels=channels)
    tokens = torch.randn(4, 6, 8)
    maps = tokens.reshape(4, 2, 3, 8)
    expected = ours.relate(tokens).reshape(4, 2, 3, 8)
    out = ours(maps.movedim(-1, 1) if channels == "first" else maps)
    out = out.movedim(1, -1) if channels == "first" else out
    torch.testing.assert_close(out[4:], expected)
    assert torch.equal(out[:4], maps)


def test_in_eval_mode_the_input_itself_comes_back() -> None:
    x = torch.randn(4, 8, 2, 3)
    assert module().eval()(x) is x


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
def test_a_later_insertion_acts_on_the_related_rows_alone(streams: str) -> None:
    later = module(opens=False, streams=streams)
    x = torch.randn(6, 3, 8)
    plain = {"duplicate": 3, "split": 3, "single": 0}[streams]
    out = later(x)
    assert torch.equal(out[:plain], x[:plain])
    torch.testing.assert_close(out[plain:], later.relate(x[plain:]))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), group=st.sampled_from([None, 2, 3]), layers=st.integers(1, 2), opens=st.booleans())
def test_padding_passes_unchanged_is_seen_by_nothing_and_gets_no_gradient(
    seed: int, group: int | None, layers: int, opens: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = module(group_size=group, layers=layers, opens=opens, norm="pre")
    rows, related = (5, slice(5, 10)) if opens else (10, slice(5, 10))
    x = torch.randn(rows, 4, 8, generator=generator, requires_grad=True)
    valid = torch.rand(rows, 4, generator=generator) < 0.6
    out = ours(x, valid)
    mask = valid if opens else valid[5:]
    source = x if opens else x[5:]
    assert torch.equal(out[related][~mask], source[~mask])
    (gradient,) = torch.autograd.grad(out[related][mask].square().sum(), x)
    padded = ~valid if opens else torch.cat([torch.ones(5, 4, dtype=torch.bool), ~valid[5:]])
    assert gradient[padded].abs().sum() == 0
    other = torch.where(valid[..., None], x.detach(), torch.full_like(x, float("nan")))
    torch.testing.assert_close(ours(other, valid)[related][mask], out[related][mask].detach())


def test_a_position_valid_in_one_sample_attends_to_itself_alone() -> None:
    ours = module()
    x = torch.randn(4, 2, 8)
    valid = torch.ones(4, 2, dtype=torch.bool)
    valid[1:, 1] = False
    torch.testing.assert_close(ours(x, valid)[4, 1], ours.relate(x[:1, 1:])[0, 0])
    torch.testing.assert_close(ours(x, valid)[4:, 0], ours.relate(x[:, 0]))


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (2, 8, 0, 3)])
@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
def test_without_positions_or_rows_there_is_nothing_to_relate(shape: tuple[int, ...], streams: str) -> None:
    x = torch.randn(shape, requires_grad=True)
    out = module(streams=streams)(x)
    assert out.shape == ((2 if streams == "duplicate" else 1) * shape[0], *shape[1:])
    out.sum().backward()
    mask = torch.ones(shape[0], *(shape[1:2] if len(shape) == 3 else shape[2:]), dtype=torch.bool)
    assert module(streams=streams)(x, mask).shape == out.shape


def test_one_split_image_leaves_no_weight_without_a_gradient_which_ddp_would_wait_for() -> None:
    ours, x = module(streams="split"), torch.randn(1, 3, 8)
    out = ours(x)
    assert torch.equal(out, x)
    out.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in ours.parameters())


def test_a_mask_that_is_all_true_changes_nothing() -> None:
    ours, x = module(), torch.randn(4, 8, 2, 3)
    torch.testing.assert_close(ours(x, torch.ones(4, 2, 3, dtype=torch.bool)), ours(x))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"shape \(4, 3\)"):
        module()(torch.randn(4, 3, 8), torch.ones(4, 2, dtype=torch.bool))


def test_layer_scale_starts_the_module_near_the_identity() -> None:
    x = torch.randn(4, 3, 8)
    far, near = module(norm="pre"), module(norm="pre", layer_scale=1e-4)
    assert (near(x)[4:] - x).norm() < 1e-2 * (far(x)[4:] - x).norm()
    assert {name for name, _ in near.named_parameters()} - {name for name, _ in far.named_parameters()} == {
        "layers.0.scale1",
        "layers.0.scale2",
    }
