"""One command at a time trains in a run folder: ``run.lock`` in it names the process that does.

The file appears with all its content in one step (a link to a temporary one): of two commands started at the same
moment one wins. A lock whose process is gone is replaced by one command only: they queue on the old file (flock), and
the second finds another file in its place. Only processes of one host do so, where flock is reliable.
"""

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.runs.folder import LOCK, RunFolder, is_main_process

_GONE = 0


@contextmanager
def locked(folders: Iterable[RunFolder]) -> Iterator[None]:
    """Hold the locks of these run folders; under DDP rank 0 does so for all."""
    with ExitStack() as held:
        for folder in folders if is_main_process() else ():
            held.enter_context(_locked(folder))
        yield


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    made = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    lock, content = folder.path / LOCK, json.dumps(_this_process())
    folder.make()
    try:
        try:
            _take(lock, content)
        except OSError as problem:
            raise UserError(f"{lock} cannot be written ({problem.strerror}); choose another --out.") from problem
        try:
            yield
        finally:
            with suppress(OSError):  # it may have been removed by hand, and be another process's by now
                if lock.read_text() == content:
                    lock.unlink()
    finally:
        with suppress(OSError):  # folders stay that something was written into
            for place in made:
                place.rmdir()


def _take(lock: Path, content: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{LOCK}.", dir=lock.parent)
    try:
        with open(handle, "w") as file:
            file.write(content)
        with suppress(OSError):  # some file systems have no modes
            os.chmod(name, 0o644)  # whoever shares the folder may see whose lock it is
        while not _put(name, lock, content):
            with suppress(FileNotFoundError), open(lock, "r+") as old:  # released in between: once more
                with suppress(OSError):  # not every file system has it
                    fcntl.flock(old, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(old.fileno()), os.stat(lock)):  # not replaced while this one waited
                    _refuse_unless_gone(lock, old.read())
                    os.replace(name, lock)
                    return
    finally:
        Path(name).unlink(missing_ok=True)


def _put(name: str, lock: Path, content: str) -> bool:
    """Put a new lock there in one step; False if there is one."""
    try:
        os.link(name, lock)
    except FileExistsError:
        return False
    except OSError:  # no links on this file system
        try:
            with open(lock, "x") as file:
                file.write(content)
        except FileExistsError:
            return False
    return True


def _refuse_unless_gone(lock: Path, content: str) -> None:
    try:
        owner = json.loads(content)
        who = f"process {owner['process']} on {owner['host']} since {owner['since']}"
        here = all(owner[key] == value for key, value in _this_place().items())
        start = _start_of(int(owner["process"])) if here else None
        if start is not None and start != owner["process_start"]:
            return
    except (ValueError, TypeError, KeyError):
        who, start = "a process that cannot be read from it", None
    if start is not None:
        raise UserError(f"{lock.parent} is in use by {who}: wait until it ends, or choose another --out.")
    raise UserError(
        f"{lock.parent} is locked by {who}, and it cannot be checked from here whether that process still runs: if "
        f"not, remove {lock} and run the command again; otherwise choose another --out."
    )


def _this_process() -> dict[str, Any]:
    pid, now = os.getpid(), datetime.now(UTC)
    since = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    return {**_this_place(), "process": pid, "process_start": _start_of(pid), "since": since}


def _this_place() -> dict[str, str]:
    """The host and container in which process ids are unique; containers may share a host name, but not process ids."""
    try:
        return {"host": socket.gethostname(), "processes_of": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": socket.gethostname(), "processes_of": ""}


def _start_of(process: int) -> int | None:
    """Start time of a process in ticks since boot; `_GONE` if there is no such process, None if it cannot be read.

    Process ids are reused; together with this number they are unique.
    """
    try:
        with suppress(PermissionError):  # of another user
            os.kill(process, 0)
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return _GONE
    except (OSError, OverflowError):
        return None
    return _GONE if state in ("Z", "X") else int(fields[18])
