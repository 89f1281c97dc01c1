"""MixStyle without a renamed key, recorded features, reversed gradients, the networks that adapt."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models import create_backbone
from batchformer.models.domains import (
    AdaptationNet,
    FeatureRecorder,
    _classifier,
    insert_mix_style,
    mix_style,
    reversed_gradient,
)


def styles(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean((2, 3)), x.std((2, 3))


def test_mixed_styles_lie_between_a_sample_and_one_of_the_other_half():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 5) * torch.rand(8, 3, 1, 1) + torch.randn(8, 3, 1, 1)
    mean, deviation = styles(x)
    for _ in range(5):
        mixed = mix_style(x, chance=1.0, alpha=0.1)
        new_mean, new_deviation = styles(mixed)
        for k in range(8):
            others = range(4, 8) if k < 4 else range(4)
            fits = []
            for j in others:
                weight = ((new_mean[k] - mean[j]) / (mean[k] - mean[j])).mean()
                blend = weight * mean[k] + (1 - weight) * mean[j], weight * deviation[k] + (1 - weight) * deviation[j]
                close = torch.allclose(blend[0], new_mean[k], atol=1e-3)
                fits.append(close and torch.allclose(blend[1], new_deviation[k], atol=1e-2) and -0.01 < weight < 1.01)
            assert any(fits), k


def test_content_stays_and_styles_are_not_differentiated():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 4, 4, requires_grad=True)  # an odd batch, too
    mixed = mix_style(x, chance=1.0, alpha=0.1)
    normalised = [(y - y.mean((2, 3), keepdim=True)) / y.std((2, 3), keepdim=True) for y in (x, mixed)]
    torch.testing.assert_close(*normalised, rtol=1e-3, atol=1e-3)
    scale = (mixed - mixed.mean((2, 3), keepdim=True)) / (x - x.mean((2, 3), keepdim=True))
    mixed.sum().backward()
    torch.testing.assert_close(x.grad, scale.detach().mean((2, 3), keepdim=True).expand_as(x), rtol=1e-2, atol=1e-2)


def test_without_chance_nothing_changes():
    x = torch.randn(4, 2, 3, 3)
    assert torch.equal(mix_style(x, chance=0.0, alpha=0.1), x)


@pytest.mark.parametrize("make", [lambda: timm.create_model("resnet18", num_classes=3),
                                  lambda: torchvision.models.resnet18(num_classes=3)])  # fmt: skip
def test_mixstyle_goes_into_a_resnet_without_a_trace(make):
    torch.manual_seed(0)
    net = make()
    keys, images = list(net.state_dict()), torch.randn(4, 3, 32, 32)
    before = net.eval()(images)
    inserted = insert_mix_style(net, chance=1.0)
    assert list(net.state_dict()) == keys
    assert torch.equal(net.eval()(images), before)
    net.train()
    twin = copy.deepcopy(net)
    outputs = []
    for each in (net, twin):
        torch.manual_seed(1)
        outputs.append(each(images))
    assert torch.equal(*outputs)  # the copy mixes by itself
    for each in inserted:
        each.remove()
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_a_stage_that_is_not_there_is_named():
    with pytest.raises(UserError, match="no 'layer9'"):
        insert_mix_style(timm.create_model("resnet18"), ["layer9"])


def test_recorded_features_are_those_of_both_streams():
    net = timm.create_model("test_resnet", num_classes=3)
    recorder = FeatureRecorder(net.get_classifier())
    recorder.put()
    attachment = bf.attach(net)
    logits = net.train()(torch.randn(4, 3, 32, 32))
    features = recorder.take()
    assert len(features) == 8
    torch.testing.assert_close(nn.functional.linear(features, net.fc.weight, net.fc.bias), logits)
    attachment.detach()
    assert recorder.features is None


def test_reversed_gradient():
    x = torch.randn(3, requires_grad=True)
    y = reversed_gradient(x, torch.tensor(0.25))
    assert torch.equal(x, y)
    (y * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    torch.testing.assert_close(x.grad, -0.25 * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("adversary", ["none", "dann", "mdd"])
def test_only_the_features_learn_against_the_adversary(adversary):
    torch.manual_seed(0)
    net = AdaptationNet(timm.create_model("test_resnet", num_classes=0), 3, adversary, 16).train()
    net.coefficient.fill_(0.0)
    logits, against = net(torch.randn(4, 3, 32, 32))
    assert logits.shape == (4, 3)
    if adversary == "none":
        assert against is None
        return
    assert against.shape == (4, 3 if adversary == "mdd" else 1)
    against.sum().backward()
    assert all(not parameter.grad.any() for parameter in net.bottleneck.parameters())
    assert any(parameter.grad.any() for parameter in net.adversary.parameters())
    assert net.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_resnet50_that_halves_in_its_1x1_convolutions_has_stock_keys_and_other_outputs():
    torch.manual_seed(0)
    net = create_backbone("resnet50_stride_in_1x1", 3, zero_init_last=False)
    stock = timm.create_model("resnet50", num_classes=3)
    stock.load_state_dict(net.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    assert net.layer2[0].conv1.stride == (2, 2)
    assert net.layer2[0].conv2.stride == (1, 1)
    assert net.layer1[0].conv1.stride == net.layer1[0].conv2.stride == (1, 1)
    assert not torch.allclose(net.eval()(images), stock.eval()(images))


def test_classifiers_of_an_adversary_begin_with_small_weights_and_no_bias():
    first, *_, last = _classifier(64, 5)
    for layer in (first, last):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.1)
        assert layer.bias.abs().max() == 0
