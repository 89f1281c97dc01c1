"""Images of (attribute, object) pairs, some of them unseen in training: MIT-States, UT-Zappos, C-GQA, own images."""

import json
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batchformer.data.augment.options import FileAugmentation
from batchformer.data.images import images_in, open_image
from batchformer.data.loading.device_loader import DeviceLoader
from batchformer.data.loading.epoch_loader import EpochLoader
from batchformer.data.loading.order import generator
from batchformer.data.sets.classification import ClassificationData
from batchformer.data.sets.files import FileData, Listing, find_file, visible_folders
from batchformer.data.sets.miniature import save_picture
from batchformer.data.sets.pair_splits import (
    SETS,
    Entry,
    Pair,
    divide_images,
    divide_pairs,
    read_metadata,
    read_pair_file,
    refuse_twice,
)
from batchformer.data.words import embed_names
from batchformer.errors import UserError

SPLIT = "compositional-split-natural"
LAYOUT = {
    "folder-pairs": "DIR/images/<attribute>_<object>/*.jpg\n"
    "a split of your own, if wanted: DIR/compositional-split-natural/{train,val,test}_pairs.txt",
    "mit-states": "DIR/images/<attribute> <object>/*.jpg, DIR/compositional-split-natural/{train,val,test}_pairs.txt,\n"
    "DIR/metadata_compositional-split-natural.t7, and a file of word vectors",
    "ut-zappos": "as mit-states, DIR/images/<material>_<shoe>/*.jpg",
    "cgqa": "as mit-states, DIR/images/*.jpg",
    "plantvillage-czsl": "as mit-states, DIR/metadata.json in place of the .t7",
}
RANDOM = "random"  # in place of a file of word vectors
_RANDOM_DIM = 100


class CompositionalData(ClassificationData):
    """Pairs that are trained on, pairs that are only evaluated, and word vectors of attributes and objects.

    A class is a pair, in alphabetical order over all sets; `class_counts` is 0 for unseen ones. Batches hold `labels`
    (pairs), `attributes` and `objects`. The evaluation sets are "test" and "val", each with images of seen pairs and of
    unseen ones of its own. `declare` adds `attributes`, `objects` (their names), `pairs` (attribute and object of each
    class, as numbers), `seen` (whether it is trained on), `evaluated` (the pairs of each evaluation set) and
    `word_vectors` (attributes, then objects).

    Args:
        words: files of word vectors (see `batchformer.data.words`), looked for in `root` and the working directory;
            several are put side by side. "random" in place of a file: random vectors, by `seed`. null: none, for
            methods that need none.
        synonyms: words to look up in place of words that the file does not have.
        allow_unknown_words: pairs may be evaluated whose attribute or object is in no training pair.
    """

    evaluation_sets = ("test", "val")
    allow_empty_classes = True
    attributes: list[str]
    objects: list[str]
    pairs: list[Pair]

    def __init__(
        self,
        root: str | None = None,
        *,
        words: list[str] | None = None,
        synonyms: dict[str, str] | None = None,
        allow_unknown_words: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.words, self.synonyms, self.allow_unknown_words = words, synonyms, allow_unknown_words
        self._features: dict[str, Tensor] = {}
        self.word_vectors: Tensor | None = None

    # for subclasses

    def _arrange(
        self, entries: Iterable[Entry], lists: Mapping[str, Sequence[Pair]], source: str
    ) -> dict[str, tuple[list[Any], np.ndarray, dict[str, np.ndarray]]]:
        """Samples, labels and fields of each set, from the images and the pairs of each set."""
        self.pairs = sorted({pair for pairs in lists.values() for pair in pairs})
        self.attributes, self.objects = (sorted({pair[k] for pair in self.pairs}) for k in (0, 1))
        numbers = [{name: k for k, name in enumerate(names)} for names in (self.pairs, self.attributes, self.objects)]
        sets: dict[str, list[Entry]] = {name: [] for name in SETS}
        for entry in entries:
            sets[entry.set].append(entry)
        self._lists = {name: sorted(numbers[0][pair] for pair in set(lists[name])) for name in SETS}
        self._check_sets(sets, source)
        arranged = {}
        for name, members in sets.items():
            labels = np.array([numbers[0][entry.pair] for entry in members], np.int64)
            fields = {
                "attributes": np.array([numbers[1][entry.pair[0]] for entry in members], np.int64),
                "objects": np.array([numbers[2][entry.pair[1]] for entry in members], np.int64),
            }
            arranged[name] = [entry.sample for entry in members], labels, fields
        self._counts = {name: Counter(labels.tolist()) for name, (_, labels, _) in arranged.items()}
        self.word_vectors = self._embed_words()
        return arranged

    def _check_sets(self, sets: Mapping[str, Sequence[Entry]], source: str) -> None:
        seen = {self.pairs[k] for k in self._lists["train"]}
        for kind, k, names in (("attribute", 0, self.attributes), ("object", 1, self.objects)):
            trained, shown = {pair[k] for pair in seen}, {entry.pair[k] for entry in sets["train"]}
            unknown = [name for name in names if name not in trained]
            if unknown and not self.allow_unknown_words:
                raise UserError(
                    f"the {kind} {unknown[0]!r} is in no training pair of {source}, so nothing is learnt of it: add it "
                    f"to the training pairs, take its pairs out, or set data.allow_unknown_words to true."
                )
            if empty := [name for name in names if name in trained and name not in shown]:
                raise UserError(
                    f"the {kind} {empty[0]!r} is in the training pairs of {source} and has no training image: add "
                    f"some, or take its pairs out."
                )
        for entry in sets["train"]:
            if entry.pair not in seen:
                raise UserError(
                    f"{source} has the training image {entry.sample} of {' '.join(entry.pair)}, which is no training "
                    f"pair: correct the set of the image, or the list of pairs."
                )
        for name in self.evaluation_sets:
            for words, wanted in (("seen", True), ("unseen", False)):
                if not any((entry.pair in seen) == wanted for entry in sets[name]):
                    raise UserError(
                        f"the set {name} of {source} has no image of a pair that is {words} in training, and seen and "
                        f"unseen pairs are compared: add some."
                    )

    def _embed_words(self) -> Tensor | None:
        if not self.words:
            return None
        names = [*self.attributes, *self.objects]
        if self.words == [RANDOM]:
            drawn = [generator(self.seed, name, "word").standard_normal(_RANDOM_DIM) for name in names]
            return torch.tensor(np.stack(drawn), dtype=torch.float32)
        files = [find_file(file, self.root or "", "words") for file in self.words]
        return torch.from_numpy(embed_names(names, files, self.synonyms))

    def _count(self, sets: Mapping[str, Any], digest: Any) -> None:
        super()._count(sets, digest)
        self.test_images = len(sets["test"].labels)  # results are about these

    # for tasks and users

    def hold_features(self, features: Mapping[str, Tensor]) -> None:
        """From now on batches hold `features`, a row for each image of a set, in place of images."""
        self._features = dict(features)

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        if name not in self._features:
            return super().make_loader(name, training)  # type: ignore[safe-super]
        labelled = self._labelled(self._set(name))
        labelled["fields"] = {"features": self._features[name], **labelled["fields"]}
        return DeviceLoader(None, device=self._device(), **labelled, **self._loader_options(name, training))

    @abstractmethod
    def _set(self, name: str) -> Any:
        """Labels and fields of a set."""

    @abstractmethod
    def picture(self, name: str, number: int) -> Image.Image:
        """An image of a set, as it is stored."""

    def declare(self) -> dict[str, Any]:
        numbers = [{name: k for k, name in enumerate(names)} for names in (self.attributes, self.objects)]
        seen = set(self._lists["train"])
        known = {
            "attributes": list(self.attributes),
            "objects": list(self.objects),
            "pairs": [[numbers[0][a], numbers[1][o]] for a, o in self.pairs],
            "seen": [k in seen for k in range(len(self.pairs))],
            "evaluated": {name: list(self._lists[name]) for name in self.evaluation_sets},
        }
        return {**super().declare(), **known, "word_vectors": self.word_vectors}

    def describe(self) -> dict[str, Any]:
        numbers = super().describe()
        seen = set(self._lists["train"])
        details = [
            f"{len(seen)} of {len(self.pairs)} pairs are trained on; {len(self.attributes)} attributes, "
            f"{len(self.objects)} objects"
        ]
        for name in self.evaluation_sets:
            unseen = {pair: count for pair, count in self._counts[name].items() if pair not in seen}
            details.append(
                f"{name}: {self._counts[name].total():,} images, {sum(unseen.values()):,} of them of {len(unseen)} "
                f"unseen pairs"
            )
        return numbers | {"details": details}


class PairFolders(CompositionalData, FileData):
    """Images in root/images, in the layout of MIT-States and of the data sets that followed it.

    root/compositional-split-natural has the pairs of each set, "attribute object" lines in train_pairs.txt,
    val_pairs.txt and test_pairs.txt. The set of an image is in metadata_compositional-split-natural.t7 (only plain
    values are read from it, no code is run) or metadata.json: a list of dicts with `image`, `attr`, `obj`, `set`. Where
    there is neither, images lie in folders <attribute>_<object> or "<attribute> <object>", and those of a pair that is
    in several sets are divided by `split_seed`, 70 % to training, 10 % to validation, 20 % to the test. Without pair
    files too, a share `unseen` of the pairs is left out of training, half of them for each evaluation set.

    Args:
        split: the folder of the pair files, which also names the metadata.
        unseen: part of the pairs that is left out, where the data have no split.
        split_seed: what is left to chance in a split; not `seed`, so that all runs are about the same pairs.
    """

    may_be_held = True

    def __init__(
        self,
        root: str | None = None,
        *,
        split: str = SPLIT,
        unseen: float = 0.3,
        split_seed: int = 0,
        augment: FileAugmentation = "imagenet",
        **options: Any,
    ) -> None:
        super().__init__(root, augment=augment, **options)
        if not 0 < unseen < 1:
            raise UserError(f"data.unseen is a part of the pairs, above 0 and below 1, got {unseen}.")
        self.split, self.unseen, self.split_seed = split, unseen, split_seed

    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        if not (Path(root) / "images").is_dir():
            raise UserError(f"there is no folder {Path(root) / 'images'}: data.root is the folder that has it.")
        if self.split != SPLIT and not (Path(root) / self.split).is_dir():
            raise UserError(f"data.split: there is no folder {Path(root) / self.split}.")
        entries, source, others = self._read_entries(root)
        lists = self._read_lists(root, entries)
        is_divided = any(entry.set for entry in entries)
        if lists is None and is_divided:
            lists = {name: sorted({entry.pair for entry in entries if entry.set == name}) for name in SETS}
        elif lists is None:
            lists = divide_pairs(sorted({entry.pair for entry in entries}), self.unseen, self.split_seed, source)
        if not is_divided:
            entries = divide_images(entries, lists, self.split_seed)
        known = {pair for pairs in lists.values() for pair in pairs}
        refuse_twice(entries, source)
        arranged = self._arrange([entry for entry in entries if entry.pair in known], lists, source)
        listings = {name: Listing(paths, labels, source, fields) for name, (paths, labels, fields) in arranged.items()}
        listings["train"].others.update(others)
        return listings, [" ".join(pair) for pair in self.pairs]

    def _read_entries(self, root: str) -> tuple[list[Entry], str, Counter[str]]:
        """All images with their pairs; the sets where metadata say them."""
        if (metadata := read_metadata(root, self.split)) is not None:
            return *metadata, Counter()
        others: Counter[str] = Counter()
        folders = visible_folders(Path(root) / "images")
        above = len(os.path.join(root, ""))
        entries = []
        for folder in folders:
            images = images_in(os.path.join(root, "images", folder), others)
            pair = self._pair_of(folder, root)
            if not images:
                raise UserError(f"{Path(root) / 'images' / folder} has no image: add some, or remove the folder.")
            entries += [Entry(path[above:], pair, "") for path in images]
        if not entries:
            raise UserError(f"no images in {Path(root) / 'images'}/<attribute>_<object>/: put some there.")
        return entries, str(Path(root) / "images"), others

    def _pair_of(self, folder: str, root: str) -> Pair:
        parts = folder.split("_") if "_" in folder else folder.split(" ")
        if len(parts) != 2 or not all(parts):
            raise UserError(
                f"{Path(root) / 'images' / folder} is not named <attribute>_<object>: write one underscore between "
                f"both, and hyphens inside of names."
            )
        return parts[0], parts[1]

    def _read_lists(self, root: str, entries: Sequence[Entry]) -> dict[str, list[Pair]] | None:
        folder = Path(root) / self.split
        if not folder.is_dir():
            return None
        names = [{entry.pair[k] for entry in entries} for k in (0, 1)]
        return {name: read_pair_file(folder / f"{name}_pairs.txt", names, root) for name in SETS}

    def _set(self, name: str) -> Listing:
        return self._listings[name]

    def picture(self, name: str, number: int) -> Image.Image:
        return open_image(self._folder + self._listings[name].paths[number], self.upright)


_MINIATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "folder-pairs": (("new", "old", "wet"), ("cat", "dog", "street")),
    "mit-states": (("ancient", "huge", "wet"), ("bear", "castle", "dog")),
    "ut-zappos": (("Faux.Fur", "Leather", "Suede"), ("Boots.Ankle", "Shoes.Flats", "Slippers")),
    "cgqa": (("black", "tall", "wet"), ("dog", "fire_hydrant", "tree")),
    "plantvillage-czsl": (("black-rot", "healthy", "rust"), ("apple", "corn", "grape")),
}
_LEFT_OUT = {(0, 1): "val", (2, 2): "test"}  # pairs of the miniatures by their numbers


def miniature(folder: Path, name: str) -> None:
    """Three attributes and three objects: seven pairs of eight images, two unseen ones of four; word vectors."""
    attributes, objects = _MINIATURES[name]
    entries: list[dict[str, str]] = []
    lists: dict[str, list[str]] = {each: [] for each in SETS}
    for a, attribute in enumerate(attributes):
        for o, object_ in enumerate(objects):
            label = 3 * a + o
            alone = _LEFT_OUT.get((a, o))
            for each in SETS if alone is None else (alone,):
                lists[each].append(f"{attribute} {object_}\n")
            sets = ["train"] * 5 + ["val", "test", "test"] if alone is None else [alone] * 4
            for i, each in enumerate(sets):
                image = f"{label}{i}.jpg" if name == "cgqa" else f"{attribute}_{object_}/{i}.jpg"
                stored = image.replace("_", " ") if name == "mit-states" else image
                save_picture(folder / "images" / stored, label, i)
                entries.append({"image": image, "attr": attribute, "obj": object_, "set": each})
    words = sorted({word for each in (*attributes, *objects) for word in each.lower().replace("_", ".").split(".")})
    words = sorted({part for word in words for part in word.split("-")})
    vectors = generator(name, "words").standard_normal((len(words), 6)).astype(np.float32)
    np.savez(folder / "words.npz", words=np.array(words), vectors=vectors)
    if name == "folder-pairs":
        return
    (folder / SPLIT).mkdir()
    for each, lines in lists.items():
        (folder / SPLIT / f"{each}_pairs.txt").write_text("".join(lines))
    if name == "plantvillage-czsl":
        (folder / "metadata.json").write_text(json.dumps(entries, indent=0))
    else:
        torch.save(entries, folder / f"metadata_{SPLIT}.t7", _use_new_zipfile_serialization=False)
