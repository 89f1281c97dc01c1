"""What fit, test and export do with detectors; that every recipe of detection trains: tests/recipes."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from batchformer.cli import main
from batchformer.data.sets import write_miniature
from batchformer.recipes import about

SMALL = {
    **dict(about("detr-coco").small_overrides()),
    "trainer.max_epochs": "1",
    "trainer.limit_train_batches": "2",
    "trainer.accelerator": "cpu",
}
DETECTION = Path(__file__).parents[2] / "docs/detection.md"


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return str(write_miniature("coco", tmp_path_factory.mktemp("mini") / "coco"))


def fit(name, method, root, out, *more):
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    return main(["fit", name, "--method", method, "--data-root", root, *words, *more, "--out", str(out)])


def test_files_of_voc_are_trained_on_by_naming_their_class(tmp_path, capsys):
    """As docs/detection.md says; other keys of the data, given before, are kept."""
    root, out = str(write_miniature("voc", tmp_path / "voc")), tmp_path / "run"
    voc = ("--data.class_path", "batchformer.data.VocDetection", "--data.train", "trainval", "--data.val", "test")
    assert f"`{' '.join(voc)}`" in DETECTION.read_text()
    assert fit("detr-coco", "batchformer", root, out, *voc) == 0, capsys.readouterr().err
    assert "AP50" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    data = result["config"]["data"]
    assert data["class_path"].endswith("VocDetection")
    assert (data["init_args"]["root"], data["init_args"]["batch_size"]) == (root, int(SMALL["data.batch_size"]))
    assert result["class_names"][0] == "aeroplane"


def test_a_detector_trained_without_evaluation_says_so(coco, tmp_path, capsys):
    assert fit("detr-coco", "batchformer", coco, tmp_path / "run", "--trainer.limit_val_batches", "0") == 0
    assert "detr-coco, batchformer, seed 0: not evaluated" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["detr", "smca-detr"])
def test_a_run_is_tested_again_and_exported(kind, coco, tmp_path, capsys):
    out = tmp_path / "run"
    assert fit(f"coco128-{kind}", "batchformer", coco, out) == 0
    assert "images that it was trained on" in capsys.readouterr().out
    assert main(["test", str(out)]) == 0
    assert "exactly these numbers" in capsys.readouterr().out
    assert main(["export", str(out)]) == 0
    assert f"create_detector('{kind}', num_labels=5, backbone='test_resnet'" in capsys.readouterr().out
    with safe_open(out / "model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "batchformer" in key]  # noqa: SIM118
        assert file.metadata()["detector"] == kind
