"""Every shipped recipe of detection trains two steps and evaluates on a miniature, its network made small."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from batchformer.cli import main
from batchformer.cli.shelf import recipe_text
from batchformer.data.sets import write_miniature

# Encoder layers stay those of the recipe, so that its places exist.
SMALL = {
    "model.backbone": "test_resnet",
    "model.backbone_weights": "null",
    "model.frozen_stages": "1",
    **{f"model.detector_args.{key}": value for key, value in
       {"d_model": "32", "encoder_ffn_dim": "8", "decoder_ffn_dim": "8", "encoder_attention_heads": "2",
        "decoder_attention_heads": "2", "decoder_layers": "2", "num_queries": "6", "image_size": "64"}.items()},
    "data.image_size": "48",
    "data.max_size": "64",
    "data.batch_size": "6",
    "data.eval_batch_size": "3",
    "data.limit_val": "6",
    "data.workers": "0",
    "trainer.max_epochs": "1",
    "trainer.limit_train_batches": "2",
    "trainer.accelerator": "cpu",
    "model.schedule.warmup_epochs": "0",
}  # fmt: skip
TABLE_3 = [f"deformable-detr-coco-l{places}" for places in ("1-2", "1-3", "3-6", "4-6", "5-6", "2", "3", "4", "5", "6")]
KINDS = ("detr", "conditional-detr", "smca-detr", "deformable-detr", "deformable-detr-refine")
RECIPES = [
    *(f"{kind}-coco" for kind in KINDS),
    "deformable-detr-r101-coco",
    "deformable-detr-coco-l6-batch16",
    "deformable-detr-coco-l6-batch32",
    *TABLE_3,
    "deformable-detr-coco-l3-6-shared",
    "deformable-detr-coco-single-stream",
    "deformable-detr-coco-batch-inference",
    *(f"coco128-{kind}" for kind in (*KINDS, "deformable-detr-two-stage")),
]
DETECTION = Path(__file__).parents[2] / "docs/detection.md"
BASELINES = [f"{kind}-coco" for kind in KINDS]
TWICE = ("deformable-detr-coco-single-stream", "deformable-detr-coco-batch-inference")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_where_it_comes_from_and_how_to_run_it(name):
    comment = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    assert len(comment[0]) < 120
    assert any(f"batchformer fit {name}" in line for line in comment)


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return str(write_miniature("coco", tmp_path_factory.mktemp("mini") / "coco"))


def fit(name, method, root, out, *more):
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    return main(["fit", name, "--method", method, "--data-root", root, *words, *more, "--out", str(out)])


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "batchformer") for name in RECIPES), *((name, "baseline") for name in BASELINES)]
)
def test_recipe_trains_two_steps(name, method, coco, tmp_path, capsys):
    out = tmp_path / "run"
    assert fit(name, method, coco, out) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "AP50" in shown
    result = json.loads((out / "result.json").read_text())
    assert (result["recipe"], result["method"], result["steps"]) == (name, method, 2)
    metrics = result["metrics"]
    assert metrics["all"] == metrics["ap"] <= metrics["ap50"] <= 100
    assert ("ap_batch" in metrics) == (name in TWICE)
    assert len(result["per_class"]) == len(result["class_counts"]) == len(result["class_names"]) == 5
    related = method == "batchformer"
    assert len(result["streams"]["related_loss"]) == related
    assert len(result["streams"]["plain_loss"]) == (name != "deformable-detr-coco-single-stream")


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
    assert main(["test", str(out)]) == 0
    assert "exactly these numbers" in capsys.readouterr().out
    assert main(["export", str(out)]) == 0
    assert f"create_detector('{kind}', num_labels=5, backbone='test_resnet'" in capsys.readouterr().out
    with safe_open(out / "model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "batchformer" in key]  # noqa: SIM118
        assert file.metadata()["detector"] == kind
