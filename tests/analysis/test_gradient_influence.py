"""The fast computation agrees with the obvious one: a loop of autograd calls, one per sample."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import batchformer as bf
from batchformer.analysis import gradient_influence
from batchformer.errors import UserError

CLASSES = 3


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [(torch.randn(n, 3, 6, 6), torch.randint(0, CLASSES, (n,))) for n in (5, 5, 3)]


def obvious(net, attachment, batches, wrt, norm="euclidean"):
    """One autograd call per sample, exactly as eq. 3 is written; or the mean absolute entry, as released."""
    module, classifier, backbone = attachment.points[0].module, net[-1], net[:-1]
    net.eval()
    per_class = [[] for _ in range(CLASSES)]
    for images, labels in batches:
        for i in range(len(labels)):
            x = images.clone() if wrt == "images" else backbone(images).detach()
            x.requires_grad_()
            related = module.relate(backbone(x) if wrt == "images" else x)
            loss = F.cross_entropy(classifier(related[i : i + 1]), labels[i : i + 1])
            (gradient,) = torch.autograd.grad(loss, x)
            others = [gradient[j] for j in range(len(labels)) if j != i]
            value = torch.cat(others).abs().mean() if norm == "absolute" else sum(other.norm() for other in others)
            per_class[labels[i]].append(float(value))
    return [sum(v) / len(v) if v else math.nan for v in per_class]


@pytest.mark.parametrize("wrt", ["features", "images"])
@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"group_size": 2}, {"norm": "pre"}])
def test_agrees_with_one_autograd_call_per_sample(net, batches, wrt, options):
    attachment = bf.attach(net, heads=2, **options)
    found = gradient_influence(net, attachment, batches, CLASSES, "cpu", wrt, mix_seed=None)
    assert found == pytest.approx(obvious(net, attachment, batches, wrt), rel=1e-4)
    assert min(found) > 0


@pytest.mark.parametrize("wrt", ["features", "images"])
def test_the_released_norm_is_the_mean_absolute_entry(net, batches, wrt):
    attachment = bf.attach(net, heads=2)
    found = gradient_influence(net, attachment, batches, CLASSES, "cpu", wrt, mix_seed=None, norm="absolute")
    assert found == pytest.approx(obvious(net, attachment, batches, wrt, "absolute"), rel=1e-4)


@pytest.mark.parametrize("wrt", ["features", "images"])
def test_the_classifier_may_be_a_convolution_over_what_pooling_left(batches, wrt):
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    convolution = nn.Sequential(*linear[:3], nn.Conv2d(8, CLASSES, 1), nn.Flatten())
    with torch.no_grad():
        convolution[3].weight.copy_(linear[4].weight[..., None, None])
        convolution[3].bias.copy_(linear[4].bias)
    attachment = bf.attach(convolution, before="3", heads=2)
    found = gradient_influence(convolution, attachment, batches, CLASSES, "cpu", wrt)
    twin = bf.attach(linear, heads=2)
    twin.load_state_dict(attachment.state_dict())
    assert found == pytest.approx(gradient_influence(linear, twin, batches, CLASSES, "cpu", wrt), rel=1e-4)


def test_chunks_do_not_change_the_result(net, batches, monkeypatch):
    attachment = bf.attach(net, heads=2)
    whole = gradient_influence(net, attachment, batches, CLASSES, "cpu")
    monkeypatch.setattr(sys.modules[gradient_influence.__module__], "_CHUNK_BYTES", 1)
    assert gradient_influence(net, attachment, batches, CLASSES, "cpu") == pytest.approx(whole, rel=1e-5)


def test_without_attention_between_samples_there_is_no_influence(net, batches):
    attachment = bf.attach(net, heads=2, group_size=1)
    assert gradient_influence(net, attachment, batches, CLASSES, "cpu") == [0.0] * CLASSES


def test_a_class_without_samples_is_nan_and_a_batch_of_one_is_left_out(net):
    attachment = bf.attach(net, heads=2)
    pair = (torch.randn(2, 3, 6, 6), torch.tensor([0, 0]))
    single = (torch.randn(1, 3, 6, 6), torch.tensor([1]))
    found = gradient_influence(net, attachment, [pair, single], CLASSES, "cpu", mix_seed=None)
    assert found[0] > 0
    assert math.isnan(found[1])
    assert math.isnan(found[2])


def test_classes_of_a_sorted_test_set_meet_in_a_batch(net, batches):
    """Sorted by class, the loader's batches hold one class each; shuffled, they are those of the shuffled set."""
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    order = labels.argsort()
    sorted_batches = list(zip(images[order].split(5), labels[order].split(5), strict=True))
    attachment = bf.attach(net, heads=2)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
    shuffled = list(zip(images[order][mixed].split(5), labels[order][mixed].split(5), strict=True))
    found = gradient_influence(net, attachment, sorted_batches, CLASSES, "cpu", mix_seed=7)
    assert found == pytest.approx(obvious(net, attachment, shuffled, "features"), rel=1e-4)


def test_max_batches_reads_no_more(net, batches):
    attachment = bf.attach(net, heads=2)
    found = gradient_influence(net, attachment, batches, CLASSES, "cpu", max_batches=1, mix_seed=None)
    assert found == pytest.approx(obvious(net, attachment, batches[:1], "features"), rel=1e-4, nan_ok=True)


def test_leaves_modes_gradients_and_hooks_as_they_were(net, batches):
    attachment = bf.attach(net, heads=2)
    net.train()
    net[1].eval()
    modes = [module.training for module in net.modules()]
    gradient_influence(net, attachment, batches, CLASSES, "cpu", wrt="images", max_batches=1)
    assert [module.training for module in net.modules()] == modes
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not net[-1]._forward_pre_hooks


@pytest.mark.parametrize("wrt", ["features", "images"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off_as_lightning_validates(net, batches, context, wrt):
    attachment = bf.attach(net, heads=2)
    with context():
        loader = [(images * 1.0, labels) for images, labels in batches]  # made inside, as a loader would
        assert min(gradient_influence(net, attachment, loader, CLASSES, "cpu", wrt)) > 0


def test_another_loss_can_be_given(net, batches):
    attachment = bf.attach(net, heads=2)
    plain = gradient_influence(net, attachment, batches, CLASSES, "cpu")
    doubled = gradient_influence(
        net, attachment, batches, CLASSES, "cpu", criterion=lambda z, y: 2 * F.cross_entropy(z, y, reduction="none")
    )
    assert doubled == pytest.approx([2 * value for value in plain], rel=1e-5)


def test_wrong_calls_say_what_to_do(net, batches):
    attachment = bf.attach(net, heads=2)
    with pytest.raises(UserError, match="'features' or 'images'"):
        gradient_influence(net, attachment, batches, CLASSES, "cpu", wrt="pixels")
    with pytest.raises(UserError, match="'euclidean' or 'absolute'"):
        gradient_influence(net, attachment, batches, CLASSES, "cpu", norm="largest")
    with pytest.raises(UserError, match="got none"):
        gradient_influence(net, attachment, [], CLASSES, "cpu")
    with pytest.raises(UserError, match="right before the classifier"):
        gradient_influence(net, attachment, batches, CLASSES + 1, "cpu")
