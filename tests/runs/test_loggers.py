"""Loggers by name, offline: each gets the numbers of the run, and metrics.csv is always there."""

import json
import sys
from pathlib import Path

import pytest

from batchformer.cli import main
from batchformer.errors import UserError
from batchformer.runs.loggers import make_loggers

TINY = ["--trainer.limit_train_batches", "1", "--data.batch_size", "16", "--model.backbone_args.widths", "[4,4]",
        "--no-analysis", "--trainer.check_val_every_n_epoch", "1"]  # fmt: skip


def fit(out, epochs, *words):
    return main(["fit", "digits-lt", *TINY, "--trainer.max_epochs", str(epochs), "--out", str(out), *words])


def accuracy(run):
    return json.loads((run / "result.json").read_text())["metrics"]["accuracy"]


def test_csv_alone_and_tensorboard_by_default(tmp_path):
    assert fit(tmp_path / "csv", 1, "--logger", "csv") == 0
    assert fit(tmp_path / "default", 1) == 0
    assert all((tmp_path / run / "metrics.csv").is_file() for run in ("csv", "default"))
    assert not (tmp_path / "csv/tensorboard").exists()
    assert list((tmp_path / "default/tensorboard").glob("events*"))


def test_mlflow_gets_the_numbers_and_a_longer_run_goes_on_under_its_name(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    assert fit(tmp_path / "run", 1, "--logger", "mlflow", "--logger", "tensorboard") == 0
    assert list((tmp_path / "run/tensorboard").glob("events*"))
    assert fit(tmp_path / "run", 2, "--logger", "mlflow", "--resume") == 0
    (history,) = (tmp_path / "store").glob("*/*/metrics/val/accuracy")
    values = [float(line.split()[1]) for line in history.read_text().splitlines()]
    assert len(values) == 2
    assert values[-1] == pytest.approx(accuracy(tmp_path / "run"))


def test_wandb_offline_gets_the_numbers_of_each_run_of_a_comparison(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = ["--seeds", "1", "--logger", "wandb", "--trainer.max_epochs", "1", "--out", str(tmp_path / "both")]
    assert main(["compare", "digits-lt", *TINY, *words]) == 0
    assert wandb.run is None
    for variant in ("baseline", "batchformer"):
        run = tmp_path / f"both/{variant}-seed0"
        (written,) = run.glob("wandb/offline-run-*/*.wandb")
        content = written.read_bytes()
        assert b"val/accuracy" in content
        assert f"{variant}-seed0".encode() in content
        assert str(accuracy(run))[:6].encode() in content


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("batchformer.runs.loggers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'needs wandb; install it with: pip install "batchformer\[wandb\]"'):
        make_loggers(["wandb"], Path("run"))


def test_an_unknown_logger_and_a_store_that_cannot_be_used_are_one_sentence(tmp_path, monkeypatch, capsys):
    assert fit(tmp_path / "run", 1, "--logger", "tensorbord") == 2
    assert "--logger tensorbord: expected one of csv, tensorboard, wandb, mlflow." in capsys.readouterr().err
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://host")
    assert fit(tmp_path / "run", 1, "--logger", "mlflow") == 2
    error = capsys.readouterr().err
    assert "nowhere://host (MLFLOW_TRACKING_URI) cannot be used" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
