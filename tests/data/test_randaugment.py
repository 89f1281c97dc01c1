"""The batched RandAugment against timm's, operation by operation, as a whole, and how often things happen."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as theirs
from torchvision.transforms.v2 import functional as F

from batchformer.data.augment.draws import RandAugmentDraw, draw_table, to_device
from batchformer.data.augment.host import array_transform
from batchformer.data.augment.operations import COLOUR_OPS, affine_bicubic
from batchformer.data.augment.policies import (
    _MOVES,
    OPERATIONS,
    _values,
    magnitudes,
    plan_randaugment,
    randaugment,
    randaugment_strength,
)

CPU = torch.device("cpu")
FILL = (124, 116, 104)
NAMES = dict(zip(OPERATIONS, theirs._RAND_INCREASING_TRANSFORMS, strict=True))
LEVELS = (0.0, 3.3, 8.2, 9.0, 9.7, 9.99)
# grey levels; torchvision's grey image, which ours is, is cut where PIL's is rounded
TOLERANCE = {"Color": 1, "Contrast": 2, "AutoContrast": 1, **dict.fromkeys(_MOVES, 1)}


def pictures(n=12, size=24):
    """Noise, ramps, narrow ranges, constant channels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    ramp = torch.linspace(0, 255, size).to(torch.uint8)
    images[1] = ramp.view(1, 1, -1)
    images[2] = (ramp // 8 + 90).view(1, -1, 1)
    images[3, 0] = 7
    images[4] = 200
    return images


def timm_operation(name, magnitude, sign, monkeypatch):
    monkeypatch.setattr(theirs.random, "random", lambda: 0.1 if sign > 0 else 0.9)  # decides the direction only
    settings = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    operation = theirs.AugmentOp(NAMES[name], prob=1.0, magnitude=magnitude, hparams=settings)
    return lambda image: F.pil_to_tensor(operation(F.to_pil_image(image)))


def ours(name, images, magnitude, sign):
    n, size = len(images), images.shape[-1]
    number = np.full(n, OPERATIONS.index(name))
    value = torch.from_numpy(_values(number, np.full(n, magnitude), np.full(n, sign), size, size))
    if name in _MOVES:
        return affine_bicubic(images, value, FILL, _MOVES[name])
    return COLOUR_OPS[name](images, value)


def test_the_operations_are_timms():
    assert list(OPERATIONS) == [
        name.removesuffix("Increasing").removesuffix("Rel") for name in theirs._RAND_INCREASING_TRANSFORMS
    ]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_timms_on_pil_images(name, sign, monkeypatch):
    images = pictures()
    for magnitude in LEVELS:
        reference = timm_operation(name, magnitude, sign, monkeypatch)
        expected = torch.stack([reference(image) for image in images]).int()
        difference = (ours(name, images, magnitude, sign).int() - expected).abs()
        assert difference.max() <= TOLERANCE.get(name, 0), magnitude
        assert name in ("Color", "Contrast") or (difference > 0).float().mean() < 0.005, magnitude
    assert (expected != images.int()).any(), "the strongest level must change something"


@pytest.mark.parametrize("name", [name for name in OPERATIONS if theirs.LEVEL_TO_ARG[NAMES[name]] is not None])
@pytest.mark.parametrize("magnitude", [0.0, 4.9, 9.3, 10.0])
def test_strength_is_timms_argument(name, magnitude, monkeypatch):
    for sign in (1.0, -1.0):
        monkeypatch.setattr(theirs.random, "random", lambda sign=sign: 0.1 if sign > 0 else 0.9)
        (expected,) = theirs.LEVEL_TO_ARG[NAMES[name]](magnitude, {})
        if name.startswith("Translate"):
            expected *= 20 if name.endswith("X") else 30  # timm's is a part of the side
        assert randaugment_strength(name, np.array([magnitude]), np.array([sign]), 30, 20) == pytest.approx([expected])


def test_moves_along_one_direction_are_the_general_move():
    images = pictures()
    for name, along in _MOVES.items():
        number = np.full(len(images), OPERATIONS.index(name))
        value = torch.from_numpy(_values(number, np.full(len(images), 9.3), np.full(len(images), 1.0), 24, 24))
        general, quick = affine_bicubic(images, value, FILL), affine_bicubic(images, value, FILL, along)
        assert torch.equal(general, quick), name


def test_batched_randaugment_is_timm_sample_by_sample(monkeypatch):
    images, draws = pictures(200, 16), draw_table(200, seed=2, epoch=1, purpose="randaugment")
    first = (RandAugmentDraw.OPERATION_FIRST, RandAugmentDraw.CHANCE_FIRST, RandAugmentDraw.SIGN_FIRST)
    second = (RandAugmentDraw.OPERATION_SECOND, RandAugmentDraw.CHANCE_SECOND, RandAugmentDraw.SIGN_SECOND)
    expected = []
    for image, row, levels in zip(images, draws, magnitudes(draws).T, strict=True):
        for (operation, chance, sign), level in zip((first, second), np.minimum(levels, 9.99), strict=True):
            if row[chance] < 0.5:
                name = OPERATIONS[int(row[operation] * len(OPERATIONS))]
                image = timm_operation(name, level, 1.0 if row[sign] < 0.5 else -1.0, monkeypatch)(image)
        expected.append(image)
    result = randaugment(images.clone(), to_device(plan_randaugment(draws, 16, 16), CPU), FILL)
    difference = (result.int() - torch.stack(expected).int()).abs().float().mean((1, 2, 3))
    assert (difference < 1).float().mean() > 0.97, "one level before Equalize or Solarize may grow; it must stay rare"
    changed = (torch.stack(expected) != images).flatten(1).any(1).float().mean()
    assert 0.6 < changed < 0.8, "two chances of a half, now and then without effect"


def test_operations_directions_and_magnitudes_are_drawn_as_timm_says():
    n = 60_000
    draws = draw_table(n, seed=0, epoch=0, purpose="randaugment")
    plan = plan_randaugment(draws, 32, 32)
    for step in (0, 1):
        shares = {key.split("/")[2]: len(value) / n for key, value in plan.items() if key.endswith("index")
                  and key.startswith(f"randaugment/{step}/")}  # fmt: skip
        assert sum(shares.values()) == pytest.approx(0.5, abs=0.01)
        for group, share in shares.items():
            operations = {"move x": 2, "move y": 2}.get(group, 1)
            assert share == pytest.approx(operations / 30, abs=0.005), group
        factor = plan[f"randaugment/{step}/Brightness/value"]
        assert (factor > 1).mean() == pytest.approx(0.5, abs=0.05)
    first, second = magnitudes(draws)
    for level in (first, second):
        assert level.max() == 10.0
        assert np.median(level) == pytest.approx(9.0, abs=0.02)
        assert (level < 8.5).mean() == pytest.approx(0.1587, abs=0.01), "one deviation below"
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_magnitude_ten_leaves_a_black_image_on_the_host_too():
    transform = array_transform("randaugment", 24, 24, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).transforms[1]
    (step,) = (step for step in transform.transforms if hasattr(step, "ops"))
    (posterize,) = (operation for operation in step.ops if operation.name == "PosterizeIncreasing")
    posterize.prob, posterize.magnitude, posterize.magnitude_std = 1.0, 10.0, 0
    picture = F.to_pil_image(pictures()[0])
    expected = ours("Posterize", pictures()[:1], 10.0, 1.0)[0]
    assert torch.equal(F.pil_to_tensor(posterize(picture)), expected)
    assert expected.max() == 0
