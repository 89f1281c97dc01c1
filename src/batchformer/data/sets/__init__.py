"""One file per data set: its reader, the layout of its folder (`LAYOUT`) and its miniature (`miniature`).

`SETS` names them all. A file that reads several sets of one layout has a dict of texts, by name, for `LAYOUT`, and its
`miniature` takes the name as a second argument. Layouts are read from the source files, so that the command line can
list them without importing torch.
"""

import ast
import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType

from batchformer.errors import UserError

#: name of a data set: the module in this folder, and its class
SETS: dict[str, str] = {
    "digits": "digits:DigitsLT",
    "cifar100": "cifar:CIFAR100",
    "cifar10": "cifar:CIFAR10",
    "tiny-imagenet": "tiny_imagenet:TinyImageNet",
    "imagenet": "imagenet:ImageNet",
    "imagenet-lt": "list_files:ListFiles",
    "places-lt": "list_files:ListFiles",
    "inaturalist18": "list_files:ListFiles",
    "folder": "folder:ImageFolders",
    "digits-domains": "digits:DigitsDomains",
    "folder-domains": "domain_folders:DomainFolders",
    "pacs": "domain_folders:PACS",
    "vlcs": "domain_folders:VLCS",
    "office-home": "domain_folders:OfficeHome",
    "terra-incognita": "domain_folders:TerraIncognita",
    "visda": "domain_folders:VisDA",
    "mnist-usps-svhn": "digit_domains:DigitDomains",
    "digits-states": "digits:DigitsStates",
    "folder-pairs": "compositional:PairFolders",
    "mit-states": "compositional:PairFolders",
    "ut-zappos": "compositional:PairFolders",
    "cgqa": "compositional:PairFolders",
    "plantvillage-czsl": "compositional:PairFolders",
    "digits-numbers": "digits:DigitNumbers",
    "xlsa17": "generalized:AttributeFiles",
    "features": "generalized:AttributeFiles",
    "coco": "coco:CocoDetection",
    "coco-panoptic": "coco_panoptic:CocoPanoptic",
    "voc": "voc:VocDetection",
    "folder-detection": "detection_folder:DetectionFolder",
    "hands": "hands:RenderedHands",
    "freihand": "hands:FreiHand",
}


def layouts() -> dict[str, str]:
    """The official folder layout of each data set, one or two lines of text."""
    found = {}
    for name in SETS:
        assigned = (part for part in _source(name).body if isinstance(part, ast.Assign))
        layout = next(part for part in assigned if ast.unparse(part.targets[0]) == "LAYOUT")
        value = ast.literal_eval(layout.value)
        found[name] = value[name] if isinstance(value, dict) else value
    return found


def miniature_names() -> list[str]:
    """The data sets that have a miniature."""
    functions = {name: [part for part in _source(name).body if isinstance(part, ast.FunctionDef)] for name in SETS}
    return [name for name in SETS if any(part.name == "miniature" for part in functions[name])]


def write_miniature(name: str, folder: str | Path) -> Path:
    """Write a tiny generated data set in the official layout of the named one; returns the path for `data.root`.

    `folder` is new or empty. The contents of each miniature: see `miniature` in the data set's file.
    """
    if name not in miniature_names():
        raise UserError(f"there is no miniature of {name!r}: choose one of {', '.join(miniature_names())}.")
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root} exists and is not an empty folder: name another one.")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{root} cannot be made ({problem.strerror}): name another folder.") from problem
    module = _module(name)
    module.miniature(*((root, name) if isinstance(module.LAYOUT, dict) else (root,)))
    return root


def import_all() -> None:
    """Import every data set: recipes may name one by its class alone."""
    for name in SETS:
        _module(name)


def _module(name: str) -> ModuleType:
    return import_module(f"{__name__}.{SETS[name].partition(':')[0]}")


def _source(name: str) -> ast.Module:
    return _parsed(SETS[name].partition(":")[0])


@functools.cache  # several sets are of one module
def _parsed(module: str) -> ast.Module:
    return ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
