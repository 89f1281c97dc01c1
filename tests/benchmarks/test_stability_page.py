"""docs/stability.md: its tables and pictures are those of the files."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from batchformer.errors import UserError
from benchmarks.pages import write
from benchmarks.stability_page import pages


def start_rows() -> list[dict]:
    rows = []
    for form, share in (("published", 0.8), ("stable", 0.99)):
        for depth in range(1, 13):
            rows.append(
                {
                    "form": form,
                    "depth": depth,
                    "signal": share**depth,
                    "between_samples": 0.5,
                    "norm_of_plain": 1.25,
                    "effective_rank": 10.0 * depth,
                    "attention_entropy": 0.5 + depth / 100,
                    "gradient_plain": 2.0,
                    "gradient_related": 0.5,
                }
            )
    return rows


def repository(root: Path, rows: list[dict] | None) -> Path:
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "docs").mkdir()
    if rows is not None:
        (root / "benchmarks" / "results" / "stability_start.json").write_text(json.dumps({"rows": rows}))
    for seed, top1 in enumerate((40.0, 41.0)):
        result = {
            "recipe": "vit-cifar100-32-stable",
            "method": "batchformer",
            "seed": seed,
            "protocol": "last",
            "metrics": {"all": top1, "top1": top1, "top5": 70.0},
            "streams": {"plain_loss": [4.0, 3.0], "related_loss": [4.1, 3.3]},
            "stream_health": {
                "points": [{"change_quiet": 0.2, "signal": 0.9}, {"change_quiet": 0.08, "signal": 0.7}],
                "blocks": [],
                "gradient_on_others": {"quiet": {"norm_share": 0.25, "squared_share": 0.02}},
            },
        }
        folder = root / "results" / "vit-cifar100-32-stable"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"batchformer-seed{seed}.json").write_text(json.dumps(result))
    return root


def written(root: Path) -> str:
    assert write("stability", root) == 0
    return (root / "docs" / "stability.md").read_text()


def cells(page: str, first: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_tables_are_those_of_the_files(tmp_path: Path) -> None:
    page = written(repository(tmp_path, start_rows()))
    signals, last = ["0.80", "0.41", "0.17", "0.07"], ["0.50", "1.25", "120", "0.62"]
    assert cells(page, "published") == ["published", *signals, *last, "0.25 to 0.25"]
    run = cells(page, "`vit-cifar100-32-stable`")
    assert run == ["`vit-cifar100-32-stable`", "2", "3.00", "3.30", "0.70", "8.0", "25.0 / 2.0", "40.50"]


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_lines_have_colours_that_can_be_told_apart(tmp_path: Path, ground: str) -> None:
    rows = [{**row, "form": f"form {k}"} for k in range(8) for row in start_rows()[:12]]
    written(repository(tmp_path, rows))
    light, dark = (tmp_path / "docs" / "stability-signal.svg").read_text().split("@media(prefers-color-scheme:dark)")
    found = re.findall(r"\.s\d{stroke:#(\w{6})}", light if ground == "light" else dark)
    colours = [bytes.fromhex(value) for value in found]
    assert len(colours) == 8
    assert min(math.dist(a, b) for a, b in itertools.combinations(colours, 2)) > 60


def test_the_pictures_are_whole_and_name_every_form(tmp_path: Path) -> None:
    written(repository(tmp_path, start_rows()))
    for name in ("stability-signal.svg", "stability-between.svg"):
        picture = ET.parse(tmp_path / "docs" / name).getroot()
        texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
        lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
        assert {"published", "stable"} <= set(texts)
        assert len(lines) == 2


def test_without_the_measurement_one_sentence_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stability_start\.json.*benchmarks/stability\.py"):
        pages(repository(tmp_path, None))


def test_the_start_of_training_is_shown_by_depth_as_the_mean_over_seeds(tmp_path: Path) -> None:
    root = repository(tmp_path, start_rows())
    rows = [
        {"depth": 24, "form": "published", "seed": s, "steps": k, "plain_loss": 1.0 + s, "related_loss": 2.0 + s}
        for s in (0, 1)
        for k in (50, 100, 150, 200)
    ]
    file = root / "benchmarks" / "results" / "stability_depth.json"
    file.write_text(json.dumps({"classes": 10, "rows": rows}))
    page = written(root)
    assert cells(page, "24 blocks, published")[1:] == ["2", "1.50 / 2.50", "1.50 / 2.50"]
    assert "Chance is 2.30" in page
