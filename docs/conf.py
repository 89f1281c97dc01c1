"""The documentation site: `make docs` builds it from these pages, the docstrings and the scripts in examples/.

The pages stay plain Markdown that reads well on a code host. What only a site has is made here while it is built: the
pages of the reference and of the examples (in `generated/`, not committed), the navigation, and links from a folder
or a script of the repository to the page about it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

import batchformer  # noqa: E402

project, author, copyright = "batchformer", "the authors of batchformer", "the authors of batchformer, Apache-2.0"
version = release = batchformer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme, html_title = "furo", f"batchformer {release}"
html_favicon, html_static_path, html_css_files = "icon.svg", ["site.css"], ["site.css"]
html_show_sourcelink = html_copy_source = False
pygments_style, pygments_dark_style = "default", "github-dark"
myst_heading_anchors = 4  # the anchors of a code host
autodoc_member_order, autodoc_typehints_format = "bysource", "short"
autodoc_inherit_docstrings = False  # Lightning's are not about our classes
autodoc_default_options = {"members": True}
highlight_language = "none"  # of blocks without a language: formulas in docstrings
napoleon_numpy_docstring = False

#: page of the reference -> (title, what it lists: a module with `__all__`, a module, or names to leave out with "-")
REFERENCE: dict[str, tuple[str, list[str]]] = {
    "batchformer": ("bf: the public names", ["batchformer -mix -parallel"]),
    "nn": ("nn and attach: further names",
           ["batchformer.nn -BatchFormer -BatchFormerV2 -StreamGuard -TwoStreamLoss -repeat_targets",
            "batchformer.attach.plan Point", "batchformer.attach.lightning"]),
    "mix": ("mix: mixing methods", ["batchformer.mix"]),
    "parallel": ("parallel: several processes", ["batchformer.parallel"]),
    "losses": ("losses", ["batchformer.losses"]),
    "metrics": ("metrics", ["batchformer.metrics"]),
    "models": ("models", ["batchformer.models -DETECTORS"]),
    "data": ("data: data sets", ["batchformer.data"]),
    "training": ("training: the contract of a task",
                 [f"batchformer.training.{name}" for name in ("task", "network_task", "classifier_task", "options",
                  "optimizers", "schedules", "averaging", "momentum", "meter", "weights", "reseed")]),
    "tasks": ("tasks: the families", ["batchformer.tasks -Task -TASKS"]),
    "analysis": ("analysis", ["batchformer.analysis"]),
    "report": ("report: tables and pages of runs", ["batchformer.report"]),
    "runs": ("runs: run folders and results",
             [f"batchformer.runs.{name}" for name in ("options", "folder", "train", "result", "checkpoints")]),
}  # fmt: skip
NAVIGATION = {
    "Begin": ["when-it-helps", "attach", "your-own-data", "your-own-task", "command-line", "from-python", "examples"],
    "Families": ["long-tail", "mix", "detection", "panoptic", "domains", "zero-shot", "self-supervised", "hands"],
    "Background": ["how-it-works", "recipes", "results", "stability", "pictures", "scale", "kernels"],
    "Reference": ["reference", *(f"generated/reference/{page}" for page in REFERENCE)],
    "Project": ["generated/changelog", "generated/contributing", "generated/security"],
}
PLACED = {page for pages in NAVIGATION.values() for page in pages} | {"index"}
NAVIGATION["Background"] += sorted({file.stem for file in DOCS.glob("*.md")} - PLACED)  # pages without a place yet


def reference_page(title: str, entries: list[str]) -> str:
    parts = [f"# {title}\n"]
    for entry in entries:
        module, *names = entry.split()
        left_out = [name[1:] for name in names if name.startswith("-")]
        chosen = [name for name in names if not name.startswith("-")]
        options = [f"   :exclude-members: {', '.join(left_out)}"] * bool(left_out)
        options += [f"   :members: {', '.join(chosen)}"] * bool(chosen)
        heading = [f"## {module}\n"] * (len(entries) > 1)
        parts += [*heading, "\n".join(["```{eval-rst}", f".. automodule:: {module}", *options, "```\n"])]
    return "\n".join(parts)


def example_page(script: Path, kept: Path) -> str:
    """The docstring of an example, its source, and what it printed and drew where `make docs` has run it."""
    source = script.read_text(encoding="utf-8")
    title, _, rest = (ast.get_docstring(ast.parse(source)) or script.stem).partition("\n")
    parts = [
        f"# {script.name}\n",
        title,
        rest,
        f"```{{literalinclude}} ../../../examples/{script.name}\n:language: python\n```",
    ]
    printed = kept / script.stem / "printed.txt"
    if printed.is_file():
        parts += ["## What it prints\n", f"```text\n{printed.read_text(encoding='utf-8').strip()}\n```\n"]
        for picture in sorted(printed.parent.rglob("*.png")):
            parts.append(f"![{picture.stem}]({os.path.relpath(picture, DOCS / 'generated' / 'examples')})\n")
    return "\n".join(parts)


def write_pages(app: Any) -> None:
    """Write the pages that only the site has; a file that is as it should be keeps its time."""
    for module in (import_module(entry.split()[0]) for _, entries in REFERENCE.values() for entry in entries):
        for name in getattr(module, "__all__", ()):
            getattr(module, name)  # names that are imported when first asked for
    kept = ROOT / "build" / "examples"
    pages = {f"reference/{page}": reference_page(*entry) for page, entry in REFERENCE.items()}
    pages |= {f"examples/{script.stem}": example_page(script, kept) for script in (ROOT / "examples").glob("*.py")}
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\(([A-Z]+)\.md\)", lambda link: f"]({link[1].lower()}.md)", text)
        pages[name.lower()] = text.replace("](docs/", "](../")
    folder = DOCS / "generated"
    for old in folder.rglob("*.md"):
        if old.relative_to(folder).with_suffix("").as_posix() not in pages:
            old.unlink()
    for name, text in pages.items():
        file = folder / f"{name}.md"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def on_the_site(app: Any, page: str, source: list[str]) -> None:
    """Lead links to pages of the site where it has one, and give the landing page the navigation."""
    up = "../" * page.count("/")
    if page == "index":
        toctrees = (f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```"
                    for caption, pages in NAVIGATION.items())  # fmt: skip
        source[0] += "\n" + "\n\n".join(toctrees) + "\n"
    if page == "examples":
        scripts = sorted(script.stem for script in (ROOT / "examples").glob("*.py"))
        listed = "\n".join(f"generated/examples/{name}" for name in scripts)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        source[0] = source[0].replace(f"](../{name}.md", f"]({up}generated/{name.lower()}.md")
    source[0] = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", rf"]({up}generated/examples/\1.md)", source[0])
    source[0] = re.sub(r"\]\(\.\./examples/?\)", f"]({up}examples.md)", source[0])
    source[0] = source[0].replace("](../src/batchformer/__init__.py)", f"]({up}generated/reference/batchformer.md)")
    source[0] = re.sub(r"\]\(\.\./src/batchformer/(\w+)/?\)", rf"]({up}generated/reference/\1.md)", source[0])


def as_restructured_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` in it: other markup means itself, indented paragraphs are code."""
    result: list[str] = []
    text: list[str] = []
    section = formula = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.strip() and not line.startswith("    "):
            section, formula = line in ("Args:", "Returns:", "Raises:", "Yields:"), False
        elif line.strip() and not before.strip() and not section and not formula:
            formula = True
            result += [*escaped(text), "::", ""]
            text = []
        (result if formula else text).append(line)
    lines[:] = [*result, *escaped(text)]


def escaped(lines: list[str]) -> list[str]:
    pieces = re.split(r"`([^`]+)`", "\n".join(lines))
    pieces[::2] = [re.sub(r"([*|\\])|(?<=\w)(_)(?!\w)", r"\\\1\2", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"``{piece}``" for piece in pieces[1::2]]
    return "".join(pieces).split("\n")


def setup(app: Any) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", on_the_site)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon reads it
