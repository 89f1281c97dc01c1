"""The recipes shipped with the package, read as text: neither torch nor YAML is needed to list them."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from batchformer.errors import UserError, did_you_mean

SHELVES = {
    "Start here, nothing to download": (
        "digits-lt",
        "vit-digits",
    ),
    "Long-tailed recognition, BatchFormer": (
        "cifar100-lt-100",
        "cifar100-lt-200",
        "cifar10-lt-100",
        "imagenet-lt-r10",
        "imagenet-lt-r50",
        "places-lt",
        "inaturalist18",
        "folder-lt",
    ),
    "Image classification, BatchFormerV2 (ResNet-50: BatchFormer)": (
        "vit-cifar100-32",
        "deit-ti-cifar100-100",
        "deit-s-cifar100-100",
        "deit-b-cifar100-100",
        "deit-ti-cifar100-300",
        "deit-s-cifar100-300",
        "deit-b-cifar100-300",
        "deit-s-tiny-imagenet",
        "deit-s-tiny-imagenet-no-mix",
        "deit-s-tiny-imagenet-no-cutmix",
        "deit-ti-imagenet",
        "deit-s-imagenet",
        "deit-b-imagenet",
        "resnet50-imagenet",
        "deit-s-imagenet-lt-1-12",
        "deit-s-imagenet-lt-4-12",
        "deit-s-imagenet-lt-8-12",
        "deit-s-imagenet-lt-not-shared",
    ),
    "Detection, BatchFormerV2": (
        "coco128-detr",
        "coco128-conditional-detr",
        "coco128-smca-detr",
        "coco128-deformable-detr",
        "coco128-deformable-detr-refine",
        "coco128-deformable-detr-two-stage",
        "detr-coco",
        "conditional-detr-coco",
        "smca-detr-coco",
        "deformable-detr-coco",
        "deformable-detr-refine-coco",
        "deformable-detr-r101-coco",
        "deformable-detr-coco-l6-batch16",
        "deformable-detr-coco-l6",
        "deformable-detr-coco-l6-batch32",
        "deformable-detr-coco-l1-2",
        "deformable-detr-coco-l1-3",
        "deformable-detr-coco-l3-6",
        "deformable-detr-coco-l4-6",
        "deformable-detr-coco-l5-6",
        "deformable-detr-coco-l2",
        "deformable-detr-coco-l3",
        "deformable-detr-coco-l4",
        "deformable-detr-coco-l5",
        "deformable-detr-coco-l3-6-shared",
        "deformable-detr-coco-single-stream",
        "deformable-detr-coco-batch-inference",
    ),
    "Panoptic segmentation, BatchFormerV2": (
        "coco128-panoptic-boxes",
        "coco128-panoptic",
        "detr-coco-panoptic-boxes",
        "detr-coco-panoptic",
    ),
}
LAST_SHELF = "TransMix and the other ways of mixing, CIFAR-100 first"


def shelves() -> dict[str, list[str]]:
    """All shipped recipes by what they are about; those that no shelf names are on the last one."""
    found = {file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml")}
    placed = {title: [name for name in names if name in found] for title, names in SHELVES.items()}
    rest = found.difference(*placed.values())
    return {**placed, LAST_SHELF: sorted(rest, key=_cifar_first_and_numbers_by_value)}


def recipe_names() -> list[str]:
    """All shipped recipes, in the order of their shelves."""
    return [name for names in shelves().values() for name in names]


def _cifar_first_and_numbers_by_value(name: str) -> tuple[bool, list[tuple[int, str]]]:
    parts = re.split(r"(\d+)", name)
    return "cifar" not in name, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def recipe_text(name: str) -> str:
    return _folder().joinpath(f"{name}.yaml").read_text()


def recipe_description(name: str) -> str:
    """The first comment line of the file."""
    return recipe_text(name).splitlines()[0].lstrip("# ").strip()


def find_recipe(given: str) -> tuple[str, Path]:
    """Name and file of a shipped recipe, or of the user's own YAML file."""
    if given.endswith((".yaml", ".yml")) or "/" in given:
        path = Path(given)
        if path.is_file():
            return path.stem, path
        raise UserError(f"There is no recipe file {given}; batchformer recipes lists the shipped ones.")
    if given in recipe_names():
        with resources.as_file(_folder().joinpath(f"{given}.yaml")) as path:
            return given, path
    hint = did_you_mean(given, recipe_names()) or " batchformer recipes lists them."
    raise UserError(f"There is no recipe named {given}.{hint}")


def _folder() -> Traversable:
    return resources.files("batchformer").joinpath("recipes")
