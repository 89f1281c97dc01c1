"""A study on the page: a table that leads to its recipes, and every seed in a picture."""

import re

import pytest
from made_up import classification, comparison, write

from batchformer.report import load_runs, write_report
from batchformer.report.comparison import format_difference
from batchformer.report.paper import STUDIES
from batchformer.report.runs import by_recipe
from batchformer.report.statistics import paired_difference
from batchformer.report.studies import find_studies
from batchformer.report.study_figure import study_chart, study_picture

BASE = "mix-resnet56-cifar100"
VARIANTS = ("baseline", "cutmix", "saliencymix")


@pytest.fixture
def results():
    return [classification(f"{BASE}-{name}", "baseline", s, 60 + s) for name in VARIANTS for s in (0, 1, 2)]


def values(results, name):
    return [one["metrics"]["all"] for one in results if one["recipe"] == f"{BASE}-{name}"]


def page(tmp_path, results):
    write(tmp_path / "runs", results)
    return write_report([tmp_path / "runs"], tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_table_holds_each_variant_to_the_baseline_and_to_what_it_is_compared_with(tmp_path, results):
    text = page(tmp_path, [*results, *comparison(seeds=2)])
    assert f"<h2>Study: {BASE}</h2>" in text
    assert "This study is not finished: not trained yet <code>attentive-cutmix</code>" in text
    rows = dict(re.findall(r'<tr><th scope="row"><a href="#[\w-]+">([\w-]+)</a></th>(.*?)</tr>', text))
    assert list(rows) == ["cifar100-lt-100", *VARIANTS]  # the first in the overview, where the study's are not again
    base, cutmix, saliency = (values(results, name) for name in VARIANTS)
    assert f"<td>{format_difference(paired_difference(base, saliency))}</td>" in rows["saliencymix"]
    assert f"<td>{format_difference(paired_difference(cutmix, saliency))} to cutmix</td>" in rows["saliencymix"]
    assert "<td>the baseline</td>" in rows["baseline"]
    assert f"<p>{STUDIES[BASE].held_to_words}</p>" in text
    ids = {*re.findall(r'<section class="recipe" id="([\w-]+)"', text)}
    assert {*re.findall(r'<th scope="row"><a href="#([\w-]+)"', text)} == ids


def test_every_seed_is_a_ring_where_its_accuracy_is(tmp_path, results):
    (study,) = find_studies(by_recipe(load_runs([write(tmp_path, results)])))
    chart, words = study_chart("name", study)
    drawn = chart.svg("title", words)
    for row, name in enumerate(VARIANTS):
        for seed, value in enumerate(values(results, name)):
            across, down = chart.at(value, len(VARIANTS) - row - 0.5)
            place = rf'cx="{across:.1f}" cy="{down:.1f}" r="4"><title>{name}, seed {seed}: {value:.2f} %</title>'
            assert place in drawn
        assert f"{name} {sum(values(results, name)) / 3:.2f} %" in words
    middle, _ = chart.at(sum(values(results, "baseline")) / 3, 0)
    assert f'class="divider" x1="{middle:.1f}"' in drawn


def test_the_picture_is_a_file_that_opens_alone(tmp_path, results):
    import xml.etree.ElementTree as xml

    (study,) = find_studies(by_recipe(load_runs([write(tmp_path, results)])))
    root = xml.fromstring(study_picture(study))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 9


def test_there_is_no_card_without_a_baseline_or_with_two_rows_only(tmp_path, results):
    left = [one for one in results if not one["recipe"].endswith("-baseline")]
    assert "<h2>Study:" not in page(tmp_path / "no baseline", left)
    two = [one for one in results if not one["recipe"].endswith("-saliencymix")]
    assert "<h2>Study:" not in page(tmp_path / "two", two)


def test_names_from_files_are_escaped(tmp_path, results):
    text = page(tmp_path, [*results, classification(f"{BASE}-<b>", "baseline", 0, 60)])
    assert "<b>, seed" not in text
    assert "&lt;b&gt;, seed 0" in text
