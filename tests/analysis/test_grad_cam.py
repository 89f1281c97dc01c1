"""Grad-CAM against its definition, image by image; on maps and tokens; and that it leaves the model as it was."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import batchformer as bf
from batchformer.analysis import grad_cam
from batchformer.analysis.drawing import HEADING, MARGIN, TILE
from batchformer.analysis.pictures import draw_grad_cam
from batchformer.errors import UserError

TARGETS = torch.tensor([2, 0, 1])


def network(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(width, width, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
    )  # fmt: skip


def by_definition(front: nn.Module, back: nn.Module, image: torch.Tensor, target: int) -> torch.Tensor:
    """One image, a loop over the channels of maps (C, H, W)."""
    maps = front(image[None]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(back(maps)[0, target], maps)
    total = torch.zeros(maps.shape[2:])
    for channel in range(maps.shape[1]):
        total += gradient[0, channel].mean() * maps[0, channel].detach()
    total = total.clamp_min(0)
    return total / total.max() if total.max() > 0 else total


@pytest.mark.parametrize("attached", [False, True], ids=["plain", "attached"])
def test_maps_are_those_of_the_definition(attached):
    net = network().eval()
    images = torch.randn(3, 3, 12, 20)
    expected = [by_definition(net[:3], net[3:], image, t) for image, t in zip(images, TARGETS.tolist(), strict=True)]
    if attached:
        bf.attach(net, heads=2)
        net.train()  # the plain model is explained all the same
    found = grad_cam(net, images, "2", TARGETS)
    torch.testing.assert_close(found, torch.stack(expected))
    assert found.shape == (3, 5, 9)
    assert 0 <= found.min() <= found.max() <= 1


class TwoExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([network(), network()])
        for layer in (self.experts[1][0], self.experts[1][4], self.experts[1][7]):
            layer.reset_parameters()  # to others

    def forward(self, images):
        return torch.stack([expert(images) for expert in self.experts]).mean(0)


def test_several_layers_are_one_with_all_their_channels():
    net, images = TwoExperts().eval(), torch.randn(3, 3, 12, 20)
    fronts = [expert[:3] for expert in net.experts]

    def back(maps):
        return torch.stack([e[3:](part) for e, part in zip(net.experts, maps.chunk(2, 1), strict=True)]).mean(0)

    def front(image):
        return torch.cat([front(image) for front in fronts], 1)

    pairs = zip(images, TARGETS.tolist(), strict=True)
    expected = torch.stack([by_definition(front, back, image, target) for image, target in pairs])
    found = grad_cam(net, images, ["experts.0.2", "experts.1.2"], TARGETS)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, grad_cam(net, images, "experts.1.2", TARGETS), atol=1e-2)
    with pytest.raises(UserError, match="is not one map for each of the 3 images"):
        grad_cam(net, images, ["experts.0.2", "experts.1.5"], TARGETS)


def test_left_to_the_model_the_class_is_the_one_it_finds():
    net, images = network().eval(), torch.randn(3, 3, 12, 12)
    assert torch.equal(grad_cam(net, images, "2"), grad_cam(net, images, "2", net(images).argmax(1)))


class ChannelsLast(nn.Module):
    def forward(self, x):
        return x.movedim(1, -1)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def test_maps_with_their_channels_last_are_told_by_their_sides():
    net, images = network(), torch.randn(3, 3, 12, 20)
    turned = nn.Sequential(*net[:3], ChannelsLast(), nn.Flatten(1, 2), Mean(), *net[6:])
    first = nn.Sequential(*net[:3], nn.AdaptiveAvgPool2d(1), *net[6:])
    torch.testing.assert_close(grad_cam(turned, images, "3", TARGETS), grad_cam(first, images, "2", TARGETS))


def test_tokens_are_laid_out_as_the_patches_they_came_from_without_the_class_token():
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 48), patch_size=8, depth=3, embed_dim=24, num_heads=2, num_classes=3
    ).eval()
    images = torch.randn(3, 3, 32, 48)
    found = grad_cam(vit, images, "blocks.2.norm1", TARGETS)
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    tokens = vit.blocks[1](vit.blocks[0](tokens)).detach()
    normed = vit.blocks[2].norm1(tokens).detach().requires_grad_()
    left = tokens + vit.blocks[2].attn(normed)
    left = left + vit.blocks[2].mlp(vit.blocks[2].norm2(left))
    scores = vit.forward_head(vit.norm(left))
    (gradient,) = torch.autograd.grad(scores[range(3), TARGETS].sum(), normed)
    expected = torch.einsum("bnc,bc->bn", normed[:, 1:], gradient[:, 1:].mean(1)).relu().reshape(3, 4, 6).detach()
    torch.testing.assert_close(found, expected / expected.amax(dim=(1, 2), keepdim=True), atol=1e-5, rtol=1e-4)


def test_the_model_is_left_as_it_was():
    net = network()
    bf.attach(net, heads=2)
    net[4].eval()
    net.zero_grad()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    state = torch.get_rng_state()
    grad_cam(net, torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0)), "2")
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not net[2]._forward_hooks


def test_an_image_that_speaks_against_the_class_is_dark():
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), ([[[[1.0]]]], [0.0], [[1.0], [-1.0]], [0.0, 0.0]), strict=True):
            parameter.copy_(torch.tensor(value))
    found = grad_cam(net, torch.ones(2, 1, 4, 4), "0", torch.tensor([0, 1]))
    assert torch.equal(found, torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]))


@pytest.mark.parametrize(
    ("layer", "targets", "words"),
    [
        ("nowhere", None, "there is no submodule 'nowhere'"),
        ("6", None, "has no rows and columns"),
        ("2", torch.tensor([0, 1]), "one of the 3 classes for each of the 3 images"),
        ("2", torch.tensor([0, 1, 3]), "one of the 3 classes"),
        ("2", torch.tensor([0.0, 1.0, 2.0]), "the number of one of the 3 classes"),
        ("2", ["a", "b", "c"], "the number of one of the 3 classes"),
    ],
)
def test_what_cannot_be_explained_is_said(layer, targets, words):
    with pytest.raises(UserError, match=words):
        grad_cam(network(), torch.randn(3, 3, 12, 12), layer, targets)


def test_words_for_the_channels_and_images_in_a_list_are_refused():
    images = torch.randn(3, 3, 12, 12)
    with pytest.raises(UserError, match="'middle' must be"):
        grad_cam(network(), images, "2", channels="middle")
    with pytest.raises(UserError, match="one tensor with the whole batch"):
        grad_cam(network(), list(images), "2")


@pytest.mark.traced
def test_a_compiled_model_is_looked_into():
    images = torch.randn(3, 3, 12, 12)
    wanted = grad_cam(network(), images, "2", TARGETS)
    compiled = torch.compile(network(), backend="aot_eager")
    torch.testing.assert_close(grad_cam(compiled, images, "2", TARGETS), wanted)


def test_patches_that_the_classifier_does_not_read_are_refused():
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2, num_classes=3
    )
    with pytest.raises(UserError, match=r"patches that leave 'blocks\.1': choose an earlier"):
        grad_cam(vit, torch.randn(2, 3, 32, 32), "blocks.1")


def test_the_picture_is_bright_where_the_evidence_is():
    evidence = torch.zeros(1, 4, 4)
    evidence[0, 0, 0] = 1
    sheet = draw_grad_cam({"one": evidence, "other": evidence.flip(1, 2)}, [Image.new("RGB", (64, 64), (128,) * 3)])
    pixels = np.asarray(sheet).astype(int)
    warm = pixels[..., 0] - pixels[..., 2] > 80
    left, row = MARGIN, HEADING + TILE + 10
    one, other = (warm[MARGIN // 2 + k * row + HEADING :][:TILE, left : left + TILE] for k in (1, 2))
    assert one[: TILE // 8, : TILE // 8].all()
    assert not one[TILE // 2 :, TILE // 2 :].any()
    assert np.array_equal(one, other[::-1, ::-1])


@pytest.mark.parametrize("out", ["picture", "gone/picture.png", "file/picture.png", "folder.png"])
def test_the_example_says_before_it_trains_that_it_cannot_write(tmp_path, monkeypatch, out):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grad_cam.py", "--out", out])
    monkeypatch.setattr(torch.optim, "AdamW", None)
    with pytest.raises(SystemExit, match="in a folder that is there"):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grad_cam.py"), run_name="__main__")
