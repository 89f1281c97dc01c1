"""Views of an image with an augmentation each: every step against torchvision's, on the device and on the host."""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from batchformer.data import DigitsLT, ImageFolders
from batchformer.data.augment import batched_augmentation, operations
from batchformer.data.augment.draws import JitterDraw, ViewDraw, draw_table, to_device
from batchformer.data.augment.host import array_transform, file_transform
from batchformer.data.augment.options import REGION_VIEWS, blur_pixels
from batchformer.data.augment.resample import crop_rectangles
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError

MEAN, STD = (0.0,) * 3, (1.0,) * 3


def noise(n=8, size=24):
    return torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (6, 20)])
def test_blur_is_torchvisions(height, width):
    images = noise()[:, :, :height, :width]
    sigmas = torch.linspace(0.1, 2.0, len(images))
    kernel = [blur_pixels(width), blur_pixels(height)]
    assert kernel == [13, min(13, 2 * height - 1)]
    expected = torch.stack(
        [F.gaussian_blur(image, kernel, [float(s)] * 2) for image, s in zip(images, sigmas, strict=True)]
    )
    off = (operations.blur(images, sigmas).int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.01
    assert torch.equal(operations.blur(images, sigmas)[0], images[0])  # a sigma of 0.1 changes nothing
    assert (expected[1:] != images[1:]).any()


@pytest.mark.parametrize("name", REGION_VIEWS)
def test_a_view_on_the_device_is_torchvisions_sample_by_sample(name):
    """Region, flip, the changes of colour in the sample's own order and those behind them, from the same numbers."""
    images, size, view = noise(n=60), 20, REGION_VIEWS[name]
    augmentation = batched_augmentation(name, 24, size)
    draws = {purpose: draw_table(len(images), 3, 0, purpose) for purpose in augmentation.purposes}
    assert set(draws) - {"view"} == {"augment", "crop", "jitter"}
    assert ("view" in draws) == (name != "domains")
    plan = to_device(augmentation.plan(draws, 24, 24), torch.device("cpu"))
    ours = augmentation.apply(images.clone(), torch.arange(len(images)), plan)
    changes = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    regions = np.stack(crop_rectangles(draws["crop"], 24, 24, (view.area, 1.0)), 1)
    off, orders, done = [], set(), set()
    for i, image in enumerate(images):
        expected = F.resized_crop(image, *regions[i].tolist(), [size, size], antialias=True)
        if draws["augment"][i, 2] >= 0.5:
            expected = F.horizontal_flip(expected)
        row = draws["jitter"][i]
        other = draws["view"][i] if "view" in draws else np.zeros(4)
        if other[ViewDraw.JITTER] < view.jitter_prob:
            done.add("jitter")
            order = list(permutations(range(4)))[int(row[JitterDraw.ORDER] * 24)]
            orders.add(order)
            for number in order:
                uniform = 2 * row[JitterDraw.BRIGHTNESS + number] - 1
                expected = changes[number](expected, float(np.float32(view.jitter[number] * uniform + (number < 3))))
        else:
            done.add("not jittered")
        if row[JitterDraw.GREY] < view.grey:
            done.add("grey")
            expected = F.rgb_to_grayscale(expected, 3)
        if other[ViewDraw.BLUR] < view.blur:
            done.add("blur")
            expected = F.gaussian_blur(expected, [13, 13], [0.1 + 1.9 * other[ViewDraw.SIGMA]] * 2)
        if other[ViewDraw.SOLARIZE] < view.solarize:
            done.add("solarize")
            expected = F.solarize(expected, 128)
        off.append((ours[i].int() - expected.int()).abs())
    off = torch.stack(off)
    assert len(orders) > 15
    wanted = {"jitter": True, "not jittered": view.jitter_prob < 1, "grey": True, "blur": view.blur > 0}
    assert done == {step for step, there in {**wanted, "solarize": view.solarize > 0}.items() if there}
    # a level that differs once is carried on by the later steps; solarising turns one at the threshold around
    assert off.float().mean() < 0.1
    assert (off > 6).float().mean() < 1e-3


def test_views_on_the_host_have_the_published_parameters():
    crop, flip, jitter, grey, blur, solarize, *_ = array_transform("moco-v3-2", 24, 20, MEAN, STD).transforms
    assert (crop.scale, crop.size, flip.p, grey.p) == ((0.2, 1.0), (20, 20), 0.5, 0.2)
    assert (jitter.p, jitter.transforms[0].saturation, jitter.transforms[0].hue) == (0.8, (0.8, 1.2), (-0.1, 0.1))
    assert (blur.p, tuple(blur.transforms[0].sigma), blur.transforms[0].kernel_size) == (0.1, (0.1, 2.0), (13, 13))
    assert (solarize.p, solarize.threshold) == (0.2, 128)
    queries = file_transform("paco-query", 20, MEAN, STD).transforms
    assert [type(step).__name__ for step in queries[:4]] == [
        "RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "RandAugment"
    ]  # fmt: skip
    image = Image.fromarray(noise(1, 40)[0].permute(1, 2, 0).numpy())
    for name in ("paco-query", *REGION_VIEWS):
        assert file_transform(name, 20, MEAN, STD)(image).shape == (3, 20, 20)


@pytest.mark.parametrize("on_device", ["auto", False])
def test_each_view_has_its_own_augmentation(on_device):
    def batch(**options):
        return next(iter(DigitsLT(batch_size=16, on_device=on_device, index=True, **options).train_dataloader()))

    first, second, third = (views := batch(views=["shift", "simclr", "none"]))["views"]
    assert torch.equal(first, batch(augment="shift")["images"])  # a border of its own, which the others have not
    data = DigitsLT()
    data.setup()
    stored = torch.from_numpy(data._splits["train"].images)[views["index"]]
    assert torch.allclose(third, (stored / 255 - 0.305) / 0.377, atol=1e-5)
    assert not torch.equal(second, third)
    again = batch(views=["none", "simclr", "shift"])["views"]
    assert torch.equal(again[1], second)  # by (seed, epoch, index, view), whatever the others are


def test_files_have_an_augmentation_for_each_view(tmp_path):
    root = str(write_miniature("folder", tmp_path / "data"))
    options = {"image_size": 16, "batch_size": 8, "workers": 0}
    plain, changed = next(iter(ImageFolders(root, views=["none", "simclr"], **options).train_dataloader()))["views"]
    alone = next(iter(ImageFolders(root, augment="none", **options).train_dataloader()))["images"]
    assert torch.equal(plain, alone)
    assert not torch.equal(plain, changed)


@pytest.mark.parametrize(("views", "expected"), [(None, 2), (3, 3), (["shift", "none"], 2)])
def test_data_leave_the_number_of_views_to_the_task(views, expected):
    data = DigitsLT(batch_size=16, views=views)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(
        lightning_module=SimpleNamespace(views=2), current_epoch=0, global_rank=0, world_size=1, strategy=strategy,
        training=True, sanity_checking=False,
    )  # fmt: skip
    assert len(next(iter(data.train_dataloader()))["views"]) == expected


def test_mistakes_in_views_are_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.views: there is no augmentation 'simcl'; .*Did you mean simclr\?"):
        DigitsLT(views=["shift", "simcl"])
    with pytest.raises(UserError, match=r"data\.views: there is no augmentation 'shift'"):
        ImageFolders(str(tmp_path), views=["imagenet", "shift"])
    with pytest.raises(UserError, match=r"data\.views must be at least 1, got 0"):
        DigitsLT(views=[])
