"""A run folder that version 0.1 wrote is read by every command of today."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from batchformer.cli import main
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.recipes import find_recipe
from batchformer.report import load_runs

OLD = Path(__file__).with_name("run-0.1")


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def test_it_is_tested_with_the_same_numbers(run, capsys):
    assert main(["test", str(run)]) == 0
    assert "result.json has exactly these numbers" in capsys.readouterr().out


def test_its_weights_are_exported_with_the_names_of_its_classes(run, tmp_path):
    from safetensors import safe_open

    assert main(["export", str(run), "--out", str(tmp_path / "plain.safetensors")]) == 0
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert json.loads(file.metadata()["class_names"]) == [str(digit) for digit in range(10)]


def test_its_result_is_reported_in_the_words_of_today(run, tmp_path):
    old = json.loads((OLD / "result.json").read_text())
    (read,) = load_runs([run])
    assert read.variant == old["method"] == "batchformer"
    assert read.metrics["accuracy"] == old["metrics"]["all"]
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0


def test_it_is_known_to_be_finished(run, capsys):
    words = ["--model.backbone_args.widths", "[4,4]", "--trainer.max_epochs", "2", "--seed", "1"]
    assert main(["fit", "digits-lt", *words, "--out", str(run), "--resume"]) == 0
    assert "already finished" in capsys.readouterr().out


def test_it_goes_on_where_it_was_stopped(run, capsys):
    """Its checkpoint is of the second of two epochs; without a result the run is not over yet."""
    (run / "result.json").unlink()
    words = ["--model.backbone_args.widths", "[4,4]", "--trainer.max_epochs", "2", "--seed", "1", "--no-analysis"]
    assert main(["fit", "digits-lt", *words, "--out", str(run), "--resume"]) == 0
    old, new = (json.loads((folder / "result.json").read_text()) for folder in (OLD, run))
    assert new["metrics"]["accuracy"] == old["metrics"]["all"]
    assert new["per_class"] == old["per_class"]
    assert new["steps"] == old["steps"]


def test_its_weights_begin_another_run(run, tmp_path, capsys):
    words = ["--model.backbone_args.widths", "[4,4]", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1"]
    rate = ["--model.optimizer.lr", "0", "--model.schedule.warmup_epochs", "0", "--no-analysis"]
    assert main(["fit", "digits-lt", *words, *rate, "--init-from", str(run), "--out", str(tmp_path / "new")]) == 0


@pytest.mark.parametrize("given", ["mine.pth", None])
def test_a_recipe_of_0_1_says_where_weights_come_from_instead_of_the_one_it_extends(given, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"extends": "detr-coco", "model": {"backbone_weights": given}}))
    assert RecipeCLI().load(find_recipe("detr-coco")[1])["run"]["init_from"] == {"backbone": "pretrained"}
    assert RecipeCLI().load(recipe)["run"]["init_from"] == {"backbone": given}
