"""``batchformer data [RECIPE] [--check]`` and ``batchformer data miniature NAME DEST``."""

from pathlib import Path

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.show import program
from batchformer.cli.training import check_file, recipe_overrides, shell_arguments
from batchformer.errors import UserError
from batchformer.metrics.measures import SHOTS
from batchformer.recipes import find_recipe

HELP = """
batchformer data                              list the data sets and their folder layouts
batchformer data RECIPE [--data-root DIR]     show the data of a recipe: classes, images, skipped files
batchformer data RECIPE --check               read every image once and list problems
batchformer data miniature NAME DEST          write a tiny data set in the official layout, to try out a recipe

  --check     finds damaged and skipped files, the same picture in training and evaluation or in several classes (by its
              pixels), classes with few images, label and box errors; lists sizes and channels. Writes data-check.html
              and data-check.json, which `fit --skip-bad` reads. The exit code is 1 if there is an error.
  --out DIR   folder for both files (default: runs/RECIPE)
"""
_SHOWN = 5  # findings of a kind in the terminal
FOOTNOTE = """\
DIR is --data-root (default: data, in the current folder). CIFAR can be downloaded: --data.download true
Inspect one:  batchformer data cifar100-lt-100 --data-root DIR
No data yet?  batchformer data miniature cifar100 DIR     writes a tiny generated set in the same layout"""


def run(args: list[str]) -> int:
    options = [Option("data-root"), Option("check", "nothing"), Option("out")]
    given = read_arguments(args, options, recipe_keys=True)
    words = given.positional
    if given.flag("out") and not given.flag("check"):
        raise UserError("--out is the folder that --check writes to: add --check, or drop --out.")
    if not words and (given.values or given.recipe_keys):
        raise UserError("These options need a recipe: batchformer data digits-lt; batchformer recipes lists them.")
    if not words:
        print(f"{layout_table()}\n\n{FOOTNOTE}")
    elif words[0] == "miniature":
        if len(words) != 3:
            raise UserError("miniature needs a name and a folder: batchformer data miniature cifar100 DIR")
        from batchformer.data.sets import write_miniature

        made = write_miniature(*words[1:])
        print(f"{made}: a tiny {words[1]} in its official layout; use it with --data-root {words[2]}")
    elif len(words) == 1 and given.flag("check"):
        return _check(words[0], recipe_overrides(given), given.value("out"), shell_arguments(given, "data-root"))
    elif len(words) == 1:
        _describe(words[0], recipe_overrides(given))
    else:
        raise UserError(f"Unexpected argument {words[1]}: data takes one recipe.")
    return 0


def _check(recipe: str, overrides: list[tuple[str, str]], out: str | None, again: str) -> int:
    name, file = find_recipe(recipe)
    from batchformer.cli.recipe_cli import RecipeCLI
    from batchformer.data.check import KINDS, check_data
    from batchformer.files import refuse_unwritable, write_json, write_text
    from batchformer.report.data_page import render_check
    from batchformer.runs.progress import ProgressLine

    target = Path(out) / "data-check.json" if out else Path(check_file(name))
    refuse_unwritable(target)
    cli = RecipeCLI()
    cli.load(file, overrides)
    _, data, *_ = cli.build()
    line = ProgressLine()
    check = check_data(data, lambda done, all_of_them: line.update(done / all_of_them, f"{done:,} images"))
    line.clear()
    skip = "--skip-bad" if not out else f"--data.skip_bad {target}"
    way_out = f"train without them: `{program()} fit {again} {skip}`"
    content = check.as_dict()
    page = target.with_suffix(".html")
    write_json(target, {"recipe": name, **content})
    write_text(page, render_check(name, content, KINDS, f"Fix them, or {way_out}" if check.errors else ""))
    print(f"{name}: {', '.join(f'{count:,} {part}' for part, count in check.sets.items())} images in {check.root}")
    for each in ("widths", "heights"):
        low, middle, high = getattr(check, each)
        print(f"  {each:<8} {low:,} to {high:,}, median {middle:,}")
    print(f"  channels {', '.join(f'{mode} {count:,}' for mode, count in check.modes.items())}")
    if check.image_size and check.smaller:
        print(f"  {check.smaller:,} smaller than data.image_size {check.image_size}")
    if check.turned:
        print(f"  {check.turned:,} rotated by their EXIF orientation")
    for kind, lines in check.findings.items():
        title, error, remedy = KINDS[kind]
        print(f"\n{'error' if error else 'note'}: {title[:1].lower()}{title[1:]}: {len(lines):,} ({remedy})")
        print("\n".join(f"  {each}" for each in lines[:_SHOWN]))
        if len(lines) > _SHOWN:
            print(f"  ... and {len(lines) - _SHOWN:,} more")
    print(f"\n{'No errors' if not check.errors else f'{check.errors:,} to fix, or ' + way_out.replace('`', '')}")
    print(f"Look at:  {page}   (open it in a browser)")
    return 1 if check.errors else 0


def layout_table() -> str:
    """One line per data set: its name and the layout of its folder."""
    from batchformer.data.sets import layouts

    texts = layouts()
    width = max(len(name) for name in texts) + 1
    indented = "\n" + " " * width
    return "\n".join(f"{name:{width}}{indented.join(text.splitlines())}" for name, text in texts.items())


def _describe(recipe: str, overrides: list[tuple[str, str]]) -> None:
    name, file = find_recipe(recipe)
    from batchformer.cli.recipe_cli import RecipeCLI

    cli = RecipeCLI()
    cli.load(file, overrides)
    task, data, *_ = cli.build()
    about = data.describe()
    head, tail = about["head"], about["tail"]
    print(
        f"{name}: {about['classes']} {'class' if about['classes'] == 1 else 'classes'}, "
        f"{about['train_images']:,} training and {about['test_images']:,} test images"
    )
    things = "boxes" if "train_boxes" in about else "images"
    if things == "boxes":
        print(f"  {about['train_boxes']:,} training and {about['test_boxes']:,} test boxes")
    print(f"  most {things}:   {head['name']} ({head['images']:,})")
    print(f"  fewest {things}: {tail['name']} ({tail['images']:,}), imbalance {about['imbalance']:.0f}")
    judged = {measure.key for measure in task.measures}.issuperset(SHOTS)
    if judged and sum(about[shot] > 0 for shot in SHOTS) > 1:  # a long tail
        print(
            f"  many (> 100): {about['many']}   medium (20 to 100): {about['medium']}   few (< 20): {about['few']} "
            "classes"
        )
    for sentence in about.get("details", ()):
        print(f"  {sentence}")
    size = "" if about["image_size"] is None else f"image size {about['image_size']}, "  # none of features
    print(f"  {size}fingerprint {about['fingerprint'][:16]}")
    for remark in data.remarks():
        print(f"  note: {remark}")
