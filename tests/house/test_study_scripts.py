"""The scripts in benchmarks/ that train studies: every variant is a recipe that loads, and runs take turns."""

import importlib
import json
import shutil
import threading
from pathlib import Path

import pytest

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.cli.training import COMMON, single_run_overrides
from batchformer.recipes import find_recipe
from benchmarks.paper import STUDIES

from ..selection import others_slow

EVERY_STUDY = pytest.mark.parametrize(
    ("module", "name"),
    others_slow(
        [
            ("v2_study", "STUDY"),
            ("v2_study", "TABLE_7"),
            ("mix_study", "VIT"),
            ("mix_study", "RESNET"),
            ("cifar_tuning", "STUDY"),
            ("long_tail_study", "RIDE"),
            ("long_tail_study", "ON_BALANCED"),
            ("long_tail_study", "ON_SOFTMAX"),
        ],
        [("v2_study", "TABLE_7"), ("cifar_tuning", "STUDY")],
    ),
)


@pytest.fixture
def script():
    """Imports a module of benchmarks/."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def recipes():
    return RecipeCLI()


def settings(study, variant, recipes):
    words = [study.recipe, *study.common, *study.variants[variant]]
    given = read_arguments(words, [*COMMON, Option("method")], recipe_keys=True)
    loaded = recipes.load(find_recipe(study.recipe)[1], single_run_overrides(given))
    return {part: loaded[part] for part in ("model", "data", "trainer")}


@EVERY_STUDY
def test_every_variant_is_a_training_of_its_own(module, name, script, recipes):
    study = getattr(script(module), name)
    found = {variant: settings(study, variant, recipes) for variant in study.variants if not variant.startswith("long")}
    assert found["baseline"]["model"]["method"] == "baseline"
    for variant, one in found.items():
        assert study.method(variant) == one["model"]["method"]  # the name its result is kept under
        for other, another in found.items():
            assert variant == other or one != another, f"{variant} is {other}"


@EVERY_STUDY
def test_what_the_report_compares_is_trained(module, name, script):
    study = getattr(script(module), name)
    told = STUDIES[study.name].held_to if study.name in STUDIES else {}
    assert {*told, *told.values()} <= study.variants.keys()


def test_what_the_results_hold_is_not_trained_again_where_one_asks_for_the_missing(
    tmp_path, script, monkeypatch, capsys
):
    study = script("mix_study").RESNET
    results, started = tmp_path / "results", []
    for seed, accuracy in ((0, 70.0), (1, 71.0)):
        kept = results / f"{study.name}-cutmix" / f"baseline-seed{seed}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"method": "baseline", "metrics": {"all": accuracy}}))
    monkeypatch.setattr(script("_study").subprocess, "call", lambda command, **_: started.append(command) or 1)
    words = ["--runs", str(tmp_path / "runs"), "--results", str(results), "--only", "cutmix", "saliencymix"]
    assert study.train(study.parser(None).parse_args([*words, "--missing"])) == 4  # one of CutMix, three of the other
    assert sorted((each[each.index("--name") + 1], each[each.index("--seed") + 1]) for each in started) == [
        (f"{study.name}-cutmix", "2"), *((f"{study.name}-saliencymix", seed) for seed in "012"),
    ]  # fmt: skip
    assert "70.50 ± 0.71 (2 seeds)" in capsys.readouterr().out
    assert study.train(study.parser(None).parse_args(words)) == 6  # without the word all of it


def test_a_variant_that_begins_with_the_weights_of_another_is_trained_after_it(tmp_path, script, monkeypatch):
    study = script("long_tail_study").RIDE
    results, runs, started = tmp_path / "results", tmp_path / "runs", []

    def call(command, **_):
        out = Path(command[command.index("--out") + 1])
        started.append((out.parent.name.removeprefix(f"{study.name}-"), out.name))
        if "--init-from" in command:
            assert (Path(command[command.index("--init-from") + 1]) / "result.json").is_file()
        out.mkdir(parents=True)
        (out / "result.json").write_text(json.dumps({"method": study.method(started[-1][0]), "metrics": {"all": 50.0}}))
        return 0

    monkeypatch.setattr(script("_study").subprocess, "call", call)
    words = ["--runs", str(runs), "--results", str(results), "--jobs", "3", "--seeds", "0", "1", "--missing"]
    assert study.train(study.parser(None).parse_args([*words, "--only", "routed"])) == 0
    assert sorted(started) == [(name, f"seed{seed}") for name in ("baseline", "routed") for seed in (0, 1)]
    started.clear()
    shutil.rmtree(runs / f"{study.name}-baseline")  # its results are kept: enough, unless others begin with its weights
    assert study.train(study.parser(None).parse_args([*words, "--only", "baseline", "routed"])) == 0
    assert started == []
    assert {path.parent.name for path in results.rglob("*.json")} == {study.name, f"{study.name}-routed"}


def test_runs_start_side_by_side_and_train_one_at_a_time(tmp_path, script):
    turn = script("_turn").InTurn
    first, second, third = (turn(str(tmp_path / "turn"), free=1) for _ in range(3))
    for run in (first, second, third):
        run.on_train_batch_start(None, None, None, 0)  # free: compiling is done side by side
    first.on_train_batch_start(None, None, None, 1)
    waits = _next_step(second)
    waits.join(0.2)
    assert waits.is_alive()
    first.on_train_batch_start(None, None, None, 2)  # the one whose turn it is goes on
    first.on_train_end(None, None)
    waits.join(60)
    assert not waits.is_alive()
    second.on_exception(None, None, RuntimeError())  # a run that fails does not keep its turn
    waits = _next_step(third)
    waits.join(60)
    assert not waits.is_alive()


def _next_step(run):
    """In a thread, as it may wait for its turn."""
    step = threading.Thread(target=run.on_train_batch_start, args=(None, None, None, 1), daemon=True)
    step.start()
    return step


def test_a_kept_result_is_that_of_the_run_without_the_folders_of_a_machine(script, tmp_path):
    result = {"metrics": {"top1": 0.1}, "data": {"root": "/home/me/data/cub", "words": ["/a/words.npz", "glove.txt"]}}
    result["command"] = "batchformer fit recipe --init-from backbone=/a/b/net.pth --data-root /c/d --model.method a/b"
    (tmp_path / "result.json").write_text(json.dumps(result))
    script("_common").keep_result(tmp_path, tmp_path / "kept" / "baseline-seed0.json")
    kept = json.loads((tmp_path / "kept" / "baseline-seed0.json").read_text())
    assert kept == {
        "metrics": {"top1": 0.1},
        "data": {"root": "cub", "words": ["words.npz", "glove.txt"]},
        "command": "batchformer fit recipe --init-from backbone=net.pth --data-root d --model.method a/b",
    }
