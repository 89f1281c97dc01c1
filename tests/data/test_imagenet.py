"""Tiny-ImageNet and ImageNet in their official layouts: what is read, and what is said about parts that are wrong."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from batchformer.data import ImageFolders, ImageNet, ListFiles, TinyImageNet
from batchformer.data.augment.host import file_transform
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.data.sets import write_miniature
from batchformer.data.sets.imagenet import readable_names
from batchformer.errors import UserError

SMALL = {"image_size": 24, "batch_size": 16, "workers": 0}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {name: write_miniature(name, folder / name) for name in ("tiny-imagenet", "imagenet")}


@pytest.fixture
def tiny(originals, tmp_path):
    return shutil.copytree(originals["tiny-imagenet"], tmp_path / "tiny")


@pytest.fixture
def imagenet(originals, tmp_path):
    return shutil.copytree(originals["imagenet"], tmp_path / "imagenet")


# Tiny-ImageNet


def test_tiny_imagenet_is_what_image_folder_reads(originals):
    root = originals["tiny-imagenet"]
    data = TinyImageNet(str(root), batch_size=16)
    data.setup()
    reference = ImageFolder(root / "train")
    assert data.train_images == len(reference) == 320
    labels = [label for _, label in reference.samples]
    assert sorted(data._splits["train"].labels.tolist()) == sorted(labels)
    train = data._splits["train"]
    pixels = {image.tobytes(): int(label) for image, label in zip(train.images, train.labels, strict=True)}
    for image, label in (reference[k] for k in range(0, 320, 7)):
        assert pixels[np.asarray(image).transpose(2, 0, 1).tobytes()] == label
    assert data.class_names[:2] == ["tench", "goldfish"]


def test_validation_labels_come_from_the_annotations(originals):
    root = originals["tiny-imagenet"]
    data = TinyImageNet(str(root))
    data.setup()
    first = (root / "val" / "val_annotations.txt").read_text().splitlines()[3].split("\t")
    expected = np.asarray(Image.open(root / "val" / "images" / first[0])).transpose(2, 0, 1)
    assert np.array_equal(data._splits["val"].images[3], expected)
    assert data.class_names[data._splits["val"].labels[3]] == "tiger shark"
    assert data.test_images == 30


def test_tiny_imagenet_trains_at_any_size(originals):
    data = TinyImageNet(
        str(originals["tiny-imagenet"]), image_size=96, augment_repeats=2, erase_prob=0.25, batch_size=8
    )
    images, labels = images_and_labels(next(iter(data.train_dataloader())))
    assert images.shape == (8, 3, 96, 96)
    assert labels[0] == labels[1]
    assert next(iter(data.val_dataloader()))["images"].shape == (30, 3, 96, 96)


def test_the_folder_may_be_named_by_its_parent(tiny, tmp_path):
    tiny.rename(tmp_path / "tiny-imagenet-200")
    data = TinyImageNet(str(tmp_path))
    data.setup()
    assert data.num_classes == 10


def test_grey_images_become_colour(originals):
    grey = originals["tiny-imagenet"] / "train" / "n01440764" / "images" / "n01440764_0.JPEG"
    assert Image.open(grey).mode == "L"
    data = TinyImageNet(str(originals["tiny-imagenet"]))
    data.setup()
    first = data._splits["train"].images[0]
    assert np.array_equal(first[0], first[1])
    assert np.array_equal(first[0], np.asarray(Image.open(grey)))


@pytest.mark.parametrize("part", ["wnids.txt", "val/val_annotations.txt", "val/images", "train/n01443537"])
def test_a_missing_part_is_named(tiny, part):
    place = tiny / part
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    with pytest.raises(UserError) as caught:
        TinyImageNet(str(tiny)).setup()
    assert str(place) in str(caught.value)
    assert "unpack it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_words_classes_are_called_by_their_wnid(tiny):
    (tiny / "words.txt").unlink()
    data = TinyImageNet(str(tiny))
    data.setup()
    assert data.class_names[0] == "n01440764"


@pytest.mark.parametrize("damage", ["cut", "size", "missing"])
def test_a_damaged_image_is_named(tiny, damage):
    place = tiny / "val" / "images" / "val_7.JPEG"
    if damage == "cut":
        place.write_bytes(place.read_bytes()[:300])
    elif damage == "size":
        Image.new("RGB", (64, 50)).save(place)
    else:
        place.unlink()
    with pytest.raises(UserError) as caught:
        TinyImageNet(str(tiny)).setup()
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_of_the_annotations_that_is_wrong_is_named(tiny):
    listing = tiny / "val" / "val_annotations.txt"
    lines = listing.read_text().splitlines()
    lines[4] = "val_4.JPEG\tn99999999\t0\t0\t1\t1"
    listing.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"val_annotations\.txt, line 5: .*n99999999"):
        TinyImageNet(str(tiny)).setup()


def test_an_empty_class_of_tiny_imagenet_is_named(tiny):
    folder = tiny / "train" / "n01496331" / "images"
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"n01496331.images has no training image"):
        TinyImageNet(str(tiny)).setup()
    with pytest.raises(UserError, match=r"data\.root is not set"):
        TinyImageNet().setup()


# ImageNet


def test_imagenet_is_what_image_folder_reads(originals):
    root = originals["imagenet"]
    data = ImageNet(str(root), **SMALL)
    data.setup()
    for part in ("train", "val"):
        reference = ImageFolder(root / part)
        listing = data._listings[part]
        ours = {(str(root / p), int(c)) for p, c in zip(listing.paths, listing.labels, strict=True)}
        assert ours == set(reference.samples)
    assert data.class_names[0] == "tench"
    images = next(iter(data.train_dataloader()))["images"]
    assert images.shape == (16, 3, 24, 24)


@pytest.mark.parametrize("form", ["list", "file"])
def test_some_classes_of_imagenet(imagenet, form):
    chosen = ["n01514668", "n01443537", "n01496331"]
    (imagenet / "mine.txt").write_text("".join(f"{wnid} with a remark\n" for wnid in chosen))
    data = ImageNet(str(imagenet), classes=chosen if form == "list" else "mine.txt", **SMALL)
    data.setup()
    assert data.class_names == ["goldfish", "electric ray", "cock"]
    assert data.class_counts == [32, 32, 32]
    assert all("n01440764" not in path for path in data._listings["train"].paths)


def test_wrong_classes_are_named(imagenet):
    with pytest.raises(UserError, match=r"names n00000001 \(and 1 more\), but there is no folder"):
        ImageNet(str(imagenet), classes=["n00000001", "n00000002", "n01440764"], **SMALL).setup()
    with pytest.raises(UserError, match=r"expected wnids such as n01440764, found 'tench'"):
        ImageNet(str(imagenet), classes=["tench"], **SMALL).setup()
    with pytest.raises(UserError, match=r"data\.classes: there is no file"):
        ImageNet(str(imagenet), classes="absent.txt", **SMALL).setup()


def test_a_flat_val_folder_says_what_to_do(imagenet):
    for folder in list((imagenet / "val").iterdir()):
        for file in folder.iterdir():
            file.rename(imagenet / "val" / file.name)
        folder.rmdir()
    with pytest.raises(UserError, match=r"val are not sorted.*val/<wnid>/") as caught:
        ImageNet(str(imagenet), **SMALL).setup()
    assert "\n" not in str(caught.value)


def test_a_class_without_validation_images_is_named(imagenet):
    shutil.rmtree(imagenet / "val" / "n01491361")
    with pytest.raises(UserError, match=r"val/n01491361 has no image"):
        ImageNet(str(imagenet), **SMALL).setup()


def test_names_that_occur_twice_keep_their_wnid():
    assert readable_names(["n02012849", "n03126707", "n01440764"]) == [
        "crane (n02012849)",
        "crane (n03126707)",
        "tench",
    ]


# augmentation of files, whatever lists them


@pytest.mark.parametrize(
    "augment", ["none", "imagenet", "imagenet-lt", "inaturalist", "resized-crop", "mae", "randaugment"]
)
def test_files_are_augmented_by_name_and_the_same_each_time(originals, augment):
    root = str(originals["imagenet"])
    make = lambda seed=0: ImageFolders(root, augment=augment, erase_prob=0.5, augment_repeats=2, seed=seed, **SMALL)  # noqa: E731
    batches = [images_and_labels(next(iter(make(seed).train_dataloader()))) for seed in (0, 0, 1)]
    (images, labels), (again, _), (other, _) = batches
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    assert labels.view(8, 2).unique(dim=1).shape == (8, 1)
    assert images.shape == (16, 3, 24, 24)


def test_lists_take_the_same_options(originals):
    root = originals["imagenet"]
    lines = [
        f"train/{wnid}/{wnid}_{i}.JPEG {c}\n" for c, wnid in enumerate(["n01440764", "n01443537"]) for i in range(9)
    ]
    (root / "list.txt").write_text("".join(lines))
    options = {"augment": "randaugment", "erase_prob": 0.25, "augment_repeats": 3, **SMALL, "batch_size": 9}
    data = ListFiles(str(root), "list.txt", "list.txt", **options)
    images, labels = images_and_labels(next(iter(data.train_dataloader())))
    assert images.shape == (9, 3, 24, 24)
    assert labels.view(3, 3).unique(dim=1).shape == (3, 1)


def test_randaugment_of_files_is_timms_transform():
    transform = file_transform("randaugment", 24, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 0.25)
    text = str(transform)
    for piece in ("RandomResizedCropAndInterpolation", "bicubic", "RandomHorizontalFlip", "mstd=0.5", "RandomErasing"):
        assert piece in text
    assert "ColorJitter" not in text
    assert "scale=(0.05, 1.0)" in str(file_transform("resized-crop", 24, (0.5,) * 3, (0.5,) * 3))
    assert "scale=(0.2, 1.0)" in str(file_transform("mae", 24, (0.5,) * 3, (0.5,) * 3))
    with pytest.raises(UserError, match=r"unknown augmentation 'mild'"):
        file_transform("mild", 24, (0.5,) * 3, (0.5,) * 3)


def test_evaluation_of_files_is_bicubic_where_training_is(originals):
    root = str(originals["imagenet"])
    picture = Image.open(originals["imagenet"] / "val" / "n01440764" / "ILSVRC2012_val_00000001.JPEG")
    for augment, method in (("randaugment", Image.Resampling.BICUBIC), ("imagenet", Image.Resampling.BILINEAR)):
        data = ImageNet(root, augment=augment, **SMALL)
        resized = picture.resize((32, 27), method)  # short side 40 of 48 x 40 to 24 * 256 / 224
        cut = np.asarray(resized.crop((4, 2, 28, 26)), dtype=np.float32) / 255
        expected = (cut - np.array(data.mean, np.float32)) / np.array(data.std, np.float32)
        torch.testing.assert_close(data.predict_transform(picture), torch.from_numpy(expected.transpose(2, 0, 1)))
