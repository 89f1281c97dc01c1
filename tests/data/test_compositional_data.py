"""Data of pairs: what is trained on, splits from files, metadata and seeds, word vectors, features, and mistakes."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from batchformer.cli import main
from batchformer.data import DigitsStates, PairFolders
from batchformer.data.sets import write_miniature
from batchformer.data.sets.pair_splits import choose_unseen
from batchformer.errors import UserError

NAMES = ("folder-pairs", "mit-states", "ut-zappos", "cgqa", "plantvillage-czsl")
SPLIT = "compositional-split-natural"
SMALL = {"image_size": 12, "workers": 0, "batch_size": 8, "words": ["words.npz"]}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return {name: write_miniature(name, folder / name) for name in NAMES}


@pytest.fixture
def copied(roots, tmp_path):
    """A miniature to break."""
    return lambda name: Path(shutil.copytree(roots[name], tmp_path / name))


def pairs_of(data, name):
    """The names of the pairs of all images that a set gives out."""
    batches = list(data.make_loader(name, training=False))
    labels = torch.cat([batch["labels"] for batch in batches])
    attributes = [data.attributes[k] for batch in batches for k in batch["attributes"]]
    objects = [data.objects[k] for batch in batches for k in batch["objects"]]
    assert [data.pairs[k] for k in labels] == list(zip(attributes, objects, strict=True))
    return [data.pairs[k] for k in labels]


def fingerprints(data, name):
    images = torch.cat([batch["images"] for batch in data.make_loader(name, training=False)])
    return {image.numpy().tobytes() for image in images}


# who sees what


@pytest.mark.parametrize("name", [*NAMES, "digits-states"])
def test_unseen_pairs_never_reach_training_and_no_image_is_in_two_sets(name, roots):
    data = DigitsStates() if name == "digits-states" else PairFolders(str(roots[name]), **SMALL)
    info = data.info
    seen = {pair for pair, is_seen in zip(data.pairs, info.seen, strict=True) if is_seen}
    trained = set(pairs_of(data, "train"))
    assert trained == seen
    assert all((count > 0) == is_seen for count, is_seen in zip(info.class_counts, info.seen, strict=True))
    unseen = {each: set(pairs_of(data, each)) - seen for each in ("val", "test")}
    assert unseen["val"]
    assert unseen["test"]
    assert not unseen["val"] & unseen["test"]
    assert seen & set(pairs_of(data, "test"))
    for k in (0, 1):
        assert {pair[k] for pair in data.pairs} == {pair[k] for pair in trained}
    for _ in range(2):  # epochs
        for batch in data.train_dataloader():
            assert {data.pairs[label] for label in batch["labels"]} <= seen
    sets = [fingerprints(data, each) for each in ("train", "val", "test")]
    assert len(set.union(*sets)) == sum(map(len, sets))
    assert info.evaluated["test"] == [k for k, p in enumerate(data.pairs) if p in seen | unseen["test"]]
    assert info.word_vectors.shape[0] == len(info.attributes) + len(info.objects)


def test_metadata_pair_files_and_folders_alone_give_the_same_pairs(roots, copied):
    told = PairFolders(str(roots["mit-states"]), **SMALL)
    root = copied("mit-states")
    (root / f"metadata_{SPLIT}.t7").unlink()
    derived = PairFolders(str(root), **SMALL)
    assert derived.info.pairs == told.info.pairs
    assert derived.info.seen == told.info.seen
    assert derived.info.evaluated == told.info.evaluated
    counts = {name: len(pairs_of(derived, name)) for name in ("train", "val", "test")}
    assert counts == {"train": 7 * 6, "val": 7 + 4, "test": 7 + 4}  # of eight images: 70, 10 and 20 %
    shutil.rmtree(root / SPLIT)
    shutil.rmtree(root / "images")
    shutil.copytree(roots["plantvillage-czsl"] / "images", root / "images")
    shutil.copyfile(roots["plantvillage-czsl"] / "metadata.json", root / "metadata.json")
    alone = PairFolders(str(root), **{**SMALL, "words": None})
    assert alone.info.seen == PairFolders(str(roots["plantvillage-czsl"]), **SMALL).info.seen
    assert alone.info.word_vectors is None


def test_a_split_of_own_images_is_made_by_its_own_seed(roots):
    def made(**options):
        return PairFolders(str(roots["folder-pairs"]), **SMALL, **options).info

    assert made(seed=3).seen == made(seed=4).seen
    assert len({tuple(made(split_seed=seed).seen) for seed in range(4)}) > 1
    assert sum(made(unseen=0.2).seen) > sum(made(unseen=0.5).seen)


def test_pairs_that_are_left_out_leave_their_words_in_others():
    pairs = [(a, o) for a in "abcd" for o in "wxyz" if (a, o) != ("a", "z")]
    for seed in range(20):
        left_out = choose_unseen(pairs, 0.6, seed)
        rest = [pair for pair in pairs if pair not in left_out]
        assert {a for a, _ in rest} == set("abcd")
        assert {o for _, o in rest} == set("wxyz")
    assert choose_unseen([("a", "x"), ("b", "y")], 0.5, 0) == []


def test_random_vectors_are_those_of_the_seed_and_of_the_word(roots):
    one, other, same = (
        PairFolders(str(roots["cgqa"]), **{**SMALL, "words": ["random"], "seed": seed}).info.word_vectors
        for seed in (1, 2, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len({row.numpy().tobytes() for row in one}) == len(one)


def test_held_features_take_the_place_of_images(roots):
    data = PairFolders(str(roots["cgqa"]), **SMALL)
    data.setup()
    count = len(pairs_of(data, "train"))
    features = {name: torch.arange(len(pairs_of(data, name)))[:, None].float() for name in ("train", "test")}
    labels = torch.cat([batch["labels"] for batch in data.make_loader("train", training=False)])
    data.hold_features(features)
    batch = next(iter(data.train_dataloader()))
    assert batch.keys() == {"features", "labels", "attributes", "objects"}
    assert torch.equal(labels[batch["features"][:, 0].long()], batch["labels"])
    assert len(batch["labels"]) == 8 < count
    assert "images" in next(iter(data.evaluation_loader("val")))


def test_images_may_be_held_on_the_device(roots):
    options = {**SMALL, "augment": "resized-crop"}
    held, read = (PairFolders(str(roots["cgqa"]), on_device=on, **options) for on in (True, "auto"))
    one, other = (next(iter(data.evaluation_loader("test"))) for data in (held, read))
    assert one["images"].shape == other["images"].shape
    assert torch.equal(one["labels"], other["labels"])


def test_the_command_describes_the_pairs(roots, capsys):
    assert main(["data", "folders-pairs", "--data-root", str(roots["folder-pairs"])]) == 0
    said = capsys.readouterr().out
    assert "6 of 9 pairs are trained on; 3 attributes, 3 objects" in said
    assert "of them of 2 unseen pairs" in said


# mistakes


def refused(root, match, **options):
    with pytest.raises(UserError, match=match) as caught:
        PairFolders(str(root), **{**SMALL, **options}).setup()
    assert "\n" not in str(caught.value)


def edit(root, name, change):
    file = root / SPLIT / f"{name}_pairs.txt"
    file.write_text(change(file.read_text()))


def test_pair_files_with_unknown_words_wrong_lines_and_places_outside(copied):
    root = copied("mit-states")
    good = (root / SPLIT / "val_pairs.txt").read_text()
    for line, said in (
        ("wett dog", r"val_pairs\.txt, line 1: no image has the attribute 'wett'\. Did you mean wet\?"),
        ("wet doge", "no image has the object 'doge'"),
        ("wet", 'expected "attribute object"'),
        ("../../x y", "outside of"),
    ):
        edit(root, "val", lambda _, line=line: f"{line}\n{good}")
        refused(root, said)
    edit(root, "val", lambda _: "\n")
    refused(root, "lists no pair")
    (root / SPLIT / "val_pairs.txt").unlink()
    refused(root, r"there is no file .*val_pairs\.txt")


def test_words_that_are_in_no_training_pair_or_have_no_image(copied):
    root = copied("mit-states")
    edit(root, "train", lambda text: "".join(line for line in text.splitlines(True) if not line.startswith("huge")))
    refused(root, "the attribute 'huge' is in no training pair")
    refused(root, "of huge .*, which is no training pair", allow_unknown_words=True)
    root = copied("plantvillage-czsl")
    entries = json.loads((root / "metadata.json").read_text())
    kept = [entry for entry in entries if not (entry["obj"] == "corn" and entry["set"] == "train")]
    (root / "metadata.json").write_text(json.dumps(kept))
    refused(root, "the object 'corn' is in the training pairs .* has no training image")


def test_metadata_that_leave_the_root_repeat_an_image_or_run_code(copied):
    root = copied("plantvillage-czsl")
    entries = json.loads((root / "metadata.json").read_text())

    def with_first(**changes):
        (root / "metadata.json").write_text(json.dumps([{**entries[0], **changes}, *entries[1:]]))

    with_first(image="../../etc/passwd")
    refused(root, "outside of")
    with_first(set="training")
    refused(root, "the set is one of train, val, test or NA")
    with_first(attr=None)
    refused(root, "entry 0: expected image, attr, obj and set as text")
    (root / "metadata.json").write_text(json.dumps([*entries, {**entries[0], "set": "test"}]))
    refused(root, "in train and in test")
    (root / "metadata.json").write_text("[]")
    refused(root, "lists no image")
    (root / "metadata.json").write_text("{")
    refused(root, "cannot be read")
    with open(root / f"metadata_{SPLIT}.t7", "wb") as file:
        pickle.dump([Path("x")], file, protocol=2)
    refused(root, "no code in it is run")


def test_sets_without_seen_or_unseen_images(copied):
    root = copied("plantvillage-czsl")
    entries = json.loads((root / "metadata.json").read_text())
    unseen = {"val": ("black-rot", "corn"), "test": ("rust", "grape")}

    def is_unseen(entry, name):
        return (entry["attr"], entry["obj"]) == unseen[name]

    (root / "metadata.json").write_text(json.dumps([entry for entry in entries if not is_unseen(entry, "test")]))
    refused(root, "the set test .* unseen in training")
    kept = [entry for entry in entries if entry["set"] != "val" or is_unseen(entry, "val")]
    (root / "metadata.json").write_text(json.dumps(kept))
    refused(root, "the set val .* that is seen in training")


def test_folders_that_cannot_be_read_as_pairs(copied, tmp_path):
    root = copied("folder-pairs")
    (root / "images" / "very_old_cat").mkdir()
    refused(root, "very_old_cat is not named <attribute>_<object>")
    (root / "images" / "very_old_cat").rmdir()
    (root / "images" / "blue_cat").mkdir()
    refused(root, "blue_cat has no image")
    (root / "images" / "blue_cat").rmdir()
    for folder in (root / "images").iterdir():
        if folder.name not in ("new_cat", "old_dog"):
            shutil.rmtree(folder)
    refused(root, "no two pairs that can be left out")
    shutil.rmtree(root / "images")
    refused(root, "there is no folder .*images")
    (root / "images").mkdir()
    refused(root, "no images in")
    refused(tmp_path, r"data\.unseen is a part", unseen=1.5)
    refused(copied("cgqa"), r"data\.split: there is no folder", split="other")
    refused(tmp_path / "cgqa", r"data\.words: there is no file", words=["glove.txt"])


def test_a_split_of_numbers_is_near_its_shares():
    from batchformer.data.sets.pair_splits import _divided

    draw = np.random.default_rng(0)
    for count in (1, 2, 3, 10, 30):
        sets = _divided(count, ("train", "val", "test"), draw)
        assert len(sets) == count
        assert sets.count("train") >= 0.7 * count
    assert _divided(30, ("train", "val", "test"), draw).count("test") == 6
