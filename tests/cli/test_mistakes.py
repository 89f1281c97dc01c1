"""Bad input: one sentence on stderr, exit code 2, no traceback, nothing written."""

import os
import resource
import signal
import warnings

import pytest
import torch
import yaml

from batchformer.cli import quiet_libraries

OUT = ["--out", "run"]
DATA = "data: {class_path: batchformer.data.DigitsLT}\n"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _complaint(answer):
    code, out, err = answer
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert not os.path.exists("run")
    return err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fitt"], "Did you mean fit?"),
        (["fit"], "needs a recipe"),
        (["recipes", "digits-lt", "digits-domains"], "recipes takes one name, or none to list them all"),
        (["completion", "fish"], "completion needs the name of a shell: bash or zsh"),
        (["completion", "bash", "zsh"], "completion needs the name of a shell: bash or zsh"),
        (["fit", "digits-tl"], "Did you mean digits-lt?"),
        (["fit", "none.yaml"], "no recipe file none.yaml"),
        (["fit", "digits-lt", "extra"], "Unexpected argument extra"),
        (["fit", "digits-lt", "--sed", "3"], "Did you mean --seed?"),
        (["fit", "digits-lt", "--seed", "x"], "--seed x: expected a whole number"),
        (["fit", "digits-lt", "--method", "best"], "expected baseline or batchformer"),
        (["fit", "digits-lt", "--resume", "--overwrite"], "give only one of them"),
        (["fit", "digits-lt", "--max_epochs", "3"], "Unknown option --max_epochs. Did you mean --epochs?"),
        (["fit", "digits-lt", "--device", "tpux"], "--device tpux: expected cpu, cuda, cuda:1"),
        (["fit", "digits-lt", "--early-stop", "0"], "--early-stop 0: expected 1 or more"),
        (["fit", "voc-faster-rcnn-r18", "--epochs", "3"], "--epochs: this recipe ends after 1500 steps"),
        (["fit", "digits-lt", "--run.best", "true"], "add --data.holdout 0.1"),
        (["fit", "digits-lt", "--best"], "these data hold none out"),
        (["fit", "digits-lt", "--skip-bad"], "these data are not read from image files: leave it out"),
        (["tune", "digits-lt", "--find", "all"], "--find all: expected lr, batch-size, both"),
        (["tune", "digits-domains", "--variant", "nothing"], "digits-domains has no variant nothing"),
        (["tune", "digits-lt", "--resume"], "Unknown option --resume"),
        (["probe", "nowhere", "--best"], "Unknown option --best"),
        (["data", "digits-lt", "--out", "here"], "--out is the folder that --check writes to"),
        (["data", "digits-lt", "--check"], "are not image files"),
        (["data", "--check"], "These options need a recipe"),
        (["compare", "digits-lt", "--batches", "3"], "Did you mean --batch-size?"),
        (["fit", "digits-lt", "--trainer.max_epochs", "0"], "trainer.max_epochs 0 trains nothing"),
        (["compare", "digits-lt", "--trainer.max_steps", "0"], "trainer.max_steps 0 trains nothing"),
        (["fit", "digits-lt", "--trainer.check_val_every_n_epoch", "0"], "trainer.check_val_every_n_epoch 0: give 1"),
        (["fit", "digits-lt", "--trainer.limit_train_batches", "0.001"], "increase the `limit_train_batches`"),
        (["fit", "digits-lt", "--run.checkpoint_every_steps", "0"], "run.checkpoint_every_steps 0: give 1 or more"),
        (["fit", "digits-lt", "--run.threads", "0"], "run.threads 0: give 1 or more"),
        (["fit", "digits-lt", "--trainer.max_epochs", "-1"], "needs an end"),
        (["fit", "digits-lt", "--trainer.max_epochs", "-5"], "Lightning refuses the trainer settings"),
        (["fit", "digits-lt", "--trainer.accelerator", "tpu"], "trainer.accelerator tpu: this machine has none"),
        (["fit", "digits-lt", "--trainer.strategy", "ddp_spawn", "--trainer.devices", "2"], "use ddp"),
        (["fit", "digits-lt", "--trainer.sync_batchnorm", "true", "--trainer.devices", "2"], "leave it out on the CPU"),
        (["fit", "digits-lt", "--trainer.max_epoch", "3"], "Did you mean trainer.max_epochs?"),
        (["fit", "digits-lt", "--model.batchformer.head", "3"], "Did you mean model.batchformer.heads?"),
        (["fit", "digits-lt", "--data.imbalanc", "3"], "Did you mean data.init_args.imbalance?"),
        (["fit", "digits-lt", "--trainer.max_epochs", "many"], "trainer.max_epochs: expected a whole number or null"),
        (["fit", "digits-lt", "--data.imbalance", "big"], "data.init_args.imbalance: expected a number, got big"),
        (["fit", "digits-lt", "--model.loss.name", "mse"], "got mse"),
        (["fit", "digits-lt", "--model.num_classes", "5"], "model.num_classes: how many classes there are is read"),
        (["fit", "digits-lt", "--model.seed", "1.5"], "model.seed: expected a whole number, got 1.5"),
        (["fit", "digits-lt", "--data.class_path", "batchformer.data.Digits"], "batchformer.data.Digits"),
        (["fit", "digits-lt", "--data.class_path", "batchformer.data.RenderedHands"],
         "data.class_path batchformer.data.RenderedHands: this task takes ClassificationData"),
        (["fit", "digits-lt", "--model.backbone", "resnet2000"], "resnet2000"),
        (["fit", "vit-digits", "--model.label_smoothing", "1.5"], "model.label_smoothing=1.5 must be 0 or more"),
        (["fit", "vit-digits", "--model.schedule.min_lr", "-1"], "model.schedule.min_lr=-1.0 must be 0 or more"),
        (["fit", "vit-digits", "--model.optimizer.betas", "[0.9, 1]"], "model.optimizer.betas=[0.9, 1.0] must be two"),
        (["fit", "vit-digits", "--model.batchformer.layer_scale", "-1"], "layer_scale=-1.0 must be 0 or more"),
        (["fit", "cifar100-lt-100"], "cifar-100-python"),
        (["fit", "folder-lt", "--init-from", "scratch", "--data-root", "nowhere"], "nowhere"),
        (["compare", "digits-lt", "--seeds", "x"], "--seeds x"),
        (["compare", "digits-lt", "--model.seed", "3"], "leave out --model.seed"),
        (["compare", "digits-lt", "--data.seed", "3"], "leave out --data.seed"),
        (["compare", "digits-lt", "--seed_everything", "3"], "give --seeds instead"),
        (["test", "nowhere"], "no run folder nowhere"),
        (["export", "nowhere"], "no run folder nowhere"),
        (["predict", "nowhere"], "needs a run folder and images"),
        (["report"], "needs run folders"),
        (["report", "nowhere"], "nowhere"),
        (["data", "miniature", "mnist", "x"], "no miniature of 'mnist'"),
    ],
)  # fmt: skip
def test_one_sentence(say, arguments, expected):
    out = OUT if arguments[0] in ("fit", "compare") else []
    assert expected in _complaint(say(*arguments, *out))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DATA + "trainer: {max_epoch: 3}", "Did you mean trainer.max_epochs?"),
        (DATA + "model: {batchformer: {head: 3}}", "Did you mean model.batchformer.heads?"),
        ("modl: {}", "Unknown key modl. Did you mean model?"),
        (DATA + "trainer: {max_epochs: many}", "trainer.max_epochs: expected a whole number or null, got many"),
        ("trainer: [1", "not valid YAML"),
        ("just words", "is not a recipe"),
        ("trainer: {max_epochs: 1}", "has no data: section"),
    ],
)
def test_mistakes_in_a_recipe_file(say, tmp_path, text, expected):
    (tmp_path / "mine.yaml").write_text(text)
    assert expected in _complaint(say("fit", "mine.yaml", *OUT))


def test_a_run_folder_that_exists_is_refused_and_kept(say, tiny_run):
    before = (tiny_run / "result.json").read_bytes()
    code, _, err = say("fit", "digits-lt", "--out", tiny_run)
    assert (code, err.count("\n")) == (2, 1)
    assert "--resume" in err
    assert "--overwrite" in err
    assert (tiny_run / "result.json").read_bytes() == before


def test_resume_with_other_settings_names_the_first_that_differs(say, tmp_path):
    common = ["fit", "digits-lt", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--no-analysis"]
    common += ["--out", "other"]
    assert say(*common)[0] == 0
    (tmp_path / "other/result.json").unlink()
    code, _, err = say(*common, "--model.batchformer.heads", "8", "--resume")
    assert code == 2
    assert "model.batchformer.heads 4, now it is 8" in err
    # of a version that did not know these fields: it did what their defaults say
    file = tmp_path / "other/config.yaml"
    config = yaml.safe_load(file.read_text())
    for name in ("scope", "process_group", "backend", "memory"):
        del config["model"]["batchformer"][name]
    file.write_text(yaml.safe_dump(config))
    assert "scope local, now it is global" in say(*common, "--model.batchformer.scope", "global", "--resume")[2]
    assert say(*common, "--resume")[0] == 0


def test_missing_and_damaged_checkpoints_are_named(say, tiny_run, tmp_path):
    (tmp_path / "copy/checkpoints").mkdir(parents=True)
    (tmp_path / "copy/config.yaml").write_text((tiny_run / "config.yaml").read_text())
    assert "no checkpoint at" in _complaint(say("export", "copy"))
    (tmp_path / "copy/checkpoints/last.ckpt").write_bytes((tiny_run / "checkpoints/last.ckpt").read_bytes()[:5000])
    assert "damaged" in _complaint(say("test", "copy"))


def test_a_checkpoint_of_another_network_is_told_by_what_does_not_fit(say, tiny_run, tmp_path):
    (tmp_path / "copy/checkpoints").mkdir(parents=True)
    (tmp_path / "copy/checkpoints/last.ckpt").write_bytes((tiny_run / "checkpoints/last.ckpt").read_bytes())
    config = (tiny_run / "config.yaml").read_text()
    assert "resnet20" in config
    (tmp_path / "copy/config.yaml").write_text(config.replace("resnet20", "resnet32"))
    complaint = _complaint(say("export", "copy"))
    assert "last.ckpt does not fit copy/config.yaml (Missing key(s) in state_dict" in complaint
    assert len(complaint) < 250


def test_an_image_that_cannot_be_read_is_named_and_nothing_is_written(say, tiny_run, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert "broken.png" in _complaint(say("predict", tiny_run, "broken.png"))
    assert not (tmp_path / "predictions.csv").exists()


def test_a_class_without_images_is_named(say, tmp_path):
    assert say("data", "miniature", "folder", "own")[0] == 0
    for image in (tmp_path / "own/train/class_7").iterdir():
        image.unlink()
    assert "class_7" in _complaint(say("fit", "folder-lt", "--init-from", "scratch", "--data-root", "own", *OUT))


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(say, tmp_path):
    code, _, err = say(
        "fit", "digits-lt", "--trainer.max_epochs", "3", "--trainer.enable_progress_bar", "false", "--out", "hot",
        "--model.optimizer.lr", "1e20", "--model.schedule.warmup_epochs", "0", "--run.checkpoint_every_steps", "1",
    )  # fmt: skip
    assert (code, err.count("\n")) == (2, 1)
    assert "not finite" in err
    assert "model.optimizer.lr" in err
    assert "the checkpoint from before it is kept (hot/checkpoints/last.ckpt)" in err
    assert not (tmp_path / "hot/result.json").exists()

    saved = torch.load(tmp_path / "hot/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] >= 1


def test_a_loss_that_is_not_finite_promises_no_checkpoint_where_there_is_none(say, tmp_path):
    code, _, err = say(
        "fit", "digits-lt", "--trainer.max_epochs", "3", "--trainer.enable_progress_bar", "false", "--out", "hot",
        "--model.optimizer.lr", "1e20", "--model.schedule.warmup_epochs", "0",
    )  # fmt: skip
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no checkpoint from before it" in err
    assert "kept" not in err
    assert not list((tmp_path / "hot").rglob("*.ckpt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(say):
    complaint = _complaint(say("fit", "digits-lt", "--trainer.accelerator", "gpu", *OUT))
    assert "trainer.accelerator gpu: this machine has none" in complaint


def test_export_names_the_place_it_was_given(say, tiny_run, tmp_path):
    (tmp_path / "folder").mkdir()
    assert "folder could not be written: it is a folder" in _complaint(say("export", tiny_run, "--out", "folder"))
    (tmp_path / "file").write_text("")
    complaint = _complaint(say("export", tiny_run, "--out", "file/model.safetensors"))
    assert "file/model.safetensors could not be written" in complaint
    assert "partial" not in complaint


def test_a_wrong_call_with_overwrite_keeps_the_old_comparison(say, tmp_path):
    old = tmp_path / "cmp/baseline-seed0/config.yaml"
    old.parent.mkdir(parents=True)
    old.write_text("a: 1\n")
    (tmp_path / "cmp/compare.json").write_text("{}")
    _complaint(say("compare", "digits-lt", "--trainer.max_epochs", "0", "--overwrite", "--out", "cmp"))
    assert old.exists()
    assert (tmp_path / "cmp/compare.json").exists()


def test_a_full_disk_leaves_nothing_half_written_and_the_run_can_go_on(say, tmp_path):
    arguments = ["fit", "digits-lt", "--trainer.max_epochs", "2", "--trainer.limit_train_batches", "2", "--no-analysis"]
    arguments += ["--out", "full"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writes fail as they do on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        code, _, err = say(*arguments, "--trainer.enable_progress_bar", "false")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert code != 0
    assert err.count("\n") == 1
    assert "the disk is full" in err
    assert not list((tmp_path / "full").rglob("*.partial"))
    assert not list((tmp_path / "full").rglob("*.ckpt"))
    assert not (tmp_path / "full/result.json").exists()
    assert say(*arguments, "--resume")[0] == 0


def test_without_the_train_extra_the_way_to_install_it_is_said(say, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning", "jsonargparse")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("batchformer.cli.recipe_cli", "batchformer.runs.progress"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    assert 'pip install "batchformer[train]"' in _complaint(say("fit", "digits-lt", *OUT))


def test_debug_shows_the_traceback():
    from batchformer.cli import main
    from batchformer.errors import UserError

    with pytest.raises(UserError):
        main(["fit", "digits-tl", "--debug"])


def test_warnings_are_one_line_without_code_and_python_has_its_own_back():
    before = warnings.formatwarning
    with quiet_libraries():
        shown = warnings.formatwarning("the related stream\nstays at chance", UserWarning, "stream_guard.py", 122)
    assert shown == "batchformer: warning: the related stream stays at chance\n"
    assert warnings.formatwarning is before
