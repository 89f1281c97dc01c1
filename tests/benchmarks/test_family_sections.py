"""Tables of the studies of unseen domains and unseen classes in the docs."""

import random
import shutil

from made_up import comparison, write

from batchformer.metrics.measures import COMPOSITIONAL
from batchformer.report.comparison import format_difference
from batchformer.report.statistics import paired_difference
from benchmarks._markdown import BEGIN, END
from benchmarks.family_sections import long_tailed_table
from benchmarks.pages import write as write_pages
from benchmarks.results_page import results_page
from benchmarks.studies import STUDIES

LEVELS = {
    "erm": 70.0, "erm+batchformer": 71.0, "irm": 66.0, "irm+batchformer": 65.0, "irm+batchformer-mixed": 60.0,
}  # fmt: skip


def made(variants=LEVELS, seeds=3, recipe="pacs-128"):
    """Runs of every variant, target and seed; SWAD is two points above the last step, with the module three."""
    measures = [
        {"key": "accuracy", "label": "Accuracy", "unit": "%", "primary": True, "bounds": [0, 100]},
        {"key": "accuracy_swad", "label": "Accuracy, SWAD", "unit": "%", "bounds": [0, 100], "reading_of": "accuracy"},
    ]
    found = []
    for variant in variants:
        for target in STUDIES["pacs-128"].targets:
            for seed in range(seeds):
                noise = random.Random(f"{target}{seed}").gauss(0, 1) + random.Random(f"{variant}{target}{seed}").gauss(
                    0, 0.1
                )
                value = LEVELS[variant] + noise
                swad = value + (3 if "batchformer" in variant else 2)
                found.append({"recipe": recipe, "variant": variant, "target": target, "reference": "erm", "seed": seed,
                              "protocol": "last", "measures": measures, "steps": 2500, "epochs": 25, "device": "card",
                              "versions": {}, "data": {"fingerprint": f"{target}{seed}"},
                              "metrics": {"accuracy": value, "accuracy_swad": swad}})  # fmt: skip
    return found


def means(results, variant, key="accuracy"):
    """Of each seed, over the targets."""
    found = {}
    for each in results:
        if each["variant"] == variant:
            found.setdefault(each["seed"], []).append(each["metrics"][key])
    return [sum(values) / len(values) for _, values in sorted(found.items())]


def rows(page, heading):
    """The rows of the table whose header begins so, by their first cell."""
    lines = page.split(f"\n| {heading}")[1].splitlines()[2:]
    table = [line.strip("| ").split(" | ") for line in lines[: next(k for k, line in enumerate(lines) if not line)]]
    return {cells[0].strip("`"): cells[1:] for cells in table}


def test_every_method_is_held_to_itself_without_the_module_and_to_the_reference(tmp_path):
    results = made()
    page = results_page(write(tmp_path, results))
    assert page.count("## Unseen domains") == 1
    whole = rows(page, "Accuracy, %")
    assert list(whole) == [*LEVELS, "swad", "swad+batchformer"]
    sketch = [each["metrics"]["accuracy"] for each in results if (each["variant"], each["target"]) == ("irm", "sketch")]
    assert whole["irm"][3].startswith(f"{sum(sketch) / 3:.2f} ±")
    assert whole["erm"][-1] == "the reference"
    wanted = paired_difference(means(results, "erm"), means(results, "erm", "accuracy_swad"))
    assert whole["swad"][-1] == format_difference(wanted)
    gains = rows(page, "method")
    assert list(gains) == ["erm", "irm", "irm, mixed", "swad"]
    for name, before, after, key in (
        ("erm", "erm", "erm+batchformer", "accuracy"),
        ("irm, mixed", "irm", "irm+batchformer-mixed", "accuracy"),
        ("swad", "erm", "erm+batchformer", "accuracy_swad"),
    ):
        wanted = paired_difference(means(results, before, key), means(results, after, key))
        assert gains[name][2] == format_difference(wanted)
    assert [cells[4] for cells in gains.values()] == ["better", "worse", "worse", "better"]
    assert gains["erm"][5] == "+0.4 (`pacs-r18-erm`)"
    assert gains["swad"][5] == "+1.0 (`pacs-r18-swad`)"
    assert "| SWAD (Cha et al., 2021) | PACS, ResNet-50, average | 88.1 |" in page


def test_a_study_that_is_not_finished_gives_what_there_is(tmp_path):
    results = [each for each in made(seeds=2) if (each["variant"], each["target"], each["seed"]) != ("irm", "photo", 1)]
    gains = rows(results_page(write(tmp_path, results)), "method")
    assert gains["irm"][3:5] == ["1", "one seed: may be chance"]
    assert gains["erm"][3] == "2"


def test_a_page_without_such_results_has_no_such_section(tmp_path):
    assert "Unseen domains" not in results_page(write(tmp_path, comparison(seeds=2)))


OF_PAIRS = {"visual-product": 70.0, "visual-product+batchformer": 70.0, "cge": 60.0, "cge+batchformer": 62.0,
          "compcos-random": 20.0}  # fmt: skip


def made_of_pairs(seeds=3):
    measures = [measure.as_dict() for measure in COMPOSITIONAL if not measure.detail]
    found = []
    for variant, level in OF_PAIRS.items():
        for seed in range(seeds):
            noise = random.Random(f"{variant}{seed}").gauss(0, 0.1) + random.Random(seed).gauss(0, 1)
            metrics = {measure["key"]: level + noise + k for k, measure in enumerate(measures)}
            found.append({"recipe": "plantvillage-czsl", "variant": variant, "reference": "visual-product",
                          "seed": seed, "protocol": "last", "measures": measures, "metrics": metrics, "steps": 3,
                          "epochs": 1, "device": "processor", "versions": {}, "data": {}})  # fmt: skip
    return found


def values(results, variant):
    return [each["metrics"]["auc"] for each in results if each["variant"] == variant]


def test_every_variant_is_held_to_the_reference_and_to_itself_without_the_module(tmp_path):
    results = made_of_pairs()
    page = results_page(write(tmp_path, results))
    assert page.count("## Unseen classes") == 1
    whole = rows(page.split("## Unseen classes")[1], " | AUC")
    assert list(whole) == list(OF_PAIRS)
    assert whole["visual-product"][-1] == "the reference"
    wanted = paired_difference(values(results, "visual-product"), values(results, "compcos-random"))
    assert whole["compcos-random"][-1] == format_difference(wanted)
    gains = rows(page, "AUC, %")
    assert list(gains) == ["visual-product", "cge"]
    wanted = paired_difference(values(results, "cge"), values(results, "cge+batchformer"))
    assert gains["cge"][2:] == [format_difference(wanted), "3", "better"]


def made_of_long_tails():
    """Balanced Softmax in one stage, and cRT, whose results have a name of their own with and without the module."""
    results = comparison(seeds=2, recipe="imagenette-lt")
    for each in comparison(seeds=2, recipe="imagenette-lt-on-softmax-crt"):
        suffix = "-batchformer" if each["method"] == "batchformer" else ""
        results.append(each | {"recipe": each["recipe"] + suffix})
    return results


def test_of_long_tails_each_method_has_all_measures_and_what_the_module_adds(tmp_path):
    results = made_of_long_tails()
    write(tmp_path, results)
    lines = long_tailed_table(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| softmax, then cRT", "| Balanced Softmax, in one stage"]
    of_crt = [each for each in results if "crt" in each["recipe"]]
    sides = [
        [each["metrics"]["all"] for each in of_crt if each["method"] == method]
        for method in ("baseline", "batchformer")
    ]
    assert format_difference(paired_difference(*sides)) in lines[2]
    assert lines[2].endswith("| 2 | no clear difference |")
    header, row = (line.split(" | ") for line in (lines[0], lines[2]))
    assert len(header) == len(row)
    assert f"{of_crt[0]['metrics']['many']:.0f}" in row[header.index("Many")]


def test_the_pages_of_the_families_get_the_tables(tmp_path, capsys):
    pages = [tmp_path / "docs" / name for name in ("domains.md", "zero-shot.md", "long-tail.md")]
    pages[0].parent.mkdir()
    for page in pages:
        page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(tmp_path / "results", [*made(), *made_of_pairs(), *made_of_long_tails()])
    assert write_pages("families", tmp_path) == 0
    texts = [page.read_text() for page in pages]
    for text, row in zip(texts, ("| erm | ", "| `cge` | ", "| softmax, then cRT | "), strict=True):
        assert "old" not in text
        assert text.startswith("before\n")
        assert row in text
    lacking = (
        (comparison(seeds=1), "unseen domains"),
        (made(), "unseen classes"),
        ([*made(), *made_of_pairs()], "long tails"),
    )
    for results, missing in lacking:
        shutil.rmtree(tmp_path / "results")
        write(tmp_path / "results", results)
        assert write_pages("families", tmp_path) == 2
        assert f"no study of {missing}" in capsys.readouterr().err
        assert [page.read_text() for page in pages] == texts
