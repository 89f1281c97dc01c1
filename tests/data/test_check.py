"""The check of a data set: every fault that is put in is found, nothing else is, and it can be left out."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from batchformer.data import CocoDetection, DomainFolders, ImageFolders, ListFiles, PairFolders, VocDetection
from batchformer.data.check import check_data
from batchformer.data.images import inspect_image
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError

SMALL = {"image_size": 24, "batch_size": 8, "workers": 0}
TRAIN = "annotations/instances_train2017.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    names = ("folder", "imagenet-lt", "coco", "voc", "folder-domains")
    return {name: write_miniature(name, folder / name) for name in names}


@pytest.fixture
def copied(originals, tmp_path):
    return lambda name: shutil.copytree(originals[name], tmp_path / name)


def written(check, tmp_path):
    """The file of a check, as the command writes it."""
    file = tmp_path / "data-check.json"
    file.write_text(json.dumps(check.as_dict()))
    return str(file)


def errors(check):
    return {kind: found for kind, found in check.findings.items() if kind not in ("few", "empty", "copies", "passed")}


def test_pairs_that_are_unseen_on_purpose_are_not_called_rare(tmp_path):
    data = PairFolders(str(write_miniature("folder-pairs", tmp_path / "pairs")), **SMALL)
    found = [line.rpartition(": ")[0] for line in check_data(data).findings["few"]]
    info = data.info
    assert 0 < len(found) < len(info.classes)
    assert sorted(found) == sorted(name for name, seen in zip(info.classes, info["seen"], strict=True) if seen)


class TestPictures:
    def test_equal_pixels_are_equal_content_in_any_lossless_file(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
        for name in ("a.png", "b.bmp", "c.tif"):
            Image.fromarray(pixels).save(tmp_path / name)
        pixels[4, 4, 1] ^= 1
        Image.fromarray(pixels).save(tmp_path / "other.png")
        facts = {file.name: inspect_image(file) for file in tmp_path.iterdir()}
        assert facts["a.png"].content == facts["b.bmp"].content == facts["c.tif"].content
        assert facts["other.png"].content != facts["a.png"].content
        assert facts["a.png"][:4] == (7, 9, "RGB", False)

    def test_the_palette_is_part_of_the_content(self, tmp_path):
        for name, colour in (("a.png", 10), ("b.png", 20)):
            image = Image.new("P", (5, 5), 1)
            image.putpalette([0, 0, 0, colour, 0, 0])
            image.save(tmp_path / name)
        assert inspect_image(tmp_path / "a.png").content != inspect_image(tmp_path / "b.png").content

    def test_what_training_refuses_is_refused(self, tmp_path):
        Image.fromarray(np.full((4, 4), -1.0, dtype=np.float32)).save(tmp_path / "negative.tif")
        with pytest.raises(UserError, match="negative"):
            inspect_image(tmp_path / "negative.tif")


class TestFolders:
    def test_a_sound_folder_has_no_error(self, copied):
        check = check_data(ImageFolders(str(copied("folder")), **SMALL))
        assert (check.errors, errors(check)) == (0, {})
        assert check.sets == {"train": 320, "val": 24}
        assert (check.modes, check.widths, check.heights) == ({"RGB": 344}, (48, 48, 48), (40, 40, 40))
        assert check.findings["few"] == ["class_7: 2", "class_6: 3", "class_5: 5", "class_4: 10"]
        assert not check.skip

    def test_every_fault_is_found_and_left_out(self, copied, tmp_path):
        root = copied("folder")
        whole = (root / "train/class_0/0000.jpg").read_bytes()
        (root / "train/class_0/0000.jpg").write_bytes(whole[: len(whole) // 2])
        (root / "val/class_1/broken.jpg").write_bytes(b"no image")
        shutil.copy(root / "val/class_2/0001.jpg", root / "train/class_2/leaked.jpg")
        Image.open(root / "train/class_3/0002.jpg").save(root / "train/class_0/same.png")  # other bytes, same pixels
        shutil.copy(root / "train/class_1/0007.jpg", root / "train/class_1/twice.jpg")
        (root / "train/class_1/notes.txt").write_text("")
        seen = []
        check = check_data(ImageFolders(str(root), **SMALL), lambda done, of: seen.append((done, of)))
        assert seen[-1] == (348, 348)
        assert [line.partition(":")[0] for line in check.findings["damaged"]] == [
            "train/class_0/0000.jpg", "val/class_1/broken.jpg"
        ]  # fmt: skip
        assert check.findings["leak"] == ["train/class_2/leaked.jpg and val/class_2/0001.jpg"]
        assert check.findings["classes"] == ["train/class_0/same.png, train/class_3/0002.jpg (class_0, class_3)"]
        assert check.findings["copies"] == ["train/class_1/0007.jpg, train/class_1/twice.jpg"]
        assert check.findings["passed"] == ["train/class_1/notes.txt"]
        assert check.errors == 4

        data = ImageFolders(str(root), skip_bad=written(check, tmp_path), **SMALL)
        data.setup()
        assert data.class_counts == [159, 81, 40, 19, 10, 5, 3, 2]
        assert data.test_images == 24
        left = {file.path for each in data.image_files().values() for file in each}
        assert "val/class_2/0001.jpg" in left
        assert not left & {"train/class_2/leaked.jpg", "train/class_0/same.png", "train/class_0/0000.jpg"}
        assert any("5 files are left out" in remark for remark in data.remarks())
        assert check_data(ImageFolders(str(root), skip_bad=None, **SMALL)).errors == 4

    def test_lists_and_domains_are_checked_and_skipped_too(self, copied, tmp_path):
        root = copied("imagenet-lt")
        (root / "train/n00000000/n00000000_3.JPEG").write_bytes(b"")
        lists = {"train_list": "ImageNet_LT_train.txt", "val_list": "ImageNet_LT_test.txt", **SMALL}
        check = check_data(ListFiles(str(root), **lists))
        assert check.skip.files == {"train/n00000000/n00000000_3.JPEG"}
        data = ListFiles(str(root), skip_bad=written(check, tmp_path), **lists)
        data.setup()
        assert data.class_counts[0] == 159

        root = copied("folder-domains")
        (root / "noon/dog/004.jpg").write_bytes(b"")
        options = {"image_size": 24, "batch_size": 4, "workers": 0}
        check = check_data(DomainFolders(str(root), **options))
        assert check.skip.files == {"noon/dog/004.jpg"}
        data = DomainFolders(str(root), target="evening", skip_bad=written(check, tmp_path), **options)
        data.setup()
        assert sum(data._counts["train"] + data._counts["source"]) == 29
        assert len(next(iter(data.train_dataloader()))["labels"]) == 4

    def test_a_file_about_other_data_is_refused(self, copied, tmp_path):
        check = check_data(ImageFolders(str(copied("folder")), **SMALL))
        other = shutil.copytree(tmp_path / "folder", tmp_path / "other")
        with pytest.raises(UserError, match=r"is about .*folder, not about"):
            ImageFolders(str(other), skip_bad=written(check, tmp_path), **SMALL).setup()
        shutil.rmtree(tmp_path / "folder")  # moved
        ImageFolders(str(other), skip_bad=written(check, tmp_path), **SMALL).setup()
        (tmp_path / "odd.json").write_text('{"skip": []}')
        with pytest.raises(UserError, match="is not what a check wrote"):
            ImageFolders(str(other), skip_bad=str(tmp_path / "odd.json"), **SMALL).setup()


class TestBoxes:
    def test_every_wrong_annotation_of_a_coco_file_is_found_and_left_out(self, copied, tmp_path):
        root = copied("coco")
        assert check_data(CocoDetection(str(root), **SMALL)).errors == 0
        content = json.loads((root / TRAIN).read_text())
        entries = content["annotations"]
        entries[0]["category_id"] = 2
        entries[1]["bbox"][2] = 0
        entries[2]["bbox"][3] = -4
        entries[4]["bbox"][0] = 500
        entries[5]["image_id"] = 1
        entries[6]["bbox"] = [1, 2, 3]
        del entries[7]["bbox"]
        entries.append({**entries[8], "id": 900})
        entries.append({**entries[9], "bbox": [1, 1, 9, 9]})
        before = len(entries)
        (root / TRAIN).write_text(json.dumps(content))
        with pytest.raises(UserError):
            CocoDetection(str(root), **SMALL).setup()

        check = check_data(CocoDetection(str(root), **SMALL))
        told = "\n".join(check.findings["annotation"])
        reasons = ("category 2, which", "no width or no height (0 x", "negative width or height", "out of its image",
                   "image 1, which", "is not [x, y, width, height]", "it has no 'bbox'",
                   "annotation 900: it is a copy", "another annotation has the same id")  # fmt: skip
        for reason in reasons:
            assert told.count(reason) == 1, reason
        assert check.errors == 9
        file = written(check, tmp_path)
        data = CocoDetection(str(root), skip_bad=file, **SMALL)
        data.setup()
        assert len(data._scenes["train"].labels) == before - 8
        assert check_data(CocoDetection(str(root), **SMALL)).findings["empty"][0].startswith("train: ")

        (root / TRAIN).write_text(json.dumps(content) + " ")
        with pytest.raises(UserError, match="is not the file that was checked"):
            CocoDetection(str(root), skip_bad=file, **SMALL).setup()

    def test_an_image_of_another_size_than_annotated_is_left_out(self, copied, tmp_path):
        root = copied("coco")
        image = sorted((root / "train2017").iterdir())[5]
        Image.open(image).rotate(90, expand=True).save(image)
        check = check_data(CocoDetection(str(root), **SMALL))
        assert [line.partition(":")[0] for line in check.findings["size"]] == [f"train2017/{image.name}"]
        data = CocoDetection(str(root), skip_bad=written(check, tmp_path), **SMALL)
        data.setup()
        assert data.train_images == 23

    def test_wrong_objects_and_files_of_voc_are_found_and_left_out(self, copied, tmp_path):
        root = copied("voc")
        assert check_data(VocDetection(str(root), **SMALL)).errors == 0
        files = [f for f in sorted((root / "Annotations").iterdir()) if f.read_text().count("<object>") > 1]
        for file, old, new in ((files[0], "<xmin>", "<xmin>9"), (files[1], "</ymax>", "x</ymax>")):
            file.write_text(file.read_text().replace(old, new, 1))
        files[2].write_text("<annotation>")
        last = files[-1]  # an image to evaluate on
        name = last.read_text().partition("<name>")[2].partition("</name>")[0]
        last.write_text(last.read_text().replace(f"<name>{name}</name>", "<name>unicorn</name>", 1))
        check = check_data(VocDetection(str(root), **SMALL))
        told = check.findings["annotation"]
        assert len(told) == 4, told
        assert [line.partition(":")[0] for line in told] == [f"Annotations/{f.name}" for f in (*files[:3], last)]
        assert "not one of those trained on" in told[-1]
        data = VocDetection(str(root), skip_bad=written(check, tmp_path), **SMALL)
        data.setup()
        assert data.train_images == 23
        assert len(data.evaluation_loader("val")) > 0
