"""The page of all comparisons and the table in the README: what goes in, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchformer.errors import UserError
from benchmarks._markdown import BEGIN, END, between_markers
from benchmarks.pages import write
from benchmarks.studies import STUDIES
from benchmarks.when_it_helps import QUESTIONS, page, readme_table

ROOT = Path(__file__).parents[2]


def put(folder, recipe, method, seed, all_):
    file = folder / recipe / f"{method}-seed{seed}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    metrics = {"all": all_, "many": all_ + 10, "medium": all_, "few": all_ - 10}
    file.write_text(json.dumps({"recipe": recipe, "method": method, "seed": seed, "metrics": metrics}))


def pairs(folder, recipe, gain):
    for seed in range(3):
        put(folder, recipe, "baseline", seed, 50.0 + seed)
        put(folder, recipe, "batchformer", seed, 50.0 + seed + gain + 0.01 * seed)


def test_reading_follows_the_interval(tmp_path):
    for name, gain in (("up", 2.0), ("down", -2.0), ("level", 0.0)):
        pairs(tmp_path / name, "cifar100-lt-100", gain)
    assert readme_table(tmp_path / "up").endswith("| better |")
    assert readme_table(tmp_path / "down").endswith("| worse |")
    assert readme_table(tmp_path / "level").endswith("| no clear difference |")


def test_less_is_better_in_millimetres(tmp_path):
    measure = {"key": "pa_mpvpe", "label": "PA-MPVPE", "unit": "mm", "better": "lower", "primary": True}
    for seed in range(3):
        for method, value in (("baseline", 9.0), ("batchformer", 8.0 + 0.01 * seed)):
            file = tmp_path / "hands-tiny" / f"{method}-seed{seed}.json"
            file.parent.mkdir(exist_ok=True)
            result = {"recipe": "hands-tiny", "variant": method, "seed": seed, "measures": [measure]}
            file.write_text(json.dumps({**result, "metrics": {"pa_mpvpe": value}}))
    text, _ = page(tmp_path)
    assert "1 better, 0 worse" in text
    assert "**Better: BatchFormerV2 (−0.99).**" in text


def test_row_holds_paper_and_ours(tmp_path):
    pairs(tmp_path, "cifar100-lt-100", 0.0)
    row = readme_table(tmp_path).splitlines()[-1]
    assert "| 51.00 ± 1.00 | 51.01 ± 1.01 | +0.01 [" in row
    assert "] | 3 | +1.0 | " in row  # Table 1: 50.7 and 51.7


def test_only_matched_seeds_count_and_one_is_no_result(tmp_path):
    put(tmp_path, "cifar100-lt-100", "baseline", 0, 40.0)
    put(tmp_path, "cifar100-lt-100", "batchformer", 0, 42.0)
    put(tmp_path, "cifar100-lt-100", "batchformer", 1, 60.0)
    assert "| +2.00 (one seed) | 1 | +1.0 | one seed: may be chance |" in readme_table(tmp_path)


def test_rows_with_one_side_and_other_recipes_are_left_out(tmp_path):
    pairs(tmp_path, "cifar100-lt-100", 1.0)
    pairs(tmp_path, "cifar100-lt-100-short", 1.0)
    put(tmp_path, "vit-cifar100-32-published", "batchformer", 0, 40.0)
    assert len(readme_table(tmp_path).splitlines()) == 3


def test_nothing_to_show_is_refused(tmp_path):
    put(tmp_path, "cifar100-lt-200", "batchformer", 0, 40.0)
    with pytest.raises(UserError, match="nothing to show"):
        readme_table(tmp_path)


def test_only_what_is_between_the_markers_changes():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = between_markers(text, "new", "README.md")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert between_markers(once, "new", "README.md") == once


@pytest.mark.parametrize("text", ["no markers", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_missing_or_doubled_markers_are_refused(text):
    with pytest.raises(UserError, match="each once"):
        between_markers(text, "new", "README.md")


def test_command_writes_the_files_and_tells_mistakes_in_one_line(tmp_path, capsys):
    pairs(tmp_path / "results", "cifar100-lt-100", 1.0)
    readme, docs = tmp_path / "README.md", tmp_path / "docs"
    assert write("when-it-helps", tmp_path) == 2
    assert "README.md" in capsys.readouterr().err
    assert not docs.exists()
    readme.write_text(f"{BEGIN}\n{END}\n")
    assert write("when-it-helps", tmp_path) == 0
    assert "51.00 ± 1.00" in readme.read_text()
    assert {file.name for file in docs.iterdir()} == {
        "when-it-helps.md",
        "when-it-helps-schedule.svg",
        "when-it-helps-data.svg",
    }


def test_the_page_counts_each_comparison_once_and_draws_each_seed(tmp_path):
    pairs(tmp_path, "cifar100-lt-100", 1.0)  # stands in two sections
    pairs(tmp_path, "cifar100-lt-100-short", 0.0)
    put(tmp_path, "deit-ti-cifar100-100", "baseline", 0, 40.0)
    put(tmp_path, "deit-ti-cifar100-100", "batchformer", 0, 42.0)
    text, pictures = page(tmp_path)
    assert (
        "Of 2 comparisons over several seeds, 1 better, 0 worse, 1 without a clear difference; 1 more has one seed."
    ) in text
    assert "**No clear difference: 1/8 of the schedule (+0.01); better: the whole schedule (+1.01).**" in text
    assert "You test on another domain" not in text
    rings = {name: picture.count("<circle") for name, picture in pictures.items()}
    assert rings == {"when-it-helps-schedule.svg": 6, "when-it-helps-data.svg": 3, "when-it-helps-v2.svg": 1}


def test_questions_and_comparisons_have_names_of_their_own():
    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS)
    for question in QUESTIONS:
        assert len({pair.title for pair in question.pairs}) == len(question.pairs)


def test_what_a_step_of_each_variant_costs_is_that_of_the_benchmark():
    rows = json.loads((ROOT / "benchmarks" / "results" / "vit_step.json").read_text())["rows"]
    cost = {row["variant"]: f"{row['of_baseline']:.2f}" for row in rows}
    words = STUDIES["vit-cifar100-32"].held_to_words
    for variant in ("published", "published-block8", "stable", "stable-block8", "stable-split"):
        assert cost[variant] in words, variant
