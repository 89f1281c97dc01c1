"""TransMix against the slow way: the whole attention matrix of the stock model, and loops over cells."""

from __future__ import annotations

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.volo import VOLO
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.nn.token_layout import token_grid

from .tiny_models import CASES, SMALL, Case, class_row, opinionated, vit, whole_attention

VIT = vit("vit_tiny_patch16_224")
IDS = torch.arange(3)


def slow_share(mask: Tensor, attention: Tensor) -> Tensor:
    """The part of one map of attention that falls into the box: cell by cell, the box looked up by nearest pixel."""
    (height, width), (rows, columns) = mask.shape, attention.shape
    inside = sum(
        attention[i, j] * mask[i * height // rows, j * width // columns] for i in range(rows) for j in range(columns)
    )
    return inside / attention.sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_that_of_the_stock_models_whole_matrix(case: Case):
    model, images = case.build().eval(), case.images()
    with bf.mix.TransMix(model, 5, per_sample=True) as mix:
        mixed = mix(images, IDS)
        model(mixed.images)
    attention = mixed.attention()
    expected = class_row(whole_attention(model, mixed.images)[-1], case.query, case.prefix)
    assert expected.amax() > 1.4 * expected.mean()  # attention worth the name
    assert attention.shape == (3, *case.grid)
    torch.testing.assert_close(attention.flatten(1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("per_sample", [False, True])
def test_targets_weigh_area_and_attention(weight, per_sample):
    case = vit("vit_tiny_patch16_224", img_size=(48, 96))
    model, images = case.build().train(), case.images(5)
    soft = torch.rand(5, 5).softmax(1)
    mix = bf.mix.TransMix(model, 5, attention_weight=weight, per_sample=per_sample, label_smoothing=0.1)
    mixed = mix(images, soft)
    model(mixed.images)
    targets = mixed.targets()
    masks = mixed.mask.expand(5, 1, 48, 96)
    smooth = 0.9 * soft + 0.1 / 5
    whole = class_row(whole_attention(model, mixed.images)[-1], "class", 1)
    for i, j in enumerate(mixed.partner.tolist()):
        by_attention = slow_share(masks[i, 0], whole[i].reshape(3, 6))
        share = (1 - weight) * masks[i].mean() + weight * by_attention
        torch.testing.assert_close(targets[i], (1 - share) * smooth[i] + share * smooth[j], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [0, 1, -2])
def test_any_block_can_be_asked(block):
    model, images = VIT.build().eval(), VIT.images()
    mix = bf.mix.TransMix(model, 5, block=block)
    mixed = mix(images, IDS)
    model(mixed.images)
    attention = mixed.attention()
    expected = class_row(whole_attention(model, mixed.images)[block], "class", 1)
    torch.testing.assert_close(attention.flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_an_early_stage_of_a_pyramid_reduces_its_keys():
    case = next(case for case in CASES if case.name == "pvt")
    model, images = case.build().eval(), case.images()
    mixed = bf.mix.TransMix(model, 5, block=0)(images, IDS)
    model(mixed.images)
    assert mixed.attention().shape == (3, 2, 3)  # 16 x 24 tokens, reduced 8 times
    expected = class_row(whole_attention(model, mixed.images)[0], "mean", 0)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "case", [vit("deit_tiny_distilled_patch16_224", prefix=2, depth=3), CASES[5]], ids=lambda case: case.name
)
def test_rollout_is_the_product_of_all_blocks(case):
    model, images = case.build().eval(), case.images()
    mixed = bf.mix.TransMix(model, 5, block="rollout")(images, IDS)
    model(mixed.images)
    attention = mixed.attention()
    product = torch.eye(16 + case.prefix).expand(3, -1, -1)
    for whole in whole_attention(model, mixed.images):
        product = (whole.mean(1) + torch.eye(16 + case.prefix)) / 2 @ product
    row = (product[:, 0] if case.query == "class" else product[:, case.prefix :].mean(1))[:, case.prefix :]
    torch.testing.assert_close(attention.flatten(1), row / row.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)


def tiny_volo() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embed_dims": (24, 48, 48, 48), "num_heads": (3,) * 4}
    return opinionated(VOLO(layers=(1, 1, 1, 2), img_size=64, num_classes=5, global_pool="token", **sizes))


@pytest.mark.parametrize(
    "build",
    [*(case.build for case in CASES if case.name.startswith(("cait", "xcit"))), tiny_volo],
    ids=("cait", "xcit", "volo"),
)
def test_rollout_of_class_attention_leaves_the_other_tokens_where_they_are(build):
    model = build().eval()
    mixed = bf.mix.TransMix(model, 5, block="rollout")(torch.randn(3, 3, 64, 64), IDS)
    model(mixed.images)
    attention = mixed.attention()
    product = torch.eye(17).expand(3, -1, -1)
    for whole in whole_attention(model, mixed.images)[-2:]:  # the class-attention layers come last
        layer = torch.eye(17).repeat(3, 1, 1)
        assert whole.shape[2] == 1  # nobody but the class token asks
        layer[:, 0] = whole.mean(1)[:, 0]
        product = (layer + torch.eye(17)) / 2 @ product
    row = product[:, 0, 1:]
    torch.testing.assert_close(attention.flatten(1), row / row.sum(1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_rollout_over_tokens_that_are_merged_on_the_way_is_refused():
    model = timm.create_model("pit_ti_224", img_size=64, num_classes=5)
    mixed = bf.mix.TransMix(model, 5, block="rollout")(torch.randn(3, 3, 64, 64), IDS)
    model(mixed.images)
    with pytest.raises(UserError, match="the blocks of this model have 50, 17, 5 tokens: choose a block by its number"):
        mixed.targets()


def test_swin_is_read_as_one_window_whatever_its_windows_are():
    options = {"embed_dim": 24, "depths": (1, 2), "num_heads": (1, 2), "img_size": 32, "window_size": 2}
    model = opinionated(timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **options)).eval()
    block = model.layers[-1].blocks[-1]
    assert any(block.shift_size)  # windows of 2 x 2 on a map of 4 x 4, shifted
    mix = bf.mix.TransMix(model, 5)
    entered: list[Tensor] = []
    block.norm1.register_forward_hook(lambda _, args, out: entered.append(out))
    mixed = mix(torch.randn(3, 3, 32, 32), IDS)
    model(mixed.images)
    q, k, _ = block.attn.qkv(entered[-1]).reshape(3, 16, 3, 2, 24).permute(2, 0, 3, 1, 4)
    whole = (q @ k.transpose(-2, -1) / 24**0.5).softmax(-1)  # attention over the whole map, no window and no bias
    torch.testing.assert_close(
        mixed.attention().flatten(1), class_row(whole, "mean", 0), atol=1e-5, rtol=1e-4, check_stride=False
    )


def test_a_torchvision_model_is_read_too():
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = opinionated(VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5)).eval()
    entered: list[Tensor] = []
    model.encoder.layers[-1].ln_1.register_forward_hook(lambda _, args, out: entered.append(out))
    mixed = bf.mix.TransMix(model, 5)(torch.randn(3, 3, 32, 32), IDS)
    model(mixed.images)
    layer, tokens = model.encoder.layers[-1].self_attention, entered[0]
    whole = nn.MultiheadAttention.forward(layer, tokens, tokens, tokens, average_attn_weights=False)[1]
    torch.testing.assert_close(mixed.attention().flatten(1), class_row(whole, "class", 1), atol=1e-5, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(2, 5),
    size=st.sampled_from([(32, 32), (16, 48), (48, 32)]),
    seed=st.integers(0, 2**31),
    per_sample=st.booleans(),
    prob=st.sampled_from([0.5, 1.0]),
)
def test_properties_of_targets_and_images(count, size, seed, per_sample, prob):
    model = vit("vit_tiny_patch16_224", img_size=size).build().train()
    images = torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    made = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(seed)
        with bf.mix.TransMix(model, count, prob=prob, per_sample=per_sample, generator=generator) as mix:
            mixed = mix(images, torch.arange(count))
            model(mixed.images)
        made.append((mixed.images, mixed.targets()))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    targets, share = mixed.targets(), mixed.label_share()
    torch.testing.assert_close(targets.sum(1), torch.ones(count))
    assert ((share >= 0) & (share <= 1)).all()
    assert (share[mixed.share == 0] == 0).all()  # no box, nothing of image B
    assert not targets.requires_grad
    partners = images[mixed.partner]
    assert ((mixed.images == images) | (mixed.images == partners)).all()


def test_patches_that_are_not_square_have_their_own_grid():
    case = vit("vit_tiny_patch16_224", img_size=96, patch_size=(12, 16))
    model = case.build()
    mixed = bf.mix.TransMix(model, 5)(case.images(), IDS)
    model(mixed.images)
    assert mixed.attention().shape[1:] == model.patch_embed.grid_size == (8, 6)


def test_tokens_that_make_no_such_grid_are_refused_unless_the_grid_is_said():
    for tokens, side in ((17, 64), (442, 168)):  # 442: 21 x 21 and a class token
        with pytest.raises(UserError, match="pass grid="):
            token_grid(tokens, side, side)
    model = VIT.build()
    mix = bf.mix.TransMix(model, 5, grid=(2, 8))
    mixed = mix(VIT.images(), IDS)
    model(mixed.images)
    assert mixed.attention().shape == (3, 2, 8)
    mixed = bf.mix.TransMix(model, 5, grid=(3, 5))(VIT.images(), IDS)
    model(mixed.images)
    with pytest.raises(UserError, match=r"grid=\(3, 5\) is not the grid of the 16 tokens"):
        mixed.targets()


def test_a_model_without_attention_is_refused():
    for model in (timm.create_model("resnet10t"), nn.Linear(3, 5)):
        with pytest.raises(UserError, match="found no attention"):
            bf.mix.TransMix(model, 5)


def test_a_model_that_drops_patches_is_refused():
    with pytest.raises(UserError, match="drops patches in training"):
        bf.mix.TransMix(vit("vit_tiny_patch16_224", patch_drop_rate=0.25).build(), 5)


def test_attention_that_is_not_softmax_of_queries_and_keys_is_not_read():
    # talking heads and cross-covariance: of CaiT and XCiT the class-attention layers alone are read
    for case in CASES[-4:-2]:
        mix = bf.mix.TransMix(case.build(), 5, block=0)
        assert type(mix.recorders[0].layer).__name__ == "ClassAttn"
    small = {"embed_dim": 24, "depths": (1, 1), "num_heads": (1, 2), "img_size": 64}
    for name in ("swinv2_tiny_window8_256", "swinv2_cr_tiny_224"):  # cosines in the place of products
        with pytest.raises(UserError, match="found no attention"):
            bf.mix.TransMix(timm.create_model(name, **small), 5)


def test_targets_before_the_forward_pass_are_refused():
    model = VIT.build()
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(VIT.images(), IDS)
    with pytest.raises(UserError, match=r"on mixed.images before mixed.targets\(\)"):
        mixed.targets()
    model(mixed.images)
    targets = mixed.targets()
    later = mix(VIT.images(), IDS)
    with pytest.raises(UserError, match="run the model given to TransMix"):
        later.targets()
    assert torch.equal(mixed.targets(), targets)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 64, 64), "this batch has 1"),
        (torch.zeros(3, 3, 64, 8), "64 x 8 pixels and the model's patches 16 x 16"),
    ],
)
def test_images_that_cannot_be_attended_are_refused(images, message):
    mix = bf.mix.TransMix(VIT.build(), 5)
    with pytest.raises(UserError, match=message):
        mix(images, torch.zeros(len(images)).long())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention_weight": 1.5}, "attention_weight=1.5"),
        ({"attention_weight": "half"}, "attention_weight='half'"),
        ({"block": 2}, "from 0 to 1"),
        ({"block": "last"}, "block='last'"),
        ({"query": "cls"}, "query='cls'"),
        ({"grid": 14}, "grid=14"),
    ],
)
def test_wrong_options_are_named(wrong, message):
    model = VIT.build()
    with pytest.raises(UserError, match=message):
        bf.mix.TransMix(model, 5, **wrong)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_class_token_must_be_there_to_be_asked():
    with pytest.raises(UserError, match="no class token"):
        bf.mix.TransMix(timm.create_model("vit_base_patch16_siglip_gap_224", img_size=64, **SMALL), 5, query="class")
    with pytest.raises(UserError, match="not such a block"):
        bf.mix.TransMix(next(case for case in CASES if case.name == "pvt").build(), 5, block="rollout")


def test_another_number_of_images_than_mixed_is_noticed():
    model = VIT.build()
    mixed = bf.mix.TransMix(model, 5)(VIT.images(), IDS)
    model(mixed.images[:2])
    with pytest.raises(
        UserError, match=r"3 images were mixed and the model's attention saw 2 rows: .*choose another block="
    ):
        mixed.targets()
