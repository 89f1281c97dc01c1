"""Parts that are cut from a data set: what is evaluated on without a val folder, and what chooses a checkpoint."""

import shutil

import numpy as np
import pytest

from batchformer.data import CocoDetection, DetectionFolder, ImageFolders, ListFiles
from batchformer.data.sets import write_miniature
from batchformer.data.sets.classification import stratified_part
from batchformer.errors import UserError

SMALL = {"image_size": 24, "batch_size": 4, "workers": 0}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {name: write_miniature(name, folder / name) for name in ("folder", "imagenet-lt", "coco", "voc")}


@pytest.fixture
def copied(originals, tmp_path):
    return lambda name: shutil.copytree(originals[name], tmp_path / name)


def paths(data, name):
    return [file.path for file in data.image_files()[name]]


class TestStratified:
    def test_every_class_gives_its_fraction_and_keeps_one(self):
        labels = np.repeat([0, 1, 2, 3], [50, 10, 2, 1])
        names = [str(k) for k in range(len(labels))]
        inside = stratified_part(names, labels, 0.2, 0, "val", at_least=1)
        assert np.bincount(labels[inside], minlength=4).tolist() == [10, 2, 1, 0]
        assert np.bincount(labels[stratified_part(names, labels, 0.2, 0, "val")], minlength=4).tolist() == [10, 2, 0, 0]

    def test_it_depends_on_seed_purpose_and_names_alone(self):
        labels, names = np.zeros(100, dtype=int), [str(k) for k in range(100)]
        first = stratified_part(names, labels, 0.3, 0, "val")
        assert (first == stratified_part(names, labels, 0.3, 0, "val")).all()
        for other in (stratified_part(names, labels, 0.3, 1, "val"), stratified_part(names, labels, 0.3, 0, "holdout")):
            assert (first != other).any()
        order = np.random.default_rng(0).permutation(100)
        assert (stratified_part([names[k] for k in order], labels, 0.3, 0, "val") == first[order]).all()

    def test_most_stay_where_they_are_when_one_is_added(self):
        labels, names = np.zeros(100, dtype=int), [str(k) for k in range(100)]
        before = stratified_part(names, labels, 0.3, 0, "val")
        after = stratified_part([*names, "new"], np.zeros(101, dtype=int), 0.3, 0, "val")[:100]
        assert (before != after).sum() <= 1


class TestValFraction:
    def test_a_folder_without_val_is_divided_the_same_way_every_time(self, copied):
        root = copied("folder")
        with pytest.raises(UserError, match=r"data\.val_fraction divides images without a val part"):
            ImageFolders(str(root), val_fraction=0.2, **SMALL).setup()
        shutil.rmtree(root / "val")
        with pytest.raises(UserError, match=r"--data\.val_fraction 0\.2"):
            ImageFolders(str(root), **SMALL).setup()
        one, two = (ImageFolders(str(root), val_fraction=0.2, seed=seed, **SMALL) for seed in (0, 7))
        assert paths(one, "val") == paths(two, "val")
        assert not set(paths(one, "val")) & set(paths(one, "train"))
        assert one.class_counts == [128, 64, 32, 16, 8, 4, 2, 1]
        assert np.bincount(one.set_labels["val"]).tolist() == [32, 16, 8, 4, 2, 1, 1, 1]
        other = ImageFolders(str(root), val_fraction=0.2, split_seed=1, **SMALL)
        assert paths(other, "val") != paths(one, "val")

    def test_class_folders_alone_are_enough(self, copied):
        root = copied("folder") / "train"
        data = ImageFolders(str(root), val_fraction=0.5, **SMALL)
        data.setup()
        assert data.class_names == [f"class_{c}" for c in range(8)]
        assert (data.train_images, data.test_images) == (160, 160)

    @pytest.mark.parametrize("fraction", [-0.1, 1.0])
    def test_fractions_have_their_range(self, fraction):
        with pytest.raises(UserError, match=r"data\.val_fraction is a part"):
            ImageFolders("data", val_fraction=fraction)


class TestHoldout:
    def test_it_is_cut_from_the_training_images_and_evaluated_by_itself(self, copied):
        root = copied("folder")
        whole, data = ImageFolders(str(root), **SMALL), ImageFolders(str(root), holdout=0.1, **SMALL)
        assert sorted(paths(data, "train") + paths(data, "holdout")) == paths(whole, "train")
        assert paths(data, "val") == paths(whole, "val")
        assert (data.evaluation_sets, data.holdout_set) == (("val", "holdout"), "holdout")
        assert (data.test_images, whole.holdout_set) == (24, None)
        assert [len(loader) for loader in data.val_dataloader()] == [1, 1]
        assert np.bincount(data.set_labels["holdout"], minlength=8).tolist() == [16, 8, 4, 2, 1, 0, 0, 0]

    def test_lists_and_boxes_have_it_too(self, originals):
        names = {"train_list": "ImageNet_LT_train.txt", "val_list": "ImageNet_LT_test.txt"}
        data = ListFiles(str(originals["imagenet-lt"]), holdout=0.1, **names, **SMALL)
        assert len(paths(data, "holdout")) == 31
        boxes = CocoDetection(str(originals["coco"]), holdout=0.25, **SMALL)
        boxes.setup()
        assert boxes.train_images + len(boxes._scenes["holdout"]) == 24
        assert 4 <= len(boxes._scenes["holdout"]) <= 8
        val, held = boxes.val_dataloader()
        seen = [int(label["image_id"]) for batch in held for label in batch["labels"]]
        assert sorted(seen) == sorted(boxes._scenes["holdout"].ids.tolist())
        assert len([label for batch in val for label in batch["labels"]]) == 8


class TestDetectionFolder:
    @pytest.mark.parametrize(
        ("files", "images"),
        [
            ("annotations/{}.json", "{}"),
            ("annotations/instances_{}2017.json", "{}2017"),
            ("{}.json", "images/{}"),
            ("{}/_annotations.coco.json", "{}"),
        ],
    )
    def test_cocos_files_are_found_where_people_put_them(self, copied, originals, files, images):
        root = copied("coco")
        for part in ("train", "val"):
            for old, new in ((f"{part}2017", images), (f"annotations/instances_{part}2017.json", files)):
                target = root / new.format(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                (root / old).rename(target)
        data = DetectionFolder(str(root), **SMALL)
        data.setup()
        plain = CocoDetection(str(originals["coco"]), **SMALL)
        plain.setup()
        assert data.fingerprint == plain.fingerprint
        assert (data.train_images, data.test_images, data.class_names) == (24, 8, plain.class_names)

    def test_vocs_folders_with_and_without_lists(self, copied):
        root = copied("voc")
        data = DetectionFolder(str(root), **SMALL)
        data.setup()
        assert (data.train_images, data.test_images) == (24, 8)
        shutil.rmtree(root / "ImageSets")
        with pytest.raises(UserError, match=r"--data\.val_fraction 0\.2"):
            DetectionFolder(str(root), **SMALL).setup()
        data = DetectionFolder(str(root), val_fraction=0.25, **SMALL)
        data.setup()
        assert data.train_images + data.test_images == 32
        assert 4 <= data.test_images <= 12
        assert data.annotation_problems() == []

    def test_a_part_to_evaluate_on_is_needed_once(self, copied):
        root = copied("coco")
        with pytest.raises(UserError, match="has one"):
            DetectionFolder(str(root), val_fraction=0.2, **SMALL).setup()
        (root / "annotations/instances_val2017.json").unlink()
        with pytest.raises(UserError, match=r"annotations/val\.json is not there"):
            DetectionFolder(str(root), **SMALL).setup()
        one, two = (DetectionFolder(str(root), val_fraction=0.2, seed=seed, **SMALL) for seed in (0, 1))
        assert paths(one, "val") == paths(two, "val")
        assert not set(paths(one, "val")) & set(paths(one, "train"))
        (root / "annotations/instances_train2017.json").unlink()
        with pytest.raises(UserError, match="has neither"):
            DetectionFolder(str(root), **SMALL).setup()
