"""The command that makes features of a user's images, from images to a training."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from batchformer.cli import _command
from batchformer.data import AttributeFiles
from batchformer.data.images import open_image
from batchformer.data.sets.miniature import save_picture
from batchformer.errors import UserError

CLASSES = ["auk", "crow", "dove", "finch", "gull"]


@pytest.fixture(scope="module")
def command():
    return _command("features")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    network, file = timm.create_model("test_resnet"), tmp_path_factory.mktemp("weights") / "net.safetensors"
    save_file(network.state_dict(), file)
    return file


@pytest.fixture
def birds(tmp_path):
    for label, name in enumerate(CLASSES):
        for number in range(5):
            save_picture(tmp_path / "birds" / name / f"{number}.jpg", label, number)
    rows = [f"{name},{label},{label % 2}" for label, name in enumerate(CLASSES)]
    (tmp_path / "attributes.csv").write_text("\n".join(["class,size,black", *rows]) + "\n")
    return tmp_path / "birds"


def words(birds, weights, *more):
    return [str(birds), "--attributes", str(birds.parent / "attributes.csv"), "--backbone", "test_resnet",
            "--weights", str(weights), *more]  # fmt: skip


def test_features_are_those_of_the_network_and_a_task_trains_on_the_file(command, birds, weights, capsys):
    (birds / "crow" / "3.jpg").write_bytes(b"no image")
    (birds / "crow" / "notes.txt").write_text("")
    assert command.run(words(birds, weights, "--unseen", "2", "--batch-size", "4")) == 0
    said = capsys.readouterr().out
    assert "left out: image" in said
    assert "3.jpg cannot be read" in said
    assert "1 file skipped: 1 .txt" in said
    data = AttributeFiles(str(birds), batch_size=4)
    data.setup()
    assert data.class_names == CLASSES
    assert sum(data.seen) == 3
    content = np.load(birds / "features.npz")
    assert len(content["features"]) == 24
    assert [len(content[part]) for part in ("trainval_loc", "test_seen_loc")] in ([12, 3], [11, 3])
    network = timm.create_model("test_resnet", num_classes=0).eval()
    network.load_state_dict(torch.load(_as_pth(weights), weights_only=True), strict=False)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network), is_training=False)
    for position in (0, 17):
        image = transform(open_image(birds / str(content["files"][position])))
        with torch.no_grad():
            wanted = network(image[None])[0]
        torch.testing.assert_close(torch.from_numpy(content["features"][position]), wanted, rtol=1e-4, atol=1e-5)
    assert content["labels"][17] == CLASSES.index(str(content["files"][17]).split("/")[0])


def _as_pth(weights):
    from safetensors.torch import load_file

    file = weights.with_suffix(".pth")
    torch.save(load_file(weights), file)
    return file


def test_unseen_classes_are_drawn_by_the_seed_or_named(command, birds, weights, tmp_path):
    choose = command.choose_unseen
    assert choose("2", CLASSES, 0) == choose("2", CLASSES, 0)
    assert len({tuple(choose("2", CLASSES, seed)) for seed in range(20)}) > 3
    (tmp_path / "unseen.txt").write_text("gull\n\ncrow\n")
    out = tmp_path / "out" / "features.npz"
    assert command.run(words(birds, weights, "--unseen", str(tmp_path / "unseen.txt"), "--out", str(out))) == 0
    content = np.load(out)
    labels = content["labels"]
    assert {*labels[content["test_unseen_loc"]].tolist()} == {1, 4}
    assert {*labels[content["trainval_loc"]].tolist()} == {0, 2, 3}
    assert command.run(words(birds, weights, "--unseen", "1", "--out", str(out))) == 0  # its own file is replaced


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--unseen", "4"], "--unseen 4 leaves 1 of 5 classes to train on"),
        (["--unseen", "0"], "at least two must be seen and one unseen"),
        (["--unseen", "nobody.txt"], "there is no file nobody.txt"),
        (["--unseen", "1", "--test-part", "1"], "--test-part above 0 and below 1"),
        (["--unseen", "1", "--backbone", "resnet1001"], "resnet1001"),
        (["--unseen", "1", "--weights", "nowhere.pth"], "there is no file nowhere.pth"),
        (["--unseen", "1", "--attributes", "nowhere.csv"], "nowhere.csv cannot be read as CSV"),
        ([], "required: --unseen"),
        (["--unseen", "1", "--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_wrong_calls_are_refused_in_a_sentence_and_write_nothing(command, birds, weights, more, sentence):
    with pytest.raises(UserError, match=sentence):
        command.run(words(birds, weights, *more))
    assert not (birds / "features.npz").exists()


def test_what_cannot_be_used_is_refused(command, birds, weights, tmp_path):
    (tmp_path / "damaged.pth").write_text("no weights")
    with pytest.raises(UserError, match="give a file of them, --weights FILE"):
        command.run(words(birds, tmp_path / "damaged.pth", "--unseen", "1"))
    (birds / "features.npz").write_text("mine")
    with pytest.raises(UserError, match="was not written by this command"):
        command.run(words(birds, weights, "--unseen", "1"))
    (birds / "features.npz").unlink()
    (birds / "heron").mkdir()
    with pytest.raises(UserError, match="class heron has no attributes"):
        command.run(words(birds, weights, "--unseen", "1"))
    (birds / "heron").rmdir()
    with pytest.raises(UserError, match="is not a folder"):
        command.run(words(birds / "nowhere", weights, "--unseen", "1"))
    for number in range(1, 5):
        (birds / "dove" / f"{number}.jpg").write_bytes(b"no image")
    (birds.parent / "unseen.txt").write_text("auk\n")
    with pytest.raises(UserError, match="class dove has 1 readable images"):
        command.run(words(birds, weights, "--unseen", str(birds.parent / "unseen.txt")))
