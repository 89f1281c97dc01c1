"""When the C++ library is built, when not again, and what is said of it. The compiler is a script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchformer.kernels import host_library


class Compiler:
    """A script in its place, that writes down when it is called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.file = folder / "calls", folder / "compiler"
        monkeypatch.setenv("CXX", str(self.file))
        monkeypatch.setattr(host_library, "path", lambda: folder / "cache" / "library.so")
        monkeypatch.setattr(host_library, "_ready", None)
        monkeypatch.setattr(host_library, "_builder", None)

    def does(self, *lines: str) -> None:
        self.file.write_text("\n".join(["#!/bin/sh", f"echo once >> {self.calls}", *lines, ""]))
        self.file.chmod(0o755)

    @property
    def called(self) -> int:
        return len(self.calls.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_a_build_that_failed_is_not_tried_again_and_that_is_said_once(compiler: Compiler, tmp_path) -> None:
    compiler.does("echo no such thing >&2", "exit 1")
    assert [host_library.build(), host_library.build()] == ["no such thing\n"] * 2
    assert compiler.called == 1
    with pytest.warns(UserWarning, match=r"why is written in (\S+\.failed)") as said:
        assert not host_library.is_ready()
    (reason,) = (tmp_path / "cache").glob("*.failed")
    assert str(reason) in str(said[0].message)
    assert reason.read_text() == "no such thing\n"
    assert not host_library.is_ready()  # without another word, which would be an error here
    assert compiler.called == 1


def test_a_build_that_fails_meanwhile_is_said(compiler: Compiler) -> None:
    compiler.does("exit 1")
    assert not host_library.is_ready()  # being built
    assert host_library._builder is not None
    host_library._builder.join()
    with pytest.warns(UserWarning, match="why is written in"):
        assert not host_library.is_ready()


def test_another_compiler_or_a_new_version_tries_again(
    compiler: Compiler, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.does("exit 1")
    assert host_library.build() is not None
    stamp = compiler.file.stat().st_mtime_ns
    os.utime(compiler.file, ns=(stamp, stamp + 1_000_000_000))  # installed anew
    assert host_library.build() is not None
    assert compiler.called == 2
    other = compiler.file.rename(tmp_path / "other")
    monkeypatch.setenv("CXX", f"{other} -v")
    assert host_library.build() is not None
    assert compiler.called == 3


def test_where_nothing_can_be_written_the_reason_itself_is_said(compiler: Compiler, tmp_path) -> None:
    compiler.does("exit 1")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert not host_library.is_ready()
    assert host_library._builder is not None
    host_library._builder.join()
    with pytest.warns(UserWarning, match=r"could not build the library \(.*File exists"):
        assert not host_library.is_ready()


@pytest.mark.parametrize(
    "end", ["kill -9 $$", "echo fatal error: Killed signal terminated program cc1plus >&2; exit 1"]
)
def test_a_compiler_that_was_stopped_is_asked_again(compiler: Compiler, tmp_path, end: str) -> None:
    compiler.does(end)
    assert host_library.build()
    assert not list((tmp_path / "cache").glob("*.failed"))
    assert host_library.build()
    assert compiler.called == 2


def test_a_library_that_cannot_be_loaded_is_said(compiler: Compiler) -> None:
    host_library.path().parent.mkdir()
    host_library.path().write_text("no library")
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert not host_library.is_ready()
