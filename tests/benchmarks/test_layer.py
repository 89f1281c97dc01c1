"""The layer benchmark: its rows, its floor, what it says without a GPU, and that one failure loses nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _layer_growth as growth
from benchmarks import _layer_steps as steps
from benchmarks import _layer_timing as timing
from benchmarks._layer_timing import Rates, Settings, Shape, floor_ms
from benchmarks.layer import main, write_growth, write_rows, write_steps

KEYS = {"shape", "heads", "dtype", "pass", "dropout", "memory", "ours_ms", "papers_ms", "compiled_ms", "graph_ms",
        "ours_gib", "papers_gib", "floor_ms", "ours_threads_ms", "papers_threads_ms", "ours_median_ms",
        "papers_median_ms", "speedup"}  # fmt: skip
TINY = {"tiny": Shape(3, 2, 16, 2)}
FAST = Settings("fp32", 0.5, rounds=1, seconds=0.001)
CPU = torch.device("cpu")


def test_a_file_has_a_row_for_each_pass_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "layer.json"
    assert write_rows(path, TINY, FAST, CPU) == 0
    result = json.loads(path.read_text())
    assert {(row["pass"], row["memory"]) for row in result["rows"]} == {
        (kind, memory) for kind in ("fwd", "fwd+bwd") for memory in ("fast", "lean")
    }
    for row in result["rows"]:
        assert set(row) == KEYS
        assert row["shape"] == [3, 2, 16]
        assert row["ours_ms"] > 0
        assert row["papers_ms"] > 0
        assert row["speedup"] == row["papers_ms"] / row["ours_ms"]
        assert row["ours_median_ms"] >= row["ours_ms"]
        assert row["papers_median_ms"] >= row["papers_ms"]
        assert (row["ours_threads_ms"] is None) == (row["papers_threads_ms"] is None) == (row["pass"] == "fwd")
    assert set(result) == {"device", "versions", "rows"}
    assert capsys.readouterr().out.count("3 x 2 x 16") == 4


def test_one_failure_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.nn.TransformerEncoderLayer):
        def forward(self, *_, **__) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of luck\nand more")

    monkeypatch.setattr(timing.nn, "TransformerEncoderLayer", Broken)
    path = tmp_path / "layer.json"
    assert write_rows(path, TINY, FAST._replace(passes=("fwd",)), CPU) == 1
    result = json.loads(path.read_text())
    assert [row["papers_ms"] for row in result["rows"]] == [None, None]
    assert all(row["ours_ms"] > 0 for row in result["rows"])
    assert result["problems"] == ["tiny fwd papers_ms: RuntimeError: CUDA error: out of luck"]


def test_the_papers_layer_is_compiled_once_for_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: made.append(module) or module)
    measured = list(timing.rows(TINY, FAST._replace(compile=True), CPU, []))
    assert len(made) == 1
    assert all(row["compiled_ms"] > 0 for row in measured)


def test_growth_is_a_file_with_a_plot_and_where_attention_overtakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = growth.Sweep((2, 4), (1, 3), tokens=8, dim=16, heads=2, dtype="fp32")
    assert write_growth(tmp_path / "growth.json", sweep, CPU) == 0
    result = json.loads((tmp_path / "growth.json").read_text())
    assert [row["shape"][:2] for row in result["rows"]] == [[2, 1], [4, 1], [2, 3]]  # 12 tokens are too many
    assert all(row[key] > 0 for row in result["rows"] for key in ("fast_ms", "lean_ms", "attention_ms", "products_ms"))
    assert [crossing["positions"] for crossing in result["crossings"]] == [1, 3]
    drawn = {path.name: path.read_text() for path in tmp_path.glob("growth-*.svg")}
    assert set(drawn) == {"growth-time.svg", "growth-attention.svg"}  # memory is measured on a GPU only
    assert all(picture.count("<polyline") == 1 and "3 positions" in picture for picture in drawn.values())
    assert "matrix products at 3 positions" in capsys.readouterr().out


def test_the_crossing_lies_between_the_two_batches_around_it() -> None:
    """Attention as the square of the batch, products as the batch: they meet at 100."""
    rows = [{"shape": [b, 7, 4], "attention_ms": b * b, "products_ms": 100 * b} for b in (16, 64, 256)]
    assert growth.crossings(rows) == [{"positions": 7, "batch": pytest.approx(100)}]
    assert growth.crossings(rows[:2]) == [{"positions": 7, "batch": None}]
    assert growth.crossings(rows[2:]) == [{"positions": 7, "batch": 256}]


def test_steps_are_those_of_the_plain_model_of_ours_and_of_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    # bfloat16 convolutions of 512 channels take half a minute on a CPU
    monkeypatch.setitem(steps.MODELS, "resnet-50-tiny", steps._classifier("test_resnet", 32))
    path = tmp_path / "end_to_end.json"
    assert write_steps(path, {"resnet-50-tiny": 4}, CPU, 0.0) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert all(row[f"{kind}_ms"] > 0 for kind in ("plain", "ours", "papers"))


def test_the_floor_is_that_of_the_table_of_measurements() -> None:
    """Worked out by hand before there was a benchmark, at 759 TFLOP/s and 4.16 TB/s."""
    rates = Rates(759e12, 4.16e12)
    assert floor_ms(Shape(24, 13294, 256, 4), "fwd+bwd", torch.bfloat16, rates) == pytest.approx(1.0, abs=0.05)
    assert floor_ms(Shape(1024, 197, 192, 3), "fwd+bwd", torch.bfloat16, rates) == pytest.approx(0.95, abs=0.05)


def test_without_a_gpu_and_for_wrong_options_it_says_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for args, said in ((["--quick"], "no CUDA device"), (["deit-z"], "deit-s"), (["--dropout", "2"], "--dropout: 2")):
        with pytest.raises(SystemExit) as stopped:
            main(args)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err.strip().splitlines()[-1]


def test_the_shapes_of_the_published_table_are_measured_by_default() -> None:
    measured = {shape[:3] for shape in timing.SHAPES.values()}
    assert {(24, 13294, 256), (1024, 197, 192), (128, 197, 384), (16, 950, 256), (128, 1, 2048)} <= measured


def test_it_runs_as_a_module_from_the_repository() -> None:
    command = [sys.executable, "-m", "benchmarks.layer", "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert "--no-compile" in done.stdout
