"""Values and files that cannot be: each is refused in a sentence, and the last one that can be is taken."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from batchformer.data.augment.options import check_at_least, check_fraction, check_images
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.data.sets.annotations import box_problem
from batchformer.data.sets.classification import check_labels
from batchformer.data.sets.coco import read_categories
from batchformer.data.sets.feature_files import read_attributes
from batchformer.data.sets.files import class_folders
from batchformer.data.sets.list_files import ListFiles
from batchformer.data.sets.pair_splits import Entry, refuse_twice
from batchformer.errors import UserError


def test_the_last_values_that_can_be_are_taken():
    check_at_least(2, workers=2, views=None)
    check_fraction("holdout", 0.0)
    check_images(1, (0.1, 0.1, 0.1), 0.0)
    check_images(1, (0.1, 0.1, 0.1), 1.0)


@pytest.mark.parametrize(
    ("check", "given", "said"),
    [
        (check_fraction, ("holdout", 1.0), "from 0 to below 1, got 1.0"),
        (check_fraction, ("holdout", -0.1), "from 0 to below 1, got -0.1"),
        (check_images, (0, (1.0,)), "image_size must be at least 1, got 0"),
        (check_images, (8, (1.0,), 1.1), "a probability from 0 to 1, got 1.1"),
        (check_images, (8, (1.0,), -0.1), "a probability from 0 to 1, got -0.1"),
        (check_images, (8, (1.0, 0.0, 1.0)), r"above 0 in every channel, got \[1.0, 0.0, 1.0\]"),
    ],
)
def test_values_beyond_them_are_refused(check, given, said):
    with pytest.raises(UserError, match=said):
        check(*given)


@pytest.mark.parametrize("batch", [(1,), (1, 2, 3), 7])
def test_a_batch_is_a_dict_or_a_pair(batch):
    assert as_batch((1, 2)) == as_batch([1, 2]) == {"images": 1, "labels": 2}
    with pytest.raises(UserError, match=f"a pair of images and labels, got {type(batch).__name__}"):
        as_batch(batch)


def test_an_image_is_in_one_set_alone():
    twice = [Entry("a.png", ("wet", "dog"), "train"), Entry("a.png", ("wet", "dog"), "train")]
    refuse_twice(twice, "metadata.t7")
    with pytest.raises(UserError, match=r"metadata.t7 has a.png in train and in val: an image is in one set"):
        refuse_twice([*twice, Entry("a.png", ("wet", "dog"), "val")], "metadata.t7")


@pytest.mark.parametrize(("ids", "said"), [((), "from 0 on, got none"), ((3, -1), "from 0 on, got -1")])
def test_categories_have_ids_from_zero_on(tmp_path, ids, said):
    def categories(*ids):
        return {"categories": [{"id": k, "name": f"class {k}"} for k in ids]}

    assert read_categories(categories(2, 0), tmp_path).names == ["class 0", "class 2"]
    with pytest.raises(UserError, match=said):
        read_categories(categories(*ids), tmp_path)


def test_attributes_have_a_name_for_every_row(tmp_path):
    np.savez(tmp_path / "att.npz", att=np.ones((3, 2)), allclasses=np.array(["a", "b"]))
    with pytest.raises(UserError, match="has 3 rows of attributes and 2 names of classes"):
        read_attributes(tmp_path / "att.npz")


def test_a_file_of_names_has_one_for_every_class(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for part in ("train", "val"):
        (tmp_path / f"{part}.txt").write_text("a.png 0\na.png 1\n")
    for count in (1, 3):
        (tmp_path / "names.txt").write_text("\n\n".join("abc"[:count]))
        with pytest.raises(UserError, match=rf"has {count} class names, but the labels in .* go up to 1"):
            ListFiles(str(tmp_path), names="names.txt", workers=0).setup()
    (tmp_path / "names.txt").write_text("a\n\nb\n")
    data = ListFiles(str(tmp_path), names="names.txt", workers=0, batch_size=2)
    data.setup()
    assert data.info["classes"] == ["a", "b"]


def test_a_folder_without_class_folders_is_named(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"train has no class folders: images are expected in .*train/<class>/"):
        class_folders(str(tmp_path), "train")


def test_labels_are_those_of_the_classes():
    check_labels(np.array([0, 2]), 3, "here")
    for labels, said in (
        ([], "no images in here"),
        ([-1, 0], "label -1 in here"),
        ([0, 3], "label 3 in here is not one"),
    ):
        with pytest.raises(UserError, match=said):
            check_labels(np.array(labels, dtype=int), 3, "here")


@pytest.mark.parametrize(
    ("corners", "said"),
    [
        ((0, 0, 100, 50), None),
        ((-2, -2, 102, 52), None),
        ((5, 5, 4, 9), "a negative width or height (-1 x 4)"),
        ((5, 5, 9, 4), "a negative width or height (4 x -1)"),
        ((5, 5, 5, 9), "no width or no height (0 x 4)"),
        ((5, 5, 9, 5), "no width or no height (4 x 0)"),
        ((5, 5, float("nan"), 9), "not made of numbers"),
        ((-50, 0, 20, 20), "out of its image of 100 x 50 pixels"),
        ((0, -50, 20, 20), "out of its image"),
        ((0, 0, 150, 20), "out of its image"),
        ((0, 0, 20, 90), "out of its image"),
    ],
)
def test_what_is_wrong_with_a_box(corners, said):
    problem = box_problem(corners, 50, 100)
    assert (problem is None) if said is None else said in problem
