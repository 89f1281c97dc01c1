"""The table of supported models, written from the behaviour suite, which tests the promises on each of them.

In README.md one row for each library and kind; elsewhere one for each class, with the models that were built. Both go
between the markers; everything outside stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks._markdown import between_markers, markdown
from tests.behaviour.cases import ALL_CASES, Case

BEGIN, END = "<!-- models -->", "<!-- /models -->"


def models_table(short: bool) -> str:
    rows = []
    for kind, cases in _grouped(ALL_CASES, lambda case: case.kind).items():
        classes = _grouped(cases, _class_name)
        if short:
            # transformers' classes by their stem, ViT of ViTForImageClassification
            names = [name.partition("For")[0] if kind.startswith("transformers") else name for name in classes]
            rows.append([kind, ", ".join(dict.fromkeys(names)), _places(cases)])
        else:
            rows += [[kind, f"`{name}`{_built(of)}", _places(of)] for name, of in classes.items()]
    return markdown(["models", "tested", "module position"], rows, right=False)


def _grouped(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(key(case), []).append(case)
    return found


def _class_name(case: Case) -> str:
    with torch.device("meta"):  # no weights are made
        return type(case.build()).__name__


def _built(cases: Sequence[Case]) -> str:
    """Of timm the names of the models, which say more than the class."""
    names = (case.name.removeprefix("timm-").partition("-")[0] for case in cases if case.kind.startswith("timm"))
    listed = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    return f" ({listed})" if listed else ""


def _places(cases: Iterable[Case]) -> str:
    inside = {bool({"after", "blocks", "encoder_layers"} & dict(case.places).keys()) for case in cases}
    return " or ".join(text for at, text in ((False, "before the classifier"), (True, "after blocks")) if at in inside)


def pages(root: Path) -> dict[Path, str]:
    found = (root / "README.md", root / "docs" / "attach.md")
    return {page: with_models(page) for page in found}


def with_models(page: Path) -> str:
    """The text of the page with its table."""
    table = models_table(short=page.name == "README.md")
    return between_markers(page.read_text(encoding="utf-8"), table, page.name, BEGIN, END)
