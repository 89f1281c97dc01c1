"""Crop, flip and Cutout against their definitions, sample by sample."""

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from batchformer.data.augment.batched import BatchedAugmentation
from batchformer.data.augment.crop_erase import crop_flip, cutout
from batchformer.data.augment.draws import AugmentDraw, draw_table, to_device, uniform_integers


def noise(n, height=12, width=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (n, 3, height, width), generator=generator, dtype=torch.uint8)


def test_crop_and_flip_are_torchvisions():
    images = noise(9)
    index = torch.tensor([3, 0, 8, 8, 1])
    row, column = torch.tensor([0, 8, 4, 1, 7]), torch.tensor([8, 0, 4, 5, 2])
    flip = torch.tensor([0, 1, 0, 1, 1])
    padded = torch.nn.functional.pad(images, (4,) * 4)
    ours = crop_flip(padded, index, row, column, flip, 12, 16)
    for result, i, r, c, mirrored in zip(ours, index, row, column, flip, strict=True):
        expected = F.crop(F.pad(images[i], [4] * 4, fill=0), int(r), int(c), 12, 16)
        assert torch.equal(result, F.horizontal_flip(expected) if mirrored else expected)


def test_cutout_is_clipped_at_the_border():
    images = noise(4, 16, 16)
    row, column = torch.tensor([0, 8, 15, 3]), torch.tensor([0, 8, 2, 15])
    ours = cutout(images, row, column, 6)
    for result, image, r, c in zip(ours, images, row.tolist(), column.tolist(), strict=True):
        expected = image.clone()
        expected[:, max(r - 3, 0) : r + 3, max(c - 3, 0) : c + 3] = 0
        assert torch.equal(result, expected)


def test_cutout_at_the_border_removes_a_quarter_and_in_the_middle_everything():
    images = noise(2, 32, 32)
    removed = (cutout(images, torch.tensor([0, 16]), torch.tensor([0, 16]), 16) == 0)[:, 0].sum((1, 2))
    assert removed.tolist() == [8 * 8, 16 * 16]


def test_draws_depend_on_seed_epoch_and_row_only():
    table = draw_table(50, seed=1, epoch=2)
    assert np.array_equal(table, draw_table(50, seed=1, epoch=2))
    assert not np.array_equal(table, draw_table(50, seed=1, epoch=3))
    assert not np.array_equal(table, draw_table(50, seed=2, epoch=2))


def test_choices_are_uniform_and_inside():
    chosen = uniform_integers(draw_table(30000, 0, 0)[:, AugmentDraw.ROW], 9)
    counts = np.bincount(chosen)
    assert len(counts) == 9
    assert counts.min() > 0.9 * 30000 / 9


def test_every_place_inside_the_border_and_every_centre_of_the_hole_is_drawn():
    augmentation = BatchedAugmentation(pad=2, flip=True, hole=2)
    plan = augmentation.plan({"augment": draw_table(2000, seed=0, epoch=0)}, 12, 16)
    ends = {name: (values.min(), values.max()) for name, values in plan.items()}
    assert ends == {"flip": (0, 1), "row": (0, 4), "column": (0, 4), "hole_row": (0, 11), "hole_column": (0, 15)}
    assert len(set(zip(plan["row"], plan["column"], strict=True))) == 5 * 5  # each with each


def test_packed_arrays_arrive_whole():
    arrays = {
        "a": np.arange(7, dtype=np.int64) - 3,
        "empty": np.zeros(0, np.float32),
        "m": np.random.default_rng(0).random((5, 2, 3)).astype(np.float32),
    }
    sent = to_device(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        assert np.array_equal(sent[name].numpy(), array)
        assert sent[name].shape == array.shape


def test_rotations_are_torchvisions_within_their_range():
    augmentation = BatchedAugmentation(rotate=15.0)
    images, draws = noise(64, 16, 16), {"rotate": draw_table(64, 0, 0, "rotate")}
    assert augmentation.purposes == ("rotate",)
    plan = to_device(augmentation.plan(draws, 16, 16), torch.device("cpu"))
    ours = augmentation.apply(images.clone(), torch.arange(64), plan)
    degrees = 15 * (2 * draws["rotate"][:, 0] - 1)
    assert -15 <= degrees.min() < -12 < 12 < degrees.max() <= 15
    for result, image, angle in zip(ours, images, degrees.tolist(), strict=True):
        assert (result == F.rotate(image, angle, fill=0)).float().mean() > 0.99  # a corner may round otherwise
