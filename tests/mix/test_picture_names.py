"""What examples/mix_pictures.py calls the images it mixes, and says of weights it cannot take."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from batchformer.analysis import mix_pictures

EXAMPLE = Path(__file__).parents[2] / "examples" / "mix_pictures.py"


@pytest.mark.parametrize(
    ("files", "names"),
    [(("cat.png", "dog.png"), ["cat.png", "dog.png"]), (("cats/1.png", "dogs/1.png"), ["cats", "dogs"])],
    ids=("without-classes", "with-classes"),
)
def test_images_are_called_by_their_class_or_else_by_their_file(tmp_path, monkeypatch, files, names):
    for file in files:
        (tmp_path / "photos" / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (90, 60, 0)).save(tmp_path / "photos" / file)
    monkeypatch.chdir(tmp_path)
    shown: list[list[str]] = []
    monkeypatch.setattr(mix_pictures, "write_mix_picture", lambda *_, names, **__: shown.append(names))
    monkeypatch.setattr(sys, "argv", ["example", "photos", "--model", "test_resnet", "--method", "cutmix"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert shown == [names]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("missing.pt", "there is no file missing.pt: "),
        ("other.pt", "other.pt does not hold the weights of a test_resnet"),
    ],
)
def test_weights_that_do_not_fit_are_told_in_a_sentence(tmp_path, monkeypatch, file, said):
    for name in ("cat.png", "dog.png"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (90, 60, 0)).save(tmp_path / "photos" / name)
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example", "photos", "--model", "test_resnet", "--weights", file])
    with pytest.raises(SystemExit, match=said) as stopped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "mixing").exists()
