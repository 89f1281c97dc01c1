"""Files that are either whole or absent.

Lightning writes checkpoints through the system's temporary folder and moves them, which is not atomic across file
systems. Here the temporary file lives in the folder of its target, is flushed to the disk, and is then renamed.
"""

import csv
import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from batchformer.errors import UserError, causes

TEMPORARY_SUFFIX = ".partial"
DISK_IS_FULL = "the disk is full"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Call ``write`` with a binary file, then put that file at ``path`` in one step; on any error leave no trace."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)  # the rename itself must reach the disk too
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as problem:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = disk_problem(problem)
        if reason is None and isinstance(problem, OSError):  # its own words name the temporary file
            reason = _obstacle(path) or problem.strerror or str(problem)
        if reason is None:
            raise
        make_room = "free some space and run the command again (with --resume if it trains)"
        what_to_do = make_room if reason == DISK_IS_FULL else "choose another place"
        raise UserError(f"{path} could not be written: {reason}; {what_to_do}.") from problem


def refuse_unwritable(path: Path) -> None:
    """Says what `write_atomically` would say of this place, as far as it can be seen without writing."""
    if (reason := _obstacle(path)) is not None:
        raise UserError(f"{path} could not be written: {reason}; choose another place.")


def _obstacle(path: Path) -> str | None:
    folder = next((above for above in path.absolute().parents if above.exists()), Path("/"))
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"a part of {path.parent} is a file"
    return None if os.access(folder, os.W_OK) else "writing there is not permitted"


def refuse_to_replace(path: Path, is_ours: Callable[[bytes], bool]) -> None:
    """Refuse a file that is there, unless its content says that an earlier command of the same kind wrote it."""
    if path.is_file() and path.stat().st_size and not is_ours(path.read_bytes()):
        raise UserError(
            f"{path} was not written by this command and is not replaced: remove it, or choose another place."
        )


def write_text(path: Path, text: str) -> None:
    """As UTF-8; names of files that are not, which Python reads all the same, are written as they are on the disk."""
    write_atomically(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def write_json(path: Path, content: Any) -> None:
    """Numbers that are not finite become ``null``: every reader of JSON then accepts the file."""
    write_text(path, json.dumps(finite(content), indent=1, allow_nan=False) + "\n")


def read_json(file: Path, suspicion: str, remedy: str) -> Any:
    """The parsed content; an error says in one sentence what is wrong with the file and what to do."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} {suspicion} ({error}): {remedy}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None


def remove_stale_temporaries(folder: Path) -> None:
    """Remove the temporary files of processes that were killed in the middle of a write."""
    for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def disk_problem(problem: BaseException | None) -> str | None:
    """The reason, if the disk (or a quota) is full or read-only somewhere in the chain of causes; else None.

    torch.save reports a short write as a RuntimeError of its zip writer, with the OSError as context or not at all.
    """
    for each in causes(problem):
        if isinstance(each, OSError) and each.errno in _FULL:
            return DISK_IS_FULL
        if isinstance(each, OSError) and each.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return "writing there is not permitted"
        if isinstance(each, RuntimeError) and "PytorchStreamWriter" in str(each):
            return DISK_IS_FULL
    return None


def finite(content: Any) -> Any:
    """Plain values for JSON: None in the place of numbers that are not finite."""
    if isinstance(content, float):
        return content if content - content == 0 else None
    if isinstance(content, dict):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return content
