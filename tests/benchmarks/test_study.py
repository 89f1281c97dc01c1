"""Studies: what is trained, what is probed, what is left out, and what waits for what."""

import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.cli.training import COMMON, command_line_variants, single_run_overrides
from batchformer.recipes import find_recipe
from benchmarks import study as script
from benchmarks._turn import InTurn
from benchmarks.studies import STUDIES, Run, Study
from tests.selection import others_slow


def settings(study, variant, cli):
    """What is trained, as the arguments of `batchformer fit` say."""
    file = find_recipe(study.recipe)[1]
    cli.load(file)
    given = read_arguments(study.words(variant), [*COMMON, Option("method")], recipe_keys=True)
    ((name, keys),) = command_line_variants(given.values.get("variant", [variant])).items()
    assert name == variant
    own = [] if study.folders else cli.variants.get(variant, [])
    target = [("data.init_args.target", study.targets[0])] if study.targets[0] else []
    loaded = cli.load(file, [*own, *keys, *single_run_overrides(given), *target])
    found = {part: loaded[part] for part in ("model", "data", "trainer")}
    return {**found, "init_from": loaded["run"]["init_from"], "after": study.after.get(variant)}


@pytest.mark.parametrize(
    "name",
    others_slow(
        STUDIES,
        ["pacs-128", "plantvillage-czsl", "moco-v3-cifar100", "deit-ti-cifar100-100", "cifar100-lt-50-tuning"],
    ),
)  # fmt: skip
def test_every_variant_is_a_training_of_its_own(name):
    study, cli = STUDIES[name], RecipeCLI()
    found = {variant: settings(study, variant, cli) for variant in study.variants}
    assert len({json.dumps(each, default=str) for each in found.values()}) == len(found)
    if study.folders:
        assert found["baseline"]["model"]["method"] == "baseline"
    for variant, content in found.items():
        if study.folders:
            assert study.method(variant) == content["model"]["method"]  # the name its result is kept under
        elif name != "voc-faster-rcnn-r18":
            assert content["model"]["method"] == ("batchformer" if "batchformer" in variant else "baseline")
        if "words" in content["data"]["init_args"]:
            random = variant.endswith("-random") or name == "digits-states"
            assert ("random" in content["data"]["init_args"]["words"]) == random


@pytest.mark.parametrize("name", STUDIES)
def test_what_a_study_names_is_a_variant_of_it_and_every_run_has_a_file(name):
    study = STUDIES[name]
    told = {
        *study.held_to,
        *study.held_to.values(),
        *study.after,
        *study.after.values(),
        *study.itself,
        *study.seeds_of,
    }
    assert told <= study.variants.keys()
    runs = study.runs(None, list(study.variants), study.targets)
    assert len({study.file(run) for run in runs}) == len(set(runs)) == len(runs)


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
def workers(monkeypatch):
    """Threads of this process in place of processes, so that a test sees what they do."""
    monkeypatch.setattr(script, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(script, "write_to", lambda log: None)
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def started(workers, monkeypatch):
    """The commands that a study gives, each with the end of its run folder; it is as if all trained."""
    commands = []

    def train(words):
        out = Path(words[words.index("--out") + 1])
        commands.append([*words[:2], out.name])
        if "--init-from" in words:
            assert (Path(words[words.index("--init-from") + 1]) / "result.json").is_file()
        time.sleep(0.1)  # what does not wait for this run is begun meanwhile
        out.mkdir(parents=True)
        (out / "result.json").write_text(json.dumps({"method": "baseline", "metrics": {"all": 50.0}}))
        return 0

    monkeypatch.setattr("batchformer.cli.main", train)
    return commands


@pytest.fixture
def study(tmp_path, workers, monkeypatch):
    def run(name, *words):
        folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
        monkeypatch.setattr("sys.argv", ["study", name, *folders, *words])
        return script.main()

    return run


def test_what_the_results_hold_is_not_trained_again_and_no_run_is_begun_too_late(tmp_path, started, study, capsys):
    kept = tmp_path / "results" / "mnist-usps" / "dann-usps-seed1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"method": "baseline", "metrics": {"all": 50.0}}))
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


def test_what_a_folder_for_each_variant_holds_is_not_trained_again_and_is_in_the_table(
    tmp_path, study, monkeypatch, capsys
):
    name, started = "mix-resnet56-cifar100", []
    for variant, seed, accuracy in (
        ("cutmix", 0, 70.0),
        ("cutmix", 1, 71.0),
        ("baseline", 0, 69.0),
        ("baseline", 1, 68.0),
    ):
        kept = tmp_path / "results" / f"{name}-{variant}" / f"baseline-seed{seed}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"method": "baseline", "metrics": {"all": accuracy}}))
    monkeypatch.setattr("batchformer.cli.main", lambda words: started.append(words) or 1)
    words = ["--only", "baseline", "cutmix", "saliencymix"]
    assert study(name, *words, "--missing") == 1
    assert [(each[each.index("--name") + 1], each[each.index("--seed") + 1]) for each in started] == [
        (f"{name}-saliencymix", "0"), (f"{name}-saliencymix", "1"),
        *((f"{name}-{variant}", "2") for variant in ("baseline", "cutmix", "saliencymix")),
    ]  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cutmix")]
    assert "70.50 ± 0.71 (2 seeds)" in line
    assert "+2.00 [" in line
    started.clear()
    assert study(name, *words) == 1
    assert len(started) == 9  # without the word all of it


def test_a_variant_that_begins_with_the_weights_of_another_is_trained_after_it(tmp_path, started, study):
    name = "cifar100-lt-100-ride"
    words = ["--jobs", "3", "--seeds", "0", "1", "--missing"]
    assert study(name, *words, "--only", "routed") == 0
    assert sorted(each[2] for each in started) == ["baseline-seed0", "baseline-seed1", "routed-seed0", "routed-seed1"]
    started.clear()
    for seed in (0, 1):  # its results are kept: enough, unless others begin with its weights
        shutil.rmtree(tmp_path / "runs" / f"baseline-seed{seed}")
    assert study(name, *words, "--only", "baseline", "routed") == 0
    assert started == []
    assert {path.parent.name for path in (tmp_path / "results").rglob("*.json")} == {name, f"{name}-routed"}


def test_what_begins_with_a_run_that_failed_is_not_trained(started, study, monkeypatch, capsys):
    begun = []
    monkeypatch.setattr(
        "batchformer.cli.main", lambda words: begun.append(Path(words[words.index("--out") + 1]).name) or 2
    )
    assert study("cifar100-lt-100-ride", "--seeds", "0", "--only", "routed", "sum", "--jobs", "2") == 1
    assert sorted(begun) == ["baseline-seed0", "sum-seed0"]
    assert "routed-seed0: not trained" in capsys.readouterr().err


def test_an_interrupted_run_ends_the_study(study, monkeypatch):
    interrupted = []
    monkeypatch.setattr("batchformer.cli.main", lambda words: interrupted.append(words) or 130)
    assert study("mnist-usps", "--only", "dann") == 1
    assert len(interrupted) == 1


class _Deadly:
    """Ends the process that is to call it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_process_that_is_killed_costs_one_run(tmp_path, monkeypatch, capsys):
    """In real processes: each that dies is replaced."""
    monkeypatch.setattr(script, "fit_in_worker", _Deadly())
    words = ["digits-lt", "--runs", str(tmp_path), "--results", str(tmp_path), "--seeds", "0", "1"]
    args = script.parser().parse_args([*words, "--only", "baseline", "--targets", ""])
    assert script.train(STUDIES["digits-lt"], args) == 2
    said = capsys.readouterr().err
    assert [line.partition(":")[0] for line in said.splitlines()] == ["baseline-seed0", "baseline-seed1"]


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


def test_weights_are_for_first_stages(monkeypatch, study, tmp_path):
    begins = {}

    def train(words):
        out = Path(words[words.index("--out") + 1])
        begins[out.name] = words[words.index("--init-from") + 1]
        out.mkdir(parents=True)
        (out / "result.json").write_text(json.dumps({"method": "baseline", "metrics": {"all": 50.0}}))
        return 0

    monkeypatch.setattr("batchformer.cli.main", train)
    assert study("imagenette-lt-on-softmax", "--weights", "net.pth", "--only", "crt", "--seeds", "1") == 0
    assert begins == {"baseline-seed1": "net.pth", "crt-seed1": str(tmp_path / "runs" / "baseline-seed1")}


def test_runs_are_named_by_variant_target_and_seed():
    assert Run("erm+batchformer", "sketch", 2).name == "erm+batchformer-sketch-seed2"
    assert Run("visual-product", "", 0).name == "visual-product-seed0"
    study = Study("one", "digits-domains", {"erm": ""}, targets=("a",))
    assert study.runs([5], ["erm"], ["a"]) == [Run("erm", "a", 5)]
    assert study.file(Run("erm", "a", 5)) == "one/erm-a-seed5.json"
    study = STUDIES["deit-ti-cifar100-100"]
    files = [study.file(Run(variant, "", 0)) for variant in study.variants]
    assert [file.removeprefix(study.name) for file in files] == [
        "/baseline-seed0.json", "/batchformer-seed0.json", "-stable/batchformer-seed0.json",
    ]  # fmt: skip


def test_runs_start_side_by_side_and_train_one_at_a_time(tmp_path):
    first, second, third = (InTurn(str(tmp_path / "turn"), free=1) for _ in range(3))
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


def test_a_kept_result_is_that_of_the_run_without_the_folders_of_a_machine(tmp_path):
    result = {"metrics": {"top1": 0.1}, "data": {"root": "/home/me/data/cub", "words": ["/a/words.npz", "glove.txt"]}}
    result["command"] = "batchformer fit recipe --init-from backbone=/a/b/net.pth --data-root /c/d --model.method a/b"
    (tmp_path / "result.json").write_text(json.dumps(result))
    script.keep_result(tmp_path, tmp_path / "kept" / "baseline-seed0.json")
    kept = json.loads((tmp_path / "kept" / "baseline-seed0.json").read_text())
    assert kept == {
        "metrics": {"top1": 0.1},
        "data": {"root": "cub", "words": ["words.npz", "glove.txt"]},
        "command": "batchformer fit recipe --init-from backbone=net.pth --data-root d --model.method a/b",
    }
