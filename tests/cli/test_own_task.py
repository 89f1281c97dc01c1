"""A family of somebody's own, outside the package: the page docs/your-own-task.md, executed in every command."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from batchformer.cli import main

from ..runs.die_at import ends_of

PAGE = Path(__file__).parents[2] / "docs/your-own-task.md"
_FILES = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ["--trainer.max_epochs", "2", "--run.checkpoint_every_steps", "6"]  # two optimizers: a batch counts two steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page tells to save, in a folder of its own."""
    place = tmp_path_factory.mktemp("mine")
    for name, code in _FILES.findall(PAGE.read_text(encoding="utf-8")):
        with open(place / name, "a", encoding="utf-8") as file:
            file.write(code + "\n\n")
    return place


@pytest.fixture(scope="module")
def run(folder):
    assert main(["fit", str(folder / "ink.yaml"), *SHORT, "--out", str(folder / "run")]) == 0
    return folder / "run"


def result_of(run):
    return json.loads((run / "result.json").read_text())


def test_the_page_is_a_recipe_and_a_module(folder):
    assert {path.name for path in folder.glob("ink.*")} == {"ink.py", "ink.yaml"}


def test_fit_writes_the_measures_the_task_names(run):
    result = result_of(run)
    told = (result["recipe"], result["variant"], result["reference"], result["target"], result["seed"])
    assert told == ("ink", "batchformer", "plain", "turned", 0)  # as it is written it is that variant
    measures = {measure["key"]: measure for measure in result["measures"]}
    assert list(measures) == ["error", "worst", "source/error", "source/worst"]
    assert (measures["error"]["unit"], measures["error"]["better"]) == ("mm", "lower")
    assert [measure["key"] for measure in result["measures"] if measure["primary"]] == ["error"]
    assert 0 < result["metrics"]["error"] <= result["metrics"]["worst"]
    assert result["metrics"]["source/error"] != result["metrics"]["error"]
    assert len(result["sections"][0]["table"]["rows"]) == len(result["per_class"]) == 10
    assert len(result["history"]) == 2


def test_two_sets_two_views_and_two_optimizers_were_trained(run):
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert len(checkpoint["optimizer_states"]) == 2
    assert all(state["state"] for state in checkpoint["optimizer_states"])
    batches = 1347 // 64  # three quarters of the digits
    assert checkpoint["global_step"] == 2 * 2 * batches
    assert any(".batchformer." in key for key in checkpoint["state_dict"])


@pytest.mark.slow
def test_a_run_killed_inside_an_epoch_ends_with_the_bits_of_one_never_killed(folder, run, tmp_path):
    out = folder / "killed"
    words = ["fit", str(folder / "ink.yaml"), *SHORT, "--out", str(out)]
    [(code, said)] = ends_of([("step", 50, words)], tmp_path)
    assert code == -signal.SIGKILL, said
    assert torch.load(out / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 48
    assert main([*words, "--resume"]) == 0
    found, expected = (torch.load(r / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for r in (out, run))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert result_of(out)["metrics"] == result_of(run)["metrics"]


def test_compare_over_targets_judges_in_millimetres_where_less_is_better(folder, capsys):
    out = folder / "compare"
    words = ["compare", str(folder / "ink.yaml"), "--targets", "all", "--seeds", "2", "--trainer.max_epochs", "1"]
    words += ["--trainer.limit_train_batches", "3"]
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == sorted(
        f"{variant}-{target}-seed{seed}"
        for variant in ("plain", "batchformer")
        for target in ("turned", "upright")
        for seed in (0, 1)
    )
    assert all(word in shown for word in ("turned", "upright", "plain", "batchformer", "mm"))
    compared = json.loads((out / "compare.json").read_text())
    assert compared["variants"] == ["plain", "batchformer"]
    assert compared["targets"] == ["turned", "upright"]
    assert "accuracy" not in shown
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Which digits are misjudged" in page
    assert "Mean error" in page
    differences = [
        result_of(out / f"batchformer-{target}-seed{seed}")["metrics"]["error"]
        - result_of(out / f"plain-{target}-seed{seed}")["metrics"]["error"]
        for target in ("turned", "upright")
        for seed in (0, 1)
    ]
    mean = sum(differences) / len(differences)
    assert f"{abs(mean):.3f} mm" in compared["verdict"]


def test_commands_on_a_run_folder_import_its_code_only_when_trusted(run, folder, capsys):
    for command in (["test"], ["export", "--out", str(folder / "plain.safetensors")]):
        assert main([command[0], str(run), *command[1:]]) == 2
        assert "--trust" in capsys.readouterr().err
        assert not (folder / "plain.safetensors").exists()
    assert main(["test", str(run), "--trust"]) == 0
    assert "exactly these numbers" in capsys.readouterr().out
    assert main(["export", str(run), "--trust", "--out", str(folder / "plain.safetensors")]) == 0
    assert set(load_file(folder / "plain.safetensors")) == {
        f"{layer}.{kind}" for layer in ("features.1", "length") for kind in ("weight", "bias")
    }
    names = {}
    exec("\n".join(map(str.strip, capsys.readouterr().out.split("To load it:\n")[1].splitlines())), names)
    expected = load_file(folder / "plain.safetensors")
    assert all(torch.equal(value, expected[key]) for key, value in names["model"].state_dict().items())


def test_a_data_set_of_ones_own_beside_the_recipe_is_found_with_a_shipped_task(tmp_path, capsys):
    code = "from batchformer.data import DigitsLT\n\n\nclass MyDigits(DigitsLT):\n    pass\n"
    (tmp_path / "my_digits.py").write_text(code)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: digits-lt\ndata: {class_path: my_digits.MyDigits, init_args: {imbalance: 5}}\n")
    assert main(["fit", str(recipe), "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "class_path: my_digits.MyDigits" in shown
    assert f"code: {tmp_path.resolve()}" in shown


def test_report_needs_no_trust_and_imports_nothing(run, folder):
    alone = folder / "elsewhere"
    shutil.copytree(run, alone / "run")
    words = ["report", str(alone / "run"), "--out", str(alone / "page.html")]
    code = f"import sys; from batchformer.cli import main; assert main({words!r}) == 0; "
    code += "assert not {'ink', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=alone).returncode == 0


@pytest.mark.parametrize("callbacks", ["[{class_path: evil.Callback}]", "[evil.Callback]", "evil.Callback"])
def test_a_config_that_names_code_anywhere_is_not_run(run, tmp_path, callbacks, capsys):
    copy = tmp_path / "tampered"
    shutil.copytree(run, copy)
    config = (copy / "config.yaml").read_text()
    marker = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = config.replace("ink.InkLength", "long_tailed").replace("ink.InkData", "batchformer.data.DigitsLT")
    (copy / "config.yaml").write_text(config.replace("callbacks: null", f"callbacks: {callbacks}"))
    assert main(["test", str(copy)]) == 2
    assert "evil.Callback" in capsys.readouterr().err
    assert not marker.exists()
