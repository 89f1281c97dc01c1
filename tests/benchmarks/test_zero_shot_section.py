"""Studies of unseen classes: what is trained, and their tables in the docs."""

import json
import random

import pytest
from made_up import comparison, write

from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.cli.training import variants_on_the_line
from batchformer.metrics.measures import COMPOSITIONAL
from batchformer.recipes import find_recipe
from batchformer.report.comparison import format_difference
from batchformer.report.statistics import paired_difference
from benchmarks.domains_study import Run
from benchmarks.results_page import results_page
from benchmarks.zero_shot_section import BEGIN, END, main
from benchmarks.zero_shot_study import STUDIES

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
    assert gains["cge"][2:] == [format_difference(wanted), "3", "higher"]


def test_the_page_about_unseen_classes_gets_the_tables(tmp_path, capsys):
    page = tmp_path / "zero-shot.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main([str(write(tmp_path / "results", made())), str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert "| `cge` | " in text
    assert main([str(write(tmp_path / "none", comparison(seeds=1))), str(page)]) == 2
    assert "no study of unseen classes" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_every_variant_is_a_training_of_its_own(name):
    study, cli, found = STUDIES[name], RecipeCLI(), {}
    file = find_recipe(study.recipe)[1]
    for variant, words in study.variants.items():
        cli.load(file)
        ((given, keys),) = variants_on_the_line([words]).items()
        assert given == variant
        loaded = cli.load(file, [*cli.variants.get(variant, []), *keys])
        found[variant] = json.dumps({part: loaded[part] for part in ("model", "data", "trainer")}, default=str)
    assert len(set(found.values())) == len(found)
    for variant, content in found.items():
        assert json.loads(content)["model"]["method"] == ("batchformer" if "+batchformer" in variant else "baseline")
        assert ("random" in json.loads(content)["data"]["init_args"]["words"]) == (
            variant.endswith("-random") or name == "digits-states"
        )


def test_runs_of_data_without_targets_are_named_by_variant_and_seed():
    study = STUDIES["plantvillage-czsl"]
    runs = study.runs(None, list(study.variants), study.targets)
    assert len(runs) == 3 * 9
    assert runs[0] == Run("visual-product", "", 0)
    assert runs[0].name == "visual-product-seed0"
