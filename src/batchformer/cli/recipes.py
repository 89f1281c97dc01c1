"""``batchformer recipes [NAME or FOLDER]``: list recipes, or print one."""

from pathlib import Path

from batchformer.cli.arguments import read_arguments
from batchformer.errors import UserError
from batchformer.recipes import about, find_recipe, recipe_groups, recipe_names

HELP = """
batchformer recipes          list the shipped recipes
batchformer recipes NAME     print one; save it to a file, edit it and train it: batchformer fit FILE.yaml
batchformer recipes FOLDER   list your own recipes in a folder
"""
NEXT = """
Train one:    batchformer fit NAME           (--method baseline: without BatchFormer)
Compare:      batchformer compare NAME --seeds 3
Edit one:     batchformer recipes NAME > mine.yaml && batchformer fit mine.yaml"""


def run(args: list[str]) -> int:
    given = read_arguments(args, []).positional
    if len(given) > 1:
        raise UserError("recipes takes one name, or none to list them all.")
    if not given:
        try:
            print(_list(None))
        except ModuleNotFoundError:  # YAML comes with the train extra, the names without it
            print("\n".join(recipe_names()))
        print(NEXT)
    elif Path(given[0]).is_dir() and given[0] not in recipe_names():
        print(_list(Path(given[0])))
    else:
        print(find_recipe(given[0])[1].read_text(encoding="utf-8"), end="")
    return 0


def _list(folder: Path | None) -> str:
    """The recipes of a folder, or the shipped ones, with their titles."""
    groups = recipe_groups(folder)
    if not groups:
        raise UserError(f"There is no recipe in {folder}: recipes are files that end in .yaml.")
    width = max(len(name) for names in groups.values() for name in names)
    parts = []
    for group, names in groups.items():
        titles = (about(name if folder is None else folder / f"{name}.yaml").title for name in names)
        lines = (f"  {name:<{width}}  {title}" for name, title in zip(names, titles, strict=True))
        parts.append("\n".join([f"{group}:", *lines]))
    return "\n\n".join(parts)
