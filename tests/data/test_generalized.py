"""Features and attributes: xlsa17's files and npz, what is refused, and that training never sees an unseen class."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from batchformer.data import AttributeFiles, DigitNumbers
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both miniatures, to be copied."""
    return {name: write_miniature(name, tmp_path_factory.mktemp(name) / "data") for name in ("features", "xlsa17")}


@pytest.fixture
def npz(tmp_path, made):
    return Path(shutil.copytree(made["features"], tmp_path / "npz")) / "features.npz"


@pytest.fixture
def mat(tmp_path, made):
    return Path(shutil.copytree(made["xlsa17"], tmp_path / "mat"))


def changed(file, **arrays):
    """The npz file with some arrays in place of its own; None removes one."""
    content = {**np.load(file), **arrays}
    np.savez(file, **{name: values for name, values in content.items() if values is not None})
    return file


def read(root, **options):
    data = AttributeFiles(str(root), batch_size=8, **options)
    data.setup()
    return data


def test_mat_and_npz_of_the_same_arrays_are_the_same_data(tmp_path, npz, mat):
    ways = [read(npz), read(npz.parent), read(mat / "CUB"), read(mat, dataset="CUB"), read(mat, dataset="FLO")]
    (tmp_path / "whole/xlsa17").mkdir(parents=True)
    mat.rename(tmp_path / "whole/xlsa17/data")
    ways.append(read(tmp_path / "whole", dataset="SUN"))
    assert len({data.fingerprint for data in ways}) == 1
    told = [data.declare() for data in ways]
    assert all(each == told[0] for each in told)
    assert told[0]["feature_dim"] == 16
    assert np.array(told[0]["attributes"]).shape == (11, 6)
    assert sum(told[0]["seen"]) == 8


def test_other_attributes_are_found_by_the_names_of_the_classes(tmp_path, npz):
    names, values = np.load(npz)["allclasses"], np.random.default_rng(0).random((11, 2), dtype=np.float32)
    order = np.random.default_rng(1).permutation(11)
    np.savez(npz.parent / "other.npz", att=values[order], allclasses=names[order])
    lines = ["class,long,red", *(f"{names[k]},{values[k, 0]},{values[k, 1]}" for k in order)]
    (npz.parent / "other.csv").write_text("\n".join(lines) + "\n")
    savemat(npz.parent / "other.mat", {"att": values.T})
    plain = read(npz)
    for file in ("other.npz", "other.csv", str(npz.parent / "other.mat")):
        data = read(npz, attributes=file)
        np.testing.assert_allclose(data.attributes, values, rtol=1e-6)
        assert data.fingerprint != plain.fingerprint
    unit = read(npz, attributes="other.npz", normalise_attributes=True)
    np.testing.assert_allclose(np.linalg.norm(unit.attributes, axis=1), 1, rtol=1e-6)


def test_sentences_of_cub_are_a_mat_file_beside_the_attributes(mat):
    assert read(mat, dataset="CUB", attributes="sent_splits.mat").attributes.shape == (11, 4)


def test_a_mat_file_without_names_has_numbered_classes(mat):
    file = mat / "FLO" / "att_splits.mat"
    content = {name: values for name, values in loadmat(file).items() if not name.startswith("__")}
    del content["allclasses_names"]
    savemat(file, content)
    data = read(mat, dataset="FLO")
    assert data.declare()["classes"][:2] == ["class 1", "class 2"]
    assert data.fingerprint == read(mat, dataset="CUB").fingerprint


@pytest.mark.parametrize("make", [lambda npz: read(npz), lambda npz: DigitNumbers()], ids=["files", "digits"])
def test_unseen_classes_are_not_in_the_training_set(npz, make):
    data = make(npz)
    data.setup()
    trained = {label for batch in data.train_dataloader() for label in batch["labels"].tolist()}
    whole = {label for batch in data.evaluation_loader("train") for label in batch["labels"].tolist()}
    tested = {label for batch in data.val_dataloader() for label in batch["labels"].tolist()}
    assert trained <= whole == {*np.flatnonzero(data.seen).tolist()}
    assert tested == {*range(data.num_classes)}
    assert [count > 0 for count in data.class_counts] == data.seen.tolist()


def test_features_of_unseen_classes_change_nothing_that_training_reads(npz):
    before = read(npz)
    content = np.load(npz)
    features = content["features"].copy()
    features[content["test_unseen_loc"]] *= 100
    after = read(changed(npz, features=features))
    assert after.fingerprint == before.fingerprint
    assert after.declare() == before.declare()  # the range of the features too
    assert not np.array_equal(after._splits["val"].images, before._splits["val"].images)


def test_settings_are_chosen_on_classes_held_out_of_the_training_set(npz):
    whole, data = read(npz), read(npz, held_out=3)
    assert (len(data.seen), sum(data.seen)) == (8, 5)
    train = whole._splits["train"]
    rows = {row.tobytes(): whole.class_names[label] for row, label in zip(train.images, train.labels, strict=True)}
    found = []
    for split in data._splits.values():
        for row, label in zip(split.images, split.labels, strict=True):
            assert rows[row.tobytes()] == data.class_names[label]  # no sample of the test set, the right class
            np.testing.assert_array_equal(
                data.attributes[label], whole.attributes[whole.class_names.index(data.class_names[label])]
            )
            found.append(row.tobytes())
    assert len(found) == len({*found}) == len(train.labels)
    assert read(npz, held_out=3).fingerprint == data.fingerprint
    with pytest.raises(UserError, match=r"data\.held_out 7 leaves less than two of the 8 seen classes"):
        read(npz, held_out=7)


def test_numbers_come_from_other_writers_in_the_test_and_every_digit_is_seen_on_either_side():
    data = DigitNumbers()
    data.setup()
    seen = np.flatnonzero(data.seen)
    assert len(seen) == 80
    assert {*(seen // 10).tolist()} == {*(seen % 10).tolist()} == {*range(10)}
    assert len(np.unique(data.attributes, axis=0)) == 100
    halves = [{half.tobytes() for half in split.images.reshape(-1, 64)} for split in data._splits.values()]
    assert not halves[0] & halves[1]


def spoil(**arrays):
    return lambda content: arrays


def with_nan(content):
    features = content["features"].copy()
    features[5, 3] = np.nan
    return {"features": features}


def nameless_attributes(content):
    attributes = content["att"].copy()
    attributes[4] = np.nan
    return {"att": attributes}


def overlapping(content):
    return {"test_seen_loc": np.r_[content["test_seen_loc"], content["trainval_loc"][:3]]}


def trained_and_unseen(content):
    moved = content["test_unseen_loc"][:2]
    return {"trainval_loc": np.r_[content["trainval_loc"], moved], "test_unseen_loc": content["test_unseen_loc"][2:]}


BAD = {
    "labels of another length": (lambda c: {"labels": c["labels"][:-3]}, "88 features and 85 labels"),
    "NaN in the features": (with_nan, "feature of sample 5 .* holds NaN"),
    "a class without attributes": (nameless_attributes, "class 005.class has no attributes"),
    "a label without attributes": (
        lambda c: {"att": c["att"][:-1], "allclasses": c["allclasses"][:-1]},
        "label 10 .* class without attributes",
    ),
    "fewer names than attributes": (lambda c: {"allclasses": c["allclasses"][:-1]}, "one row of attributes per class"),
    "a class twice": (lambda c: {"allclasses": np.repeat("x", 11)}, "names a class twice"),
    "parts that overlap": (overlapping, "trainval_loc and test_seen_loc .* share 3 samples"),
    "a class trained on and unseen": (trained_and_unseen, "class 009.class is in trainval_loc and in test_unseen_loc"),
    "a sample twice": (lambda c: {"test_seen_loc": np.repeat(c["test_seen_loc"], 2)}, "names a sample twice"),
    "a sample that is not there": (spoil(test_seen_loc=np.array([500])), "names sample 500"),
    "no unseen sample": (spoil(test_unseen_loc=np.array([], int)), "test_unseen_loc .* is empty"),
    "a seen class that is not trained on": (
        lambda c: {"trainval_loc": c["trainval_loc"][6:]},
        "class 001.class of test_seen_loc .* no training sample",
    ),
    "a seen class that is not tested": (
        lambda c: {"test_seen_loc": c["test_seen_loc"][2:]},
        "class 001.class of trainval_loc .* no sample to test on",
    ),
    "a class without any sample": (
        lambda c: {"att": np.r_[c["att"], c["att"][:1]], "allclasses": np.r_[c["allclasses"], ["x"]]},
        "class x .* no sample in any part",
    ),
    "no labels": (spoil(labels=None), "has no array labels"),
    "labels that are no numbers": (lambda c: {"labels": c["labels"] + 0.5}, "labels .* no whole numbers"),
    "features that are words": (lambda c: {"features": c["features"].astype(str)}, "features .* are no real numbers"),
    "attributes that are words": (lambda c: {"att": c["att"].astype(str)}, "attributes .* are no real numbers"),
    "features of the wrong shape": (lambda c: {"features": c["features"][None]}, "expected .samples, width."),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_on_is_refused_in_a_sentence(npz, name):
    change, sentence = BAD[name]
    changed(npz, **change(np.load(npz)))
    with pytest.raises(UserError, match=sentence):
        read(npz)


def test_files_that_cannot_be_read_are_named(tmp_path, npz, mat):
    mat = mat / "CUB"
    whole = (mat / "res101.mat").read_bytes()
    hdf = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n".rjust(400)
    (mat / "res101.mat").write_bytes(hdf)
    with pytest.raises(UserError, match=r"res101\.mat is a MATLAB file of version 7\.3 \(HDF5\).*-v7"):
        read(mat)
    (mat / "res101.mat").write_bytes(whole[:300])
    with pytest.raises(UserError, match=r"res101\.mat cannot be read as a MATLAB file"):
        read(mat)
    (mat / "res101.mat").write_bytes(whole)
    (mat / "att_splits.mat").unlink()
    with pytest.raises(UserError, match=r"no file .*att_splits\.mat"):
        read(mat)
    npz.write_bytes(npz.read_bytes()[:200])
    with pytest.raises(UserError, match=r"cannot be read as npz \(it is none, or cut off"):  # numpy says: a pickle
        read(npz)
    np.savez(npz, features=np.array([{}]))  # a pickle
    with pytest.raises(UserError, match="cannot be read as npz"):
        read(npz)
    with pytest.raises(UserError, match=r"neither res101\.mat nor an npz file"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"data\.root is not set"):
        AttributeFiles().setup()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("class,a\n001.class,1\n", "class 002.class has no attributes in .*other.csv. Did you mean 001.class"),
        ("class,a\n001.class,1,2\n", "class 001.class has 2 attributes, the header 1"),
        ("class,a\n001.class,big\n", "an attribute is no number"),
        ("", "cannot be read as CSV"),
    ],
)
def test_a_table_of_attributes_with_a_mistake_is_refused(npz, text, sentence):
    (npz.parent / "other.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read(npz, attributes="other.csv")


def test_two_files_of_features_in_a_folder_are_not_guessed_between(npz):
    (npz.parent / "more.npz").write_bytes(npz.read_bytes())
    with pytest.raises(UserError, match="several files of features"):
        read(npz.parent)


def test_the_miniature_of_xlsa17_has_the_layout_of_the_release(mat):
    folder = mat / "AWA2"
    features, split = loadmat(folder / "res101.mat"), loadmat(folder / "att_splits.mat")
    assert features["features"].shape == (16, 88)
    assert features["labels"].min() == 1
    assert split["att"].shape == (6, 11)
    assert split["trainval_loc"].min() == 1
    assert split["allclasses_names"][0, 0].tolist() == ["001.class"]


def test_a_mat_file_of_other_bytes_is_refused(mat):
    (mat / "CUB" / "res101.mat").write_bytes(pickle.dumps(print))
    with pytest.raises(UserError, match=r"res101\.mat cannot be read as a MATLAB file"):
        read(mat, dataset="CUB")
