"""Which files of a folder are images, and what an image of unusual make is read as."""

import os
import sys
from collections import Counter
from pathlib import PurePath
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, features

from batchformer.data import ImageFolders
from batchformer.data.images import _readable_endings, images_in, open_image, passed_over
from batchformer.errors import UserError


def picture(path, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (8, 6), 100 if mode == "L" else None).save(path)
    return path


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    seen = picture(tmp_path / "a.jpg")
    deep = picture(tmp_path / "more" / "B.PNG")
    (tmp_path / "._a.jpg").write_bytes(b"of macOS")
    picture(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jpg")
    (tmp_path / "notes.txt").write_text("no image")
    assert images_in(tmp_path) == [str(seen), str(deep)]


def test_linked_folders_are_followed_and_end_where_they_would_go_round(tmp_path):
    picture(tmp_path / "elsewhere" / "far.jpg")
    near = picture(tmp_path / "cat" / "near.jpg")
    os.symlink(tmp_path / "elsewhere", tmp_path / "cat" / "linked")
    os.symlink(tmp_path / "cat", tmp_path / "cat" / "round")
    os.symlink(tmp_path, tmp_path / "cat" / "above")
    found = images_in(tmp_path / "cat")
    assert str(near) in found
    assert str(tmp_path / "cat" / "linked" / "far.jpg") in found
    assert len(found) <= 4  # the folders above once more at most


def test_a_million_files_are_listed_without_work_of_pathlib_for_each(tmp_path, monkeypatch):
    """ImageNet's folders took four times as long to list as torchvision takes."""
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            for number in range(20):
                picture(tmp_path / part / name / f"{number}.png")
    made = []
    relpath, suffix = os.path.relpath, PurePath.suffix.fget
    monkeypatch.setattr(os.path, "relpath", lambda *args: made.append(args) or relpath(*args))
    monkeypatch.setattr(PurePath, "suffix", property(lambda path: made.append(path) or suffix(path)))
    monkeypatch.chdir(tmp_path)
    for root in (str(tmp_path), ".", f"{tmp_path}/train/..", "train/../"):
        made.clear()
        data = ImageFolders(root)
        data.setup()
        assert len(made) < 20  # of 80 images
        assert data._listings["train"].paths == sorted(
            f"train/{name}/{number}.png" for name in ("cat", "dog") for number in range(20)
        )


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_grey_values_of_16_bits_are_scaled_and_not_cut_off(tmp_path, ending):
    values = np.array([[0, 257, 100 * 257, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / f"deep.{ending}")
    image = np.asarray(open_image(tmp_path / f"deep.{ending}", upright=True))
    assert image[0, :, 0].tolist() == [0, 1, 100, 255]
    assert (image == image[..., :1]).all()


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_grey_values_without_a_range_are_refused(tmp_path, kind):
    Image.fromarray(np.full((2, 2), 300, kind)).save(tmp_path / "x.tif")
    with pytest.raises(
        UserError, match=r"x\.tif cannot be read \(its grey values are above 255 .* save it with 8 or 16"
    ):
        open_image(tmp_path / "x.tif")


@pytest.mark.parametrize(
    ("kind", "ending"), [(np.uint16, "png"), (np.uint16, "tif"), (np.int32, "tif"), (np.float32, "tif")]
)
def test_grey_values_of_8_bits_in_a_wider_file_stay(tmp_path, kind, ending):
    Image.fromarray(np.array([[0, 7, 200, 255]], kind)).save(tmp_path / f"x.{ending}")
    assert np.asarray(open_image(tmp_path / f"x.{ending}"))[0, :, 0].tolist() == [0, 7, 200, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_every_other_mode_becomes_rgb(tmp_path, mode):
    ending = "jpg" if mode in ("CMYK", "YCbCr") else "png"
    Image.new("RGB", (8, 6), (255, 255, 255)).convert(mode).save(tmp_path / f"x.{ending}")
    image = open_image(tmp_path / f"x.{ending}")
    assert image.mode == "RGB"
    assert image.getpixel((3, 3)) == (255, 255, 255)


def test_one_class_is_refused(tmp_path):
    for part in ("train", "val"):
        picture(tmp_path / part / "only" / "1.png")
    with pytest.raises(UserError, match=r"has one class only \(only\): .* add another class"):
        ImageFolders(str(tmp_path)).setup()


def test_a_crowd_of_workers_is_refused():
    with pytest.raises(UserError, match=r"workers must be [0-9]+ or fewer on this machine, got 100000"):
        ImageFolders("nowhere", workers=100_000)


def test_fractions_of_white_are_scaled(tmp_path):
    """Float TIFFs of microscopes and of numpy hold 0 to 1: rounded they would be black."""
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "x.tif")
    assert np.asarray(open_image(tmp_path / "x.tif"))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_grey_values_that_are_no_brightness_are_refused(tmp_path, wrong):
    Image.fromarray(np.array([[0, wrong]], np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(UserError, match=r"x\.tif cannot be read \(some of its grey values are negative or no numbers"):
        open_image(tmp_path / "x.tif")


def test_other_files_are_counted_by_their_endings(tmp_path):
    for name in ("a.txt", "b.TXT", "c.heic2", "README", ".hidden", "d.jpg", "e.JFIF"):
        (tmp_path / name).write_bytes(b"")
    others = Counter()
    assert [os.path.basename(path) for path in images_in(tmp_path, others)] == ["d.jpg", "e.JFIF"]
    assert others == {".txt": 2, ".heic2": 1, "": 1}
    assert passed_over(Counter({".txt": 2, ".md": 1})) == "3 files skipped: 2 .txt, 1 .md"
    assert passed_over(Counter({".heic": 1})) == "1 file skipped: 1 .heic (to read .heic: pip install pillow-heif)"


@pytest.mark.parametrize("ending", ["jfif", *(["avif"] if features.check("avif") else [])])
def test_images_with_newer_endings_are_read(tmp_path, ending):
    Image.new("RGB", (8, 6), (200, 0, 0)).save(tmp_path / f"x.{ending}")
    (found,) = images_in(tmp_path)
    assert open_image(found).size == (8, 6)


def test_photos_of_phones_are_read_where_the_plug_in_is_installed(monkeypatch):
    registered = []
    plug_in = SimpleNamespace(register_heif_opener=lambda: registered.append(True))
    monkeypatch.setitem(sys.modules, "pillow_heif", plug_in)
    assert ".heic" in _readable_endings()
    assert registered
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert ".heic" not in _readable_endings()


@pytest.mark.skipif(not features.check("avif"), reason="needs Pillow with AVIF")
@pytest.mark.filterwarnings("ignore")
def test_an_image_with_random_bytes_is_read_or_refused(tmp_path):
    whole = picture(tmp_path / "a.avif").read_bytes()
    outcomes = Counter()
    for seed in range(60):
        generator = np.random.default_rng(seed)
        content = bytearray(whole)
        for place in generator.integers(0, len(whole), 5):
            content[place] = generator.integers(256)
        (tmp_path / "b.avif").write_bytes(content)
        try:
            open_image(tmp_path / "b.avif")
            outcomes["read"] += 1
        except UserError as refused:
            outcomes[type(refused.__cause__).__name__] += 1
    assert set(outcomes) - {"read", "UnidentifiedImageError"}  # among them errors of the decoder
