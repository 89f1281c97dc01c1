"""Which layers TransMix reads: those that compute what their weights promise, and what they are given beside tokens."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import batchformer as bf
from batchformer.errors import UserError
from batchformer.mix.class_attention_layers import attending_tokens, find_attention

from .tiny_models import CASES, Case, opinionated

IDS = torch.arange(3)


class Plain(nn.Module):
    """Attention over tokens, for others to differ from."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1) @ v


class Channels(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q @ (k.transpose(-2, -1) @ v * 8**-0.5).softmax(-1)


class OtherScale(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / 8).softmax(-1) @ v


class Causal(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_layer_must_compute_the_attention_that_its_weights_promise():
    torch.manual_seed(0)
    assert attending_tokens(Plain())
    assert attending_tokens(Plain().to(torch.bfloat16))
    for kind in (Channels, OtherScale, Causal):
        assert not attending_tokens(kind())
    assert attending_tokens(nn.MultiheadAttention(16, 2))
    with pytest.raises(UserError, match="found no attention"):
        find_attention(nn.MultiheadAttention(16, 2, add_zero_attn=True))


class Asking(Plain):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(x)


class Half(nn.Module):
    """A map that takes half precision only, as some kernels do; no trial in float64 gets through it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.in_features = linear, linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return self.linear(x)


def test_what_cannot_be_tried_is_read_where_its_kind_is_known():
    assert attending_tokens(Asking())
    own = Plain().bfloat16()
    own.qkv = Half(own.qkv)
    assert not attending_tokens(own)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vit = ViTForImageClassification(ViTConfig(**sizes, image_size=32)).bfloat16()
    (_, layer, _), *_ = find_attention(vit)
    name = next(name for name in ("q_proj", "query") if hasattr(layer, name))
    setattr(layer, name, Half(getattr(layer, name)))
    assert attending_tokens(layer)
    for parameter in list(layer.named_parameters()):  # as quantised layers, which keep their weights elsewhere
        part, _, weight = parameter[0].rpartition(".")
        delattr(layer.get_submodule(part), weight)
    assert attending_tokens(layer)


@pytest.mark.parametrize("case", [case for case in CASES if "pvt" not in case.name], ids=lambda case: case.name)
def test_trying_a_layer_accepts_all_that_are_known_and_leaves_no_trace(case: Case):
    model = case.build().train()
    model.blocks[0].attn.eval() if hasattr(model, "blocks") else None
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    layers = [layer for _, layer, _ in find_attention(model)]
    assert all(attending_tokens(layer) for layer in layers)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_a_layer_is_tried_where_it_can_be_whatever_torchs_default_device_is():
    layer = Plain()
    with torch.device("meta"):
        assert attending_tokens(layer) == "all"


def test_attention_inside_windows_or_between_channels_is_not_read():
    twins = timm.create_model("twins_svt_small", embed_dims=(16, 16, 16, 16), num_heads=(2, 2, 2, 2), depths=(2,) * 4)
    davit = timm.create_model("davit_tiny", embed_dims=(16, 16, 16, 16), num_heads=(2,) * 4, depths=(1, 1, 1, 1))
    for model, unwanted in ((twins, "LocallyGroupedAttn"), (davit, "ChannelAttention")):
        kinds = {type(layer).__name__ for layer in model.modules()}
        assert unwanted in kinds
        assert unwanted not in {type(layer).__name__ for _, layer, _ in find_attention(model)}


class Pooled(nn.Module):
    """Tokens of 8 x 8 pixels, one block, and a learnt probe that pools them."""

    def __init__(self, probes: int = 1, batch_first: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.probe = nn.Parameter(torch.randn(1, probes, 16))
        self.pool = nn.MultiheadAttention(16, 2, batch_first=batch_first)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.block(self.patches(images).flatten(2).transpose(1, 2))
        probe = self.probe.expand(len(images), -1, -1)
        if not self.pool.batch_first:
            tokens, probe = tokens.transpose(0, 1), probe.transpose(0, 1)
        out, self.weights = self.pool(probe, tokens, tokens)
        return self.head(out.mean(1 if self.pool.batch_first else 0))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_probe_that_pools_the_tokens_is_asked_what_it_attends_to(batch_first):
    torch.manual_seed(0)
    model = Pooled(batch_first=batch_first).train()
    nn.init.normal_(model.pool.in_proj_weight)
    mixed = bf.mix.TransMix(model, 5)(torch.randn(3, 3, 32, 16), IDS)
    model(mixed.images)
    attention = mixed.attention()
    assert attention.shape == (3, 4, 2)
    assert attention.amax() > 0.2
    torch.testing.assert_close(attention.flatten(1), model.weights[:, 0], atol=1e-5, rtol=1e-4)


def test_several_probes_are_refused_and_so_is_their_rollout():
    for model, block in ((Pooled(probes=2), None), (Pooled(), "rollout")):
        mixed = bf.mix.TransMix(model, 5, block=block)(torch.randn(3, 3, 32, 32), IDS)
        with pytest.raises(UserError, match="choose another block="):
            model(mixed.images)


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("included", [False, True])
def test_timms_attention_pooling_is_asked_what_its_latent_attends_to(registers, included):
    torch.manual_seed(0)
    small = {"img_size": (48, 64), "embed_dim": 48, "num_heads": 3, "depth": 2, "num_classes": 5, "qk_norm": True}
    options = {**small, "reg_tokens": registers, "pool_include_prefix": included}
    model = opinionated(timm.create_model("vit_base_patch16_siglip_224", **options)).train()
    pool, seen = model.attn_pool, []
    pool.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(torch.randn(3, 3, 48, 64), IDS)
    model(mixed.images)
    q = pool.q_norm(pool.q(pool.latent).unflatten(-1, (3, 16)).transpose(1, 2))
    k = pool.k_norm(pool.kv(seen[0]).unflatten(-1, (2, 3, 16))[:, :, 0].transpose(1, 2))
    row = (q @ k.transpose(-2, -1) / 4).softmax(-1).mean(1)[:, 0, registers if included else 0 :]
    assert mixed.attention().shape == (3, 3, 4)
    torch.testing.assert_close(mixed.attention().flatten(1), row / row.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)
    assert (row.amax(1) / row.amin(1)).min() > 1.5
    assert bf.mix.TransMix(model, 5, query="mean").recorders[0].layer is model.blocks[-1].attn
    with pytest.raises(UserError, match="'attn_pool' is not such a block"):
        bf.mix.TransMix(model, 5, block="rollout")


def test_where_the_pooling_sees_the_class_token_too_it_is_no_cell():
    options = {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 1, "num_classes": 5, "attn_pool_num_heads": 3}
    model = timm.create_model("vit_pe_core_tiny_patch16_384", **options).train()
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(torch.randn(3, 3, 64, 64), IDS)
    model(mixed.images)
    assert mix.recorders[0].layer is model.attn_pool
    assert mixed.attention().shape == (3, 4, 4)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 16, 8, 8), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, images: Tensor, **given: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens, **given)[0].mean(1)


def test_what_a_layer_is_given_beside_its_tokens_is_refused_by_name():
    model = Masked()
    mixed = bf.mix.TransMix(model, 5)(torch.randn(3, 3, 16, 16), IDS)
    with pytest.raises(UserError, match="that is given attn_mask"):
        model(mixed.images, attn_mask=torch.zeros(4, 4))
    model(mixed.images)
    assert mixed.targets().shape == (3, 5)
