"""Attention over the batch and features with and without the module are those of a walk through the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import timm
import torch
from sklearn.decomposition import PCA

import batchformer as bf
from batchformer.analysis import (
    attention_over_batch,
    attention_weights,
    features_with_and_without,
    on_itself,
    relative_entropy,
)
from batchformer.analysis.features import principal_components
from batchformer.errors import UserError
from batchformer.nn import BatchAttention

BATCH, WIDTH = 6, 32


def tiny_vit(**keywords):
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": WIDTH, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**shape, **keywords})


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(BATCH, 3, 32, 32)


def walk(vit, modules, images):
    """(tokens before, tokens after) the module of each block, all rows related, and those of the plain model."""
    vit.eval()
    plain = related = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    found = {}
    for k, block in enumerate(vit.blocks):
        plain, related = block(plain), block(related)
        if k in modules:
            before = related
            related = modules[k].relate(before)
            found[k] = (before, related, plain)
    return found


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
@pytest.mark.parametrize("share", [False, True])
def test_arrays_are_those_of_a_walk_through_the_model(images, streams, share):
    vit = tiny_vit()
    attachment = bf.attach(vit, blocks=[0, 2], heads=2, streams=streams, share=share)
    modules = {0: attachment.points[0].module, 2: attachment.points[1].module}
    found = attention_over_batch(vit, images, "blocks.2")
    features = features_with_and_without(vit, images, 1)
    with torch.no_grad():
        before, after, plain = walk(vit, modules, images)[2]
        wanted = attention_weights(modules[2].layers[0].self_attn, before).mean(1)
    torch.testing.assert_close(found.weights, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(features.related, after, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(features.without, plain, atol=1e-5, rtol=1e-4)


def test_mass_is_what_the_others_give_in_multiples_of_chance(images):
    vit = tiny_vit()
    bf.attach(vit, blocks=[0], heads=2, group_size=4)  # groups of 4 and 2
    found = attention_over_batch(vit, images)
    mass = found.mass()
    for n in (0, 5, 16):
        for j in range(BATCH):
            group = range(0, 4) if j < 4 else range(4, 6)
            others = sum(found.weights[n, i, j].item() for i in group if i != j)
            assert mass[j, n].item() == pytest.approx(others / ((len(group) - 1) / len(group)), rel=1e-4)
            assert found.factors(n)[j].sum().item() == pytest.approx(len(group), rel=1e-4)
    assert found.weights[:, 0, 4:].abs().max() == 0


def test_uniform_attention_is_one_everywhere(images):
    vit = tiny_vit()
    attachment = bf.attach(vit, blocks=[0], heads=2)
    torch.nn.init.zeros_(attachment.points[0].module.layers[0].self_attn.in_proj_weight)
    found = attention_over_batch(vit, images)
    torch.testing.assert_close(found.mass_map(), torch.ones(BATCH, 4, 4))
    torch.testing.assert_close(found.factors((1, 2)), torch.ones(BATCH, BATCH))


def test_heads_average_to_the_mean(images):
    vit = tiny_vit()
    bf.attach(vit, blocks=[0], heads=2)
    one, other = (attention_over_batch(vit, images, head=head).weights for head in (0, 1))
    torch.testing.assert_close((one + other) / 2, attention_over_batch(vit, images).weights)
    assert not torch.allclose(one, other)


SMALL_VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
WIDE_PATCHES = {**SMALL_VIT, "img_size": 96, "patch_size": (12, 16)}  # 1 + 8 x 6 tokens, which are also 7 x 7
SMALL_SWIN = {"img_size": 32, "window_size": 4, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2)}


@pytest.mark.parametrize(
    ("name", "options", "place", "size", "prefix", "grid"),
    [
        ("vit_tiny_patch16_224", {**SMALL_VIT, "img_size": (32, 64)}, "blocks.0", (32, 64), 1, (4, 8)),
        ("vit_tiny_patch16_224", {**SMALL_VIT, "reg_tokens": 4}, "blocks.0", (32, 32), 5, (4, 4)),
        # 1 + 8 x 6 tokens, which are also 7 x 7
        (
            "vit_tiny_patch16_224",
            {**SMALL_VIT, "img_size": 96, "patch_size": (12, 16)},
            "blocks.0",
            (96, 96),
            1,
            (8, 6),
        ),
        ("vit_tiny_patch16_224", {**SMALL_VIT, "dynamic_img_size": True}, "blocks.0", (16, 64), 1, (2, 8)),
        ("vit_tiny_patch16_224", {**SMALL_VIT, "patch_size": (4, 8)}, "patch_embed", (32, 32), 0, (8, 4)),
        ("resnet10t", {}, "layer2", (32, 48), 0, (4, 6)),
        ("swin_tiny_patch4_window7_224", SMALL_SWIN, "layers.0", (32, 32), 0, (8, 8)),
    ],
    ids=["vit-wide", "vit-registers", "vit-wide-patches", "vit-any-size", "vit-no-class-token-yet", "resnet", "swin"],
)
def test_positions_are_found_on_the_image(name, options, place, size, prefix, grid):
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=3, **options)
    bf.attach(net, after=place, heads=2)
    found = attention_over_batch(net, torch.randn(3, 3, *size))
    assert (found.layout.prefix, found.layout.grid) == (prefix, grid)
    assert found.mass_map().shape == (3, *grid)
    last = (grid[0] - 1, grid[1] - 1)
    assert torch.equal(found.at(last), found.weights[-1])


def test_tokens_that_are_not_in_the_order_of_the_image_have_no_grid():
    torch.manual_seed(0)
    hiera = timm.create_model(
        "hiera_tiny_224", img_size=64, embed_dim=16, num_heads=1, stages=(1, 1), q_pool=1, mask_unit_size=(4, 4)
    )
    bf.attach(hiera, after="blocks.0", heads=2)
    found = attention_over_batch(hiera, torch.randn(2, 3, 64, 64))
    assert (found.layout.positions, found.layout.grid) == (16 * 16, None)


def test_a_pooled_feature_has_one_position_and_no_map(images):
    net = tiny_vit()
    bf.attach(net, heads=2)
    found = attention_over_batch(net, images)
    assert found.weights.shape == (1, BATCH, BATCH)
    with pytest.raises(UserError, match="no grid"):
        found.mass_map()


def test_features_of_a_module_before_a_submodule_are_those_that_enter_it(images):
    vit = tiny_vit()
    attachment = bf.attach(vit, heads=2)
    features = features_with_and_without(vit, images)
    with torch.no_grad():
        entering = vit.eval().forward_head(vit.forward_features(images), pre_logits=True)
        wanted = attachment.points[0].module.relate(entering)
    torch.testing.assert_close(features.without[:, 0], entering)
    torch.testing.assert_close(features.related[:, 0], wanted)
    assert features.side == "before"


def test_maps_before_a_submodule_are_laid_out_as_they_enter_it():
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=3)
    bf.attach(net, before="layer4", heads=2, dim=256, channels="first")
    images = torch.randn(3, 3, 64, 96)
    found, features = attention_over_batch(net, images), features_with_and_without(net, images)
    assert (found.layout.positions, found.layout.grid) == (4 * 6, (4, 6))
    assert found.mass_map().shape == (3, 4, 6)
    with torch.no_grad():
        entering = torch.nn.Sequential(*list(net.eval().children())[:7])(images)  # up to layer3
    torch.testing.assert_close(features.without, entering.flatten(2).transpose(1, 2))
    assert features.colours()[0].shape == (3, 4, 6, 3)


def test_the_plain_model_is_plain_inside_of_mini_batch_inference(images):
    vit = tiny_vit()
    attachment = bf.attach(vit, blocks=[0, 2], heads=2)
    wanted = features_with_and_without(vit, images, 1)
    with attachment.infer_with_batch():
        found = features_with_and_without(vit, images, 1)
    assert torch.equal(found.without, wanted.without)
    assert torch.equal(found.related, wanted.related)


def test_signals_have_positions_and_no_grid():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv1d(2, 8, 3, padding=1), torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )
    signals = torch.randn(3, 2, 20)
    bf.attach(net, after="0", heads=2, channels="first", dim=8, example_inputs=signals)
    found, features = attention_over_batch(net, signals), features_with_and_without(net, signals)
    assert (found.weights.shape, found.layout.positions, found.layout.grid) == ((20, 3, 3), 20, None)
    with torch.no_grad():
        torch.testing.assert_close(features.without, net.eval()[0](signals).transpose(1, 2))


def test_principal_components_are_those_of_scikit_learn():
    torch.manual_seed(0)
    rows = torch.randn(40, 6) * torch.tensor([5.0, 4, 3, 2, 1, 0.5])
    wanted = torch.from_numpy(PCA(3).fit_transform(rows.double().numpy())).float()
    torch.testing.assert_close(principal_components(rows, 3).abs(), wanted.abs(), atol=1e-4, rtol=1e-4)
    assert principal_components(rows[:, :1], 3)[:, 1:].abs().max() == 0


def test_a_module_that_changes_nothing_leaves_the_colours_and_the_plane(images):
    vit = tiny_vit()
    bf.attach(vit, blocks=[0], heads=2, norm="pre", layer_scale=0.0)
    features = features_with_and_without(vit, images)
    for without, related in (features.colours(), features.plane()):
        torch.testing.assert_close(without, related)
    assert features.colours()[0].std() > 0.1


def test_wrong_calls_say_what_to_do(images):
    vit = tiny_vit()
    with pytest.raises(UserError, match="call attach first"):
        attention_over_batch(vit, images)
    bf.attach(vit, blocks=[0, 1], heads=2)
    for keywords, words in [
        ({"place": "blocks.2"}, "'blocks.0', 'blocks.1'"),
        ({"place": 2}, "2 insertions"),
        ({"layer": 1}, "1 layers"),
        ({"head": 2}, "there are 2"),
        ({"place": 1.0}, "place=1.0 must be a whole number"),
        ({"layer": "last"}, "layer='last' must be a whole number"),
        ({"head": "all"}, "head='all' must be a whole number"),
    ]:
        with pytest.raises(UserError, match=words):
            attention_over_batch(vit, images, **keywords)
    with pytest.raises(UserError, match="two or more"):
        attention_over_batch(vit, images[:1])
    with pytest.raises(UserError, match="one tensor with the whole batch, not list"):
        attention_over_batch(vit, list(images))
    with bf.attachment_of(vit).disabled(), pytest.raises(UserError, match="disabled here"):
        attention_over_batch(vit, images)
    found = attention_over_batch(vit, images)
    with pytest.raises(UserError, match="4 rows and 4 columns"):
        found.at((4, 0))
    with pytest.raises(UserError, match="no position 17"):
        found.at(17)
    for position in (1.5, (1.0, 2), "3", (1, 2, 3), None):
        with pytest.raises(UserError, match="neither the number of a position"):
            found.at(position)


def test_numbers_of_numpy_and_torch_are_positions_too(images):
    vit = tiny_vit()
    bf.attach(vit, blocks=[0], heads=2)
    found = attention_over_batch(vit, images, place=np.int64(0), head=np.int64(1))
    assert torch.equal(found.at(np.int64(3)), found.at(3))
    assert torch.equal(found.at(torch.tensor(3)), found.at(3))
    assert torch.equal(found.at([np.int32(1), 2]), found.at((1, 2)))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 3, 8)


@pytest.mark.parametrize("group_size", [None, 2, 5, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_times_values_are_what_the_module_gives(x, group_size, masked):
    attention = BatchAttention(8, heads=2, group_size=group_size)
    valid = torch.rand(5, 3) > 0.4 if masked else None
    weights = attention_weights(attention, x, valid)
    value = (x @ attention.in_proj_weight[16:].T + attention.in_proj_bias[16:]).reshape(5, 3, 2, 4)
    out = torch.einsum("nhij,jnhw->inhw", weights, value).reshape(5, 3, 8)
    torch.testing.assert_close(attention.out_proj(out), attention(x, valid))


def test_entropy_and_own_mass_per_head_by_loops(x):
    attention = BatchAttention(8, heads=2, group_size=3)  # groups of 3 and 2
    weights = attention_weights(attention, x)
    for h in range(2):
        entropies, own = [], []
        for n in range(3):
            for i in range(5):
                seen = range(0, 3) if i < 3 else range(3, 5)
                p = [weights[n, h, i, j].item() for j in seen]
                entropies.append(-sum(v * math.log(v) for v in p) / math.log(len(p)))
                own.append(weights[n, h, i, i].item())
        assert relative_entropy(weights, 3)[h].item() == pytest.approx(sum(entropies) / 15, rel=1e-5)
        assert on_itself(weights)[h].item() == pytest.approx(sum(own) / 15, rel=1e-5)


def test_uniform_attention_has_entropy_one_and_a_fixed_one_has_zero():
    uniform, fixed = torch.full((2, 1, 4, 4), 0.25), torch.eye(4).expand(2, 1, 4, 4)
    assert relative_entropy(uniform).tolist() == pytest.approx([1.0])
    assert relative_entropy(fixed).tolist() == [0.0]
    assert on_itself(uniform).tolist() == [0.25]
    assert relative_entropy(fixed, group_size=1).tolist() == [0.0]
