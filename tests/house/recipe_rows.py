"""The line of docs/recipes.md about a recipe, made from its YAML file and those it extends."""

from __future__ import annotations

import inspect
from importlib import import_module

from batchformer.recipes import find_recipe, read_recipe

HEADER = "| recipe | backbone | loss over the streams | epochs | batch | learning rate | weight decay | augmentation |"


def recipe_row(name: str) -> str:
    recipe = read_recipe(find_recipe(name)[1])
    model, data = recipe["model"], recipe["data"]["init_args"]
    room, _, kind = recipe["data"]["class_path"].rpartition(".")
    augment = data["augment"] if "augment" in data else _default(getattr(import_module(room), kind), "augment")
    cells = [
        f"[`{name}`](#{name})",
        model["backbone"],
        model["stream_loss"],
        recipe["trainer"]["max_epochs"],
        data["batch_size"],
        model["optimizer"]["lr"],
        f"{model['optimizer']['weight_decay']:.0e}".replace("e-0", "e-"),
        augment,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _default(kind: type, keyword: str) -> object:
    """Of a keyword of a class, or of the first of its base classes that names it."""
    signatures = (inspect.signature(each).parameters for each in kind.__mro__[:-1])
    return next(keywords[keyword].default for keywords in signatures if keyword in keywords)
