"""TransMix on layers and models that differ from the plain ViT in one thing each."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import timm
import torch
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.mix import TransMix
from batchformer.mix.class_attention_readers import ClassAttentionRecorder

from .tiny_models import CASES, class_row, opinionated, vit, whole_attention


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class OwnAttention(nn.Module):
    """Grouped queries, and a scale of its own."""

    def __init__(self, named):
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        setattr(self, named, 0.9)
        self.by = 0.9
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, w) for w in (16, 8, 8, 16))

    def weights(self, x):
        q, k = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q_proj, self.k_proj))
        return (self.by * q @ k.repeat_interleave(2, 1).transpose(-2, -1)).softmax(-1)

    def forward(self, x):
        v = self.v_proj(x).unflatten(-1, (-1, 4)).transpose(1, 2).repeat_interleave(2, 1)
        return self.o_proj((self.weights(x) @ v).transpose(1, 2).flatten(2))


class OwnModel(nn.Module):
    def __init__(self, named):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.stem, self.attn, self.head = nn.Conv2d(3, 16, 8, 8), OwnAttention(named), nn.Linear(16, 3)

    def tokens(self, images):
        patches = self.stem(images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1)

    def forward(self, images):
        return self.head(self.attn(self.tokens(images))[:, 0])


@pytest.mark.parametrize("named", ["scale", "scaling"])
def test_grouped_queries_and_a_scale_of_its_own_are_those_of_the_layer(named):
    torch.manual_seed(0)
    model, images = OwnModel(named), torch.randn(3, 3, 32, 32)
    with TransMix(model, 3) as mix:
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
    row = model.attn.weights(model.tokens(mixed.images)).mean(1)[:, 0, 1:]
    torch.testing.assert_close(mixed.attention().flatten(1), (row / row.sum(1, keepdim=True)).detach())


class Adapted(nn.Linear):
    """As peft and quantised layers are: a Linear whose `forward` does more."""

    def forward(self, x):
        return super().forward(x) * torch.linspace(-2, 2, self.out_features)


def test_a_linear_map_of_another_kind_is_used_as_it_computes():
    case = vit("vit_tiny_patch16_224")
    model, images = case.build().eval(), case.images()
    for block in model.blocks:
        adapted = Adapted(48, 144)
        adapted.load_state_dict(block.attn.qkv.state_dict())
        block.attn.qkv = adapted
    with TransMix(model, 5) as mix:
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
    expected = class_row(whole_attention(model, mixed.images)[-1], "class", 1)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_dinov3_in_timm_turns_halves():
    case = vit("vit_small_patch16_dinov3", prefix=5)
    model, images = case.build().eval(), case.images()
    with TransMix(model, 5) as mix:
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
    expected = class_row(whole_attention(model, mixed.images)[-1], mix.recorders[0].reader.query, 5)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_dropout_in_training_hides_no_layer():
    model = vit("vit_tiny_patch16_224", attn_drop_rate=0.5, proj_drop_rate=0.5).build().train()
    with TransMix(model, 5) as mix:
        assert mix.recorders[0].layer is model.blocks[-1].attn


@pytest.mark.parametrize("shared", [{"use_rel_pos_bias": False}, {"use_rel_pos_bias": True}], ids=["alone", "both"])
def test_a_bias_that_all_blocks_share_is_read(shared):
    case = vit("beit_base_patch16_224", global_pool="token", use_shared_rel_pos_bias=True, **shared)
    model, images = case.build().eval(), case.images()
    with TransMix(model, 5) as mix:
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
    expected = class_row(whole_attention(model, mixed.images)[-1], "class", 1)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pool", ["max", "avgmax", "avg", "map"])
def test_where_the_class_token_is_not_classified_the_mean_is_asked(pool):
    with TransMix(vit("vit_tiny_patch16_224", global_pool=pool).build(), 5, block=0) as mix:
        assert mix.recorders[0].reader.query == "mean"


def test_patches_that_are_never_dropped_are_no_trouble():
    model = vit("vit_tiny_patch16_224", patch_drop_rate=0.5).build()
    model.patch_drop.prob = 0.0
    with TransMix(model, 5) as mix:
        assert mix.recorders[0].layer is model.blocks[-1].attn


def test_a_causal_layer_is_refused():
    model = vit("vit_tiny_patch16_224").build()
    with TransMix(model, 5) as mix:
        mix(torch.rand(2, 3, 64, 64), torch.arange(2))
        with pytest.raises(UserError, match="is_causal"):
            model.blocks[-1].attn(torch.rand(2, 17, 48), is_causal=True)


def test_positions_that_the_pooling_adds_are_read():
    torch.manual_seed(0)

    small = {"img_size": (48, 64), "embed_dim": 48, "num_heads": 3, "depth": 1, "num_classes": 5}
    model = opinionated(timm.create_model("vit_base_patch16_siglip_224", **small)).train()
    pool, seen = model.attn_pool, []
    pool.pos_embed = nn.Parameter(torch.randn(12, 48))
    pool.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    mixed = TransMix(model, 5)(torch.randn(3, 3, 48, 64), torch.arange(3))
    model(mixed.images)
    q = pool.q(pool.latent).unflatten(-1, (3, 16)).transpose(1, 2)
    k = pool.kv(seen[0] + pool.pos_embed).unflatten(-1, (2, 3, 16))[:, :, 0].transpose(1, 2)
    row = (q @ k.transpose(-2, -1) / 4).softmax(-1).mean(1)[:, 0]
    torch.testing.assert_close(mixed.attention().flatten(1), row.detach(), atol=1e-5, rtol=1e-4)


def test_rollout_through_two_streams_is_that_of_the_plain_one():
    case = vit("vit_tiny_patch16_224")
    model, plain = case.build().train(), case.build().train()
    bf.attach(model, after=["blocks.0"], heads=4)
    mixes = [TransMix(one, 5, block="rollout", generator=generator()) for one in (model, plain)]
    mixed = [mix(case.images(), torch.arange(3)) for mix in mixes]
    for one, batch in zip((model, plain), mixed, strict=True):
        one(batch.images)
    torch.testing.assert_close(mixed[0].attention(), mixed[1].attention())


def test_rollout_to_the_mean_leaves_the_class_token_out_of_it():
    case = vit("vit_base_patch16_clip_224", "mean", global_pool="avg")
    model, images = case.build().eval(), case.images()
    with TransMix(model, 5, block="rollout") as mix:
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
    row = torch.full((3, 1, 17), 1 / 16)
    row[:, :, 0] = 0
    for whole in reversed(whole_attention(model, mixed.images)):
        row = (row + row @ whole.mean(1)) / 2
    row = row[:, 0, 1:]
    torch.testing.assert_close(mixed.attention().flatten(1), row / row.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_a_copied_mix_that_nobody_holds_leaves_its_model_too():
    model = vit("vit_tiny_patch16_224").build()
    mix = TransMix(model, 5)
    model_copy, mix_copy = copy.deepcopy((model, mix))
    layer = model_copy.blocks[-1].attn
    assert isinstance(layer.__dict__.get("forward"), ClassAttentionRecorder)
    del mix_copy
    gc.collect()
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_last_attention_of_every_model_here_is_read(case):
    model = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TransMix(model, 5).close()


def test_a_last_layer_that_cannot_be_read_is_named_and_rollout_refused():
    model = vit("vit_tiny_patch16_224").build()
    last = f"blocks.{len(model.blocks) - 1}.attn"
    model.blocks[-1].attn.tap = nn.Identity()  # a layer that may do anything
    with pytest.warns(UserWarning, match=rf"since that of '{last}'"):
        TransMix(model, 5).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with TransMix(model, 5, block=-1) as mix:
            assert mix.recorders[0].layer is model.blocks[-2].attn
    with pytest.raises(UserError, match=rf"that of '{last}' cannot be read"):
        TransMix(model, 5, block="rollout")


def test_twice_the_rows_are_two_streams_in_an_attached_model_only():
    case = vit("vit_tiny_patch16_224")
    model, images = case.build().train(), case.images()
    with TransMix(model, 5) as mix:
        mixed = mix(images, torch.arange(3))
        model(torch.cat([images, mixed.images]))
        with pytest.raises(UserError, match="3 images were mixed and the model's attention saw 6 rows"):
            mixed.targets()
        bf.attach(model, after=["blocks.0"], heads=4)
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
        assert mixed.attention().shape[0] == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_the_projection_is_part_of_what_the_layer_computes(when):
    case = vit("vit_tiny_patch16_224")
    model, images = case.build().eval(), case.images()
    qkv, steeper = model.blocks[-1].attn.qkv, lambda _, given, out: out * 3
    if when == "before":
        qkv.register_forward_hook(steeper)
    with TransMix(model, 5) as mix:
        if when == "after":
            qkv.register_forward_hook(steeper)
        mixed = mix(images, torch.arange(3))
        model(mixed.images)
    expected = class_row(whole_attention(model, mixed.images)[-1], "class", 1)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)
