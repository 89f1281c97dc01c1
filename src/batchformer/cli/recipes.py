"""``batchformer recipes [NAME]``."""

from __future__ import annotations

from batchformer.cli.arguments import read_arguments
from batchformer.cli.shelf import find_recipe, recipe_description, recipe_names, shelves
from batchformer.errors import UserError

HELP = """
batchformer recipes          list the recipes that are shipped
batchformer recipes NAME     print one; save it to a file, change it, and train it: batchformer fit FILE.yaml
"""


def run(args: list[str]) -> int:
    given = read_arguments(args, []).positional
    if len(given) > 1:
        raise UserError("recipes takes one name, or none to list them all.")
    if given:
        print(find_recipe(given[0])[1].read_text(), end="")
        return 0
    width = max(map(len, recipe_names()))
    for title, names in shelves().items():
        print(f"{title}:")
        for name in names:
            print(f"  {name:<{width}}  {recipe_description(name)}")
        print()
    print("Train one:    batchformer fit NAME           (--method baseline: the same without BatchFormer)")
    print("Compare:      batchformer compare NAME --seeds 3")
    print("Read or edit: batchformer recipes NAME > mine.yaml && batchformer fit mine.yaml")
    return 0
