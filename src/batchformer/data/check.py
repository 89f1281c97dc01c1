"""Read every image of a data set once and list what is wrong: damaged files, copies, label and box errors."""

import os
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from batchformer.data.images import ImageFacts, inspect_image, pixel_digest
from batchformer.data.info import DataInfo
from batchformer.data.loading.data_module import ImageFile
from batchformer.data.sets.annotations import Skipped, WrongEntry, file_digest
from batchformer.errors import UserError
from batchformer.metrics.measures import FEW_BELOW

_AT_ONCE = 64
_NAMED = 3  # copies of a picture that are named


class Kind(NamedTuple):
    """A kind of finding: its title, whether it is an error, and what `--skip-bad` does about it."""

    title: str
    error: bool
    remedy: str


KINDS = {
    "damaged": Kind("Damaged files", True, "left out by --skip-bad"),
    "size": Kind("Images of another size than annotated", True, "left out by --skip-bad"),
    "annotation": Kind("Label and box errors", True, "left out by --skip-bad, but for ids that occur twice"),
    "leak": Kind("The same picture in training and evaluation", True, "--skip-bad leaves out the training copy"),
    "classes": Kind("The same picture in several classes", True, "--skip-bad leaves out all copies in training"),
    "copies": Kind("The same picture twice in one set", False, "kept"),
    "few": Kind(f"Classes of fewer than {FEW_BELOW} training images or boxes", False, "add some"),
    "unseen": Kind("Classes without anything to evaluate on", False, "they have no result; add images"),
    "empty": Kind("Images without any box", False, "kept; --data.keep_empty false leaves them out of training"),
    "passed": Kind("Files skipped", False, "not images that can be read here"),
}


@dataclass
class Check:
    """What a check found: `findings` by kind as lines of text, the sets, sizes and modes, and what is to be skipped."""

    root: str
    sets: dict[str, int]
    findings: dict[str, list[str]]
    modes: dict[str, int]
    widths: tuple[int, int, int]  # smallest, median, largest
    heights: tuple[int, int, int]
    turned: int  # images that their EXIF orientation rotates
    smaller: int  # images with a side below `image_size`
    image_size: int | None
    class_counts: dict[str, int] = field(default_factory=dict)
    skip: Skipped = field(default_factory=Skipped)

    @property
    def errors(self) -> int:
        return sum(len(found) for kind, found in self.findings.items() if KINDS[kind].error)

    def as_dict(self) -> dict[str, Any]:
        named = ("root", "sets", "findings", "modes", "widths", "heights", "turned", "smaller", "image_size")
        return {**{name: getattr(self, name) for name in named}, "class_counts": self.class_counts,
                "errors": self.errors, "skip": self.skip.as_dict()}  # fmt: skip


def check_data(data: Any, progress: Callable[[int, int], None] | None = None) -> Check:
    """Check a data module that was not set up yet; `progress` is called with (images read, all images)."""
    if not data.root:
        raise UserError("the data of this recipe are not image files: there is nothing to check.")
    if data.targets and data.target is None:
        data.target = data.targets[0]  # every domain is read, whichever is left out of training
    problems: list[WrongEntry] = data.annotation_problems()
    root = os.path.expanduser(data.root)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    found["annotation"] = [f"{problem.file}: {problem.reason}" for problem in problems]
    data.skipped = _skip_of(root, problems)  # so that the rest can be read
    data.setup()
    files: Mapping[str, Sequence[ImageFile]] = data.image_files()
    if not files:
        raise UserError(f"{type(data).__name__} does not read its images one by one from files: nothing to check.")
    paths = list(dict.fromkeys(file.path for each in files.values() for file in each))
    facts = dict(zip(paths, read_facts([os.path.join(root, path) for path in paths], progress), strict=True))
    bad = _damaged(files, facts, found)
    training = _copies(data, root, files, facts, found)
    _classes(data, found)
    found["passed"] = list(data.passed_over())
    return _summary(data, files, facts, found, _skip_of(root, problems, bad, training))


def read_facts(
    paths: Sequence[str], progress: Callable[[int, int], None] | None = None, threads: int | None = None
) -> list[ImageFacts | str]:
    """Facts of every image, or why it cannot be read; in threads, since Pillow releases the GIL while it decodes."""

    def read(first: int) -> list[ImageFacts | str]:
        return [_facts(path) for path in paths[first : first + _AT_ONCE]]

    facts: list[ImageFacts | str] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=threads or os.cpu_count()) as pool:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            for part in pool.map(read, range(0, len(paths), _AT_ONCE)):
                facts += part
                if progress is not None:
                    progress(len(facts), len(paths))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # do not read on after an interrupt
            raise
    return facts


def _facts(path: str) -> ImageFacts | str:
    try:
        return inspect_image(path)
    except UserError as problem:
        reason = str(problem).removeprefix(f"image {path} ").split(": ")[0]
        return reason.replace(f"'{path}'", "it").replace("identify image file it", "identify it as an image")


def _damaged(
    files: Mapping[str, Sequence[ImageFile]], facts: Mapping[str, ImageFacts | str], found: dict[str, list[str]]
) -> set[str]:
    """Files that training could not read, or whose boxes are those of another image."""
    sizes = {file.path: file.size for each in files.values() for file in each}
    bad = set()
    for path, fact in facts.items():
        size = sizes[path]
        if isinstance(fact, str):
            found["damaged"].append(f"{path}: {fact}")
            bad.add(path)
        elif size is not None and size != (fact.height, fact.width):
            bad.add(path)
            turned = ", which its EXIF orientation swaps in viewers" if fact.turned else ""
            found["size"].append(
                f"{path}: {fact.width} x {fact.height} pixels{turned}, annotated as {size[1]} x {size[0]}"
            )
    return bad


def _same_pictures(root: str, facts: Mapping[str, ImageFacts | str]) -> dict[str, Any]:
    """A key for every readable file, equal where all pixels are; files that look alike are read a second time."""
    alike: dict[Any, list[str]] = {}
    for path, fact in facts.items():
        if not isinstance(fact, str):
            alike.setdefault(fact.content, []).append(path)
    keys = {path: content for content, paths in alike.items() for path in paths if len(paths) == 1}
    again = [path for paths in alike.values() if len(paths) > 1 for path in paths]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = pool.map(pixel_digest, [os.path.join(root, path) for path in again])
        return keys | dict(zip(again, digests, strict=True))


def _copies(
    data: Any, root: str, files: Mapping[str, Sequence[ImageFile]], facts: Mapping[str, ImageFacts | str],
    found: dict[str, list[str]],
) -> set[str]:  # fmt: skip
    """The same pictures in training and evaluation, in several classes, twice; returns what training leaves out."""
    pictures = _same_pictures(root, facts)
    places: dict[Any, list[tuple[str, ImageFile]]] = {}
    for name in ("train", *data.evaluation_sets):
        for file in files.get(name, ()):
            if file.path in pictures:
                places.setdefault(pictures[file.path], []).append((name, file))
    names = getattr(data, "class_names", [])
    leave_out: set[str] = set()
    for group in places.values():
        if len(group) == 1:
            continue
        trained = {file.path for name, file in group if name == "train"}
        judged = {file.path for name, file in group if name != "train"}
        labels = {file.label for _, file in group if file.label is not None}
        if trained and judged and getattr(data, "evaluate_on", "val") != "train":
            found["leak"].append(f"{_list(trained)} and {_list(judged)}")
            leave_out |= trained
        if len(labels) > 1:
            classes = ", ".join(str(names[label]) for label in sorted(labels))
            found["classes"].append(f"{_list(trained | judged)} ({classes})")
            leave_out |= trained
        elif len(trained) > 1 or (not trained and len(judged) > 1):
            found["copies"].append(_list(trained or judged))
    return leave_out


def _list(paths: set[str]) -> str:
    first = sorted(paths)[:_NAMED]
    return ", ".join(first) + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")


def _classes(data: Any, found: dict[str, list[str]]) -> None:
    names, counts = list(data.class_names), list(data.class_counts)
    trained = DataInfo.of(data).get("seen") or [name != "N/A" for name in names]  # unseen pairs have none on purpose
    few = sorted((n, name) for name, n, seen in zip(names, counts, trained, strict=True) if n < FEW_BELOW and seen)
    found["few"] = [f"{name}: {count}" for count, name in few]
    labels = getattr(data, "set_labels", {}).get(data.evaluation_sets[0])
    if labels is not None:
        there = set(labels.tolist())
        found["unseen"] = [name for label, name in enumerate(names) if label not in there]
    for name, scenes in getattr(data, "_scenes", {}).items():
        empty = [k for k in range(len(scenes)) if scenes.first[k] == scenes.first[k + 1]]
        found["empty"] += [f"{name}: {Path(scenes.path(k)).name}" for k in empty]


def _skip_of(
    root: str, problems: Sequence[WrongEntry], files: set[str] | None = None, training: set[str] | None = None
) -> Skipped:
    entries: dict[str, set[int]] = {}
    for problem in problems:
        if problem.entry is not None:
            entries.setdefault(problem.file, set()).add(problem.entry)
    annotations = {name: (file_digest(Path(root) / name), frozenset(each)) for name, each in entries.items()}
    images = {problem.image for problem in problems if problem.image is not None}
    return Skipped(frozenset(images | (files or set())), frozenset(training or ()), annotations)


def _summary(
    data: Any, files: Mapping[str, Sequence[ImageFile]], facts: Mapping[str, ImageFacts | str],
    found: dict[str, list[str]], skip: Skipped,
) -> Check:  # fmt: skip
    good = [fact for fact in facts.values() if not isinstance(fact, str)]
    size = getattr(data, "image_size", None)
    return Check(
        root=str(data.root),
        sets={name: len(each) for name, each in files.items()},
        findings={kind: each for kind, each in found.items() if each},
        modes=dict(Counter(fact.mode for fact in good).most_common()),
        widths=_spread(fact.width for fact in good),
        heights=_spread(fact.height for fact in good),
        turned=sum(fact.turned for fact in good),
        smaller=sum(min(fact.width, fact.height) < (size or 0) for fact in good),
        image_size=size,
        class_counts={str(n): int(c) for n, c in zip(data.class_names, data.class_counts, strict=True) if n != "N/A"},
        skip=skip,
    )


def _spread(values: Iterator[int]) -> tuple[int, int, int]:
    ordered = sorted(values) or [0]
    return ordered[0], int(statistics.median(ordered)), ordered[-1]
