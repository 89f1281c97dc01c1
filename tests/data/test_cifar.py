"""CIFAR from the official files: which images are taken, and what is said about files that are not right."""

import pickle

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from batchformer.data import CIFAR10LT, CIFAR100LT
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.data.sets import write_miniature
from batchformer.data.sets.classification import tail_counts
from batchformer.errors import UserError


@pytest.fixture(scope="module")
def root10(tmp_path_factory):
    return write_miniature("cifar10", tmp_path_factory.mktemp("data") / "cifar10")


@pytest.fixture
def tiny100(tmp_path):
    """A complete miniature: every class with six images, each image telling its place in the file."""
    labels = [c for _ in range(6) for c in range(100)]
    rows = np.zeros((600, 3072), np.uint8)
    rows[:, 0], rows[:, 1] = np.arange(600) // 256, np.arange(600) % 256
    base = tmp_path / "cifar-100-python"
    base.mkdir()
    for name in ("train", "test"):
        (base / name).write_bytes(pickle.dumps({"data": rows, "fine_labels": labels}, protocol=2))
    (base / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"name{c}" for c in range(100)]}, protocol=2))
    return tmp_path


@pytest.mark.parametrize(("imbalance", "total", "groups"), [(100, 10847, (35, 35, 30)), (200, 9502, (30, 31, 39))])
def test_official_counts_are_the_papers(imbalance, total, groups):
    counts = tail_counts(100, 500, imbalance)
    assert sum(counts) == total
    many, few = sum(n > 100 for n in counts), sum(n < 20 for n in counts)
    assert (many, 100 - many - few, few) == groups


def test_the_first_images_of_each_class_in_file_order_are_taken(tiny100):
    data = CIFAR100LT(str(tiny100), imbalance=6, batch_size=8)
    data.setup()
    assert data.class_counts == tail_counts(100, 6, 6)
    train = data._splits["train"]
    places = train.images[:, 0, 0, 0].astype(int) * 256 + train.images[:, 0, 0, 1]
    for c, count in enumerate(data.class_counts):
        assert places[train.labels == c].tolist() == [c + 100 * i for i in range(count)]
    assert data.class_names[7] == "name7"
    assert data.test_images == 600


def test_torchvision_reads_the_same_test_set(root10, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)  # a miniature has other sums
    reference = torchvision.datasets.CIFAR10(root10, train=False)
    data = CIFAR10LT(str(root10))
    data.setup()
    assert np.array_equal(data._splits["val"].images.transpose(0, 2, 3, 1), reference.data)
    assert data._splits["val"].labels.tolist() == reference.targets
    assert data.class_names == reference.classes


def test_five_batches_are_one_training_set(root10):
    data = CIFAR10LT(str(root10), batch_size=64)
    data.setup()
    assert data.class_counts == tail_counts(10, 300, 100)
    images, labels = images_and_labels(next(iter(data.train_dataloader())))
    assert images.shape == (64, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64


def test_fingerprint_follows_what_is_trained_on(root10):
    one, same, other = CIFAR10LT(str(root10)), CIFAR10LT(str(root10), seed=3), CIFAR10LT(str(root10), imbalance=150)
    for data in (one, same, other):
        data.setup()
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_class_with_too_few_images_is_named(tiny100):
    path = tiny100 / "cifar-100-python" / "train"
    entry = pickle.loads(path.read_bytes())
    keep = [i for i, c in enumerate(entry["fine_labels"]) if c != 3 or i < 100]
    entry = {"data": entry["data"][keep], "fine_labels": [entry["fine_labels"][i] for i in keep]}
    path.write_bytes(pickle.dumps(entry, protocol=2))
    with pytest.raises(UserError, match=r"class 3 \(name3\) needs 5 .* has 1"):
        CIFAR100LT(str(tiny100), imbalance=6).setup()


def test_an_imbalance_that_empties_a_class_is_refused(tiny100):
    with pytest.raises(UserError, match=r"imbalance 100 leaves class \d+ without"):
        CIFAR100LT(str(tiny100), imbalance=100).setup()
    with pytest.raises(UserError, match="imbalance must be 1"):
        CIFAR100LT(str(tiny100), imbalance=0.5).setup()


def test_missing_files_say_where_and_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"looked for in .*cifar-100-python.*data\.download"):
        CIFAR100LT(str(tmp_path)).setup()
    with pytest.raises(UserError, match=r"data\.root is not set"):
        CIFAR100LT().setup()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "labels", "planes", "code"])
def test_a_damaged_file_is_named(tiny100, damage, tmp_path):
    path = tiny100 / "cifar-100-python" / "train"
    whole = path.read_bytes()
    entry = pickle.loads(whole)
    content = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"<html>not found</html>",
        "labels": pickle.dumps({**entry, "fine_labels": entry["fine_labels"][:-1]}),
        "planes": pickle.dumps({**entry, "data": entry["data"][:, :100]}),
        "code": b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.",
    }[damage]
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cifar-100-python.train.* damaged.*again\.") as caught:
        CIFAR100LT(str(tiny100), imbalance=6).setup()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_predict_transform_is_what_evaluation_sees(root10):
    data = CIFAR10LT(str(root10), batch_size=64)
    picture = Image.fromarray(_first_test_image(data))
    image = next(iter(data.val_dataloader()))["images"]
    torch.testing.assert_close(data.predict_transform(picture), image[0])
    assert data.predict_transform(picture.convert("L").resize((70, 50))).shape == (3, 32, 32)


def _first_test_image(data):
    data.setup()
    return np.ascontiguousarray(data._splits["val"].images[0].transpose(1, 2, 0))


def test_setup_twice_reads_once(tiny100):
    data = CIFAR100LT(str(tiny100), imbalance=6)
    data.setup()
    (tiny100 / "cifar-100-python" / "train").unlink()
    data.setup("fit")
    assert data.num_classes == 100
