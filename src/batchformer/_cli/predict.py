"""``batchformer predict RUN IMAGES_OR_FOLDERS...``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchformer._cli.arguments import Option, read_arguments
from batchformer.errors import UserError
from batchformer.running.atomic import write_text

HELP = """
batchformer predict RUN IMAGES_OR_FOLDERS... [--out predictions.csv] [--topk 5]

Classify images with a finished run; folders are searched for images. Writes a CSV file with one line per image:
path, class_1, score_1, class_2, score_2, ... (scores are probabilities, the best class first).
"""
_BATCH = 64


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("out"), Option("topk")])
    if len(given.positional) < 2:
        raise UserError("predict needs a run folder and images: batchformer predict RUN photo.jpg FOLDER")
    top = given.integer("topk", 5, at_least=1)
    out = Path(given.value("out") or "predictions.csv")
    run_path, *places = given.positional

    from batchformer._cli.finished_run import load_run

    images = list(find_images(places))
    found = load_run(run_path)
    rows = [
        [str(path), *(cell for name, score in classes for cell in (name, f"{score:.6f}"))]
        for path, classes in classify(found, images, min(top, len(found.class_names)))
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


def find_images(places: list[str]) -> Iterator[Path]:
    """Files as they are given, folders searched in alphabetical order."""
    from batchformer.data.images import is_image

    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.rglob("*") if path.is_file() and is_image(path))
            if not inside:
                raise UserError(f"There is no image in the folder {place}.")
            yield from inside
        elif place.is_file():
            yield place
        else:
            raise UserError(f"There is no image or folder {place}.")


def classify(found: Any, images: list[Path], top: int) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    import torch

    from batchformer._cli.finished_run import best_device
    from batchformer.data.images import open_image

    device, transform = best_device(), found.data.predict_transform
    task = found.task.to(device)
    with torch.inference_mode():
        for start in range(0, len(images), _BATCH):
            paths = images[start : start + _BATCH]
            batch = torch.stack([transform(open_image(path)) for path in paths]).to(device)
            scores, labels = task.predict_step(batch, 0).topk(top, dim=1)
            for path, row_scores, row_labels in zip(paths, scores.tolist(), labels.tolist(), strict=True):
                names = [found.class_names[label] for label in row_labels]
                yield path, list(zip(names, row_scores, strict=True))
