"""Models that noted the batch size get every image twice, and what stands before the insertion computes each once."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.attach.doubled_input import PlainHalfOnly
from batchformer.attach.plan import IMAGES
from batchformer.errors import UserError

from .small_models import Blocks, tokens

QUIET = {"heads": 2, "dropout": 0.0}


def test_a_model_that_noted_the_batch_size_gets_its_input_twice_and_computes_nothing_twice() -> None:
    model, x = Blocks(captures=True).train(), tokens()
    expected = model(x)
    rows: dict[str, int] = {}
    inner = {"embed": model.embed, "0": model.blocks[0][0], "1": model.blocks[1][0], "2": model.blocks[2][0]}
    attachment = bf.attach(model, blocks=[1], heads=2, dropout=0.0)
    kept = nn.functional.linear

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.update({name: len(x) for name, layer in inner.items() if layer.weight is weight})
        return kept(x, weight, bias)

    nn.functional.linear = counting
    try:
        outputs = model(x)
    finally:
        nn.functional.linear = kept
    torch.testing.assert_close(outputs[:4], expected)
    assert rows == {"embed": 4, "0": 4, "1": 4, "2": 8}
    assert any(isinstance(piece, PlainHalfOnly) for piece in attachment._pieces)
    assert model.eval()(x).shape == (4, 3)


class Block(nn.Module):
    def __init__(self, position: nn.Module) -> None:
        super().__init__()
        self.position, self.mlp = position, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.position(x))


class Shares(nn.Module):
    """Two blocks share what the model has registered itself, and the class token notes the batch size (as CoaT's)."""

    def __init__(self, apart: bool = False, sorts: bool = False) -> None:
        super().__init__()
        self.position, self.apart, self.sorts = nn.Linear(8, 8), apart, sorts
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(
            Block(each) for each in (self.position, self.position, nn.Identity(), nn.Identity())
        )
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 5)
        self.default_cfg = {"input_size": (3, 8, 8)}

    def forward(self, images: Tensor) -> Tensor:
        token = self.token.expand(len(images), -1, -1)
        if self.sorts:
            images = images[images.mean((1, 2, 3)).argsort()]
        x = self.patch(images).flatten(2).transpose(1, 2)
        if self.apart:
            x = self.position(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([token, x], 1).mean(1))


@pytest.mark.parametrize(
    ("dtype", "rounding", "difference"),
    [(torch.float32, 0.005, 0.02), (torch.float64, 0.005, 0.02), (torch.bfloat16, 0.05, 0.2), (torch.half, 0.05, 0.2)],
)
def test_twice_the_rows_may_round_otherwise_but_not_differ(dtype, rounding, difference) -> None:
    class Rounds(Shares):
        """With more images than the other dry runs have, it gives a little more."""

        more = 0.0

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * (1 + self.more * (len(images) == 4 * IMAGES))

    model = Rounds().to(dtype)
    model.more = rounding
    bf.attach(model, blocks=[1], **QUIET).detach()
    model.more = difference
    with pytest.raises(UserError, match=r"Rounds mixes up the images of a batch .* at 'blocks.1'"):
        bf.attach(model, blocks=[1], **QUIET)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rows", [3, 4])
def test_a_part_that_several_blocks_share_keeps_the_images_in_order(rows: int, apart: bool) -> None:
    torch.manual_seed(0)
    model = Shares(apart).train()
    plain, images = copy.deepcopy(model), torch.randn(rows, 3, 8, 8)
    attachment = bf.attach(model, after=["blocks.2"], **QUIET)
    torch.testing.assert_close(attachment.plain(model(images)), plain(images))


def test_the_blocks_of_coat_share_their_positions() -> None:
    torch.manual_seed(0)
    model = timm.create_model("coat_lite_tiny", img_size=32, num_classes=5).train()
    plain, images = copy.deepcopy(model), torch.randn(4, 3, 32, 32)
    attachment = bf.attach(model, after=["serial_blocks2.0"], **QUIET)
    torch.testing.assert_close(attachment.plain(model(images)), plain(images))


def test_a_model_whose_plain_rows_would_be_wrong_is_refused() -> None:
    model = Shares(sorts=True)
    with pytest.raises(UserError, match=r"Shares mixes up the images of a batch .* opens at 'blocks.1'"):
        bf.attach(model, after=["blocks.1"], **QUIET)
    assert model(torch.randn(3, 3, 8, 8)).shape == (3, 5)
    split = bf.attach(model, after=["blocks.1"], streams="split", **QUIET)
    assert model.train()(torch.randn(4, 3, 8, 8)).shape == (4, 5)
    split.detach()


class NormAct(nn.BatchNorm1d):
    """As timm's: the activation is a part of the BatchNorm."""

    def __init__(self) -> None:
        super().__init__(8)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x.transpose(1, 2)).transpose(1, 2))


def test_a_place_inside_of_a_batch_norm_that_would_see_each_image_twice_is_refused() -> None:
    torch.manual_seed(0)
    model = Shares().train()
    model.blocks[2] = NormAct()
    with pytest.raises(UserError, match=r"'blocks.2.act' is a part of the BatchNorm 'blocks.2': attach after that one"):
        bf.attach(model, after=["blocks.2.act"], **QUIET)
    plain, images = copy.deepcopy(model), torch.randn(3, 3, 8, 8)
    attachment = bf.attach(model, after=["blocks.2"], **QUIET)
    torch.testing.assert_close(attachment.plain(model(images)), plain(images))
    torch.testing.assert_close(model.blocks[2].running_var, plain.blocks[2].running_var)


class Dense(nn.Module):
    """Every layer is given all outputs so far, in a list, as in a DenseNet: early ones are read late, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(3 + 4 * k) for k in range(3))
        self.head = nn.Linear(15, 5)
        self.default_cfg = {"input_size": (3, 8, 8)}

    def forward(self, images: Tensor) -> Tensor:
        outputs = [images]
        for layer in self.layers:
            outputs.append(layer(outputs))
        return self.head(torch.cat(outputs, 1).mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 4, 1)

    def forward(self, so_far: list[Tensor]) -> Tensor:
        return self.conv(self.norm(torch.cat(so_far, 1)).relu())


def test_a_layer_that_is_given_a_list_sees_every_image_once() -> None:
    torch.manual_seed(0)
    model = Dense().train()
    plain, images = copy.deepcopy(model), torch.randn(3, 3, 8, 8)
    attachment = bf.attach(model, after=["layers.2.conv"], **QUIET)
    torch.testing.assert_close(attachment.plain(model(images)), plain(images))
    for found, wanted in zip(model.layers, plain.layers, strict=True):
        torch.testing.assert_close(found.norm.running_var, wanted.norm.running_var)


@pytest.mark.parametrize("blocks", [[0], [1]])
@pytest.mark.parametrize(
    ("name", "size"), [("eva02_tiny_patch14_224", 56), ("vit_small_patch16_dinov3", 64), ("vit_tiny_patch16_224", 64)]
)
def test_positions_follow_the_patches_that_training_leaves_to_an_image(name: str, size: int, blocks: list[int]) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=size, depth=2, embed_dim=32, num_heads=2, num_classes=5, patch_drop_rate=0.5
    ).train()
    plain, images = copy.deepcopy(model), torch.randn(3, 3, size, size)
    attachment = bf.attach(model, blocks=blocks, **QUIET)
    outputs = []
    for each in (model, plain):
        torch.manual_seed(1)
        outputs.append(each(images))
    assert outputs[0].shape == (6, 5)
    torch.testing.assert_close(attachment.plain(outputs[0]), outputs[1])
    outputs[0].sum().backward()
    assert all(p.grad is not None for p in attachment.parameters())
