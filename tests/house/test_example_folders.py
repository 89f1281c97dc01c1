"""Examples that take a folder of images find in it what the commands find."""

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["mix_pictures.py", "batch_attention_pictures.py"])
def test_hidden_files_are_passed_over(tmp_path, monkeypatch, name):
    for label in range(2):
        folder = tmp_path / "photos" / f"class {label}"
        folder.mkdir(parents=True)
        (folder / "._0.png").write_bytes(b"of macOS")
        for number in range(4):
            Image.new("RGB", (40, 30), (90 * label, 60 * number, 0)).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "photos", "--model", "test_vit", "--out", "out"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")  # leaves by sys.exit where it says what is wrong
    assert list((tmp_path / "out").iterdir())
