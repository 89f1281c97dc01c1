"""One command at a time trains in a run folder; who reads it is not concerned."""

import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from batchformer.cli import main
from batchformer.cli.training import RunMaker
from batchformer.errors import UserError
from batchformer.runs import lock as lock_module
from batchformer.runs.folder import LOCK, RunFolder
from batchformer.runs.lock import locked

ELSEWHERE = {"another host": {"host": "elsewhere"}, "another container": {"processes_of": "pid:[1]"}}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs/digits/run")


@pytest.fixture
def left_by(folder):
    """Leave a lock there as this process would write it, but for these entries."""

    def leave(**entries):
        with locked([folder]):
            lock = json.loads((folder.path / LOCK).read_text())
        folder.path.mkdir(parents=True)
        (folder.path / LOCK).write_text(json.dumps({**lock, **entries}))

    return leave


@pytest.fixture
def gone():
    """What names a process that has ended and is still listed, as one is until its parent asks for it."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    yield {"process": process.pid, "process_start": int(start)}
    process.wait()


@pytest.mark.parametrize("how", [[], ["--resume"], ["--overwrite"]], ids=lambda how: "".join(how) or "plain")
@pytest.mark.parametrize("command", ["fit", "compare"])
def test_a_second_command_beside_a_live_one_is_refused_and_writes_nothing(command, how, tmp_path, capsys):
    out = tmp_path / "out"
    run = RunFolder(out if command == "fit" else out / "batchformer-seed0")
    with locked([run]):
        since = json.loads((run.path / LOCK).read_text())["since"]
        assert main([command, "digits-lt", "--out", str(out), *how]) == 2
        assert [path for path in out.rglob("*") if path.is_file()] == [run.path / LOCK]
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{run.path} is in use by process {os.getpid()} on {socket.gethostname()} since {since}" in told


def test_where_files_cannot_be_linked_one_command_has_the_folder_too(folder, monkeypatch):
    def refused(*_):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with locked([folder]):
        assert json.loads((folder.path / LOCK).read_text())["process"] == os.getpid()
        with pytest.raises(UserError, match="is in use by process"), locked([folder]):
            pass
    assert not (folder.path / LOCK).exists()


def test_a_lock_and_the_folders_made_for_it_are_gone_at_every_end(folder, tmp_path):
    for end in (UserError("no data"), KeyboardInterrupt(), None):
        with pytest.raises(type(end)) if end else locked([]), locked([folder]):
            assert (folder.path / LOCK).is_file()
            assert not folder.started
            if end:
                raise end
        assert not list(tmp_path.iterdir())
    folder.path.mkdir(parents=True)
    with pytest.raises(UserError), locked([folder]):
        raise UserError("no data")
    assert folder.path.is_dir()  # it was there before
    with locked([folder]):
        folder.config.write_text("a: 1\n")
    assert [file.name for file in folder.path.iterdir()] == ["config.yaml"]


def test_a_lock_whose_process_is_gone_is_taken_over(folder, left_by, gone):
    left_by(**gone)
    with locked([folder]):
        assert json.loads((folder.path / LOCK).read_text())["process"] == os.getpid()


def test_a_lock_whose_process_id_is_now_that_of_another_process_is_taken_over(folder, left_by):
    left_by(process_start=1)
    with locked([folder]):
        assert json.loads((folder.path / LOCK).read_text())["process_start"] > 1


@pytest.mark.parametrize("entries", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_lock_from_elsewhere_is_never_taken_over_and_the_way_out_is_told(entries, folder, left_by, gone):
    left_by(**gone, **entries)
    before = (folder.path / LOCK).read_text()
    with pytest.raises(UserError, match=f"process {gone['process']} on .* remove .*{LOCK} and"):
        locked([folder]).__enter__()
    assert (folder.path / LOCK).read_text() == before
    (folder.path / LOCK).unlink()
    with locked([folder]):
        pass


@pytest.mark.parametrize("content", ["", "[]", '{"host": 1}', '{"process": "x", "host": "a", "since": "b"}'])
def test_a_lock_that_cannot_be_read_is_refused_with_the_way_out(content, folder):
    folder.path.mkdir(parents=True)
    (folder.path / LOCK).write_text(content)
    with pytest.raises(UserError, match=f"remove .*{LOCK}"), locked([folder]):
        pass


def test_a_lock_removed_by_hand_and_taken_by_another_stays_theirs(folder):
    with locked([folder]):
        (folder.path / LOCK).write_text("theirs")
    assert (folder.path / LOCK).read_text() == "theirs"


@pytest.mark.parametrize("dead", [False, True], ids=["a new folder", "a dead lock"])
def test_of_many_that_want_it_at_the_same_moment_one_gets_it(dead, tmp_path, gone):
    count = 8
    start, end = threading.Barrier(count), threading.Barrier(count)

    def want(folder, won):
        start.wait()
        try:
            with locked([folder]):
                won.append(True)
                end.wait()
        except UserError:
            end.wait()

    for attempt in range(25):
        folder, won = RunFolder(tmp_path / str(attempt)), []
        if dead:
            with locked([folder]):
                lock = json.loads((folder.path / LOCK).read_text())
            folder.path.mkdir()
            (folder.path / LOCK).write_text(json.dumps({**lock, **gone}))
        threads = [threading.Thread(target=want, args=(folder, won)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert won == [True]


def test_a_dead_lock_that_another_command_replaces_meanwhile_is_theirs(folder, left_by, gone, monkeypatch):
    left_by()
    theirs = (folder.path / LOCK).rename(folder.path / "theirs")
    monkeypatch.setattr(lock_module.fcntl, "flock", lambda *_: os.replace(theirs, folder.path / LOCK))
    (folder.path / LOCK).write_text(json.dumps({**json.loads(theirs.read_text()), **gone}))
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        locked([folder]).__enter__()


def test_of_several_processes_the_first_holds_the_lock_for_all(folder, monkeypatch):
    with locked([folder]):
        monkeypatch.setenv("LOCAL_RANK", "1")
        with locked([folder]):  # the second process of the same run
            pass
        assert (folder.path / LOCK).is_file()
        monkeypatch.delenv("LOCAL_RANK")


def test_a_comparison_holds_the_locks_of_all_its_runs_until_it_ends(tmp_path, capsys, monkeypatch):
    seen = []

    def stopped(*_):
        seen.extend(path.parent.name for path in tmp_path.rglob(LOCK))
        raise KeyboardInterrupt

    monkeypatch.setattr(RunMaker, "train", stopped)
    assert main(["compare", "digits-lt", "--seeds", "2", "--out", str(tmp_path / "both")]) == 130
    assert sorted(seen) == ["baseline-seed0", "baseline-seed1", "batchformer-seed0", "batchformer-seed1"]
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()
