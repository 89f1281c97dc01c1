"""With which settings a run goes on: options that came later, and a finished run that is made longer."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from batchformer.cli import main
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.errors import UserError
from batchformer.recipes import about, find_recipe, read_recipe, recipe_names
from batchformer.runs.folder import RunFolder
from batchformer.runs.options import RunOptions, dotted
from batchformer.runs.settings import defaults_of, refuse_other_settings
from batchformer.runs.train import Prepared, open_folder
from batchformer.tasks import TASKS
from batchformer.training.schedules import ScheduleOptions, lr_factor

TINY = ["--trainer.limit_train_batches", "2", "--data.batch_size", "16", "--model.backbone_args.widths", "[4,4]"]
TINY += ["--no-analysis", "--model.schedule.warmup_epochs", "1"]
STEADY = ["--model.schedule.name", "constant"]


def one_recipe_of_each_task():
    found = {}
    for name in recipe_names():
        found.setdefault(read_recipe(find_recipe(name)[1]).get("task", "long_tailed"), name)
    return sorted(found.items())


def without(config, key):
    """Delete a key, and the section it was in where nothing else is."""
    section, _, rest = key.partition(".")
    if rest:
        without(config[section], rest)
    if not rest or not config[section]:
        del config[section]


def started_with(config, path):
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return RunFolder(path)


def test_a_run_without_a_checkpoint_yet_begins_anew_with_the_settings_of_now(tmp_path):
    before, now = ({"data": {"init_args": {"workers": workers, "seed": 0}}} for workers in (4, 0))
    folder = started_with(before, tmp_path / "run")
    folder.metrics.write_text("step\n1\n")
    run = Prepared(folder, task=None, data=None, trainer=None, recorder=None, resumed_from={})
    assert open_folder(run, now, resume=True, overwrite=False) is None
    assert yaml.safe_load(folder.config.read_text()) == now
    assert not folder.metrics.exists()


@pytest.mark.parametrize(("task", "recipe"), one_recipe_of_each_task())
def test_an_option_that_came_later_refuses_no_run_that_was_started_without_it(task, recipe, tmp_path):
    """Every option that has its default today, and every group of them, could have come later."""
    file, cli = find_recipe(recipe)[1], RecipeCLI()
    small = [
        (key, value) for key, value in about(recipe).small_overrides() if not key.startswith("data.init_args.root")
    ]
    now = cli.load(file, small)
    defaults = defaults_of(model=TASKS[task], data=type(cli.build()[1]), run=RunOptions)
    flat = dotted(now)
    same = [
        key for key in defaults if key in flat and flat[key] == defaults[key] and key.startswith(("model.", "data."))
    ]
    assert {"model.seed", "data.init_args.seed"} <= set(same)
    before = yaml.safe_load(yaml.safe_dump(now))
    for key in same:
        without(before, key)
    refuse_other_settings(started_with(before, tmp_path), now, defaults)
    other = yaml.safe_load(yaml.safe_dump(now))
    other["model"]["seed"] = 5
    with pytest.raises(UserError, match=r"started with model\.seed 0, now it is 5"):
        refuse_other_settings(started_with(before, tmp_path), other, defaults)


@pytest.mark.parametrize(
    "key", ["algorithm", "ride", "sampling", "paco", "decoupled", "balms", "swad", "batchformer.process_group"]
)
def test_a_run_of_the_time_before_an_option_goes_on_and_not_with_another_value_of_it(key, tmp_path):
    cli = RecipeCLI()
    file = find_recipe("digits-lt")[1]
    now = cli.load(file)
    task, data, _, _ = cli.build()
    before = yaml.safe_load(yaml.safe_dump(now))
    without(before["model"], key)
    folder, defaults = started_with(before, tmp_path), defaults_of(model=type(task), data=type(data))
    refuse_other_settings(folder, now, defaults)
    changed = {"algorithm": "ride", "ride": '{"experts": 5}', "sampling": "class_balanced", "paco": '{"dim": 7}',
               "decoupled": '{"tau": 9}', "balms": '{"meta_batch": 3}', "swad": "{}",
               "batchformer.process_group": "2"}  # fmt: skip
    with pytest.raises(UserError, match=f"started with model.{key}"):
        refuse_other_settings(folder, cli.load(file, [(f"model.{key}", changed[key])]), defaults)


def test_a_run_of_the_time_when_one_view_meant_as_many_as_the_task_needs_goes_on(tmp_path):
    now = RecipeCLI().load(find_recipe("moco-digits")[1])
    before = yaml.safe_load(yaml.safe_dump(now))
    before["data"]["init_args"]["views"] = 1
    refuse_other_settings(started_with(before, tmp_path), now)
    before["data"]["init_args"]["views"] = 3
    with pytest.raises(UserError, match=r"data\.init_args\.views 3"):
        refuse_other_settings(started_with(before, tmp_path), now)


def fit(out, epochs, *more, seed=3):
    words = ["--trainer.max_epochs", str(epochs), "--seed", str(seed), "--out", str(out)]
    return main(["fit", "digits-lt", *TINY, *words, *more])


def weights(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two epochs that were given two more, and four from the start; with a learning rate that knows no end."""
    place = tmp_path_factory.mktemp("length")
    for out, epochs, more in (("longer", 2, []), ("longer", 4, ["--resume"]), ("whole", 4, [])):
        assert fit(place / out, epochs, *STEADY, *more) == 0
    return place


def test_a_finished_run_that_is_made_longer_ends_as_one_that_was_long_from_the_start(ended):
    longer, whole = weights(ended / "longer"), weights(ended / "whole")
    assert longer.keys() == whole.keys()
    assert all(torch.equal(longer[name], whole[name]) for name in whole)
    first, second = (json.loads((ended / out / "result.json").read_text()) for out in ("longer", "whole"))
    assert first["metrics"] == second["metrics"]
    assert (first["epochs"], first["steps"]) == (4, 8)
    assert first["lengthened"] == [2]
    assert "lengthened" not in second
    assert yaml.safe_load((ended / "longer/config.yaml").read_text())["trainer"]["max_epochs"] == 4


def test_a_finished_run_is_not_made_shorter_nor_changed_besides(ended, capsys):
    for epochs, more, reason in (
        (3, [], "max_epochs 4, now it is 3"),
        (6, ["--model.batchformer.heads", "2"], "heads 4"),
    ):
        before = (ended / "longer/result.json").read_bytes()
        assert fit(ended / "longer", epochs, *STEADY, *more, "--resume") == 2
        assert reason in capsys.readouterr().err
        assert (ended / "longer/result.json").read_bytes() == before


def test_a_cosine_goes_on_as_that_of_the_longer_run(tmp_path):
    assert fit(tmp_path / "run", 2) == 0
    assert fit(tmp_path / "run", 4, "--resume") == 0
    with open(tmp_path / "run/metrics.csv", newline="") as file:
        rates = {int(row["epoch"]): float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}
    schedule = ScheduleOptions(warmup_epochs=1, warmup_start=0.1)
    assert rates == pytest.approx({e: 0.1 * lr_factor(schedule, e, 2 if e < 2 else 4) for e in range(4)})


@pytest.mark.slow
def test_steps_are_added_to_whole_epochs_alone(tmp_path, capsys):
    for out, steps, more in (("longer", 4, []), ("longer", 7, ["--resume"]), ("whole", 7, [])):
        assert fit(tmp_path / out, -1, "--trainer.max_steps", str(steps), *STEADY, *more) == 0
    longer, whole = weights(tmp_path / "longer"), weights(tmp_path / "whole")
    assert all(torch.equal(longer[name], whole[name]) for name in whole)
    capsys.readouterr()
    assert fit(tmp_path / "longer", -1, "--trainer.max_steps", "9", *STEADY, "--resume") == 2  # 2 steps are an epoch
    assert "ended inside an epoch" in capsys.readouterr().err
    assert (tmp_path / "longer/result.json").is_file()


def test_a_run_killed_right_after_it_was_given_more_epochs_can_be_given_them_again(ended, tmp_path, capsys):
    run = Path(shutil.copytree(ended / "longer", tmp_path / "run"))
    (run / "result.json").unlink()  # the first thing that is done; config.yaml is written after it
    assert fit(run, 5, *STEADY, "--resume") == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 5
    (run / "result.json").unlink()
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    torch.save({**saved, "epoch": 2, "global_step": 6}, run / "checkpoints/last.ckpt")  # stopped before its end
    capsys.readouterr()
    assert fit(run, 7, *STEADY, "--resume") == 2
    assert "max_epochs 5, now it is 7" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_makes_all_its_runs_longer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for epochs, more in (("1", []), ("2", ["--resume"])):
        words = ["--seeds", "1", "--trainer.max_epochs", epochs, "--out", "both", *more]
        assert main(["compare", "digits-lt", *TINY, *words]) == 0
    results = [json.loads(file.read_text()) for file in Path("both").glob("*/result.json")]
    assert [(each["epochs"], each["lengthened"]) for each in results] == [(2, [1]), (2, [1])]
