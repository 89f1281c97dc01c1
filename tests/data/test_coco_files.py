"""COCO's files: what is read, and what is said about what is wrong in them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchformer.data import CocoDetection
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError

SMALL = {"image_size": 48, "batch_size": 4, "workers": 0}
TRAIN = "annotations/instances_train2017.json"
VAL = "annotations/instances_val2017.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_miniature("coco", tmp_path_factory.mktemp("coco") / "data")


@pytest.fixture
def root(original, tmp_path):
    return shutil.copytree(original, tmp_path / "coco")


def data(root, **options):
    made = CocoDetection(str(root), **SMALL | options)
    made.setup()
    return made


def edit(root, change, file=TRAIN):
    content = json.loads((root / file).read_text())
    change(content)
    (root / file).write_text(json.dumps(content))


def read(root, file=TRAIN):
    return json.loads((root / file).read_text())


def test_every_box_is_read_with_its_image_and_category(original):
    made, content = data(original), read(original)
    scenes = made._scenes["train"]
    assert scenes.ids.tolist() == sorted(image["id"] for image in content["images"])
    found = {
        (int(scenes.ids[k]), made.category_ids[label], *box)
        for k in range(len(scenes))
        for label, box in zip(scenes.labels[scenes.rows(k)], scenes.boxes[scenes.rows(k)].tolist(), strict=True)
    }
    expected = {
        (entry["image_id"], entry["category_id"], x, y, x + w, y + h)
        for entry in content["annotations"]
        for x, y, w, h in [entry["bbox"]]
    }
    assert found == expected
    assert len(found) == len(content["annotations"])


def test_labels_are_contiguous_or_the_official_ids(original):
    made = data(original)
    assert made.num_classes == 5
    assert made.category_ids == [1, 3, 17, 44, 90]
    assert made.id2label == {0: "person", 1: "car", 2: "cat", 3: "bottle", 4: "toothbrush"}
    official = data(original, labels="official")
    assert official.num_classes == 91
    assert official.class_names[17] == "cat"
    assert official.class_names[2] == "N/A"
    assert official.category_ids[17] == 17
    assert official.category_ids[2] == -1
    relabelled = [made.category_ids[label] for label in made._scenes["val"].labels]
    assert official._scenes["val"].labels.tolist() == relabelled
    assert official.describe()["classes"] == made.describe()["classes"] == 5


def test_crowds_are_evaluated_and_not_trained_on(original):
    made = data(original)
    crowds = [entry for entry in read(original)["annotations"] if entry["iscrowd"]]
    assert len(crowds) == 1
    for part in ("train", "val"):
        labels = [label for batch in made.evaluation_loader(part) for label in batch["labels"]]
        with_crowd = [label for label in labels if label["truth"]["iscrowd"].any()]
        assert len(with_crowd) == 1
        assert len(with_crowd[0]["class_labels"]) == len(with_crowd[0]["truth"]["labels"]) - 1
    assert made.train_boxes == sum(made.class_counts) == len(read(original)["annotations"]) - 1


def test_images_without_objects_are_kept_or_left_out(original):
    empty = {image["id"] for image in read(original)["images"]} - {
        entry["image_id"] for entry in read(original)["annotations"]
    }
    assert len(empty) == 1
    kept, without = data(original), data(original, keep_empty=False)
    assert (kept.train_images, without.train_images) == (24, 23)
    assert empty.isdisjoint(without._scenes["train"].ids.tolist())
    assert without.train_boxes == kept.train_boxes
    assert without.test_images == 8
    labels = [label for batch in kept.train_dataloader() for label in batch["labels"]]
    assert next(len(label["boxes"]) for label in labels if label["image_id"].item() in empty) == 0


def test_the_first_images_can_be_overfitted(original):
    made = data(original, limit_train=5, evaluate_on="train")
    assert (made.train_images, made.test_images) == (5, 5)
    ids = [label["image_id"].item() for batch in made.val_dataloader() for label in batch["labels"]]
    assert ids == sorted(image["id"] for image in read(original)["images"])[:5]
    assert made.test_boxes == made.train_boxes
    assert len([label for batch in made.evaluation_loader("val") for label in batch["labels"]]) == 8


def test_boxes_are_cut_at_the_edges_and_those_of_no_area_left_out(root):
    def change(content):
        image = content["images"][0]
        content["annotations"] = [
            {"id": 1, "image_id": image["id"], "category_id": 1, "bbox": [-1.5, 2, 20, image["height"]]},
            {"id": 2, "image_id": image["id"], "category_id": 3, "bbox": [5, 5, 0, 9]},
        ]

    edit(root, change)
    made = data(root, limit_train=1, augment="none", batch_size=1)
    label = next(iter(made.train_dataloader()))["labels"][0]
    assert label["class_labels"].tolist() == [0]
    height, width = label["orig_size"].tolist()
    x, y, w, h = label["boxes"][0].tolist()
    assert (x - w / 2, x + w / 2) == pytest.approx((0, 18.5 / width), abs=1e-3)
    assert (y - h / 2, y + h / 2) == pytest.approx((2 / height, 1), abs=1e-3)
    truth = next(iter(made.evaluation_loader("train")))["labels"][0]["truth"]
    assert truth["boxes"].tolist() == [[-1.5, 2, 18.5, 2 + height], [5, 5, 5, 14]]


def test_own_files_are_named(root):
    (root / TRAIN).rename(root / "mine.json")
    (root / "train2017").rename(root / "pictures")
    made = data(root, train_images="pictures", train_annotations="mine.json")
    assert next(iter(made.train_dataloader()))["pixel_values"].shape[0] == 4


def test_fingerprint_follows_images_and_boxes_and_not_the_folder(root, original):
    before = data(root).fingerprint
    assert before == data(original).fingerprint
    edit(root, lambda content: content["annotations"][3]["bbox"].__setitem__(2, 5))
    assert data(root).fingerprint != before


def sentence(root, **options):
    with pytest.raises(UserError) as caught:
        data(root, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("part", ["train2017", "val2017", TRAIN, VAL])
def test_a_missing_part_is_named(root, part):
    place = root / part
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert str(place) in sentence(root)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"images": []}', '{"images": [], "annotations": 3}', "\x00"])
def test_a_damaged_file_is_named(root, content):
    (root / TRAIN).write_text(content)
    assert str(root / TRAIN) in sentence(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["annotations"][2].update(image_id=777),
            "annotation 3 names image 777, which the file does not list",
        ),
        (lambda c: c["annotations"][2].update(category_id=2), "annotation 3 names category 2, which the file does not"),
        (lambda c: c["annotations"][2].pop("bbox"), "annotation 3 has no 'bbox'"),
        (lambda c: c["annotations"][2].update(bbox=[1, 2, 3]), "not [x, y, width, height], but [1, 2, 3]"),
        (lambda c: c["annotations"][2].update(bbox=[1, 2, 3, "4px"]), "the bbox of annotation 3 is not"),
        (
            lambda c: c["annotations"][2].update(bbox=[60, 60, 90, 90]),
            "annotation 3 reaches from (60, 60) to (150, 150)",
        ),
        (lambda c: c["annotations"][2].update(bbox=[1, 1, float("nan"), 5]), "annotation 3 reaches from"),
        (lambda c: c["annotations"][2].update(area="big"), "the area of annotation 3 is not a number, but big"),
        (lambda c: c["annotations"][2].update(area=None), "the area of annotation 3 is not a number, but None"),
        (lambda c: c["images"][1].pop("width"), "has no 'width'"),
        (lambda c: c["images"][1].update(height="64"), "image heights are whole numbers, found '64'"),
        (lambda c: c["images"].append(c["images"][0]), "stands for two image entries"),
        (lambda c: c["categories"].append(c["categories"][0]), "the id 1 stands for two category entries"),
        (lambda c: c.update(images=[], annotations=[]), "lists no image"),
        (lambda c: c.update(annotations=[]), "has no box to train on"),
    ],
)
def test_what_is_wrong_in_the_annotations_is_named(root, change, message):
    edit(root, change)
    assert message in sentence(root)


def test_categories_of_evaluation_must_be_those_of_training(root):
    edit(root, lambda content: content["categories"][1].update(name="dog"), VAL)
    assert "category 3 is 'dog', but is 'car' in the training annotations" in sentence(root)


def test_images_that_cannot_be_used_are_named_when_they_are_read(root):
    made = data(root, augment="none", drop_last=False)
    paths = [Path(made._scenes["train"].path(k)) for k in (3, 4)]
    Image.fromarray(np.zeros((10, 10, 3), np.uint8)).save(paths[0])
    with pytest.raises(UserError, match=r"is 10 x 10 pixels, but .*instances_train2017\.json says"):
        list(made.train_dataloader())
    paths[0].write_bytes(b"no image")
    with pytest.raises(UserError, match="cannot be read"):
        list(made.train_dataloader())
    paths[0].unlink()
    with pytest.raises(UserError, match="does not exist"):
        list(made.train_dataloader())


def test_a_wrong_root_is_named(root, tmp_path):
    with pytest.raises(UserError, match=r"data\.root is not set"):
        CocoDetection(**SMALL).setup()
    assert "is not a folder" in sentence(tmp_path / "nowhere")
    for image in (root / "train2017").iterdir():
        image.unlink()
    assert "the first in" in sentence(root)


def test_boxes_of_negative_width_are_counted_and_left_out(original, root):
    assert data(original).remarks() == []

    def mirror(content):
        for entry in content["annotations"][:2]:
            x, y, w, h = entry["bbox"]
            entry["bbox"] = [x + w, y, -w, h]

    edit(root, mirror)
    made, whole = data(root), data(original)
    assert made.remarks() == [f"{root / TRAIN}: 2 boxes are of negative width or height and left out"]
    assert len(made._scenes["train"].boxes) == len(whole._scenes["train"].boxes) - 2
    edit(root, mirror, VAL)
    truths = [label["truth"]["boxes"] for batch in data(root).val_dataloader() for label in batch["labels"]]
    assert sum(map(len, truths)) == len(whole._scenes["val"].boxes) - 2


def test_evaluation_on_the_training_images_is_said(original):
    assert data(original, evaluate_on="train").remarks() == [
        "results are those on the training images (data.evaluate_on: train)"
    ]


@pytest.mark.parametrize("path", ["../../secret.jpg", "/secret.jpg"])
def test_an_image_outside_the_root_is_refused_and_named(root, path):
    edit(root, lambda content: content["images"][2].update(file_name=path))
    number = read(root)["images"][2]["id"]
    with pytest.raises(UserError, match=rf"instances_train2017\.json, image {number}, names {path}, which is outside"):
        data(root)


def test_images_may_be_in_another_folder_of_the_root_and_their_folder_anywhere(root, tmp_path):
    edit(root, lambda content: content["images"][2].update(file_name="../val2017/other.jpg"))
    data(root)
    moved = shutil.move(root / "val2017", tmp_path / "elsewhere")
    edit(root, lambda c: [i.update(file_name=f"../elsewhere/{i['file_name']}") for i in c["images"]], VAL)
    data(root, val_images=str(moved))
