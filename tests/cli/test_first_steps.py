"""What somebody new meets: help, the commands that are proposed next, runs that were stopped, damaged results."""

import json
import os
import shlex
import shutil

import pytest
from PIL import Image

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.training import shell_arguments
from batchformer.tasks import LongTailed
from tests.cli.conftest import TINY


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def copy_of_run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "a copy")


def test_help_of_a_command_is_the_same_both_ways(say):
    assert say("help", "export") == say("export", "--help")
    assert "Did you mean export?" in say("help", "exprt")[2]


def test_the_commands_proposed_next_can_be_pasted(say, copy_of_run):
    code, out, _ = say("fit", "digits-lt", *TINY, "--out", "a copy", "--resume")
    assert code == 0
    proposed = [part.split("batchformer ", 1)[1] for part in out.split("Next: ")[1].split("   |   ")]
    assert [shlex.split(command)[1] for command in proposed] == ["a copy"] * 3


def test_the_comparison_proposed_next_is_the_same_one():
    options = [Option("name"), Option("data-root"), Option("seeds", "many"), Option("out")]
    words = ["mine.yaml", "--data-root", "my photos", "--seeds", "2", "--out", "x", "--trainer.max_epochs", "3"]
    again = shell_arguments(read_arguments(words, options, recipe_keys=True), "name", "data-root", "no-analysis")
    assert again == "mine.yaml --data-root 'my photos' --trainer.max_epochs 3"


def test_a_finished_run_is_not_shown_for_other_settings(say, copy_of_run):
    code, out, err = say("fit", "digits-lt", *TINY, "--data.batch_size", "5", "--out", "a copy", "--resume")
    assert (code, out) == (2, "")
    assert "batch_size 32, now it is 5" in err


@pytest.mark.parametrize("content", ["[]", '{"recipe": "x"}', "{"])
def test_a_damaged_result_is_one_sentence(say, copy_of_run, content):
    (copy_of_run / "result.json").write_text(content)
    for command in (["test", "a copy"], ["fit", "digits-lt", *TINY, "--out", "a copy", "--resume"]):
        code, out, err = say(*command)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert "result.json is damaged" in err
        assert "--overwrite" in err


def test_weights_of_a_stopped_run_come_with_a_note(say, copy_of_run, tiny_run, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    note = "Note: a copy is not finished (epoch 2 of 2)"
    assert note not in say("predict", tiny_run, "x.png")[1]
    (copy_of_run / "result.json").unlink()
    for command in (["predict", "a copy", "x.png"], ["export", "a copy"]):
        code, out, _ = say(*command)
        assert code == 0
        assert out.startswith(note)


def test_names_that_are_not_utf_8_are_written_as_they_are(say, tiny_run, tmp_path):
    Image.new("RGB", (8, 8)).save(os.fsdecode(b"caf\xe9.png"))
    code, out, err = say("predict", tiny_run, ".")
    assert code == 0, err
    assert "caf\\udce9.png" in out
    assert b"caf\xe9.png" in (tmp_path / "predictions.csv").read_bytes()


def test_predict_passes_hidden_files_over_and_finds_linked_folders(say, tiny_run, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "far/a.png")
    (tmp_path / "photos/._a.png").write_bytes(b"of macOS")
    os.symlink(tmp_path / "far", tmp_path / "photos/linked")
    code, out, err = say("predict", tiny_run, "photos")
    assert code == 0, err
    assert "photos/linked/a.png: " in out
    assert "1 image classified" in out


@pytest.mark.parametrize(("out", "reason"), [("folder", "it is a folder"), ("file/x.csv", "a part of file is a file")])
def test_predict_says_before_it_starts_that_it_cannot_write(say, tiny_run, tmp_path, monkeypatch, out, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    monkeypatch.setattr(LongTailed, "predict_step", lambda *_: pytest.fail("classified first"))
    code, _, err = say("predict", tiny_run, "x.png", "--out", out)
    assert code == 2
    assert f"{out} could not be written: {reason}; choose another place." in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compare", "digits-lt", "--method", "baseline"], "compare trains both methods: leave out --method"),
        (["fit", "digits-lt", "--trainer.accelerator", "cpu", "--trainer.devices", "9999"], "trainer.devices 9999"),
        (["data", "miniature", "folder", "file/x"], "file/x cannot be made (Not a directory): name another folder."),
    ],
)
def test_one_sentence(say, tmp_path, arguments, expected):
    (tmp_path / "file").write_text("")
    code, out, err = say(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert not (tmp_path / "runs").exists()


def test_results_are_checked_for_what_the_commands_need(tiny_run):
    from batchformer.runs.folder import _IN_A_RESULT

    assert set(_IN_A_RESULT) <= set(json.loads((tiny_run / "result.json").read_text()))


@pytest.fixture
def photos(say, tmp_path):
    assert say("data", "miniature", "folder", "photos")[0] == 0
    return ["--data-root", "photos", "--data.workers", "0", "--data.image_size", "32", "--trainer.precision", "32-true"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model.backbone", "vit_tiny_patch16_224"], "add --model.backbone_args.img_size 32, or set data.image_size"),
        (["--data.batch_size", "1"], "raise data.batch_size to 2 or more"),
        (["--model.backbone_args.widht", "2"], "backbone resnet18 does not take widht"),
        (["--model.backbone", "resnet20", "--model.backbone_args.widht", "2"], "backbone resnet20 does not take widht"),
    ],
)
def test_a_network_that_does_not_fit_is_one_sentence_and_leaves_nothing(say, photos, tmp_path, options, expected):
    code, out, err = say(
        "fit", "folder-lt", "--init-from", "scratch", *photos, "--trainer.enable_progress_bar", "false", *options
    )
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert expected in err
    assert not (tmp_path / "runs/folder-lt/batchformer-seed0").exists()


def test_a_failure_nobody_thought_of_leaves_no_run_in_the_way(say, tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("something unheard of")

    monkeypatch.setattr("batchformer.tasks.long_tailed.task.LongTailed.training_step", fail)
    code, _, err = say("fit", "digits-lt", *TINY, "--trainer.enable_progress_bar", "false", "--out", "run")
    assert code == 1
    assert "ZeroDivisionError: something unheard of" in err
    assert not (tmp_path / "run").exists()


def test_a_failure_later_leaves_what_there_is_to_look_at(say, tmp_path, monkeypatch):
    step = LongTailed.training_step

    def fail(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise ZeroDivisionError("something unheard of")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LongTailed, "training_step", fail)
    longer = [
        "--trainer.max_epochs",
        "3",
        "--run.checkpoint_every_epochs",
        "3",
        "--trainer.enable_progress_bar",
        "false",
    ]
    code, _, err = say("fit", "digits-lt", *TINY, *longer, "--out", "run")
    assert (code, "something unheard of" in err) == (1, True)
    assert (tmp_path / "run/metrics.csv").is_file()


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_folder_that_is_no_run_is_left_as_it_is(say, tmp_path, option):
    files = [tmp_path / "pictures" / name for name in ("me.png", "logo.svg", "checkpoints/mine.ckpt", "tensorboard/x")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    code, _, err = say("fit", "digits-lt", *TINY, option, "--out", "pictures")
    assert code == 2
    assert "choose another --out" in err
    assert sorted(path for path in (tmp_path / "pictures").rglob("*") if path.is_file()) == sorted(files)


def test_a_split_without_classes_has_no_number(say, photos):
    quick = [
        "--trainer.max_epochs",
        "1",
        "--trainer.limit_train_batches",
        "1",
        "--data.batch_size",
        "8",
        "--no-analysis",
    ]
    shutil.rmtree("photos/train/class_0")
    shutil.rmtree("photos/val/class_0")
    code, fitted, err = say("fit", "folder-lt", "--init-from", "scratch", *photos, *quick, "--out", "run")
    assert code == 0, err
    code, tested, err = say("test", "run")
    assert code == 0, err
    for out in (fitted, tested):
        assert "Many (> 100 images)       – %   0 classes" in out


def test_an_average_is_not_promised_where_none_can_be_kept(say, tiny_run):
    assert "image classification (the vit-* and deit-* recipes) can keep one" in say("export", tiny_run, "--ema")[2]
