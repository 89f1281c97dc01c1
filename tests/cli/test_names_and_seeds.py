"""What a run is called, and which seed it has, however they were said."""

import json
import shlex

import pytest
import torch
import yaml

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.cli.training import name_of_recipe
from batchformer.recipes import find_recipe, recipe_text

from .conftest import TINY

FAST = [*TINY, "--trainer.max_epochs", "1", "--no-analysis", "--trainer.enable_progress_bar", "false"]


@pytest.mark.parametrize(
    ("words", "in_file", "expected"),
    [
        ([], None, "mine"),
        ([], "", "mine"),
        ([], "filed", "filed"),
        (["--run.recipe", "keyed"], "filed", "keyed"),
        (["--run.recipe", "keyed", "--name", "named"], "filed", "named"),
        (["--name", "named"], None, "named"),
    ],
)
def test_the_name_of_a_recipe(words, in_file, expected, tmp_path):
    recipe = {} if in_file is None else {"run": {"recipe": in_file}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"data": {"class_path": "DigitsLT"}, **recipe}))
    given = read_arguments(words, [Option("name")], recipe_keys=True)
    assert name_of_recipe(given, *find_recipe(str(tmp_path / "mine.yaml"))) == expected


def test_fit_and_compare_write_the_name_and_pass_it_on(say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert say("fit", "digits-lt", *FAST, "--name", "variant")[0] == 0
    first = tmp_path / "runs/variant/batchformer-seed0"
    assert json.loads((first / "result.json").read_text())["recipe"] == "variant"
    assert say("fit", first / "config.yaml", *FAST, "--out", "again")[0] == 0
    assert json.loads((tmp_path / "again/result.json").read_text())["recipe"] == "variant"
    code, out, err = say("compare", first / "config.yaml", *FAST, "--seeds", "1", "--run.recipe", "other")
    assert code == 0, err
    assert "other: after the last epoch, 1 seed" in out
    assert json.loads((tmp_path / "runs/other-compare/compare.json").read_text())["recipe"] == "other"
    result = json.loads((tmp_path / "runs/other-compare/baseline-seed0/result.json").read_text())
    assert (result["recipe"], result["config"]["run"]["recipe"]) == ("other", "other")


@pytest.mark.slow
def test_a_result_knows_the_command_that_makes_it_again(say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(folder):
        found = json.loads((tmp_path / folder / "result.json").read_text())
        return shlex.split(found["command"]), found

    words = ["digits-lt", "--seed", "3", *FAST, "--model.optimizer.lr=0.05", "--name", "a b"]
    assert say("fit", *words, "--data-root", tmp_path, "--out", "first")[0] == 0
    command, first = read("first")
    assert command[:2] == ["batchformer", "fit"]
    assert not {"--out", "--data-root", "--resume"} & {*command}
    assert say(*command[1:], "--out", "second")[0] == 0
    again, second = read("second")
    assert again == command
    for part in ("recipe", "seed", "metrics", "history"):
        assert first[part] == second[part]
    assert say("compare", "digits-lt", *FAST, "--seeds", "4", "7", "--out", "both")[0] == 0
    command, _ = read("both/baseline-seed7")
    assert command[:6] == ["batchformer", "compare", "digits-lt", "--seeds", "4", "7"]
    assert command == read("both/batchformer-seed4")[0]


def _seeds(text, tmp_path, overrides=()):
    (tmp_path / "mine.yaml").write_text(text)
    config = RecipeCLI().load(tmp_path / "mine.yaml", overrides)
    assert "seed_everything" not in config
    return config["model"]["seed"], config["data"]["init_args"]["seed"]


def test_seed_everything_in_a_file_gives_the_seeds_that_are_not_given(tmp_path):
    recipe = yaml.safe_load(recipe_text("digits-lt"))
    assert _seeds(yaml.safe_dump(recipe), tmp_path) == (0, 0)
    recipe["seed_everything"] = 5
    assert _seeds(yaml.safe_dump(recipe), tmp_path) == (5, 5)
    assert _seeds(yaml.safe_dump(recipe), tmp_path, [("model.seed", "6")]) == (6, 5)
    recipe["model"]["seed"], recipe["data"]["init_args"]["seed"] = 1, 2  # as in the config.yaml of older runs
    assert _seeds(yaml.safe_dump(recipe), tmp_path) == (1, 2)


def test_seed_everything_on_the_command_line_is_seed(say, tmp_path):
    for option, out in (("--seed_everything", "one"), ("--seed", "other")):
        code, _, err = say("fit", "digits-lt", *FAST, option, "5", "--out", tmp_path / out)
        assert code == 0, err
    one, other = (
        torch.load(tmp_path / out / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for out in ("one", "other")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
    result = json.loads((tmp_path / "one/result.json").read_text())
    assert result["seed"] == 5
    assert "--seed_everything 5" in result["command"]


def test_a_run_of_the_time_of_seed_everything_resumes_tests_and_exports(say, tmp_path):
    command = ["fit", "digits-lt", *FAST, "--out", tmp_path / "run"]
    assert say(*command)[0] == 0
    config = tmp_path / "run/config.yaml"
    config.write_text("seed_everything: 0\n" + config.read_text())
    assert say("test", tmp_path / "run")[0] == 0
    assert say("export", tmp_path / "run")[0] == 0
    (tmp_path / "run/result.json").unlink()
    code, _, err = say(*command, "--resume")
    assert code == 0, err
