"""`batchformer bench`: its rows, its floor, what it says without a GPU, and that one failure loses nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from batchformer import cli
from batchformer._cli.bench import write_rows
from batchformer.kernels import bench
from batchformer.kernels.bench import Rates, Settings, Shape, floor_ms

KEYS = {"shape", "heads", "dtype", "pass", "dropout", "memory", "ours_ms", "papers_ms", "compiled_ms", "graph_ms",
        "ours_gib", "papers_gib", "floor_ms"}  # fmt: skip
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
    assert set(result) == {"device", "versions", "rows"}
    assert capsys.readouterr().out.count("3 x 2 x 16") == 4


def test_one_failure_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.nn.TransformerEncoderLayer):
        def forward(self, *_, **__) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of luck\nand more")

    monkeypatch.setattr(bench.nn, "TransformerEncoderLayer", Broken)
    path = tmp_path / "layer.json"
    assert write_rows(path, TINY, FAST._replace(passes=("fwd",)), CPU) == 1
    result = json.loads(path.read_text())
    assert [row["papers_ms"] for row in result["rows"]] == [None, None]
    assert all(row["ours_ms"] > 0 for row in result["rows"])
    assert result["problems"] == ["tiny fwd papers_ms: RuntimeError: CUDA error: out of luck"]


def test_the_floor_is_that_of_the_table_of_measurements() -> None:
    """Worked out by hand before there was a benchmark, at 759 TFLOP/s and 4.16 TB/s."""
    rates = Rates(759e12, 4.16e12)
    assert floor_ms(Shape(24, 13294, 256, 4), "fwd+bwd", torch.bfloat16, rates) == pytest.approx(1.0, abs=0.05)
    assert floor_ms(Shape(1024, 197, 192, 3), "fwd+bwd", torch.bfloat16, rates) == pytest.approx(0.95, abs=0.05)


def test_without_a_gpu_it_says_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--quick"]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
    assert cli.main(["bench", "deit-z"]) == 2
    assert "deit-s" in capsys.readouterr().err
    assert cli.main(["bench", "--dropout", "2"]) == 2
    assert "--dropout 2" in capsys.readouterr().err
