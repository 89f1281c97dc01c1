"""docs/results.md holds what the result files hold, beside the paper."""

import json
from pathlib import Path

import pytest
from made_up import comparison, result

from batchformer.recipes import recipe_text
from batchformer.report import compare_runs
from batchformer.report.comparison import format_difference, format_summary
from batchformer.report.runs import load_runs
from benchmarks.pages import write
from benchmarks.paper import MAIN
from benchmarks.report_page import as_studies, report_page
from benchmarks.results_page import results_page, study_pictures

REPOSITORY = Path(__file__).parents[2]


def put(folder, results):
    for each in results:
        file = folder / each["recipe"] / f"{each['method']}-seed{each['seed']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(each))
    return folder


def test_committed_page_is_what_the_committed_results_give():
    results, page = REPOSITORY / "results", REPOSITORY / "docs" / "results.md"
    assert page.read_text(encoding="utf-8") == results_page(results, REPOSITORY / "benchmarks" / "results"), (
        "docs/results.md is stale: make results"
    )
    pictures = study_pictures(results)
    assert {path.name for path in page.parent.glob("study-*.svg")} == {*pictures}
    for name, picture in pictures.items():
        assert (page.parent / name).read_text(encoding="utf-8") == picture, f"docs/{name} is stale: make results"
        assert f"]({name})" in page.read_text(encoding="utf-8")


def test_committed_report_is_what_the_committed_results_give():
    results = REPOSITORY / "results"
    committed = (REPOSITORY / "docs" / "report.html").read_text(encoding="utf-8")
    assert committed == report_page(results), "docs/report.html is stale: make results"
    shown = as_studies(load_runs([results]))
    assert len(committed) < 2_000 * len(shown)
    assert len(shown) == len(load_runs([results]))  # every run is on the page
    for study in {run.recipe for run in shown}:
        assert f"<h2>{study}</h2>" in committed


def test_variants_in_folders_of_their_own_are_held_to_the_baseline_of_their_study(tmp_path):
    names = ["coco128-detr-all", "coco128-detr-refine", "coco128-detr-methods"]
    made = comparison(seeds=2, recipe="coco128-detr") + [result(recipe=names[0], seed=s) for s in range(2)]
    made += comparison(seeds=2, recipe=names[1])  # has a baseline of its own
    made += [  # and this one a reference of its own
        {**result(recipe=names[2], method=method), "variant": method, "reference": "plain"}
        for method in ("plain", "other")
    ]
    shown = as_studies(load_runs([put(tmp_path, made)]))
    assert {(run.recipe, run.variant) for run in shown} == {
        ("coco128-detr", "baseline"), ("coco128-detr", "batchformer"), ("coco128-detr", "all"),
        (names[1], "baseline"), (names[1], "batchformer"), (names[2], "plain"), (names[2], "other"),
    }  # fmt: skip
    table = compare_runs([run.raw for run in shown if run.recipe == "coco128-detr"])
    assert table.reference == "baseline"
    assert table.difference(table.primary, "all") is not None


def test_main_recipe_stands_beside_the_paper(tmp_path):
    results = comparison(seeds=5)
    page = results_page(put(tmp_path, results))
    table = compare_runs(results)
    ours = [format_summary(table.cell(table.primary, variant)) for variant in table.variants]
    difference = format_difference(table.difference(table.primary, "batchformer"))
    assert f"| {' | '.join(['All', '50.7', '51.7', '+1.0', *ours, difference])} |" in page
    assert "Table 1" in page
    assert "Seeds: 5 baseline, 5 with BatchFormer." in page


def test_ablations_get_their_own_tables_sorted_by_number(tmp_path):
    names = ["cifar100-lt-100-single", "cifar100-lt-100-layers2", "cifar100-lt-100-batch128", "cifar100-lt-100-batch64"]
    page = results_page(put(tmp_path, comparison(seeds=2) + [result(recipe=name) for name in names]))
    single, layers, batch = (
        page.index("## Ablation: without the shared classifier"),
        page.index("## Ablation: number of layers"),
        page.index("## Ablation: batch size"),
    )
    assert (
        single
        < page.index("| `cifar100-lt-100-single` |")
        < layers
        < page.index("| `cifar100-lt-100-layers2` |")
        < batch
    )
    assert batch < page.index("| `cifar100-lt-100-batch64` |") < page.index("| `cifar100-lt-100-batch128` |")
    assert "| without shared classifier | 42.4 | 41.3 | 43.3 | 42.2 |" in page


def test_a_recipe_that_is_not_in_the_paper_is_kept_apart(tmp_path):
    page = results_page(put(tmp_path, comparison(seeds=2) + comparison(seeds=2, recipe="digits-lt", classes=10)))
    assert page.index("## cifar100-lt-100") < page.index("## Not in the paper") < page.index("### digits-lt")


def test_further_variants_of_a_recipe_are_held_to_its_baseline(tmp_path):
    made = comparison(seeds=2, recipe="digits-lt", classes=10)
    third = [{**each, "method": "third", "variant": "third"} for each in made if each["method"] == "batchformer"]
    page = results_page(put(tmp_path, made))
    assert "Further variants" not in page
    page = results_page(put(tmp_path, made + third))
    table = compare_runs(made + third)
    cells = [format_summary(table.cell(measure, "third")) for measure in table.measures]
    assert (
        f"| `third` | {' | '.join(cells)} | 2 | {format_difference(table.difference(table.primary, 'third'))} |" in page
    )


def test_benchmarks_are_listed_from_their_files(tmp_path):
    put(tmp_path / "results", comparison(seeds=1))
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    rows = [{"rate": 71234.5, "ratio": 0.89, "kernels": [["gelu", 0.5], ["sum", 0.25]]}, {"rate": 8.5}]
    content = {"versions": {"torch": "2.x"}, "batch": 512, "rows": rows}
    (folder / "cifar-step.json").write_text(json.dumps(content))
    assert write("results", tmp_path) == 0
    page = (tmp_path / "docs" / "results.md").read_text(encoding="utf-8")
    assert "versions.torch 2.x, batch 512" in page
    assert "| rate | ratio |\n" in page  # a table in a row stays in the file
    assert "| 71,234 | 0.89 |" in page
    assert "| 8.5 | – |" in page


def test_many_rows_of_a_benchmark_are_shown_by_its_pictures(tmp_path):
    put(tmp_path / "results", comparison(seeds=1))
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    rows = [{"batch": batch, "ms": batch / 7} for batch in range(40)]
    (folder / "growth.json").write_text(json.dumps({"rows": rows, "crossings": [{"at": 3, "batch": None}]}))
    (folder / "growth-time.svg").write_text("<svg/>")
    page = results_page(tmp_path / "results", folder)
    assert "40 rows, in [growth.json](../benchmarks/results/growth.json)" in page
    assert "(../benchmarks/results/growth-time.svg)" in page
    assert "| batch | ms |" not in page
    assert "crossings:\n\n| at | batch |" in page
    assert "| 3 | – |" in page


def test_an_ablation_stands_beside_what_it_varies(tmp_path):
    short = comparison(seeds=2, recipe="cifar100-lt-100-short")
    layers = [r for r in comparison(seeds=2, recipe="cifar100-lt-100-short-layers2") if r["method"] == "batchformer"]
    page = results_page(put(tmp_path, comparison(seeds=2) + short + layers))
    table = page[page.index("## Ablation: number of layers") :]
    assert table.index("| `cifar100-lt-100-short` | batchformer") < table.index("| `cifar100-lt-100-short-layers2` |")


def test_empty_results_are_one_sentence_and_write_nothing(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    assert write("results", tmp_path) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "docs").exists()


def test_splits_of_the_paper_average_to_its_total():
    """A typing mistake in the paper's numbers would show: All is the mean of the splits weighted by their classes."""
    classes = {
        "cifar100-lt-100": (35, 35, 30),
        "cifar100-lt-200": (30, 31, 39),
        "imagenet-lt-r10": (385, 479, 136),
        "imagenet-lt-r50": (385, 479, 136),
        "places-lt-balms": (131, 163, 71),
    }
    for recipe, sizes in classes.items():
        for row in (MAIN[recipe].baseline, MAIN[recipe].batchformer):
            weighted = sum(n * row[split] for n, split in zip(sizes, ("many", "medium", "few"), strict=True))
            assert row["accuracy"] == pytest.approx(weighted / sum(sizes), abs=0.75), recipe


def test_numbers_of_detectors_are_those_their_recipes_quote():
    detectors = {recipe: paper for recipe, paper in MAIN.items() if "detr" in recipe}
    for recipe, paper in detectors.items():
        header = " ".join(line for line in recipe_text(recipe).splitlines() if line.startswith(("#", "  title:")))
        assert paper.table.split(", ")[1].replace("Tables", "Table").split(" and ")[0] in header, recipe
        assert f" {next(iter(paper.batchformer.values()))}" in header, recipe


def test_detectors_stand_beside_the_row_of_the_paper_and_are_no_ablation_of_its_long_tails(tmp_path):
    measured = {
        "deformable-detr-coco-l6-batch16": {"all": 40.0, "ap": 40.0, "ap50": 61.0},
        "detr-coco-panoptic": {"all": 41.0, "pq": 41.0, "pq_things": 47.0, "ap": 30.0},
    }
    made = [
        result(recipe, method, metrics=metrics)
        for recipe, metrics in measured.items()
        for method in ("baseline", "batchformer")
    ]
    page = results_page(put(tmp_path, made))
    assert "| AP | 43.8 | 44.7 | +0.9 | 40.00 | 40.00 |" in page
    assert "| AP50 | 62.6 | 63.5 | +0.9 | 61.00 |" in page
    assert "| PQ things | 48.2 | 50.5 | +2.3 | 47.00 |" in page
    assert "| AP things | 31.1 | 33.4 | +2.3 | 30.00 |" in page
    assert "## Ablation" not in page
    assert "Not in the paper" not in page


def scaled(results, **model):
    """The same results, as if trained with these settings of the model."""
    for each in results:
        each["config"]["model"].update(model)
    return results


def test_an_unscaled_baseline_beside_the_released_loss_is_pointed_out(tmp_path):
    page = results_page(put(tmp_path / "a", scaled(comparison(seeds=2), stream_loss="released")))
    assert "the baseline's loss is not scaled" in page
    assert "Not a clean comparison" in page
    controlled = scaled(comparison(seeds=2), stream_loss="released")
    scaled([each for each in controlled if each["method"] == "baseline"], loss_weight=3.0)
    assert "the baseline's loss is not scaled" not in results_page(put(tmp_path / "b", controlled))
    mean = scaled(comparison(seeds=2), stream_loss="mean")
    assert "Not a clean comparison" not in results_page(put(tmp_path / "c", mean))


def test_an_ablation_that_changes_the_loss_scale_or_the_updates_says_so(tmp_path):
    base = scaled(comparison(seeds=2, recipe="cifar100-lt-100-short"), stream_loss="released")
    single = [result(recipe="cifar100-lt-100-short-single", seed=s, steps=5) for s in range(2)]
    scaled(single, stream_loss="released", batchformer={"streams": "single"})
    page = results_page(put(tmp_path, base + single))
    told = page[page.index("## Ablation: without the shared classifier") :]
    assert "Its loss is 1 times the mean over the rows, that of cifar100-lt-100-short 3 times" in told
    assert "It makes 5 updates, cifar100-lt-100-short makes 1,260." in told
