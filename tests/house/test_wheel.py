"""The wheel holds what it must, installs by itself, and works there, with the train extra and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from .pages import REPOSITORY

# What `pip install batchformer` alone does not bring. A finder that refuses them is an environment without them.
WITHOUT_EXTRA = """
import sys

class Refuse:
    names = {"lightning", "pytorch_lightning", "timm", "torchvision", "jsonargparse", "torchmetrics", "tensorboard",
             "sklearn", "safetensors", "PIL", "yaml", "docstring_parser"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""
ATTACH = """
import torch
from torch import nn
import batchformer as bf

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
keys = list(model.state_dict())
attachment = bf.attach(model)
loss = bf.TwoStreamLoss(nn.CrossEntropyLoss())(model(torch.randn(5, 6)), torch.arange(5) % 3)
loss.backward()
assert all(p.grad is not None for p in model.parameters())
assert attachment.detach() is model and list(model.state_dict()) == keys
print(bf.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of an sdist, and of the wheel that was built from it, as a release is."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "--target", str(target), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def run_there(installed, tmp_path):
    """Run Python in an empty folder, the installed wheel before everything else."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


def test_wheel_holds_package_recipes_style_types_and_licence(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = REPOSITORY / "src"
    ours = {
        path.relative_to(source).as_posix()
        for path in (source / "batchformer").rglob("*")
        if path.is_file() and path.suffix not in (".pyc",)
    }
    assert ours <= inside
    assert {"batchformer/py.typed", "batchformer/report/page.css", "batchformer/recipes/digits-lt.yaml"} <= inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    assert all(name.startswith("batchformer") for name in inside), "the wheel puts other folders beside the package"


def test_sdist_holds_the_source_and_nothing_that_was_made_from_it(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        inside = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert {"src/batchformer/py.typed", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= inside
    assert {name.split("/")[0] for name in inside if "/" in name} == {"src"}
    assert [name for name in inside if name.endswith((".pyc", ".ckpt", ".safetensors"))] == []


def test_one_version_everywhere():
    import batchformer

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == batchformer.__version__
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = next(line for line in changes.splitlines() if line.startswith("## "))
    assert newest in ("## Unreleased", f"## {batchformer.__version__}")


def test_workflows_call_what_the_makefile_has_on_every_supported_python():
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = {
        file.stem: file.read_text(encoding="utf-8") for file in (REPOSITORY / ".github/workflows").glob("*.yml")
    }
    assert {"tests", "docs", "release"} == set(workflows)
    called = {target for text in workflows.values() for target in re.findall(r"run: make ([a-z-]+)", text)}
    assert {"lint", "test", "test-slow", "test-oldest", "docs", "dist"} == called <= targets
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert yaml.safe_load(workflows["tests"])["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    for template in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(template.read_text(encoding="utf-8"))


def test_metadata_gives_ranges_licence_and_the_extra(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert metadata["License-Expression"] == "Apache-2.0"
    needs = metadata.get_all("Requires-Dist") or []
    torch, on_newest_python = (need for need in needs if need.startswith(("torch<", "torch>")))
    assert set(torch.removeprefix("torch").split(",")) == {">=2.11", "<2.14"}
    assert on_newest_python.replace('"', "'") == "torch>=2.12; python_version >= '3.13'"
    always = {need.split("<")[0].split(">")[0].split("[")[0] for need in needs if "extra ==" not in need}
    assert always == {"torch", "jaxtyping"}
    assert {"train", "dev"} <= set(metadata.get_all("Provides-Extra") or [])
    assert not any("==" in need.split(";")[0] for need in needs), "exact pins belong into the lock file"
    assert "docs/method.svg" in metadata.get_payload(), "the README is the long description"


def test_installed_command_prints_version_and_recipes(run_there, installed):
    import batchformer

    command = str(installed / "bin" / "batchformer")
    version = run_there(command, "--version")
    assert (version.returncode, version.stdout) == (0, f"batchformer {batchformer.__version__}\n"), version.stderr
    recipes = run_there(command, "recipes")
    assert recipes.returncode == 0, recipes.stderr
    listed = [line.split()[0] for line in recipes.stdout.splitlines() if line.startswith("  ")]
    assert listed[:3] == ["digits-domains", "digits-gzsl", "digits-lt"]


@pytest.mark.slow
def test_installed_recipe_trains(run_there, installed):
    short = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--data.batch_size", "32"]
    done = run_there(str(installed / "bin" / "batchformer"), "fit", "digits-lt", *short, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "after the last epoch" in done.stdout


@pytest.mark.parametrize("prelude", ["", WITHOUT_EXTRA], ids=["with the extra", "library alone"])
def test_installed_library_attaches(run_there, installed, prelude):
    done = run_there("-c", prelude + ATTACH)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_library_alone_lists_recipes_and_says_what_training_needs(run_there):
    call = WITHOUT_EXTRA + "from batchformer.cli import main; sys.exit(main(sys.argv[1:]))"
    assert run_there("-c", call, "recipes").returncode == 0
    done = run_there("-c", call, "fit", "digits-lt")
    assert done.returncode == 2
    assert 'pip install "batchformer[train]"' in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
