"""``batchformer data [RECIPE]`` and ``batchformer data miniature NAME DEST``."""

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.training import recipe_overrides
from batchformer.errors import UserError
from batchformer.metrics.shots import SHOTS
from batchformer.recipes import find_recipe

HELP = """
batchformer data                              the data sets and the layouts of their folders
batchformer data RECIPE [--data-root DIR]     look at the data of a recipe: classes, images, what is passed over
batchformer data miniature NAME DEST          write a tiny data set in the official layout, to try a recipe out
"""
FOOTNOTE = """\
DIR is --data-root (default: data, in the current folder). CIFAR can be fetched: --data.download true
Look at one:  batchformer data cifar100-lt-100 --data-root DIR
No data yet?  batchformer data miniature cifar100 DIR     a tiny generated set in the same layout"""


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("data-root")], recipe_keys=True)
    words = given.positional
    if not words:
        print(f"{layout_table()}\n\n{FOOTNOTE}")
    elif words[0] == "miniature":
        if len(words) != 3:
            raise UserError("miniature needs a name and a folder: batchformer data miniature cifar100 DIR")
        from batchformer.data.sets import write_miniature

        made = write_miniature(*words[1:])
        print(f"{made}: a tiny {words[1]} in its official layout; use it with --data-root {words[2]}")
    elif len(words) == 1:
        _describe(words[0], recipe_overrides(given))
    else:
        raise UserError(f"Unexpected argument {words[1]}: data takes one recipe.")
    return 0


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
    print(f"  image size {about['image_size']}, fingerprint {about['fingerprint'][:16]}")
    for remark in data.remarks():
        print(f"  note: {remark}")
