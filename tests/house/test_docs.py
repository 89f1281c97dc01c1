"""The documentation keeps its word: code runs and prints what it says, paths and links exist, no recipe is missing."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import yaml

from batchformer.cli import COMMANDS, main
from batchformer.recipes import about, recipe_names
from benchmarks import models_table, recipes_page, when_it_helps

from ..selection import others_slow
from .pages import PAGES, REPOSITORY, blocks, python_blocks

DOCS = REPOSITORY / "docs"
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# Commands whose output depends on nothing but the code: cheap, without training.
_QUICK = ("help", "recipes", "data", "data digits-lt", "data miniature cifar100 mini", "data miniature folder photos",
          "data folder-lt --data-root photos", "fit cifar100-lt-10", "fit digits-lt --trainer.max_epoch 3",
          "fit digits-lt --trainer.max_epochs three", "test runs/nothing", "completion bash")  # fmt: skip


EXAMPLES = sorted(path.name for path in (REPOSITORY / "examples").glob("*.py"))
_OWN_PROCESSES = ("global_batch.py",)  # examples that start some themselves
_SHORTEST = {"plain_loop.py", "lightning_callback.py", "transmix_loop.py"}
_SHORTER = {"detection_pictures.py": ["--steps", "10"]}


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_every_python_block_runs_and_prints_what_the_page_says(page, monkeypatch, tmp_path):
    # Dynamo traces and guards as ever; the real compiler, half a minute here, has its test in tests/behaviour.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for block in python_blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, f"{name_of(page)}, block at line {block.line}", "exec"), namespace)
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{name_of(page)}, line {block.line}"


@pytest.mark.parametrize("page", [*PAGES[1:], *REPOSITORY.glob("[A-Z]*[A-Z].md")], ids=name_of)
def test_every_link_inside_the_repository_leads_somewhere(page):
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:  # that it is there, `sphinx -b linkcheck` tries: the tests need no network
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w.~/-]*)?(#[\w.-]+)?", target), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        assert file.is_relative_to(REPOSITORY), f"{name_of(page)} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}, which has no such heading"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_how_it_works_names_is_in_the_file_it_names():
    text = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| `(src/[^`]+)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) > 15
    for path, name in rows:
        source = (REPOSITORY / path).read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), f"{name} is not in {path}"
    for path in re.findall(r"`(src/[^`]+)`", text):
        assert (REPOSITORY / path).exists(), path


def test_every_recipe_of_a_table_is_found_from_the_table():
    text = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    section = text.split("\n## Which table is which recipe\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\|[^|]*\|[^|]*\| ([^|]*) \|$", section, re.MULTILINE)
    patterns = re.findall(r"`([a-z*][\w*-]*)`", " ".join(cells))
    assert [pattern for pattern in patterns if not fnmatch.filter(recipe_names(), pattern)] == []
    of_a_table = {name for name in recipe_names() if " Table" in about(name).title}
    named = {name for pattern in patterns for name in fnmatch.filter(recipe_names(), pattern)}
    assert of_a_table <= named, of_a_table - named


def test_the_tables_of_recipes_are_what_the_recipe_files_say():
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert {DOCS / "recipes.md": text} == recipes_page.pages(REPOSITORY), "stale: python -m benchmarks.pages recipes"
    assert [name for name in recipe_names() if f"| [`{name}`]" not in text] == []


@pytest.mark.slow
def test_the_tables_of_models_are_what_the_behaviour_suite_checks():
    pages = [page for page in PAGES if models_table.BEGIN in page.read_text(encoding="utf-8")]
    assert DOCS / "attach.md" in pages
    for page in pages:
        stale = "stale: python -m benchmarks.pages models"
        assert page.read_text(encoding="utf-8") == models_table.with_models(page), stale
    short = models_table.models_table(short=True)
    assert len(short.splitlines()) <= 12
    assert all(f"| transformers {kind}" in short for kind in ("text", "audio", "video", "segmentation", "detectors"))


def test_no_page_speaks_of_a_recipe_that_is_not_shipped():
    known = {*recipe_names(), "cifar100-lt-10"}  # the last one is the page's example of a mistake
    for page in PAGES:
        named = re.findall(r"batchformer (?:fit|compare) ([a-z][a-z0-9-]*)[`\s]", page.read_text(encoding="utf-8"))
        assert {name for name in named if name != "mine"} <= known, name_of(page)


def test_every_command_is_described():
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"\n## {command}\n" in text


def test_shown_output_of_quick_commands_is_what_they_print(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shown = {}
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "console":
                command, _, output = block.code.partition("\n")
                shown[command.removeprefix("$ batchformer ")] = output
    assert set(_QUICK) <= set(shown)
    for command in _QUICK:
        main(command.split())
        out, err = capsys.readouterr()
        assert (out + err).strip() == shown[command].strip(), command


def test_the_readme_is_a_landing_page_and_the_index_knows_every_page():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if page.name != "index.md" and f"({page.name})" not in index] == []


def test_the_readme_and_the_page_of_comparisons_show_what_the_result_files_hold():
    pages = when_it_helps.pages(REPOSITORY)
    assert {REPOSITORY / "README.md", *DOCS.glob("when-it-helps*")} == set(pages)
    for page, content in pages.items():
        stale = f"{name_of(page)} is stale: python -m benchmarks.pages when-it-helps"
        assert page.read_text(encoding="utf-8") == content, stale


@pytest.mark.parametrize("example", others_slow(EXAMPLES, _SHORTEST))
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    example = REPOSITORY / "examples" / example
    monkeypatch.chdir(tmp_path)
    if example.name in _OWN_PROCESSES:
        done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:  # here, where everything is imported already
        monkeypatch.setattr(sys, "argv", [str(example), *_SHORTER.get(example.name, [])])
        with mock.patch.dict(os.environ):
            runpy.run_path(str(example), run_name="__main__")
        printed = capsys.readouterr().out
    assert "accuracy" in printed


def test_the_picture_is_well_formed_and_loads_nothing():
    picture = (DOCS / "method.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(picture)
    assert "href" not in picture
    assert "url(http" not in picture


def test_citation_names_the_three_papers_and_the_version():
    import batchformer

    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == batchformer.__version__
    assert citation["license"] == "Apache-2.0"
    titles = [reference["title"].split(":")[0] for reference in citation["references"]]
    assert titles == ["BatchFormer", "BatchFormerV2", "TransMix"]
