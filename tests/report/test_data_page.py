"""The page of a data check: its verdict, its numbers, and findings that unfold when there are many."""

from __future__ import annotations

from typing import Any

import pytest

from batchformer.report.data_page import render_check

KINDS = {"lost": ("Files that cannot be read", True, "delete `them`"), "small": ("Small images", False, "look")}


def check(**given: Any) -> dict[str, Any]:
    numbers = {"errors": 0, "root": "here", "sets": {"train": 1200, "val": 34}, "widths": (8, 16, 1024),
               "heights": (9, 17, 2048), "modes": {"RGB": 1230, "L": 4}, "image_size": None, "smaller": 0, "turned": 0,
               "class_counts": {"rare": 3, "often": 1197}, "findings": {}}  # fmt: skip
    return numbers | given


def page(**given: Any) -> str:
    return render_check("folder-lt", check(**given), KINDS, "Next: `fit`")


def lines(count: int) -> list[str]:
    return [f"<{number}>" for number in range(count)]


@pytest.mark.parametrize(("errors", "told"), [(0, "No errors. "), (1, "1 error. "), (2, "2 errors. ")])
def test_the_verdict_says_how_many_errors_there_are(errors, told):
    tone, word = ("hurt", "To fix") if errors else ("helped", "No problems found")
    verdict = f'<div class="card verdict {tone}"><strong>{word}</strong>{told}Next: <code>fit</code></div>'
    assert verdict in page(errors=errors)


def test_the_numbers_of_the_images():
    text = page()
    assert "1,234 images in here, each read once." in text
    told = {"images in train": "1,200", "images in val": "34", "width in pixels": "8 to 1,024, median 16",
            "height in pixels": "9 to 2,048, median 17", "channels": "RGB: 1,230, L: 4"}  # fmt: skip
    for name, value in told.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in text
    assert "smaller than" not in text
    assert "EXIF" not in text
    told = page(image_size=32, smaller=0, turned=5)
    assert "<dt>smaller than image_size (32)</dt><dd>0</dd>" in told
    assert "<dt>rotated by their EXIF orientation</dt><dd>5</dd>" in told


def test_classes_are_listed_by_their_number_of_images():
    text = page()
    assert "Classes: 2" in text
    assert text.index("often") < text.index("1,197") < text.index("rare")


@pytest.mark.parametrize(
    ("kind", "mark", "remedy"), [("lost", "error", "delete <code>them</code>"), ("small", "note", "look")]
)
def test_a_finding_has_its_title_its_kind_and_its_remedy(kind, mark, remedy):
    text = page(findings={kind: lines(20)})
    assert f"<h3>{KINDS[kind][0]}: 20</h3><p class='explain'>{mark}; {remedy}</p>" in text
    assert "<ul><li>&lt;0&gt;</li><li>&lt;1&gt;</li>" in text
    assert "more" not in text.partition(remedy)[2].partition("<h3>Classes")[0]


def test_twenty_lines_are_shown_and_the_others_unfold():
    text = page(findings={"small": lines(21)})
    assert "<li>&lt;19&gt;</li></ul><details><summary>1 more</summary><ul><li>&lt;20&gt;</li></ul></details>" in text
    assert "data-check.json" not in text


def test_of_two_thousand_lines_the_last_is_shown_and_of_more_the_file_is_named():
    assert "more are in" not in page(findings={"small": lines(2000)})
    text = page(findings={"small": lines(2001)})
    assert "<li>&lt;1999&gt;</li></ul></details><p class='explain'>1 more are in data-check.json.</p>" in text
    assert "&lt;2000&gt;" not in text
