"""The one command for all tests that need a GPU: what it runs, and what it writes down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_tests

MADE_UP = """
import pytest

def test_right(): pass
def test_wrong(): assert False
@pytest.mark.skip(reason="not here")
def test_left_out(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_without_its_fixture(broken): pass
"""


def test_the_record_counts_each_test_once_and_names_failures(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(MADE_UP)
    record = gpu_tests.Record()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path), str(tmp_path)], [record])
    found = record.summary()
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert [name.split("::")[1] for name in found["failures"]] == ["test_without_its_fixture", "test_wrong"]
    assert list(found["skips"].values()) == ["not here"]
    assert len(found["slowest"]) == 4


def test_files_with_gpu_tests_are_found() -> None:
    files = gpu_tests.files_with_gpu_tests(gpu_tests.REPOSITORY / "tests")
    assert {"tests/kernels/test_on_the_gpu.py", "tests/data/test_on_gpu.py", "tests/mix/test_graph_cut.py"} < set(files)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_tests.main(["--out", str(tmp_path / "gpu.json")])
    assert not (tmp_path / "gpu.json").exists()
