"""Mixup and CutMix by seed and step, and what the loss sees of them."""

import numpy as np
import pytest
import torch
from timm.data import Mixup

from batchformer.errors import UserError
from batchformer.tasks import MixOptions
from batchformer.tasks.classification.mixing import SeededMixup
from batchformer.training.reseed import seed_from

from .conftest import TinyData
from .tiny_vit import NO_MIX, built, fit, vit_task

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def test_what_a_batch_is_mixed_with_depends_on_the_numbers_alone():
    mix = SeededMixup(MixOptions(), 0.1, 4)
    np.random.seed(1)
    first = mix(IMAGES, LABELS, 3, 0, 7, 0)
    np.random.seed(2)
    expected_next = np.random.get_state()[1].copy()
    second = mix(IMAGES, LABELS, 3, 0, 7, 0)
    assert np.array_equal(np.random.get_state()[1], expected_next)  # nobody else's draws change
    other = mix(IMAGES, LABELS, 3, 0, 8, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


def test_the_batch_itself_is_left_alone():
    before = IMAGES.clone()
    mixed, _ = SeededMixup(MixOptions(), 0.1, 4)(IMAGES, LABELS, 0)
    assert torch.equal(IMAGES, before)
    assert not torch.equal(mixed, before)


@pytest.mark.parametrize("options", [MixOptions(cutmix=0.0), MixOptions(mixup=0.0)], ids=["mixup", "cutmix"])
def test_labels_follow_the_images(options):
    """With black and white images the grey that is left says how much of each there is."""
    images = torch.tensor([1.0, 0.0])[:, None, None, None].expand(2, 3, 8, 8)
    for step in range(5):
        mixed, labels = SeededMixup(options, 0.0, 2)(images, torch.tensor([0, 1]), step)
        assert labels[0, 0].item() == pytest.approx(mixed[0].mean().item(), abs=1e-6)
        assert labels.sum(1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_images_and_labels_are_timms(mode):
    """For every draw: mixup, CutMix, and a batch left alone."""
    options = MixOptions(mixup=0.8, cutmix=1.0, prob=0.7, mode=mode)
    for step in range(20):
        mixed, labels = SeededMixup(options, 0.1, 4)(IMAGES, LABELS, step)
        timms = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.7, mode=mode, label_smoothing=0.1, num_classes=4)
        np.random.seed(seed_from(step) % 2**32)
        expected, expected_labels = timms(IMAGES.clone(), LABELS)
        torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(labels, expected_labels)


def test_an_odd_batch_is_refused():
    with pytest.raises(UserError, match="even"):
        fit(vit_task(), TinyData(batch_size=5))
    fit(vit_task(mix=NO_MIX), TinyData(batch_size=5))


def test_smoothing_without_mixing_is_that_of_the_loss():
    """lr 0: the logged loss is that of the initial weights, computed by hand beside it."""
    task = vit_task(mix=NO_MIX, label_smoothing=0.2, method="baseline", optimizer={"lr": 0.0, "lr_per": None},
                    schedule={"warmup_epochs": 0, "min_lr": 0.0})  # fmt: skip
    logged = fit(task).callback_metrics["train/loss"].item()
    data = TinyData()
    twin = built(method="baseline")
    rows = twin.net.train()(data.images).log_softmax(1)
    soft = torch.nn.functional.one_hot(data.labels, 4) * 0.8 + 0.2 / 4
    assert logged == pytest.approx(-(soft * rows).sum(1).mean().item(), rel=1e-5)
