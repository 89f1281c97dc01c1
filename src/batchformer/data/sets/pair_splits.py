"""Which image of a pair belongs to which set: read from pair files and metadata, or divided by a seed."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from batchformer.data.loading.order import generator
from batchformer.data.sets.files import read_lines, refuse_outside
from batchformer.errors import UserError, did_you_mean, reason_of
from batchformer.files import read_json

SETS = ("train", "val", "test")
_SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}  # of the images of a seen pair, where nothing else says it
_NONE = "NA"  # in metadata: no attribute, or in no set

Pair = tuple[str, str]  # attribute, object


class Entry(NamedTuple):
    """An image, its pair, and its set ("train", "val", "test"; empty where it is still to be chosen)."""

    sample: Any
    pair: Pair
    set: str


def divide_images(entries: Sequence[Entry], lists: Mapping[str, Sequence[Pair]], seed: int) -> list[Entry]:
    """Divide the images of a pair among the sets that name it; images of other pairs are left out."""
    places: dict[Pair, list[str]] = {}
    for name in SETS:
        for pair in lists[name]:
            places.setdefault(pair, []).append(name)
    members: dict[Pair, list[Entry]] = {}
    for entry in entries:
        members.setdefault(entry.pair, []).append(entry)
    divided = []
    for pair, images in members.items():
        if pair in places:
            sets = _divided(len(images), places[pair], generator(seed, *pair, "images"))
            divided += [entry._replace(set=name) for entry, name in zip(images, sets, strict=True)]
    return divided


def divide_pairs(pairs: Sequence[Pair], share: float, seed: int, source: str) -> dict[str, list[Pair]]:
    """The pairs of each set; some are left out of training, half of these for each evaluation set."""
    left_out = choose_unseen(pairs, share, seed)
    if len(left_out) < 2:
        raise UserError(
            f"{source} has no two pairs that can be left out of training, one to test and one to validate on: each "
            f"needs its attribute and its object in other pairs; add some, or write pair files."
        )
    seen = [pair for pair in pairs if pair not in left_out]
    return {"train": seen, "val": [*seen, *left_out[1::2]], "test": [*seen, *left_out[::2]]}


def choose_unseen(pairs: Sequence[Pair], share: float, seed: int) -> list[Pair]:
    """Pairs to leave out of training, such that every attribute and object stays in another pair."""
    left = [Counter(pair[k] for pair in pairs) for k in (0, 1)]
    wanted, chosen = max(2, round(share * len(pairs))), list[Pair]()
    for k in generator(seed, "unseen").permutation(len(pairs)):
        pair = pairs[k]
        if len(chosen) < wanted and left[0][pair[0]] > 1 and left[1][pair[1]] > 1:
            chosen.append(pair)
            left[0][pair[0]] -= 1
            left[1][pair[1]] -= 1
    return chosen


def _divided(count: int, names: Sequence[str], draw: np.random.Generator) -> list[str]:
    """The set of each of `count` images, in the shares of these sets; the first set has one at least."""
    shares = np.array([_SHARES[name] for name in names])
    ends = np.ceil(np.cumsum(shares / shares.sum()) * count - 1e-9).astype(int)
    sets = np.repeat(np.array(names), np.diff(ends, prepend=0))
    return sets[np.argsort(draw.permutation(count))].tolist()


def read_pair_file(file: Path, names: Sequence[set[str]], root: str) -> list[Pair]:
    """Lines of an attribute and an object, both among those of the images."""
    found = []
    for number, line in enumerate(read_lines(file), 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2:
            raise UserError(f'{file}, line {number}: expected "attribute object", found {line.strip()[:80]!r}.')
        refuse_outside("_".join(words), root, f"{file}, line {number},", "images")
        for kind, word, known in zip(("attribute", "object"), words, names, strict=True):
            if word not in known:
                raise UserError(
                    f"{file}, line {number}: no image has the {kind} {word!r}.{did_you_mean(word, known)} Correct the "
                    f"line, or add images."
                )
        found.append((words[0], words[1]))
    if not found:
        raise UserError(f"{file} lists no pair.")
    return found


def read_metadata(root: str, split: str) -> tuple[list[Entry], str] | None:
    """All images with their pairs and sets, and the file that says so; None where there is none."""
    file = Path(root) / f"metadata_{split}.t7"
    if file.is_file():
        return _entries_of(_read_t7(file), file, root), str(file)
    file = Path(root) / "metadata.json"
    if file.is_file():
        return _entries_of(read_json(file, "cannot be read", "write it again."), file, root), str(file)
    return None


def _read_t7(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # the type depends on what is wrong with the file
        raise UserError(
            f"{file} holds more than plain values, or is damaged ({reason_of(problem)}), and no code in it is run: "
            f"write its entries as metadata.json, or remove it to take the sets from the folders."
        ) from problem


def _entries_of(content: Any, file: Path, root: str) -> list[Entry]:
    """Entries of the metadata, without those of no attribute or no set."""
    entries, folders = [], {}
    for number, entry in enumerate(content if isinstance(content, list) else [content]):
        keys = ("image", "attr", "obj", "set")
        values: list[Any] = [entry.get(key) for key in keys] if isinstance(entry, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{file}, entry {number}: expected image, attr, obj and set as text, found {entry!r:.80}.")
        image, attribute, object_, name = values
        if _NONE in (attribute, name):
            continue
        if name not in SETS:
            raise UserError(f"{file}, entry {number}: the set is one of {', '.join(SETS)} or {_NONE}, not {name!r}.")
        refuse_outside(image, root, f"{file}, entry {number},", "images")
        folder, base = os.path.split(image)
        if folder not in folders:
            folders[folder] = _present(root, folder)
        entries.append(Entry(os.path.join("images", folders[folder], base), (attribute, object_), name))
    if not entries:
        raise UserError(f"{file} lists no image with an attribute and a set.")
    return entries


def _present(root: str, folder: str) -> str:
    """The folder as it is on the disk: MIT-States is released with a space where its metadata have an underscore."""
    spaced = folder.replace("_", " ")
    there = not os.path.isdir(os.path.join(root, "images", folder)) and os.path.isdir(
        os.path.join(root, "images", spaced)
    )
    return spaced if there else folder


def refuse_twice(entries: Iterable[Entry], source: str) -> None:
    found: dict[str, str] = {}
    for entry in entries:
        if entry.set and found.setdefault(entry.sample, entry.set) != entry.set:
            raise UserError(
                f"{source} has {entry.sample} in {found[entry.sample]} and in {entry.set}: an image is in one set."
            )
