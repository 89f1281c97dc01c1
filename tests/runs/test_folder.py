"""The run folder: never written over by accident."""

import pytest

from batchformer.errors import UserError
from batchformer.files import write_json
from batchformer.runs.folder import RunFolder, is_main_process


def _used(path):
    folder = RunFolder(path)
    folder.open_new(overwrite=False)
    folder.config.write_text("a: 1\n")
    folder.checkpoint.parent.mkdir()
    folder.checkpoint.write_bytes(b"x")
    write_json(folder.result, {"seed": 0})
    return folder


def test_a_folder_that_exists_is_refused_with_the_ways_out(tmp_path):
    folder = _used(tmp_path / "run")
    with pytest.raises(UserError, match=r"--resume .*--overwrite .*--out"):
        RunFolder(folder.path).open_new(overwrite=False)
    assert folder.finished


def test_overwrite_removes_the_old_run(tmp_path):
    folder = _used(tmp_path / "run")
    for inside in ("meshes/pictures.json", "exported/README.md", "model.onnx"):
        (folder.path / inside).parent.mkdir(exist_ok=True)
        (folder.path / inside).write_text("of the old weights")
    folder.open_new(overwrite=True)
    assert list(folder.path.iterdir()) == []


def test_overwrite_leaves_folders_alone_that_are_no_runs(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="does not look like a run folder"):
        RunFolder(tmp_path).open_new(overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_overwrite_keeps_files_a_run_did_not_write(tmp_path):
    folder = _used(tmp_path / "run")
    (folder.path / "notes.txt").write_text("mine")
    folder.open_new(overwrite=True)
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_a_run_that_failed_is_taken_back_whatever_it_had_written_by_then(tmp_path):
    for written in ((), ("config.yaml",), ("config.yaml", "metrics.csv", "tensorboard/events", "notes.txt")):
        folder = RunFolder(tmp_path / "run")
        folder.open_new(overwrite=False)
        for name in written:
            (folder.path / name).parent.mkdir(exist_ok=True)
            (folder.path / name).write_text("x")
        folder.remove_unstarted()
        assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == [n for n in written if "notes" in n]
        assert folder.path.exists() == ("notes.txt" in written)


def test_an_empty_folder_is_fine(tmp_path):
    RunFolder(tmp_path).open_new(overwrite=False)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "run").open_new(overwrite=True)


@pytest.mark.parametrize(
    ("environment", "main"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
        ({"RANK": "8", "LOCAL_RANK": "0", "GROUP_RANK": "1"}, False),  # torchrun, first process of the second machine
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, True),  # torchrun inside a job step
        ({"RANK": "0", "LOCAL_RANK": "1"}, False),  # started by Lightning where RANK is the number of the machine
    ],
)
def test_one_process_of_all_machines_writes(environment, main, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_main_process() is main


def test_where_a_run_is_wanted_the_runs_of_a_comparison_are_named(tmp_path):
    with pytest.raises(UserError, match="name the --out of a fit"):
        RunFolder(tmp_path).require()
    _used(tmp_path / "baseline-seed0")
    with pytest.raises(UserError, match=r"one of the runs in it, .*/baseline-seed0 for example"):
        RunFolder(tmp_path).require()
