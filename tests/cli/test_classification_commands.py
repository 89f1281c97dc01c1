"""Every command on runs of image classification."""

import json

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from batchformer.cli import main

SMALL = {
    "model.backbone_args.depth": "2",
    "model.batchformer.blocks": "[0]",
    "model.schedule.warmup_epochs": "0",
    "data.batch_size": "32",
    "trainer.max_epochs": "2",
    "trainer.limit_train_batches": "2",
}
WORDS = [word for key, value in SMALL.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def vit_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("vit") / "run"
    assert main(["fit", "vit-digits", *WORDS, "--model.ema", "0.5", "--out", str(out)]) == 0
    return out


def test_the_result_has_top_one_top_five_the_average_and_both_streams(vit_run):
    result = json.loads((vit_run / "result.json").read_text())
    along = ["top1", "top5", "top1_ema", "top5_ema"]
    assert list(result["metrics"]) == [*along, "balanced_accuracy", "macro_f1", "ece", "ece_scaled"]
    assert [key for key in result["history"][-1] if key in result["metrics"]] == along
    assert result["metrics"]["top1"] == result["history"][-1]["top1"]
    assert {name: len(losses) for name, losses in result["streams"].items()} == {"plain_loss": 2, "related_loss": 2}
    assert result["config"]["task"] == "classification"
    assert len(result["per_class"]) == 10


def test_a_run_is_whole_where_its_module_cannot_be_looked_at(tmp_path):
    alone = ["--data.batch_size", "1", "--out", str(tmp_path / "run")]
    with pytest.warns(UserWarning, match="analysis after this run is left out: .* two images or more"):
        assert main(["fit", "vit-digits", *WORDS, *alone]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "top1" in result["metrics"]
    assert "stream_health" not in result


def test_test_finds_the_numbers_of_the_result_file(say, vit_run):
    code, out, err = say("test", vit_run)
    assert code == 0, err
    assert "Top-1, EMA" in out
    assert "result.json has exactly these numbers" in out


def test_export_loads_into_the_stock_timm_model(say, vit_run, tmp_path):
    code, out, err = say("export", vit_run, "--out", tmp_path / "plain.safetensors")
    assert code == 0, err
    code_line = next(line for line in out.splitlines() if "timm.create_model" in line and "import" in line)
    names = {}
    exec(code_line.strip(), names)
    weights = load_file(tmp_path / "plain.safetensors")
    names["model"].load_state_dict(weights, strict=True)
    assert isinstance(names["model"], timm.models.VisionTransformer)
    trained = torch.load(vit_run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[key], trained[f"net.{key}"]) for key in weights)


def test_export_of_the_average_is_the_average(say, vit_run, tmp_path, tiny_run):
    code, _, err = say("export", vit_run, "--ema", "--out", tmp_path / "average.safetensors")
    assert code == 0, err
    weights = load_file(tmp_path / "average.safetensors")
    trained = torch.load(vit_run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[key], trained[f"ema.module.{key}"]) for key in weights)
    assert not torch.equal(weights["head.weight"], trained["net.head.weight"])
    code, _, err = say("export", tiny_run, "--ema")
    assert code == 2
    assert "--model.ema" in err


def test_predict_classifies(say, vit_run, tmp_path):
    Image.new("RGB", (20, 30), 77).save(tmp_path / "one.png")
    code, out, err = say("predict", vit_run, tmp_path / "one.png", "--out", tmp_path / "predictions.csv")
    assert code == 0, err
    assert "1 image classified" in out


def test_compare_makes_a_table_and_a_page(say, tmp_path):
    code, out, err = say(
        "compare",
        "vit-digits",
        *WORDS,
        "--trainer.max_epochs",
        1,
        "--seeds",
        2,
        "--no-analysis",
        "--out",
        tmp_path / "c",
    )
    assert code == 0, err
    assert "Top-1" in out
    assert "Top-5" in out
    assert (tmp_path / "c/report.html").stat().st_size > 1000
    assert json.loads((tmp_path / "c/compare.json").read_text())["table"]
