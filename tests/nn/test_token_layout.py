"""Where tokens lie on an image: what the model says, and what the numbers tell."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers
from torch import nn

from batchformer.errors import UserError
from batchformer.nn.token_layout import TokenLayout, layout_of, patch_grids, patch_size, prefix_tokens, token_grid

SMALL_VIT = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
SMALL_SWIN = {"img_size": 32, "window_size": 4, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2)}


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize(
    ("tokens", "size", "grid"),
    [
        (196, (224, 224), (14, 14)),
        (18, (48, 96), (3, 6)),
        (18, (96, 48), (6, 3)),
        (6, (33, 32), (3, 2)),
        (1, (8, 8), (1, 1)),
    ],
)
def test_the_grid_is_told_from_the_shape_of_the_image(tokens, size, grid):
    assert token_grid(tokens, *size) == grid


@pytest.mark.parametrize(
    ("tokens", "size", "patch", "grid"),
    [
        (48, (96, 96), (12, 16), (8, 6)),
        (32, (64, 64), (16, 8), (4, 8)),
        (10, (16, 160), (16, 16), (1, 10)),
        (14, (20, 100), (16, 16), (2, 7)),  # padded at the border
        (49, (224, 224), (16, 16), (7, 7)),  # tokens merged later
    ],
)
def test_patches_that_are_known_make_the_grid(tokens, size, patch, grid):
    assert token_grid(tokens, *size, patch) == grid


def test_the_largest_patch_counts_in_whatever_order_they_come_and_padded_ones_in_both_directions():
    outer, inner = nn.Identity(), nn.Identity()
    outer.patch_size, inner.patch_size = (16, 8), 4
    assert patch_size(nn.Sequential(outer, inner)) == patch_size(nn.Sequential(inner, outer)) == (16, 8)
    assert token_grid(16, 32, 30, (16, 4)) == (2, 8)
    assert token_grid(16, 30, 32, (4, 16)) == (8, 2)


def test_a_wrapped_transformers_vit_tells_its_patches(images):
    config = transformers.DeiTConfig(
        image_size=32,
        patch_size=(4, 8),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    net = torch.nn.Sequential(transformers.DeiTModel(config, add_pooling_layer=False))
    layout = layout_of(net(images).last_hidden_state, "last", images, net)
    assert (layout.prefix, layout.grid) == (2, (8, 4))  # class and distillation token


def test_a_model_that_says_how_many_tokens_stand_first_is_not_guessed_otherwise(images):
    class Says(torch.nn.Module):
        num_prefix_tokens = 2

    squares = {18: (4, 4), 27: (5, 5), 25: None}  # 25 is a square itself, and 2 + 23 is no grid
    for positions, grid in squares.items():
        assert layout_of(torch.zeros(1, positions, 8), "last", images, Says()).grid == grid


def test_a_later_stage_of_a_pyramid_has_half_the_rows_and_columns(images):
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **{**SMALL_SWIN, "patch_size": (2, 4)})
    layout = layout_of(torch.zeros(1, 8 * 4, 48), "last", images, swin)
    assert (layout.prefix, layout.grid) == (0, (8, 4))


def test_tokens_of_the_image_may_be_rounded_to_a_grid_and_tokens_that_may_not_be_of_the_image_must_fit(images):
    assert token_grid(20, 32, 32) == (4, 5)
    assert layout_of(torch.zeros(1, 20, 8), "last", images, nn.Identity()).grid == (4, 4)  # four tokens before them
    declared = nn.Identity()
    declared.num_prefix_tokens = 0
    assert layout_of(torch.zeros(1, 20, 8), "last", images, declared).grid is None


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 4}, {"class_token": False, "global_pool": "avg"}])
def test_a_model_without_its_own_count_has_the_prefix_tokens_that_are_its_parameters(images, options):
    vit = timm.create_model("vit_tiny_patch16_224", **{**SMALL_VIT, **options})
    declared = vit.num_prefix_tokens
    tokens = vit.forward_features(images)
    del vit.num_prefix_tokens
    assert prefix_tokens(vit) == ("class_token" not in options, declared)
    layout = layout_of(tokens, "last", images, vit)
    assert (layout.prefix, layout.grid) == (declared, (4, 4))


def test_a_model_without_patches_tells_no_grid_and_others_drop_or_pad_the_rest() -> None:
    model = nn.Conv2d(3, 8, 3)
    assert list(patch_grids(model, 10, 8)) == []
    model.patch_size = 4
    assert list(patch_grids(model, 10, 8)) == [(2, 2), (3, 2)]


def test_a_position_is_a_number_or_a_patch_of_the_grid() -> None:
    layout, tokens = TokenLayout(13, 1, (3, 4)), TokenLayout(13, 1, None)
    numbers = {0: 0, 12: 12, (0, 0): 1, (0, 3): 4, (2, 0): 9, (2, 3): 12}
    assert {position: layout.index(position) for position in numbers} == numbers
    assert tokens.index(12) == 12
    for position, said in ((13, "has 13, counted from 0"), (-1, "has 13, counted from 0"), ((3, 0), "3 rows and 4"),
                           ((0, 4), "3 rows and 4"), ((-1, 0), "3 rows"), ((0, -1), "3 rows"),
                           ((1, 1, 1), "neither the number"), (0.5, "neither the number")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            layout.index(position)
    with pytest.raises(UserError, match="do not form a grid"):
        tokens.index((0, 0))
