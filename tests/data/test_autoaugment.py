"""The policy as a whole: its table, the grouping by operation, and how often things happen."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import AutoAugment, AutoAugmentPolicy

from batchformer.data.augment.draws import AugmentDraw, draw_table, to_device
from batchformer.data.augment.policies import autoaugment, autoaugment_strength, cifar10_policy, plan_autoaugment

CPU = torch.device("cpu")
REFERENCE = AutoAugment(AutoAugmentPolicy.CIFAR10, fill=128)


def noise(n, size=32):
    return torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def reference(image, draws):
    """torchvision's operations, one sample at a time, driven by the same random numbers."""
    height, width = image.shape[-2:]
    steps = ((AugmentDraw.CHANCE_FIRST, AugmentDraw.SIGN_FIRST), (AugmentDraw.CHANCE_SECOND, AugmentDraw.SIGN_SECOND))
    sub_policy = REFERENCE._policies[int(draws[AugmentDraw.POLICY] * len(REFERENCE._policies))]
    for (op, probability, level), (chance, sign) in zip(sub_policy, steps, strict=True):
        if draws[chance] >= probability:
            continue
        magnitudes, signed = REFERENCE._AUGMENTATION_SPACE[op]
        table = magnitudes(10, height, width)
        magnitude = 0.0 if table is None else float(table[level])
        if signed and draws[sign] < 0.5:
            magnitude = -magnitude
        image = REFERENCE._apply_image_or_video_transform(
            image, op, magnitude, REFERENCE.interpolation, REFERENCE._fill
        )
    return image


def test_table_is_that_of_the_paper():
    assert len(cifar10_policy()) == 25
    assert cifar10_policy()[0] == (("Invert", 0.1, None), ("Contrast", 0.2, 6))
    assert cifar10_policy()[12] == (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6))
    assert cifar10_policy()[24] == (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None))


@pytest.mark.parametrize("op", sorted({step[0] for pair in cifar10_policy() for step in pair} | {"ShearX"}))
@pytest.mark.parametrize("level", [0, 4, 9])
def test_strength_is_torchvisions_magnitude(op, level):
    magnitudes, signed = REFERENCE._AUGMENTATION_SPACE[op]
    table = magnitudes(10, 24, 32)
    expected = 0.0 if table is None else float(table[level])
    if op in ("Brightness", "Color", "Contrast", "Sharpness"):
        expected_both = [1 + expected, 1 - expected]
    elif op == "Solarize":
        expected_both = [255 * expected] * 2
    else:
        expected_both = [expected, -expected if signed else expected]
    np.testing.assert_allclose(autoaugment_strength(op, level, np.array([1.0, -1.0]), 24, 32), expected_both, atol=1e-4)


def test_batched_policy_is_torchvision_sample_by_sample():
    images, draws = noise(300), draw_table(300, seed=3, epoch=1)
    expected = torch.stack([reference(image, row) for image, row in zip(images, draws, strict=True)]).int()
    plan = to_device(plan_autoaugment(draws, 32, 32), CPU)
    ours = autoaugment(images.clone(), plan).int()
    wrong = (ours - expected).abs().amax((1, 2, 3))
    changed = (expected - images.int()).abs().amax((1, 2, 3)) > 0
    assert changed.float().mean() > 0.5
    # a difference of one grey level before Equalize, Solarize or AutoContrast may grow; it must stay rare
    assert (wrong <= 1).float().mean() > 0.98
    assert (ours != expected).float().mean() < 0.005


def test_each_sample_meets_each_step_at_most_once():
    plan = plan_autoaugment(draw_table(2000, seed=0, epoch=0), 32, 32)
    for step in (0, 1):
        members = np.concatenate([v for k, v in plan.items() if k.startswith(f"autoaugment/{step}/") and "index" in k])
        assert len(np.unique(members)) == len(members)


def test_operations_happen_as_often_as_the_policy_says():
    n = 20000
    plan = plan_autoaugment(draw_table(n, seed=0, epoch=0), 32, 32)
    for step in (0, 1):
        expected = sum(pair[step][1] for pair in cifar10_policy() if pair[step][0] == "Equalize") / len(
            cifar10_policy()
        )
        share = len(plan[f"autoaugment/{step}/Equalize/index"]) / n
        assert abs(share - expected) < 0.015


def test_directions_are_even():
    value = plan_autoaugment(draw_table(20000, seed=0, epoch=0), 32, 32)["autoaugment/1/Brightness/value"]
    assert abs((value > 1).mean() - 0.5) < 0.05
