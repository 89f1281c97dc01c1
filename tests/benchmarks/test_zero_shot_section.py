"""Tables of the studies of unseen classes in the docs."""

import random

from made_up import comparison, write

from batchformer.metrics.measures import COMPOSITIONAL
from batchformer.report.comparison import format_difference
from batchformer.report.statistics import paired_difference
from benchmarks.results_page import results_page
from benchmarks.zero_shot_section import BEGIN, END, main

LEVELS = {"visual-product": 70.0, "visual-product+batchformer": 70.0, "cge": 60.0, "cge+batchformer": 62.0,
          "compcos-random": 20.0}  # fmt: skip


def made(seeds=3):
    measures = [measure.as_dict() for measure in COMPOSITIONAL if not measure.detail]
    found = []
    for variant, level in LEVELS.items():
        for seed in range(seeds):
            noise = random.Random(f"{variant}{seed}").gauss(0, 0.1) + random.Random(seed).gauss(0, 1)
            metrics = {measure["key"]: level + noise + k for k, measure in enumerate(measures)}
            found.append({"recipe": "plantvillage-czsl", "variant": variant, "reference": "visual-product",
                          "seed": seed, "protocol": "last", "measures": measures, "metrics": metrics, "steps": 3,
                          "epochs": 1, "device": "processor", "versions": {}, "data": {}})  # fmt: skip
    return found


def rows(page, heading):
    lines = page.split(f"\n| {heading}")[1].splitlines()[2:]
    table = [line.strip("| ").split(" | ") for line in lines[: next(k for k, line in enumerate(lines) if not line)]]
    return {cells[0].strip("`"): cells[1:] for cells in table}


def values(results, variant):
    return [each["metrics"]["auc"] for each in results if each["variant"] == variant]


def test_every_variant_is_held_to_the_reference_and_to_itself_without_the_module(tmp_path):
    results = made()
    page = results_page(write(tmp_path, results))
    assert page.count("## Unseen classes") == 1
    whole = rows(page.split("## Unseen classes")[1], " | AUC")
    assert list(whole) == list(LEVELS)
    assert whole["visual-product"][-1] == "the reference"
    wanted = paired_difference(values(results, "visual-product"), values(results, "compcos-random"))
    assert whole["compcos-random"][-1] == format_difference(wanted)
    gains = rows(page, "AUC, %")
    assert list(gains) == ["visual-product", "cge"]
    wanted = paired_difference(values(results, "cge"), values(results, "cge+batchformer"))
    assert gains["cge"][2:] == [format_difference(wanted), "3", "better"]


def test_the_page_about_unseen_classes_gets_the_tables(tmp_path, capsys):
    page = tmp_path / "zero-shot.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main([str(write(tmp_path / "results", made())), str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert "| `cge` | " in text
    assert main([str(write(tmp_path / "none", comparison(seeds=1))), str(page)]) == 2
    assert "no study of unseen classes" in capsys.readouterr().err
