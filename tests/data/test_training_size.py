"""Images trained at another size than their own: on the device and on the host, augmented and evaluated."""

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from batchformer.data import CIFAR10, CIFAR100, CIFAR100LT, DeviceLoader, ImageFolders
from batchformer.data.augment import batched_augmentation
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.data.sets import write_miniature
from batchformer.data.sets.miniature import picture
from batchformer.errors import UserError
from tests.selection import others_slow

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
N, NATIVE = 48, 16
IMAGES = torch.stack([torch.from_numpy(picture(i % 7, i, NATIVE, NATIVE)).permute(2, 0, 1) for i in range(N)])
AUGMENTATIONS = ("none", "crop-flip", "autoaugment-cutout", "resized-crop", "mae", "randaugment")


@pytest.fixture(scope="module")
def root10(tmp_path_factory):
    return str(write_miniature("cifar10", tmp_path_factory.mktemp("data") / "cifar10"))


def device_loader(augment, size, erase_prob=0.0, **options):
    augmentation = batched_augmentation(augment, NATIVE, size, erase_prob, MEAN)
    return DeviceLoader(
        IMAGES, torch.arange(N), batch_size=12, mean=MEAN, std=STD, augmentation=augmentation, **options
    )


def by_sample(loader):
    batches = list(loader)
    labels = torch.cat([batch["labels"] for batch in batches])
    return dict(zip(labels.tolist(), torch.cat([batch["images"] for batch in batches]), strict=True))


@pytest.mark.parametrize("size", [NATIVE, 24, 10])
@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_a_sample_is_a_function_of_seed_epoch_and_index(augment, size):
    whole = by_sample(device_loader(augment, size, 0.5))
    pieces = by_sample(device_loader(augment, size, 0.5, chunk_bytes=1))
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[k], pieces[k]) for k in whole)
    assert next(iter(whole.values())).shape == (3, size, size)
    later = device_loader(augment, size, 0.5)
    later.set_epoch(1)
    other = by_sample(later)
    assert sum(torch.equal(whole[k], other[k]) for k in whole) < N * 0.75, "half are erased, at least these must differ"


def test_chunks_are_bounded_at_the_size_trained_at():
    batch = 4 * 3 * 12  # bytes of a pixel of a whole batch
    assert device_loader("none", 64, chunk_bytes=batch * 64 * 64)._chunk_batches == 1
    assert device_loader("none", 16, chunk_bytes=batch * 64 * 64)._chunk_batches == 16


@pytest.mark.parametrize("augment", AUGMENTATIONS)
@pytest.mark.parametrize("size", [32, 40])
def test_device_and_host_evaluate_alike(root10, augment, size):
    """Within two grey levels, 0.04 after normalisation, where bytes are interpolated; the same bits where not."""
    options = {"augment": augment, "image_size": size, "eval_batch_size": 50}
    on_device, on_host = (CIFAR10(root10, on_device=place, **options) for place in ("auto", False))
    for batch, other in zip(on_device.val_dataloader(), on_host.val_dataloader(), strict=True):
        (ours, labels), (theirs, same) = images_and_labels(batch), images_and_labels(other)
        assert torch.equal(labels, same)
        assert ours.shape == theirs.shape == (50, 3, size, size)
        difference = (ours - theirs).abs()
        assert difference.max() < (0.041 if size != 32 else 1e-5)
        assert difference.mean() < 1e-3


@pytest.mark.parametrize("augment", ["resized-crop", "randaugment"])
def test_evaluation_takes_the_centre_of_a_slightly_larger_image(augment):
    ours = by_sample(device_loader(augment, 28, training=False))[5]
    picture = v2.functional.to_pil_image(IMAGES[5]).resize((32, 32), Image.Resampling.BICUBIC)
    expected = v2.functional.to_dtype(
        v2.functional.pil_to_tensor(v2.functional.center_crop(picture, [28, 28])), torch.float32, scale=True
    )
    assert (ours - v2.functional.normalize(expected, list(MEAN), list(STD))).abs().max() < 0.041


@pytest.mark.parametrize("size", others_slow([32, 40], [32]))
@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_device_and_host_train_on_images_of_one_distribution(root10, augment, size):
    """Other random numbers, the same recipe: over 740 images colour, spread and the erased part agree."""
    options = {"augment": augment, "image_size": size, "batch_size": 740, "erase_prob": 0.3, "drop_last": False}
    batches = [next(iter(CIFAR10(root10, on_device=place, **options).train_dataloader())) for place in ("auto", False)]
    (ours, labels), (theirs, same) = map(images_and_labels, batches)
    assert torch.equal(labels, same)
    assert ours.shape == theirs.shape == (740, 3, size, size)
    torch.testing.assert_close(ours.mean((0, 2, 3)), theirs.mean((0, 2, 3)), atol=0.12, rtol=0)
    torch.testing.assert_close(ours.std((0, 2, 3)), theirs.std((0, 2, 3)), atol=0.08, rtol=0)
    torch.testing.assert_close(roughness(ours), roughness(theirs), atol=0.06, rtol=0)


def roughness(images):
    """Mean step between neighbouring pixels: tells the interpolation, and the share of noise."""
    return (images[..., 1:] - images[..., :-1]).abs().mean()


def test_erasing_is_applied_after_normalisation():
    plain, erased = by_sample(device_loader("none", 20)), by_sample(device_loader("none", 20, 1.0))
    noise = torch.cat([erased[k][erased[k] != plain[k]] for k in plain])
    assert abs(noise.mean()) < 0.05
    assert noise.std() == pytest.approx(1.0, abs=0.05)


def test_statistics_are_the_data_sets_or_imagenets(root10):
    own, imagenet = CIFAR10(root10), CIFAR10(root10, statistics="imagenet")
    assert own.mean == CIFAR100LT.mean
    assert imagenet.mean == (0.485, 0.456, 0.406)
    image = next(iter(imagenet.val_dataloader()))["images"][0]
    raw = torch.from_numpy(imagenet._splits["val"].images[0]) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (imagenet.mean, imagenet.std))
    torch.testing.assert_close(image, (raw - mean) / std)


@pytest.mark.parametrize("size", [32, 48])
def test_predict_transform_is_what_evaluation_sees(root10, size):
    data = CIFAR10(root10, image_size=size, augment="randaugment", on_device=False)
    image = next(iter(data.val_dataloader()))["images"][3]
    own = Image.fromarray(data._splits["val"].images[3].transpose(1, 2, 0))
    torch.testing.assert_close(data.predict_transform(own), image)
    assert data.predict_transform(own.resize((90, 70)).convert("L")).shape == (3, size, size)


def test_all_images_are_taken_and_tailed_ones_not(root10):
    data = CIFAR10(root10)
    data.setup()
    assert data.train_images == len(data._splits["train"].labels) == sum(data.class_counts)
    assert data.class_names[0] == "class_0"
    assert data.image_size == 32


def test_wrong_options_are_refused_in_a_sentence():
    with pytest.raises(UserError, match=r"data\.image_size .* got 0"):
        CIFAR100(image_size=0)
    with pytest.raises(UserError, match=r"data\.erase_prob .* got 1\.5"):
        CIFAR100(erase_prob=1.5)
    with pytest.raises(UserError, match=r"data\.std, .* above 0"):
        ImageFolders(std=(0.0, 0.0, 0.0))
    with pytest.raises(UserError, match=r"data\.augment_repeats .* got 0"):
        CIFAR100(augment_repeats=0)
    with pytest.raises(UserError, match=r"unknown augmentation 'rand': choose one of none"):
        batched_augmentation("rand")
