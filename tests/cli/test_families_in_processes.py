"""Every family in two processes, under DDP and with everything sharded (FSDP2), and what launches such runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchformer.data.sets import write_miniature
from batchformer.recipes import about

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILIES = {  # a recipe that needs no download, or a miniature of its data, and what makes it another family
    "long-tail": ("digits-lt", {}),
    "ride": ("digits-lt", {"model.algorithm": "ride"}),
    "paco": ("digits-lt", {"model.algorithm": "paco", "model.paco.momentum": "0.5"}),  # seen after two steps
    "classification": ("vit-digits", {"model.ema": "0.5"}),
    "domains": ("digits-domains", {"model.freeze_batch_norm": "false"}),
    "adaptation": ("mnist-usps", {}),
    "compositional": ("digits-states", {}),
    "compositional-open": ("digits-states", {"model.pairs.name": "compcos", "model.pairs.world": "open"}),
    "moco": ("moco-digits", {"model.contrast.momentum": "0.5"}),
    "moco-v2": (
        "moco-digits",
        {
            "model.contrast.version": "v2",
            "model.contrast.queue": "256",
            "model.contrast.momentum": "0.5",
            "model.optimizer.name": "lars",
        },
    ),
    "probe": ("linear-probe", {}),
    "mae": ("mae-digits", {}),
    "hands": ("hands-tiny", {}),
    "detection": ("coco128-detr", {}),
    "panoptic": ("coco128-panoptic-boxes", {}),
    "masks": ("coco128-panoptic", {"model.train": "joint"}),
    "regions": ("voc-faster-rcnn-r18", {"trainer.max_steps": "2", "trainer.sync_batchnorm": "false"}),
    "unseen-classes": ("digits-gzsl", {}),
}
SHARDED = tuple(family for family in FAMILIES if family != "unseen-classes")
TWO_STEPS = {"trainer.max_epochs": "1", "trainer.limit_train_batches": "2", "trainer.accelerator": "cpu"}


def fit(family: str, out: Path, data: Path, **more: str) -> list[str]:
    recipe, changed = FAMILIES[family]
    described = about(recipe)
    given = {**TWO_STEPS, **dict(described.small_overrides()), **changed, **more}
    if described.needs is not None:
        given["data-root"] = str(data / described.needs)
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    return ["fit", recipe, *words, "--out", str(out)]


def train_all(settings: dict[str, list[str]], folder: Path, **variables: str) -> None:
    """Train each family, one after the other, by one pair of processes."""
    (folder / "settings.json").write_text(json.dumps(settings))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = Path(__file__).with_name("families_worker.py")
    run([*launch, str(worker), str(folder / "settings.json"), str(folder)], folder, **variables)


def run(command: list[str], folder: Path, **variables: str) -> str:
    """The output of a command in `folder` and without the variables of a process group around it."""
    quiet = {name: value for name, value in os.environ.items() if not name.endswith("RANK")}
    source = os.pathsep.join(filter(None, [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**quiet, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """strategy -> folder of the runs of all families, trained by one pair of processes."""
    data, made = tmp_path_factory.mktemp("data"), {}
    for needs in {about(recipe).needs for recipe, _ in FAMILIES.values()} - {None}:
        write_miniature(needs, data / needs)

    def trained(strategy: str) -> Path:
        if strategy not in made:
            folder = made[strategy] = tmp_path_factory.mktemp(strategy)
            more = {"trainer.devices": "2", "trainer.strategy": strategy}
            chosen = FAMILIES if strategy == "ddp" else SHARDED
            train_all({family: fit(family, folder / family, data, **more) for family in chosen}, folder)
        return made[strategy]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strategy"), [*((name, "ddp") for name in FAMILIES), *((name, "fsdp") for name in SHARDED)]
)
def test_a_family_trains_in_two_processes_and_leaves_one_whole_run(runs, family, strategy):
    folder = runs(strategy)
    ended = [json.loads((folder / f"{family}-{rank}.json").read_text()) for rank in range(2)]
    assert [process["code"] for process in ended] == [0, 0]
    held = sum(process["here"] for process in ended)
    assert held == ended[0]["all"] * (1 if strategy == "fsdp" else 2)  # every number once, or in both processes
    if strategy == "ddp":
        assert ended[0]["sum"] == ended[1]["sum"]  # the same weights in both
    result = json.loads((folder / family / "result.json").read_text())
    assert result["steps"] in (1, 2)  # the smallest data give two processes one batch each
    assert not (folder / family / "run.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARDED)
def test_sharded_training_ends_with_the_weights_of_ddp(runs, family):
    folders = [runs(strategy) / family for strategy in ("ddp", "fsdp")]
    ddp, fsdp = (saved(folder) for folder in folders)
    assert list(ddp["state_dict"]) == list(fsdp["state_dict"])
    for key, value in ddp["state_dict"].items():
        torch.testing.assert_close(fsdp["state_dict"][key], value, rtol=1e-3, atol=1e-4, msg=key)
    average = [checkpoint["task"].get("swad") for checkpoint in (fsdp, ddp)]
    torch.testing.assert_close(*average, rtol=1e-3, atol=1e-4)
    measured = [json.loads((folder / "result.json").read_text())["metrics"] for folder in folders]
    assert measured[1] == pytest.approx(measured[0], abs=0.01)


def saved(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.slow
def test_sharded_runs_that_were_killed_go_on_to_the_same_bits(tmp_path):
    """With sums of weights (SWAD), and with a momentum encoder and a queue; killed inside the second epoch."""
    more = {"trainer.devices": "2", "trainer.strategy": "fsdp", "trainer.max_epochs": "2",
            "trainer.limit_train_batches": "3", "run.checkpoint_every_steps": "1",
            "run.checkpoint_every_epochs": "1"}  # fmt: skip
    given = {"domains": {**more, "data.steps_per_epoch": "3"}, "moco-v2": more}

    def commands(name: str, *words: str) -> dict[str, list[str]]:
        return {
            f"{family}-{name}": [*fit(family, tmp_path / f"{family}-{name}", tmp_path, **own), "--no-analysis", *words]
            for family, own in given.items()
        }

    for name, words in commands("killed").items():
        with pytest.raises(AssertionError, match="SIGKILL"):
            train_all({name: words}, tmp_path, DIE_AT_STEP="4")
        assert saved(tmp_path / name)["global_step"] == 4
    train_all({**commands("killed", "--resume"), **commands("unbroken")}, tmp_path)
    for family in given:
        resumed, unbroken = (saved(tmp_path / f"{family}-{name}") for name in ("killed", "unbroken"))
        assert resumed["global_step"] == unbroken["global_step"] == 6
        for part in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(resumed[part], unbroken[part], rtol=0, atol=0)
        torch.testing.assert_close(resumed["task"].get("swad"), unbroken["task"].get("swad"), rtol=0, atol=0)


@pytest.mark.slow
def test_what_cannot_train_with_its_parameters_divided_says_so(tmp_path):
    words = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "fsdp", "--out", "run"]
    command = [sys.executable, "-m", "batchformer.cli", "fit", "digits-gzsl", *words]
    with pytest.raises(AssertionError, match="GeneralizedZeroShot does not train with its parameters divided"):
        run(command, tmp_path)
    assert not (tmp_path / "run").exists()


# SLURM starts the tasks of a job and tells each its number: what Lightning reads of that, for two tasks on one node.
SRUN = """#!/usr/bin/env bash
export SLURM_NTASKS=2 SLURM_NODELIST=localhost SLURM_NODEID=0 SLURM_JOB_ID=12345 SLURM_JOB_NAME=batchformer
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $other
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_the_launch_examples_train_in_two_processes(launcher, tmp_path):
    words = ["fit", "digits-lt", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--out", "run"]
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", SRUN), ("python", f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    if launcher == "slurm":
        variables |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    printed = run(
        ["bash", str(EXAMPLES / f"launch_{launcher}.sh"), *words, "--data.batch_size", "32"], tmp_path, **variables
    )
    assert printed.count("after the last epoch") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 7  # 490 images in batches of 32 for each of two processes
