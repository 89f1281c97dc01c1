"""Commands that need no torch answer without importing it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from batchformer.cli import main
code = main({arguments!r})
heavy = [name for name in ("torch", "lightning", "timm", "numpy", "jsonargparse") if name in sys.modules]
print(json.dumps([code, heavy]))
"""


@pytest.fixture
def result_file(tmp_path):
    result = {
        "recipe": "digits-lt", "method": "baseline", "seed": 0, "protocol": "last",
        "metrics": {"all": 50.0, "many": 60.0, "medium": 50.0, "few": 40.0},
        "per_class": [50.0, 50.0], "class_counts": [200, 10], "class_names": ["a", "b"],
        "history": [{"epoch": 0, "train_loss": 1.0, "all": 50.0, "many": 60.0, "medium": 50.0, "few": 40.0}],
        "epochs": 1, "steps": 3, "images_per_s": 10.0,
        "data": {"fingerprint": "0", "train_images": 210, "test_images": 20},
        "versions": {"batchformer": "0", "python": "3"}, "device": "none", "wall_s": 1.0, "config": {},
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["recipes"], ["recipes", "digits-lt"], ["data"], ["fit", "--help"], ["nonsense"]],
)
def test_starts_without_torch(arguments):
    assert _heavy_imports(arguments) == []


def test_report_is_written_without_torch(result_file, tmp_path):
    assert _heavy_imports(["report", str(result_file), "--out", str(tmp_path / "page.html")]) == []
    assert (tmp_path / "page.html").stat().st_size > 1000


def _heavy_imports(arguments):
    program = PROGRAM.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    assert code == (2 if arguments == ["nonsense"] else 0), done.stderr
    return heavy
