"""What the commands say and write, on one tiny run."""

import csv
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from PIL import ExifTags, Image
from safetensors.torch import load_file

from batchformer.models import resnet20
from batchformer.runs.folder import LOCK, RunFolder
from batchformer.runs.lock import locked

from .conftest import TINY


def test_fit_writes_the_run_folder(tiny_run):
    result = json.loads((tiny_run / "result.json").read_text())
    assert result["variant"] == "batchformer"
    assert result["epochs"] == 2
    assert result["steps"] == 4
    assert result["data"]["train_images"] == sum(result["class_counts"])
    assert {"batchformer", "python", "torch", "lightning", "timm", "torchvision"} <= set(result["versions"])
    assert result["wall_s"] > 0
    assert result["images_per_s"] > 0
    assert len(result["gradient_influence"]["per_class"]) == 10
    config = yaml.safe_load((tiny_run / "config.yaml").read_text())
    assert config == result["config"]
    assert config["trainer"]["max_epochs"] == 2
    with open(tiny_run / "metrics.csv", newline="") as file:
        assert [row["train/loss"] for row in csv.DictReader(file) if row.get("train/loss")]
    assert list((tiny_run / "tensorboard").glob("events*"))
    assert not list(tiny_run.rglob("*.partial"))


def test_the_last_epoch_is_validated_whatever_the_interval(tiny_run):
    result = json.loads((tiny_run / "result.json").read_text())
    assert result["config"]["trainer"]["check_val_every_n_epoch"] > 2
    assert [entry["epoch"] for entry in result["history"]] == [1]
    assert result["history"][0]["train_loss"] > 0


def test_the_resolved_recipe_trains_the_same_network_again(say, tiny_run, tmp_path):
    assert say("fit", tiny_run / "config.yaml", "--no-analysis", "--out", tmp_path / "again")[0] == 0
    first, second = (
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for run in (tiny_run, tmp_path / "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_precision_of_matrix_products_is_a_choice_of_the_run(say, tmp_path):
    before = torch.get_float32_matmul_precision()
    try:
        words = ["--no-analysis", "--run.matmul_precision", "high"]
        assert say("fit", "digits-lt", *TINY, *words, "--out", tmp_path / "fast")[0] == 0
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    code, _, err = say("fit", "digits-lt", *TINY, "--out", tmp_path / "odd", "--run.matmul_precision", "low")
    assert code != 0
    assert "matmul_precision" in err
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize(
    ("recipe", "precision", "measured"),
    [("digits-lt", "64-true", "gradient_influence"), ("vit-digits", "bf16-true", "stream_health")],
)
def test_a_network_of_another_precision_is_analysed_too(recipe, precision, measured, say, tmp_path):
    code, _, err = say("fit", recipe, *TINY, "--trainer.precision", precision, "--out", tmp_path / "run")
    assert code == 0, err
    assert json.loads((tmp_path / "run/result.json").read_text())[measured]


def test_a_finished_run_has_nothing_to_resume(say, tiny_run):
    before = (tiny_run / "checkpoints/last.ckpt").stat().st_mtime_ns
    code, out, _ = say("fit", "digits-lt", *TINY, "--out", tiny_run, "--resume")
    assert code == 0
    assert "already finished" in out
    assert (tiny_run / "checkpoints/last.ckpt").stat().st_mtime_ns == before


def test_nor_has_one_of_an_older_version_that_knew_fewer_settings(say, tiny_run, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(tiny_run, old)
    config = yaml.safe_load((old / "config.yaml").read_text())
    del config["model"]["loss_weight"]
    (old / "config.yaml").write_text(yaml.safe_dump(config))
    assert say("fit", "digits-lt", *TINY, "--out", old, "--resume")[0] == 0
    code, _, err = say("fit", "digits-lt", *TINY, "--out", old, "--resume", "--data.batch_size", "16")
    assert (code, "batch_size" in err) == (2, True)


def test_seed_and_method_reach_every_part(say, tmp_path):
    code, _, err = say("fit", "digits-lt", *TINY, "--seed", 7, "--method", "baseline", "--out", tmp_path / "run")
    assert code == 0, err
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (config["model"]["seed"], config["data"]["init_args"]["seed"]) == (7, 7)
    assert "seed_everything" not in config
    assert config["model"]["method"] == "baseline"
    assert "gradient_influence" not in json.loads((tmp_path / "run/result.json").read_text())


def test_test_finds_the_numbers_of_the_result_file(say, tiny_run):
    code, out, _ = say("test", tiny_run)
    assert code == 0
    assert "result.json has exactly these numbers" in out


def test_test_says_when_the_numbers_differ(say, tiny_run, tmp_path):
    import shutil

    copy = shutil.copytree(tiny_run, tmp_path / "copy")
    result = json.loads((copy / "result.json").read_text())
    result["metrics"]["few"] += 1
    (copy / "result.json").write_text(json.dumps(result))
    code, out, _ = say("test", copy)
    assert code == 1
    assert "differs: few" in out


def test_a_run_without_evaluation_says_so_and_can_be_tested_later(say, tmp_path):
    code, out, err = say("fit", "digits-lt", *TINY, "--trainer.limit_val_batches", 0, "--out", tmp_path / "run")
    assert code == 0, err
    assert "batchformer, seed 0: not evaluated" in out
    code, out, _ = say("test", tmp_path / "run")
    assert code == 0
    assert "Few (< 20)" in out
    assert "the run was not evaluated" in out


def test_a_comparison_without_evaluation_is_refused_before_it_trains(say, tmp_path):
    code, _, err = say("compare", "digits-lt", *TINY, "--trainer.limit_val_batches", 0, "--out", tmp_path / "runs")
    assert code == 2
    assert "limit_val_batches 0" in err
    assert not (tmp_path / "runs").exists()


def test_fit_and_test_say_which_classes_fail(say, tiny_run, tmp_path):
    found = json.loads((tiny_run / "result.json").read_text())
    columns, metrics = found["failures"]["columns"], found["metrics"]
    assert sum(columns["images"]) == found["data"]["test_images"]
    right = sum(n * recall / 100 for n, recall in zip(columns["images"], columns["recall"], strict=True))
    assert right == pytest.approx(metrics["accuracy"] / 100 * sum(columns["images"]), abs=0.1)
    assert columns["recall"] == pytest.approx(found["per_class"], abs=0.01)
    assert metrics["balanced_accuracy"] == pytest.approx(sum(found["per_class"]) / 10)
    assert sum(map(sum, found["failures"]["matrix"])) == found["data"]["test_images"]
    assert (tiny_run / "failures/mistakes.png").stat().st_size > 1000
    listed = tmp_path / "classes.csv"
    before = {path: path.stat().st_mtime_ns for path in tiny_run.rglob("*")}
    code, out, _ = say("test", tiny_run, "--classes", listed)
    assert code == 0
    assert "Which classes fail" in out
    assert listed.read_text() == (tiny_run / "classes.csv").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in tiny_run.rglob("*")}  # nothing is changed
    (tmp_path / "mine.csv").write_text("a,b")
    code, _, err = say("test", tiny_run, "--classes", tmp_path / "mine.csv")
    assert code == 2
    assert "mine.csv" in err


def test_calibrated_scores_and_weights_are_those_of_divided_logits(say, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((24, 24), 90).save("one.png")
    temperature = json.loads((tiny_run / "result.json").read_text())["failures"]["calibration"]["temperature"]
    scores = []
    for options in ([], ["--calibrated"]):
        assert say("predict", tiny_run, "one.png", "--topk", 10, *options)[0] == 0
        with open("predictions.csv", newline="") as file:
            row = next(csv.DictReader(file))
        scores.append({row[f"class_{k}"]: float(row[f"score_{k}"]) for k in range(1, 11)})
    plain, calibrated = (torch.tensor([each[name] for name in scores[0]]) for each in scores)
    assert torch.allclose((plain.log() / temperature).softmax(0), calibrated, atol=1e-4)
    assert temperature != pytest.approx(1.0, abs=0.02)  # else the two would be the same
    for name, options in (("a", []), ("b", ["--calibrated"])):
        code, out, _ = say("export", tiny_run, "--out", f"{name}.safetensors", *options)
        assert code == 0
        assert ("all logits divided by the temperature" in out) == bool(options)
    before, after = (load_file(f"{name}.safetensors") for name in "ab")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if key.startswith(("fc.", "linear.", "classifier."))} != set()
    assert all(torch.allclose(before[key] / temperature, after[key]) for key in changed)
    bare = shutil.copytree(tiny_run, tmp_path / "bare")
    (bare / "result.json").write_text(
        json.dumps({k: v for k, v in json.loads((bare / "result.json").read_text()).items() if k != "failures"})
    )
    code, _, err = say("predict", bare, "one.png", "--calibrated")
    assert code == 2
    assert "has no temperature" in err


def test_export_is_the_plain_network(say, tiny_run, tmp_path):
    code, out, _ = say("export", tiny_run, "--out", tmp_path / "plain.safetensors")
    assert code == 0
    assert "strict=True" in out
    weights = load_file(tmp_path / "plain.safetensors")
    resnet20(num_classes=10, widths=(16, 32)).load_state_dict(weights, strict=True)
    trained = torch.load(tiny_run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[key], trained[f"net.{key}"]) for key in weights)


def test_predict_reads_images_and_folders(say, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for place in ("one.png", "folder/two.jpg", "folder/three.png"):
        Image.new("L" if "three" in place else "RGB", (20, 30), 77).save(tmp_path / place)
    (tmp_path / "folder/notes.txt").write_text("no image")
    code, out, err = say("predict", tiny_run, "one.png", "folder", "--topk", 3)
    assert code == 0, err
    assert "3 images classified" in out
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == ["one.png", "folder/three.png", "folder/two.jpg"]
    assert list(rows[0]) == ["path", "class_1", "score_1", "class_2", "score_2", "class_3", "score_3", "error"]
    for row in rows:
        scores = [float(row[f"score_{k}"]) for k in (1, 2, 3)]
        assert scores == sorted(scores, reverse=True)
        assert 0 < sum(scores) <= 1.00001
        assert row["class_1"] in {str(digit) for digit in range(10)}


@pytest.mark.parametrize(
    ("command", "name"), [("predict", "table.csv"), ("report", "page.html"), ("export", "net.pth")]
)
def test_out_replaces_what_the_same_command_wrote_and_nothing_else(command, name, say, tiny_run, tmp_path):
    Image.new("RGB", (20, 30), 77).save(tmp_path / "one.png")
    out, images = tmp_path / name, [tmp_path / "one.png"] if command == "predict" else []
    for mine in ("path,label\none.png,cat\n", "<!doctype html>\n<p>Years of work</p>\n"):
        out.write_text(mine)
        code, said, err = say(command, tiny_run, *images, "--out", out)
        assert (code, said, out.read_text()) == (2, "", mine)
        assert f"{out} was not written by this command and is not replaced: remove it, or choose another place." in err
    out.write_text("")
    for _ in range(2):
        assert say(command, tiny_run, *images, "--out", out)[0] == 0
        assert out.stat().st_size


def test_commands_that_read_a_run_work_beside_one_that_trains_in_it(say, tiny_run, tmp_path):
    Image.new("RGB", (20, 30), 77).save(tmp_path / "one.png")
    with locked([RunFolder(tiny_run)]):
        assert say("fit", "digits-lt", *TINY, "--out", tiny_run, "--overwrite")[0] == 2
        for words in (["test"], ["export"], ["report"], ["predict", tmp_path / "one.png"]):
            out = [] if words == ["test"] else ["--out", tmp_path / words[0]]
            code, _, err = say(words[0], tiny_run, *words[1:], *out)
            assert code == 0, err
    assert not (tiny_run / LOCK).exists()


def test_predict_shows_how_far_it_is_with_many_images(say, tiny_run, tmp_path):
    Image.new("L", (20, 30), 77).save(tmp_path / "0.png")
    for number in range(1, 130):
        (tmp_path / f"{number}.png").symlink_to(tmp_path / "0.png")
    code, out, err = say("predict", tiny_run, tmp_path, "--out", tmp_path / "seen.csv")
    assert code == 0
    assert "130 images classified" in out
    told = [int(percent) for percent in re.findall(r"(\d+)% .*predict", err)]
    assert told == sorted(told)
    assert 3 <= len(told) <= 11
    assert "%" not in say("predict", tiny_run, tmp_path / "0.png", "--out", tmp_path / "one.csv")[2]


def test_predict_takes_photos_as_viewers_show_them(say, tiny_run, tmp_path):
    upright = Image.new("L", (24, 24))
    upright.paste(255, (4, 2, 8, 20))  # looks different when it lies
    upright.save(tmp_path / "upright.png")
    note = Image.Exif()
    note[ExifTags.Base.Orientation] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "phone.png", exif=note)
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "lying.png")
    assert say("predict", tiny_run, tmp_path, "--out", tmp_path / "seen.csv")[0] == 0
    lying, phone, stands = (line.split(",")[1:] for line in (tmp_path / "seen.csv").read_text().splitlines()[1:])
    assert phone == stands != lying


def test_data_describes_a_recipe(say):
    code, out, _ = say("data", "digits-lt", "--data.imbalance", 10)
    assert code == 0
    assert "10 classes" in out
    assert "imbalance 10" in out
    assert "many (> 100)" in out
    assert "many (> 100)" not in say("data", "vit-digits")[1]  # no tail


def test_data_tells_what_is_special_about_these_data(say):
    code, out, err = say("data", "digits-domains")
    assert code == 0, err
    assert re.search(r"^  trained on 0-degrees \(\d+\), .* images of these are held out$", out, re.MULTILINE)
    assert re.search(r"^  tested on 75-degrees \(296\)$", out, re.MULTILINE)


def test_only_warnings_of_this_package_are_shown_one_line_each():
    program = """
import logging, warnings
from batchformer.cli import quiet_libraries
with quiet_libraries():
    warnings.warn("of a library", FutureWarning)
    logging.getLogger("library").warning("a tip")
    warnings.warn_explicit("first line\\nsecond line", UserWarning, "x.py", 1, module="batchformer.data")
warnings.warn("of somebody", FutureWarning)
logging.getLogger("library").warning("another tip")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours, others = done.stderr.splitlines()[:1], done.stderr.splitlines()[1:]
    assert ours == ["batchformer: warning: first line second line"]
    assert len(others) == 2
    assert "FutureWarning: of somebody" in others[0]
    assert others[1] == "another tip"


@pytest.mark.parametrize("command", ["fit", "compare", "test", "predict", "export", "report", "recipes", "data"])
def test_every_command_has_help(say, command):
    code, out, _ = say(command, "--help")
    assert code == 0
    assert f"batchformer {command}" in out


def test_recipes_lists_every_recipe_once_under_its_group(say):
    from batchformer.recipes import recipe_groups, recipe_names

    listed = [name for names in recipe_groups().values() for name in names]
    assert sorted(listed) == sorted(recipe_names())
    lines = say("recipes")[1].splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == listed
    assert [line[:-1] for line in lines if line.endswith(":")] == list(recipe_groups())


def test_recipes_lists_a_folder_of_ones_own(say, tmp_path):
    (tmp_path / "mine.yaml").write_text("about: {title: Longer, group: My own}\nextends: vit-digits\n")
    (tmp_path / "other.yaml").write_text("# Of one line.\nextends: digits-lt\n")
    code, out, _ = say("recipes", tmp_path)
    assert code == 0
    assert out == "Start here, nothing to download:\n  other  Of one line.\n\nMy own:\n  mine   Longer\n"
    (tmp_path / "empty").mkdir()
    assert "There is no recipe in" in say("recipes", tmp_path / "empty")[2]


def test_recipes_prints_one_as_it_is(say):
    from batchformer.recipes import recipe_text

    assert say("recipes", "folder-lt")[1] == recipe_text("folder-lt")
