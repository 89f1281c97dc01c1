"""Training in two processes from the command line, over the batch of both: one run folder, written once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchformer.cli import main

from ..processes import free_ports, run_in_processes


def test_two_cpu_processes_share_an_epoch_and_write_one_result(tmp_path):
    # 490 training images in batches of 32 for each of two processes are 7 steps.
    settings = {"devices": "2", "accelerator": "cpu", "strategy": "ddp", "max_epochs": "1"}
    words = [word for key, value in settings.items() for word in (f"--trainer.{key}", value)]
    command = ["fit", "vit-digits", *words, "--data.batch_size", "32", "--out", "run"]
    command += ["--data.imbalance", "20", "--model.backbone_args.depth", "2", "--model.batchformer.blocks", "[0,1]"]
    command += ["--model.batchformer.scope", "global", "--model.schedule.warmup_epochs", "0"]
    done = _done(command, tmp_path)
    assert done.stdout.count("after the last epoch") == 1
    assert done.stderr.count("trainer.devices 2 starts 2 processes on the CPU") == 1
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["epochs"]) == (7, 1)
    assert len(result["stream_health"]["points"]) == 2  # measured by one process, which must not wait for the other
    columns = result["failures"]["columns"]  # of all images, not of the half that the process evaluates
    assert sum(columns["images"]) == result["data"]["test_images"]
    assert columns["recall"] == pytest.approx(result["per_class"], abs=0.01)
    assert [entry["epoch"] for entry in result["history"]] == [0]
    assert len(list((tmp_path / "run/tensorboard").glob("events*"))) == 1
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "run/run.lock").exists()  # held by one process for both

    (tmp_path / "port").write_text(str(free_ports(1)[0]))
    run_in_processes(_test_the_run, 2, tmp_path)
    printed = "".join((tmp_path / f"test-{rank}.txt").read_text() for rank in range(2))
    assert printed.count("result.json has exactly these numbers") == 1


def _test_the_run(rank, folder):
    """`batchformer test` in one of two processes that were told what torchrun tells: how many start is seen above."""
    os.chdir(folder)
    port = Path("port").read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="test")  # fmt: skip
    with open(f"test-{rank}.txt", "w") as sys.stdout:
        assert main(["test", "run"]) == 0


@pytest.mark.slow
def test_the_queue_of_paco_is_filled_by_both_processes(tmp_path):
    words = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "1", "--out", "run"]
    _done(["fit", "digits-lt", "--model.algorithm", "paco", "--data.batch_size", "32", *words], tmp_path)
    state = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert state["algorithm.queue.position"] == 7 * 64
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["crt", "tau_norm", "balms"])
def test_two_processes_train_a_classifier_on_cached_features_as_one_does(tmp_path, algorithm):
    """The same order, the same mean gradient; what BALMS draws for its gradient is another in each process."""
    base = [
        "fit",
        "digits-lt",
        "--method",
        "baseline",
        "--model.schedule.warmup_epochs",
        "0",
        "--trainer.accelerator",
        "cpu",
    ]
    _done([*base, "--trainer.max_epochs", "1", "--no-analysis", "--out", "trained"], tmp_path)
    stage = [*base, "--model.algorithm", algorithm, "--model.decoupled.features", "cached", "--init-from", "trained",
             "--model.balms.frozen", "true", "--model.balms.meta_batch", "32", "--trainer.max_epochs", "2"]  # fmt: skip
    _done([*stage, "--data.batch_size", "64", "--out", "one"], tmp_path)
    two = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "32", "--out", "two"]
    _done([*stage, *two], tmp_path)
    one, two = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("one", "two")
    )
    close = {"rtol": 1e-3, "atol": 1e-4} if algorithm != "balms" else {"rtol": 0.5, "atol": 0.2}
    for key in one:
        if not key.startswith("metrics."):
            torch.testing.assert_close(two[key].double(), one[key].double(), **close, msg=key)


def _done(command, folder):
    quiet = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "batchformer.cli", *command],
        env={**quiet, "OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done
