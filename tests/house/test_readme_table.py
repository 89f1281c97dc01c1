"""The table in the README: what goes in, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchformer.errors import UserError
from benchmarks.paper import STUDIES
from benchmarks.readme_table import BEGIN, END, main, readme_table, with_table

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


def test_sentence_follows_the_numbers(tmp_path):
    pairs(tmp_path / "up", "cifar100-lt-100", 2.0)
    pairs(tmp_path / "down", "cifar100-lt-100", -2.0)
    assert "BatchFormer helped: +2.01 points" in readme_table(tmp_path / "up")
    assert "BatchFormer hurt: −1.99 points" in readme_table(tmp_path / "down")


def test_row_holds_paper_and_ours(tmp_path):
    pairs(tmp_path, "cifar100-lt-200", 0.0)
    row = next(line for line in readme_table(tmp_path).splitlines() if "| All |" in line)
    assert row.startswith("| `cifar100-lt-200` | All | 46.4 | 47.5 | 51.00 ± 1.00 | 51.01 ± 1.01 | +0.01 [")


def test_one_sided_and_unpublished_recipes_are_left_out(tmp_path):
    pairs(tmp_path, "cifar100-lt-100", 1.0)
    pairs(tmp_path, "cifar100-lt-100-short", 1.0)
    put(tmp_path, "cifar100-lt-200", "batchformer", 0, 40.0)
    table = readme_table(tmp_path)
    assert "short" not in table
    assert "cifar100-lt-200" not in table


def test_nothing_to_show_is_refused(tmp_path):
    put(tmp_path, "cifar100-lt-200", "batchformer", 0, 40.0)
    with pytest.raises(UserError, match="nothing to show"):
        readme_table(tmp_path)


def test_only_what_is_between_the_markers_changes():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert with_table(with_table(text, "new"), "new") == with_table(text, "new")


@pytest.mark.parametrize("text", ["no markers", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_missing_or_doubled_markers_are_refused(text):
    with pytest.raises(UserError, match="each once"):
        with_table(text, "new")


def test_command_writes_the_file_and_tells_mistakes_in_one_line(tmp_path, capsys):
    pairs(tmp_path / "results", "cifar100-lt-100", 1.0)
    page = tmp_path / "README.md"
    assert main([str(tmp_path / "results"), str(page)]) == 2
    assert "there is no file" in capsys.readouterr().err
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main([str(tmp_path / "results"), str(page)]) == 0
    assert "51.00 ± 1.00" in page.read_text()


def test_what_a_step_of_each_variant_costs_is_that_of_the_benchmark():
    rows = json.loads((ROOT / "benchmarks" / "results" / "vit_step.json").read_text())["rows"]
    cost = {row["variant"]: f"{row['of_baseline']:.2f}" for row in rows}
    words = STUDIES["vit-cifar100-32"].held_to_words
    for variant in ("published", "published-block8", "stable", "stable-block8", "stable-split"):
        assert cost[variant] in words, variant
