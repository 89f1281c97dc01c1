"""VOC's folders: what is read, and what is said about what is wrong in them."""

import shutil
from xml.etree import ElementTree

import pytest

from batchformer.data import VocDetection
from batchformer.data.sets import write_miniature
from batchformer.data.sets.voc import VOC_CLASSES
from batchformer.errors import UserError

SMALL = {"image_size": 48, "batch_size": 4, "workers": 0}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_miniature("voc", tmp_path_factory.mktemp("voc") / "data")


@pytest.fixture
def root(original, tmp_path):
    return shutil.copytree(original, tmp_path / "voc")


def data(root, **options):
    made = VocDetection(str(root), **SMALL | options)
    made.setup()
    return made


def sentence(root, **options):
    with pytest.raises(UserError) as caught:
        data(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_boxes_are_those_of_torchvision_counted_from_zero(original, tmp_path):
    from torchvision.datasets import VOCDetection

    (tmp_path / "VOCdevkit").mkdir()
    (tmp_path / "VOCdevkit" / "VOC2007").symlink_to(original)
    reference = VOCDetection(tmp_path, year="2007", image_set="trainval")
    scenes = data(original)._scenes["train"]
    assert len(scenes) == len(reference) == 24
    for k, (image, tree) in enumerate(reference):
        assert scenes.sizes[k].tolist() == [image.height, image.width]
        objects = tree["annotation"].get("object", [])
        for entry, label, box in zip(objects, scenes.labels[scenes.rows(k)], scenes.boxes[scenes.rows(k)], strict=True):
            corners = {name: float(value) for name, value in entry["bndbox"].items()}
            assert VOC_CLASSES[label] == entry["name"]
            assert box.tolist() == [corners["xmin"] - 1, corners["ymin"] - 1, corners["xmax"], corners["ymax"]]


def test_difficult_objects_are_trained_on_when_asked_for_and_never_punished(original):
    without, with_them = data(original), data(original, difficult=True)
    assert with_them.train_boxes == without.train_boxes + 1
    for made in (without, with_them):
        truths = [label["truth"] for batch in made.val_dataloader() for label in batch["labels"]]
        assert sum(truth["ignore"].sum() for truth in truths) == 1
        assert not any(truth["iscrowd"].any() for truth in truths)


def test_lists_of_several_years_are_put_together(original, tmp_path):
    for year in ("VOC2007", "VOC2012"):
        shutil.copytree(original, tmp_path / year)
    made = data(tmp_path, train=["VOC2007/trainval", "VOC2012/trainval"], val="VOC2007/test")
    assert (made.train_images, made.test_images) == (48, 8)
    assert next(iter(made.train_dataloader()))["pixel_values"].shape[0] == 4


def rename_class(root, new):
    for path in (root / "Annotations").iterdir():
        path.write_text(path.read_text().replace("<name>cat<", f"<name>{new}<"))


def test_own_classes_are_those_that_occur_or_those_named(root):
    assert data(root).class_names == list(VOC_CLASSES)
    rename_class(root, "pallet")
    assert data(root).class_names == ["bottle", "car", "dog", "pallet", "person"]
    names = ["pallet", "person", "car", "dog", "bottle", "crate"]
    assert data(root, class_names=names).class_names == names
    assert "names the class 'bottle', which is not one of the 2 trained on" in sentence(
        root, class_names=["person", "x"]
    )


@pytest.mark.parametrize("part", ["Annotations", "JPEGImages", "ImageSets/Main/test.txt", "Annotations/000003.xml"])
def test_a_missing_part_is_named(root, part):
    place = root / part
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert str(place) in sentence(root)


def test_a_damaged_annotation_is_named(root):
    path = root / "Annotations" / "000002.xml"
    whole = path.read_text()
    path.write_text(whole[:40])
    assert f"annotation {path} cannot be read" in sentence(root)
    tree = ElementTree.fromstring(whole)
    tree.find("object").remove(tree.find("object/bndbox"))
    path.write_bytes(ElementTree.tostring(tree))
    assert "no bndbox/xmin in <object>" in sentence(root)
    path.write_text(whole.replace("<xmax>", "<xmax>9", 1))
    assert "000002.xml reaches from" in sentence(root)


def test_an_empty_list_is_named(root):
    (root / "ImageSets" / "Main" / "trainval.txt").write_text("\n")
    assert "trainval.txt lists no image" in sentence(root)


def test_boxes_of_negative_width_are_counted_and_left_out(root):
    path = root / "Annotations" / "000002.xml"
    tree = ElementTree.fromstring(path.read_text())
    low, high = tree.find("object/bndbox/xmin"), tree.find("object/bndbox/xmax")
    low.text, high.text = high.text, low.text
    before = data(root).train_boxes
    path.write_bytes(ElementTree.tostring(tree))
    made = data(root)
    assert made.train_boxes == before - 1
    assert [told.split(": ")[1] for told in made.remarks()] == ["1 box is of negative width or height and left out"]


@pytest.mark.parametrize("stem", ["../../secret", "/secret"])
def test_an_image_outside_the_root_is_refused_and_its_line_named(root, stem):
    listing = root / "ImageSets/Main/trainval.txt"
    listing.write_text(f"{listing.read_text()}\n{stem}\n")
    assert f"{listing}, line 26, names {stem}, which is outside of {root}" in sentence(root)
