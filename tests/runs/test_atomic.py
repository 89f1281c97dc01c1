"""Files are whole or absent, whatever happens while they are written."""

import errno
import json
import os

import pytest

from batchformer.errors import UserError
from batchformer.files import remove_stale_temporaries, write_atomically, write_json, write_text


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file):
        file.write(b"half")
        raise RuntimeError("stopped here")

    with pytest.raises(RuntimeError, match="stopped here"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_new_content_is_not_visible_before_it_is_whole(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    seen = []

    def slowly(file):
        file.write(b"new")
        file.flush()
        seen.append(path.read_text())

    write_atomically(path, slowly)
    assert seen == ["old"]
    assert path.read_text() == "new"


def test_a_full_disk_is_one_sentence(tmp_path):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"result\.json could not be written: the disk is full") as caught:
        write_atomically(tmp_path / "result.json", full)
    assert "(with --resume if it trains)" in str(caught.value)  # export and predict have no such option
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path):
    (tmp_path / "last.ckpt.123.partial").write_bytes(b"half")
    (tmp_path / "last.ckpt").write_bytes(b"whole")
    remove_stale_temporaries(tmp_path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": 2}})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [1.5, None], "c": {"d": 2}}


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for place, reason in ((tmp_path / "folder", "it is a folder"), (tmp_path / "file/model", "")):
        with pytest.raises(UserError, match=f"^{place} could not be written: {reason}") as caught:
            write_text(place, "x")
        assert "partial" not in str(caught.value)
        assert "--resume" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_where_writing_is_not_permitted_nobody_is_told_to_make_room(tmp_path):
    def forbidden(file):
        raise PermissionError(errno.EACCES, "Permission denied", file.name)

    with pytest.raises(UserError, match=r"model could not be written: writing there is not permitted") as caught:
        write_atomically(tmp_path / "model", forbidden)
    assert "free some space" not in str(caught.value)
    assert "partial" not in str(caught.value)
