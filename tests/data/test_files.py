"""Lists of files and folders of images: what is read, and what is said about what cannot be."""

import re
import shutil
import time
from multiprocessing import active_children

import pytest
import torch
from PIL import ExifTags, Image

from batchformer.data import ImageFolders, ListFiles
from batchformer.data.images import open_image
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.data.sets import miniature_names, write_miniature
from batchformer.errors import UserError

SMALL = {"image_size": 24, "batch_size": 16, "workers": 0}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {name: write_miniature(name, folder / name) for name in ("imagenet-lt", "folder")}


@pytest.fixture
def lists(originals, tmp_path):
    return shutil.copytree(originals["imagenet-lt"], tmp_path / "lists")


@pytest.fixture
def folders(originals, tmp_path):
    return shutil.copytree(originals["folder"], tmp_path / "folders")


def list_data(root, **options):
    return ListFiles(str(root), "ImageNet_LT_train.txt", "ImageNet_LT_test.txt", **{**SMALL, **options})


def edit(path, change):
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))


def test_lists_are_read_with_their_labels(lists):
    data = list_data(lists)
    data.setup()
    assert data.class_counts == [160, 80, 40, 20, 10, 5, 3, 2]
    images, labels = images_and_labels(next(iter(data.train_dataloader())))
    assert images.shape == (16, 3, 24, 24)
    assert labels.dtype == torch.int64
    tested = torch.cat([batch["labels"] for batch in data.val_dataloader()])
    assert tested.bincount().tolist() == [3] * 8


def test_folders_are_classes_in_alphabetical_order(folders):
    data = ImageFolders(str(folders), **SMALL)
    data.setup()
    assert data.class_names == [f"class_{c}" for c in range(8)]
    assert data.class_counts == [160, 80, 40, 20, 10, 5, 3, 2]
    summary = data.describe()
    assert (summary["many"], summary["medium"], summary["few"]) == (1, 3, 4)
    assert summary["tail"]["name"] == "class_7"


def test_other_files_between_the_images_are_passed_over(folders):
    (folders / "train" / "class_0" / "notes.txt").write_text("not an image")
    (folders / "train" / ".cache").mkdir()
    data = ImageFolders(str(folders), **SMALL)
    data.setup()
    assert data.class_counts[0] == 160
    assert data.num_classes == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named_in_one_line(folders, workers):
    broken = folders / "train" / "class_0" / "0007.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    data = ImageFolders(str(folders), **{**SMALL, "workers": workers})
    with pytest.raises(UserError) as caught:
        list(data.train_dataloader())
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_workers_end_with_the_error_and_new_ones_go_on(folders):
    broken = folders / "train" / "class_0" / "0007.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    data = ImageFolders(str(folders), **{**SMALL, "workers": 2})
    loader, before = data.train_dataloader(), {*active_children()}
    with pytest.raises(UserError) as caught:
        list(loader)
    assert caught.tb  # which holds what the loader was at
    assert {*active_children()} == before
    broken.write_bytes(whole)
    assert [len(batch["labels"]) for batch in loader] == [data.batch_size] * len(loader)
    loader.end_workers()  # they, too, would go with the traceback


def sideways(path, upright):
    """Stored as a phone does that was held upright: turned a quarter, with a note how to turn it back."""
    note = Image.Exif()
    note[ExifTags.Base.Orientation] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=note)


def test_photos_in_folders_are_upright_and_those_of_lists_as_they_are_stored(folders, lists):
    upright = Image.new("RGB", (32, 48), (255, 0, 0))
    upright.paste((0, 0, 255), (0, 24, 32, 48))  # red above blue
    shutil.rmtree(folders / "val")
    (folders / "val/class_0").mkdir(parents=True)
    sideways(folders / "val/class_0/photo.png", upright)
    data = ImageFolders(str(folders), **SMALL)
    data.setup()
    (image,) = next(iter(data.val_dataloader()))["images"]
    assert torch.equal(image, data.predict_transform(upright))

    (lists / "ImageNet_LT_test.txt").write_text("photo.png 0\n")
    sideways(lists / "photo.png", upright)
    data = list_data(lists)
    data.setup()
    (image,) = next(iter(data.val_dataloader()))["images"]
    assert torch.equal(image, data.predict_transform(upright.transpose(Image.Transpose.ROTATE_90)))


def test_a_note_that_makes_no_sense_spoils_no_image(tmp_path):
    Image.new("RGB", (30, 20), 77).save(tmp_path / "photo.png", exif=b"Exif\x00\x00nonsense")
    assert open_image(tmp_path / "photo.png", upright=True).size == (30, 20)
    note = Image.Exif()
    note[ExifTags.Base.Orientation], note[ExifTags.Base.XResolution] = 6, 72.0
    odd = note.tobytes().replace(b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x07")  # a resolution that is no number
    Image.new("RGB", (30, 20), 77).save(tmp_path / "photo.jpg", exif=odd)
    assert open_image(tmp_path / "photo.jpg", upright=True).size == (20, 30)


def test_a_missing_image_is_named(lists):
    missing = lists / "train" / "n00000000" / "n00000000_9.JPEG"
    missing.unlink()
    with pytest.raises(UserError, match=r"n00000000_9\.JPEG does not exist"):
        list(list_data(lists).train_dataloader())


def test_a_class_without_images_is_named(folders):
    for image in (folders / "train" / "class_4").iterdir():
        image.unlink()
    with pytest.raises(UserError, match="class class_4 has no training image"):
        ImageFolders(str(folders), **SMALL).setup()


def test_a_gap_in_the_labels_is_named(lists):
    edit(lists / "ImageNet_LT_train.txt", lambda lines: [line for line in lines if not line.endswith(" 5")])
    with pytest.raises(UserError, match=r"class 5 \(5\) has no training image"):
        list_data(lists).setup()


def test_a_test_label_without_training_class_is_refused(lists):
    edit(lists / "ImageNet_LT_test.txt", lambda lines: [*lines[:-1], lines[-1].rsplit(" ", 1)[0] + " 8"])
    with pytest.raises(UserError, match=r"label 8 .* not one of the 8 classes"):
        list_data(lists).setup()


@pytest.mark.parametrize("line", ["only_a_path.jpg", "a.jpg -1", "a.jpg 1.5", "a.jpg cat"])
def test_a_line_that_is_no_pair_is_named(lists, line):
    edit(lists / "ImageNet_LT_train.txt", lambda lines: [*lines[:3], line, *lines[3:]])
    with pytest.raises(UserError, match=r"ImageNet_LT_train\.txt, line 4"):
        list_data(lists).setup()


@pytest.mark.parametrize("path", ["../secret.jpg", "train/../../secret.jpg", "/secret.jpg"])
def test_an_image_outside_the_root_is_refused_and_its_line_named(lists, path):
    edit(lists / "ImageNet_LT_train.txt", lambda lines: [*lines[:3], f"{path} 0", *lines[3:]])
    with pytest.raises(UserError, match=rf"ImageNet_LT_train\.txt, line 4, names {path}, which is outside of {lists}"):
        list_data(lists).setup()


def test_a_path_with_dots_and_an_absolute_one_may_lead_into_the_root(lists, tmp_path):
    first = "train/n00000000/n00000000_0.JPEG"
    inside = [f"{lists}/{first} 0", f"val/../{first} 0", f"../{lists.name}/{first} 0"]
    edit(lists / "ImageNet_LT_train.txt", lambda lines: [*inside, *lines])
    list_data(lists).setup()
    (tmp_path / "link").symlink_to(lists)
    list_data(tmp_path / "link").setup()
    edit(lists / "ImageNet_LT_train.txt", lambda lines: [f"{tmp_path}/link/{first} 0", *lines])
    list_data(lists).setup()


def test_paths_may_contain_spaces(lists):
    place = lists / "train" / "with space.JPEG"
    shutil.copy(lists / "train" / "n00000000" / "n00000000_0.JPEG", place)
    edit(lists / "ImageNet_LT_train.txt", lambda lines: ["train/with space.JPEG 0", *lines])
    data = list_data(lists, drop_last=False)
    assert sum(len(batch["labels"]) for batch in data.train_dataloader()) == 321


def test_missing_folders_and_lists_say_what_is_expected(folders, lists, tmp_path):
    shutil.rmtree(folders / "val")
    with pytest.raises(UserError, match=r"no folder .*val.*train/<class>/"):
        ImageFolders(str(folders), **SMALL).setup()
    classes = shutil.copytree(folders / "train", tmp_path / "classes")
    with pytest.raises(UserError, match=r"no folder .*classes/train: .*; if class_0 .* --data\.val_fraction 0\.2"):
        ImageFolders(str(classes), **SMALL).setup()
    with pytest.raises(UserError, match="is not a folder"):
        ImageFolders(str(tmp_path / "nowhere"), **SMALL).setup()
    with pytest.raises(UserError, match=r"data\.train_list.*absent\.txt"):
        ListFiles(str(lists), "absent.txt", "ImageNet_LT_test.txt", **SMALL).setup()
    with pytest.raises(UserError, match=r"data\.root is not set"):
        ImageFolders(**SMALL).setup()


def test_the_folder_of_one_part_is_answered_with_the_one_above(folders):
    with pytest.raises(UserError, match=rf"name the folder above it, {re.escape(str(folders))}\.$"):
        ImageFolders(str(folders / "train"), **SMALL).setup()


def test_a_val_class_that_is_not_trained_is_refused(folders):
    (folders / "val" / "stranger").mkdir()
    with pytest.raises(UserError, match="stranger is a class without a folder"):
        ImageFolders(str(folders), **SMALL).setup()


def test_a_folder_made_long_tailed_trains_on_the_first_images_of_each_class(folders):
    for label in range(8):
        for i in range(12 if label else 14):
            shutil.copy(
                folders / "val" / "class_0" / "0000.jpg", folders / "train" / f"class_{label}" / f"_{i:02d}.jpg"
            )
    everything = ImageFolders(str(folders), **SMALL).image_files()
    data = ImageFolders(str(folders), imbalance=7, **SMALL)
    data.setup()
    smallest = min(len(list((folders / "train" / f"class_{label}").iterdir())) for label in range(8))
    assert data.class_counts == [int(smallest * 7 ** (-c / 7)) for c in range(8)]
    named = {name: [each.path for each in files] for name, files in data.image_files().items()}
    assert named["val"] == [each.path for each in everything["val"]]
    for label, count in enumerate(data.class_counts):
        members = [each.path for each in everything["train"] if each.label == label]
        assert [path for path in named["train"] if path in members] == members[:count]
    with pytest.raises(UserError, match=f"choose {smallest} or less"):
        ImageFolders(str(folders), imbalance=1000, **SMALL).setup()


def test_class_names_from_a_file(lists):
    (lists / "names.txt").write_text("".join(f"thing {c}\n" for c in range(8)))
    data = list_data(lists, names="names.txt")
    data.setup()
    assert data.class_names[3] == "thing 3"
    (lists / "names.txt").write_text("just one\n")
    with pytest.raises(UserError, match="has 1 class names"):
        list_data(lists, names="names.txt").setup()


def test_fingerprint_follows_the_training_list(lists):
    before = list_data(lists)
    before.setup()
    edit(lists / "ImageNet_LT_train.txt", lambda lines: lines[1:])
    after = list_data(lists)
    after.setup()
    assert before.fingerprint != after.fingerprint


def test_file_images_cannot_be_asked_onto_the_device(folders):
    with pytest.raises(UserError, match="on_device"):
        ImageFolders(str(folders), on_device=True)


@pytest.mark.parametrize("name", miniature_names())
def test_every_miniature_is_the_same_at_any_time(name, tmp_path, monkeypatch):
    one = write_miniature(name, tmp_path / "one")
    later = time.time() + 1e6  # .mat, .zip and .gz files can hold the time of their writing
    monkeypatch.setattr(time, "time", lambda: later)
    monkeypatch.setattr(time, "asctime", lambda *_: time.strftime("%c", time.localtime(later)))
    two = write_miniature(name, tmp_path / "two")
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in files)


def test_a_miniature_is_not_written_over_something(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(UserError, match="not an empty folder"):
        write_miniature("folder", tmp_path)
    with pytest.raises(UserError, match="choose one of cifar10"):
        write_miniature("mnist", tmp_path / "new")
    assert not (tmp_path / "new").exists()
