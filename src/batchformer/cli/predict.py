"""``batchformer predict RUN IMAGES_OR_FOLDERS...``: predict on images with the network of a run."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from batchformer.cli.arguments import Option, read_arguments
from batchformer.errors import UserError

HELP = """
batchformer predict RUN IMAGES_OR_FOLDERS... [--out predictions.csv] [--topk 5] [--calibrated] [--strict]
batchformer predict RUN IMAGES_OR_FOLDERS... [--out predictions] [--threshold 0.5] [--strict]  (a detector)

Predict on images with a finished run; folders are searched for images. Photos are rotated by their EXIF orientation;
boxes and segments are in pixels of the rotated image.

Classification: writes a CSV file with one line per image: path, class_1, score_1, class_2, score_2, ..., error
(scores are probabilities, the best class first).

Detection and panoptic segmentation: writes a folder with one picture per image, NAME.png, showing boxes or segments
with class and score, plus predictions.json (COCO's results format) and predictions.csv. --threshold is the minimum
score of a box that is drawn (default 0.5; the files hold the 100 best of each image), or the minimum confidence of a
query that takes part in a segmentation (default 0.85).

Hand meshes: writes a folder with NAME.png, NAME.obj and NAME.glb for each image, and predictions.csv.

An unreadable image gets a row with the reason (error) in the CSV file, and the exit code is 1. Existing files are
replaced only if an earlier prediction wrote them.

  --calibrated   classification: apply the temperature that was fitted after training (result.json), so that about 80 %
            of the predictions with a probability of 80 % are right; the predicted classes do not change
  --strict  stop at the first image that cannot be read
  --trust   import classes from outside this package that the run folder names; only if you trust its source
"""
_OPTIONS = (Option("topk"), Option("threshold"), Option("strict", "nothing"), Option("calibrated", "nothing"))


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("out"), Option("trust", "nothing"), *_OPTIONS])
    if len(given.positional) < 2:
        raise UserError("predict needs a run folder and images: batchformer predict RUN photo.jpg FOLDER")
    run_path, *places = given.positional

    from batchformer.cli.finished_run import best_device, load_run
    from batchformer.runs.progress import ProgressLine

    images = list(find_images(places))
    found = load_run(run_path, trust=given.flag("trust"))
    task = found.task
    options = {name: "".join(given.values[name]) for option in _OPTIONS if given.flag(name := option.name)}
    for name in options:
        if name not in task.predict_options:
            known = ", ".join(f"--{each} ({text})" for each, text in task.predict_options.items())
            raise UserError(f"--{name} is not for {type(task).__name__}, which takes: {known or 'no option'}.")
    if "calibrated" in options:
        task.temperature = found.temperature()
    if note := found.note():
        print(note)
    if note := other_class_folders(places, images, [str(name) for name in task.data_info.get("classes", ())]):
        print(note)
    line = ProgressLine()
    line.begin_run(0, "predict")
    out = given.value("out")
    print(task.to(best_device()).predict(images, found.data, Path(out) if out else None, line, **options))
    if bad := task.unreadable:
        print(
            f"batchformer: {len(bad)} of {len(images)} images could not be read, each has a row with the reason "
            f"(error): {next(iter(bad.values()))}",
            file=sys.stderr,
        )
        return 1
    return 0


def other_class_folders(places: list[str], images: list[Path], classes: list[str]) -> str:
    """A note where folders that are searched have class folders of which some are no classes of the training."""
    inside = [image.relative_to(place) for place in map(Path, places) for image in images if place in image.parents]
    names = dict.fromkeys(image.parts[0] for image in inside if len(image.parts) > 1)
    others = [name for name in names if name not in classes]
    if not others or len(others) == len(names):
        return ""
    unknown, known = (", ".join(words[:5]) + ", ..." * (len(words) > 5) for words in (others, classes))
    return f"Note: no class of the training has the name of the folders {unknown} (its classes are {known})."


def find_images(places: list[str]) -> Iterator[Path]:
    """Files as they are given, folders searched in alphabetical order."""
    from batchformer.data.images import EXTENSIONS, images_in, passed_over

    for place in map(Path, places):
        if place.is_dir():
            others: Counter[str] = Counter()
            inside = [path for path in images_in(place, others) if Path(path).is_file()]  # no broken links
            there = f"; {passed_over(others)}" if others else ""
            if not inside:
                raise UserError(f"There is no image in the folder {place} (looked for {' '.join(EXTENSIONS)}{there}).")
            if others:
                print(f"{place}: {passed_over(others)}")
            yield from map(Path, inside)
        elif place.is_file():
            yield place
        else:
            raise UserError(f"There is no image or folder {place}.")
