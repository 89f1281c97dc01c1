"""``batchformer predict RUN IMAGES_OR_FOLDERS...``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.errors import UserError
from batchformer.runs.atomic import refuse_unwritable, write_text

HELP = """
batchformer predict RUN IMAGES_OR_FOLDERS... [--out predictions.csv] [--topk 5]
batchformer predict RUN IMAGES_OR_FOLDERS... [--out predictions] [--threshold 0.5]      (a detector)

Predict on images with a finished run; folders are searched for images. Photos are taken as viewers show them, turned as
their cameras noted (EXIF); boxes and segments are in pixels of that.

Classification: writes a CSV file with one line per image: path, class_1, score_1, class_2, score_2, ... (scores are
probabilities, the best class first).

Detection and panoptic segmentation: writes a folder with one picture per image, NAME.png, on which boxes or segments
are drawn with class and score, and with predictions.json (COCO's format of results) and predictions.csv. --threshold
says from which score a box is drawn (0.5; the files hold the 100 best of each image), or how sure a query must be to
take part in a segmentation (0.85).
"""
_BATCH = 64
Classified = tuple[Path, list[tuple[str, float]]]  # an image, and its best classes with their scores
_OF_OBJECTS = ("detection", "panoptic")


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("out"), Option("topk"), Option("threshold")])
    if len(given.positional) < 2:
        raise UserError("predict needs a run folder and images: batchformer predict RUN photo.jpg FOLDER")
    top = given.integer("topk", 5, at_least=1)
    threshold = _threshold(given.value("threshold"))
    run_path, *places = given.positional

    from batchformer.cli.finished_run import load_run

    images = list(find_images(places))
    found = load_run(run_path)
    task = found.config.get("task")
    if task in _OF_OBJECTS:
        if given.value("topk") is not None:
            raise UserError("--topk is of classification: a detector takes --threshold instead.")
        _say(found.note())
        return _predict_objects(found, images, Path(given.value("out") or "predictions"), threshold)
    if threshold is not None:
        raise UserError("--threshold is of detection and panoptic segmentation: this run classifies, see --topk.")
    out = Path(given.value("out") or "predictions.csv")
    refuse_unwritable(out)  # thousands of images may lie between here and the writing
    _say(found.note())
    rows = [
        [str(path), *(cell for name, score in classes for cell in (name, f"{score:.6f}"))]
        for path, classes in _with_progress(classify(found, images, min(top, len(found.class_names))), len(images))
    ]
    header = [
        "path",
        *(f"{kind}_{k + 1}" for k in range(min(top, len(found.class_names))) for kind in ("class", "score")),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(out, text.getvalue())
    for row in rows[:5]:
        print(f"{row[0]}: {row[1]} ({float(row[2]):.1%})")
    if len(rows) > 5:
        print(f"... and {len(rows) - 5} more")
    print(f"\n{len(rows)} {'image' if len(rows) == 1 else 'images'} classified: {out}")
    return 0


def _with_progress(classified: Iterator[Classified], count: int) -> Iterator[Classified]:
    """A line that moves, from the second batch on: a few images are done before anybody could read it."""
    from batchformer.runs.progress import ProgressLine

    line = ProgressLine()
    line.begin_run(0, "predict")
    try:
        for done, (path, classes) in enumerate(classified):
            if done >= _BATCH:
                line.update(done / count, path.name)
            yield path, classes
    finally:
        line.clear()


def _say(note: str) -> None:
    if note:
        print(note)


def _threshold(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UserError(f"--threshold: expected a number from 0 to 1, got {given}.")
    return value


def _predict_objects(found: Any, images: list[Path], out: Path, threshold: float | None) -> int:
    from batchformer.cli.predict_objects import CSV, JSON, predict_objects

    drawn = predict_objects(found, images, out, threshold)
    many = f"{len(images)} {'image' if len(images) == 1 else 'images'}"
    print(f"{drawn} {'object' if drawn == 1 else 'objects'} drawn on {many}: {out}/")
    print(f"  what was found: {out / JSON} (COCO's format), {out / CSV}")
    return 0


def find_images(places: list[str]) -> Iterator[Path]:
    """Files as they are given, folders searched in alphabetical order."""
    from batchformer.data.images import EXTENSIONS, images_in

    for place in map(Path, places):
        if place.is_dir():
            inside = [path for path in images_in(place) if Path(path).is_file()]  # not a link to nowhere
            if not inside:
                raise UserError(f"There is no image in the folder {place} (looked for {' '.join(EXTENSIONS)}).")
            yield from map(Path, inside)
        elif place.is_file():
            yield place
        else:
            raise UserError(f"There is no image or folder {place}.")


def classify(found: Any, images: list[Path], top: int) -> Iterator[Classified]:
    import torch

    from batchformer.cli.finished_run import best_device
    from batchformer.data.images import open_image

    device, transform = best_device(), found.data.predict_transform
    task = found.task.to(device)
    with torch.inference_mode():
        for start in range(0, len(images), _BATCH):
            paths = images[start : start + _BATCH]
            batch = torch.stack([transform(open_image(path, upright=True)) for path in paths]).to(device)
            scores, labels = task.predict_step(batch, 0).topk(top, dim=1)
            for path, row_scores, row_labels in zip(paths, scores.tolist(), labels.tolist(), strict=True):
                names = [found.class_names[label] for label in row_labels]
                yield path, list(zip(names, row_scores, strict=True))
