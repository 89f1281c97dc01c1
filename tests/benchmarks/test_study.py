"""Studies of recipes: what is trained, what is probed, and what is left out."""

import json
import re
from pathlib import Path

import pytest

from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.cli.training import command_line_variants
from batchformer.recipes import find_recipe
from benchmarks import study as script
from benchmarks.study import STUDIES, RecipeStudy, Run
from tests.selection import others_slow


@pytest.mark.parametrize("name", others_slow(STUDIES, ["pacs-128", "plantvillage-czsl", "moco-v3-cifar100"]))
def test_every_variant_is_a_training_of_its_own(name):
    study, cli, found = STUDIES[name], RecipeCLI(), {}
    file = find_recipe(study.recipe)[1]
    for variant, words in study.variants.items():
        cli.load(file)
        ((given, keys),) = command_line_variants([words]).items()
        assert given == variant
        target = [("data.init_args.target", study.targets[0])] if study.targets[0] else []
        loaded = cli.load(file, [*cli.variants.get(variant, []), *keys, *target])
        found[variant] = {part: loaded[part] for part in ("model", "data", "trainer")}
        found[variant]["init_from"] = loaded["run"]["init_from"]
    assert len({json.dumps(each, default=str) for each in found.values()}) == len(found)
    for variant, content in found.items():
        if study.methods:
            assert content["model"]["method"] == ("batchformer" if "batchformer" in variant else "baseline")
        if "words" in content["data"]["init_args"]:
            random = variant.endswith("-random") or name == "digits-states"
            assert ("random" in content["data"]["init_args"]["words"]) == random


def test_what_the_tables_want_is_planned():
    study = STUDIES["pacs-128"]
    runs = study.runs(None, list(study.variants), study.targets)
    assert len(runs) == len(set(runs)) == 4 * (12 * 3 + 2 * 2)
    assert {run.seed for run in runs if run.variant == "erm"} == {0, 1, 2, 3, 4}
    assert [run.seed for run in runs[: 4 * 12]] == [0] * 48  # a study that is cut short is balanced
    study = STUDIES["moco-v3-cifar100"]
    runs = study.runs(None, list(study.variants), study.targets)
    assert [run.seed for run in runs if run.variant == "batchformer-frozen"] == [0]
    assert [run.seed for run in runs if run.variant == "batchformer"] == [0, 1, 2]


@pytest.fixture
def started(monkeypatch):
    """The commands that a study gives, each with the end of its run folder; it is as if all trained."""
    commands = []

    def train(words):
        out = Path(words[words.index("--out") + 1])
        commands.append([*words[:2], out.name])
        out.mkdir(parents=True)
        (out / "result.json").write_text("{}")
        return 0

    monkeypatch.setattr("batchformer.cli.main", train)
    return commands


@pytest.fixture
def study(tmp_path, monkeypatch):
    def run(name, *words):
        folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
        monkeypatch.setattr("sys.argv", ["study", name, *folders, *words])
        return script.main()

    return run


def test_what_the_results_hold_is_not_trained_again_and_no_run_is_begun_too_late(tmp_path, started, study, capsys):
    kept = tmp_path / "results" / "mnist-usps" / "dann-usps-seed1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    words = ["mnist-usps", "--only", "dann", "mdd", "--seeds", "1"]
    assert study(*words, "--missing", "--minutes", "-1") == 0
    assert started == []
    assert study(*words, "--missing", "--targets", "usps") == 0
    assert [each[2] for each in started] == ["mdd-usps-seed1"]
    assert study(*words) == 0
    assert [each[2] for each in started] == [
        "mdd-usps-seed1", "dann-usps-seed1", "dann-mnist-seed1", "mdd-mnist-seed1",
    ]  # fmt: skip
    assert len(list(kept.parent.iterdir())) == 4
    with pytest.raises(SystemExit):
        study(*words, "--targets", "svhn")
    assert re.search("--targets svhn: choose from usps, mnist", capsys.readouterr().err)


def test_an_interrupted_run_ends_the_study(started, study, monkeypatch):
    interrupted = []
    monkeypatch.setattr("batchformer.cli.main", lambda words: interrupted.append(words) or 130)
    assert study("mnist-usps", "--only", "dann") == 1
    assert len(interrupted) == 1


def test_runs_of_pre_training_are_probed_and_what_was_found_is_kept(tmp_path, started, study):
    assert study("mae-cifar100", "--only", "baseline", "--seeds", "3") == 0
    run = str(tmp_path / "runs" / "baseline-seed3")
    assert started == [
        ["fit", "mae-cifar100", "baseline-seed3"],
        ["probe", run, "baseline-seed3-mae"],
        ["probe", run, "baseline-seed3-finetune"],
    ]
    kept = {str(file.relative_to(tmp_path / "results")) for file in (tmp_path / "results").rglob("*.json")}
    assert kept == {f"mae-cifar100{part}/baseline-seed3.json" for part in ("", "-finetune", "-mae")}


def test_one_detector_begins_with_the_weights_and_others_with_runs(monkeypatch, study, capsys):
    begins = {}

    def train(words):
        file = find_recipe(words[1])[1]
        ((name, keys),) = command_line_variants([words[words.index("--variant") + 1]]).items()
        begins[name] = RecipeCLI().load(file, keys)["run"]["init_from"]
        assert "--init-from" not in words
        return 1  # so that no result is kept

    monkeypatch.setattr("batchformer.cli.main", train)
    with pytest.raises(SystemExit):
        study("voc-faster-rcnn-r18")
    assert re.search("--weights is missing", capsys.readouterr().err)
    assert study("voc-faster-rcnn-r18", "--weights", "resnet50.pth") == 1
    runs = "runs/moco-v2-imagenette-study"
    assert begins == {
        "scratch": {},
        "moco": {"backbone": f"{runs}/baseline-seed0"},
        "moco+batchformer": {"backbone": f"{runs}/batchformer-seed0"},
        "imagenet-resnet50": {"backbone": "resnet50.pth"},
    }


def test_runs_are_named_by_variant_target_and_seed():
    assert Run("erm+batchformer", "sketch", 2).name == "erm+batchformer-sketch-seed2"
    assert Run("visual-product", "", 0).name == "visual-product-seed0"
    assert RecipeStudy("digits-domains", ("a",)).runs([5], ["erm"], ["a"]) == [Run("erm", "a", 5)]
