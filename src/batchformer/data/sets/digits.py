"""Handwritten digits of 8 x 8 pixels from scikit-learn: long tail, rotated domains, states, unseen numbers."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from PIL import Image

from batchformer.data.loading.order import generator
from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.classification import tail_subset
from batchformer.data.sets.compositional import RANDOM, CompositionalData
from batchformer.data.sets.domains import DomainData, Part
from batchformer.data.sets.generalized import AttributeData, AttributeTable
from batchformer.data.sets.pair_splits import SETS, Entry

LAYOUT = "embedded (scikit-learn), no files needed"
_TRAIN_PER_CLASS = 145
_BRIGHTEST = 16
# segments of a seven-segment display: top, upper left, upper right, middle, lower left, lower right, bottom
_SEGMENTS = "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011"
_DEGREES = {f"{degrees}-degrees": degrees for degrees in range(0, 90, 15)}


def _read_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Grey bytes, labels, the number of each image among those of its class, and the names of the classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / _BRIGHTEST)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    names = [str(name) for name in digits.target_names]
    turn = np.empty(len(labels), dtype=np.int64)
    for c in range(len(names)):
        members = np.flatnonzero(labels == c)
        turn[members] = np.arange(len(members))
    return grey, labels, turn, names


def _coloured(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, None], 3, axis=1)


class DigitsLT(ArrayData):
    """Long-tailed digits: of each digit the first 145 images for training, reduced to the tail, the rest for testing.

    Split by file order and not at random: later images (29 to 38 per digit) come from other writers, and the split is
    always the same. At imbalance 20 the zeros keep 145 training images and the nines 7; at 1 all classes keep theirs.
    """

    mean = (0.305, 0.305, 0.305)
    std = (0.377, 0.377, 0.377)
    native_size = image_size = 8

    def __init__(
        self,
        imbalance: float = 20.0,
        augment: Literal["none", "shift"] = "shift",
        root: str | None = None,
        image_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(root, augment=augment, image_size=image_size, statistics="data", **options)
        self.imbalance = imbalance

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        grey, labels, turn, names = _read_digits()
        images = _coloured(grey)
        train, test = np.flatnonzero(turn < _TRAIN_PER_CLASS), np.flatnonzero(turn >= _TRAIN_PER_CLASS)
        kept = train[tail_subset(labels[train], names, _TRAIN_PER_CLASS, self.imbalance)]
        return {"train": Split(images[kept], labels[kept]), "val": Split(images[test], labels[test])}, names


class DigitsDomains(DomainData, ArrayData):
    """The digits turned by 0, 15, 30, 45, 60 and 75 degrees: six domains of some 300 images.

    As in Rotated MNIST (DomainBed) the images are divided among the domains, every sixth one of a digit to each, so no
    image is seen under two angles.
    """

    mean, std = DigitsLT.mean, DigitsLT.std
    native_size = image_size = 8

    def __init__(
        self,
        root: str | None = None,
        *,
        augment: Literal["none", "shift"] = "shift",
        image_size: int = 8,
        batch_size: int = 160,
        **options: Any,
    ) -> None:
        super().__init__(root, augment=augment, image_size=image_size, batch_size=batch_size, **options)

    def _find_domains(self) -> tuple[str, ...]:
        return tuple(_DEGREES)

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        chosen, (grey, labels, turn, names) = self._choose_domains(), _read_digits()
        found = {}
        for name in chosen:
            members = np.flatnonzero(turn % len(_DEGREES) == list(_DEGREES).index(name))
            turned = (Image.fromarray(one).rotate(_DEGREES[name], Image.Resampling.BILINEAR) for one in grey[members])
            images = _coloured(np.stack([np.asarray(one) for one in turned]))
            found[name] = [Part(images, labels[members], "the digits")]
        sets = self._arrange(found, names)
        return {name: Split(part.samples, part.labels, fields) for name, (part, fields) in sets.items()}, names


class DigitsStates(CompositionalData, ArrayData):
    """Digits in six states (plain, inverted, rotated by a right angle, thick, noisy, dim): 60 pairs, 16 of them unseen.

    Every image is in one state, so none is seen twice: about 30 images of a pair. Of a seen pair the first 60 % in file
    order are for training, then 15 % for validation, and the last, which other writers wrote, for the test. No file of
    word vectors comes with it: they are random unless `words` names one that has the states and the digits.
    """

    mean, std = (0.4, 0.4, 0.4), (0.4, 0.4, 0.4)
    native_size = image_size = 8

    def __init__(
        self,
        root: str | None = None,
        *,
        words: list[str] | None = [RANDOM],  # noqa: B006 - jsonargparse shows it; nothing changes it
        augment: Literal["none", "shift"] = "shift",
        image_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(root, words=words, augment=augment, image_size=image_size, **options)

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        grey, digits, turn, _ = _read_digits()
        place, state = np.divmod(turn, len(_STATES))
        names = list(_STATES)
        images = np.stack([_STATES[names[s]](one, k) for k, (s, one) in enumerate(zip(state, grey, strict=True))])
        pairs = [(name, digit) for name in names for digit in _DIGITS]
        unseen = {pairs[k]: ("val", "test")[k % 2] for k in range(len(pairs)) if (k + k // len(_DIGITS)) % 4 == 0}
        lists = {name: [pair for pair in pairs if unseen.get(pair, name) == name] for name in SETS}
        entries = []
        for number, (s, digit) in enumerate(zip(state, digits, strict=True)):
            pair = (names[s], _DIGITS[digit])
            share = place[number] / ((digits == digit) & (state == s)).sum()
            seen_in = "train" if share < 0.6 else "val" if share < 0.75 else "test"
            entries.append(Entry(number, pair, unseen.get(pair, seen_in)))
        sets = self._arrange(entries, lists, "the digits")
        coloured = _coloured(images)
        splits = {name: Split(coloured[index], labels, fields) for name, (index, labels, fields) in sets.items()}
        return splits, [" ".join(pair) for pair in self.pairs]

    def _set(self, name: str) -> Split:
        return self._splits[name]

    def picture(self, name: str, number: int) -> Image.Image:
        pixels = np.ascontiguousarray(self._splits[name].images[number].transpose(1, 2, 0))
        return Image.fromarray(pixels).resize((96, 96), Image.Resampling.NEAREST)


def _thick(image: np.ndarray) -> np.ndarray:
    """Each pixel as bright as the brightest of it and its neighbours above and on the left."""
    padded = np.pad(image, ((1, 0), (1, 0)))
    return np.maximum.reduce([padded[1:, 1:], padded[:-1, 1:], padded[1:, :-1]])


def _noisy(image: np.ndarray, number: int) -> np.ndarray:
    noise = generator(number, "noise of the digits").integers(-90, 91, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_STATES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "plain": lambda image, _: image,
    "inverted": lambda image, _: 255 - image,
    "rotated": lambda image, _: np.rot90(image),
    "thick": lambda image, _: _thick(image),
    "noisy": _noisy,
    "dim": lambda image, _: image // 3,
}


class DigitNumbers(AttributeData):
    """Numbers of two digits, 00 to 99, as 128 features: pixels of a zero to a nine on the left and on the right.

    The attributes of a number are the segments that show it on two seven-segment displays. Twenty numbers are never
    seen in training; each digit stands in two of them on either side. Training pairs are of the first 145 images of
    each digit, test pairs of the others, which come from other writers.
    """

    per_class = 20, 10  # training and test images of a number

    def __init__(self, root: str | None = None, *, batch_size: int = 256, **options: Any) -> None:
        super().__init__(root, batch_size=batch_size, **options)

    def read_table(self) -> AttributeTable:
        grey, labels, turn, _ = _read_digits()
        segments = np.array([[float(lit) for lit in digit] for digit in _SEGMENTS.split()], np.float32)
        left, right = np.divmod(np.arange(100), 10)
        hidden = (left + 3 * right) % 5 == 0
        draw, rows, numbers, parts = generator(0, "numbers"), [], [], []
        for number in range(100):
            for part, count in enumerate(self.per_class):
                if part == 0 and hidden[number]:
                    continue
                of = [(labels == d) & ((turn >= _TRAIN_PER_CLASS) == part) for d in (left[number], right[number])]
                rows.append(np.stack([draw.choice(np.flatnonzero(each), count) for each in of], 1))
                numbers += [number] * count
                parts += [2 if hidden[number] else part] * count
        pairs, named = np.concatenate(rows), np.array(parts)
        features = grey[pairs].reshape(len(pairs), -1).astype(np.float32) / 255
        attributes = np.concatenate([segments[left], segments[right]], 1)
        train, seen, unseen = (np.flatnonzero(named == part) for part in range(3))
        classes = [f"{n:02}" for n in range(100)]
        return AttributeTable(features, np.array(numbers), attributes, classes, train, seen, unseen, "the numbers")
