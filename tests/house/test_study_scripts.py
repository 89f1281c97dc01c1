"""The scripts in benchmarks/ that train studies: every variant is a recipe that loads, and runs take turns."""

import importlib
import threading
from pathlib import Path

import pytest

from batchformer._cli.arguments import Option, read_arguments
from batchformer._cli.recipe_cli import RecipeCLI
from batchformer._cli.shelf import find_recipe
from batchformer._cli.training_options import COMMON, method_override, recipe_overrides
from batchformer.report.paper import STUDIES

EVERY_STUDY = pytest.mark.parametrize(
    ("module", "name"),
    [
        ("v2_study", "STUDY"),
        ("v2_study", "TABLE_7"),
        ("mix_study", "VIT"),
        ("mix_study", "RESNET"),
        ("cifar_tuning", "STUDY"),
    ],
)


@pytest.fixture
def script(monkeypatch):
    """Imports a module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="module")
def recipes():
    return RecipeCLI()


def settings(study, variant, recipes):
    given = read_arguments([*study.common, *study.variants[variant]], [*COMMON, Option("method")], recipe_keys=True)
    method = given.value("method")
    overrides = recipe_overrides(given) + (method_override(method) if method else [])
    loaded = recipes.load(find_recipe(study.recipe)[1], overrides)
    return {part: loaded[part] for part in ("model", "data", "trainer")}


@EVERY_STUDY
def test_every_variant_is_a_training_of_its_own(module, name, script, recipes):
    study = getattr(script(module), name)
    found = {variant: settings(study, variant, recipes) for variant in study.variants if not variant.startswith("long")}
    assert found["baseline"]["model"]["method"] == "baseline"
    for variant, one in found.items():
        for other, another in found.items():
            assert variant == other or one != another, f"{variant} is {other}"


@EVERY_STUDY
def test_what_the_report_compares_is_trained(module, name, script):
    study = getattr(script(module), name)
    told = STUDIES[study.name].held_to if study.name in STUDIES else {}
    assert {*told, *told.values()} <= study.variants.keys()


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
