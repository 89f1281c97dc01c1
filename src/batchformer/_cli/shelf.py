"""The recipes shipped with the package, read as text: neither torch nor YAML is needed to list them."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from batchformer._cli.nearest import did_you_mean
from batchformer.errors import UserError

ORDER = (
    "digits-lt",
    "vit-digits",
    "cifar100-lt-100",
    "cifar100-lt-200",
    "cifar10-lt-100",
    "imagenet-lt-r10",
    "imagenet-lt-r50",
    "places-lt",
    "inaturalist18",
    "folder-lt",
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
    "coco128-detr",
    "coco128-conditional-detr",
    "coco128-smca-detr",
    "coco128-deformable-detr",
    "coco128-deformable-detr-refine",
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
    "coco128-panoptic-boxes",
    "coco128-panoptic",
    "detr-coco-panoptic-boxes",
    "detr-coco-panoptic",
)


def recipe_names() -> list[str]:
    """All shipped recipes, the usual ones first and in that order."""
    found = {file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml")}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


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
