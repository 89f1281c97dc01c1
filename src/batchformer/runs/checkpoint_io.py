"""Checkpoints that are whole or absent, and read without running code from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from batchformer.errors import UserError
from batchformer.runs.atomic import remove_stale_temporaries, write_atomically


def read_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint (tensors and plain values only); a missing or damaged one is a :class:`UserError`."""
    if not path.is_file():
        raise UserError(f"There is no checkpoint at {path}; train first (batchformer fit), or name another run folder.")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as problem:  # zip, pickle and end-of-file errors all mean the same to the reader
        raise UserError(
            f"The checkpoint {path} is damaged and cannot be read ({type(problem).__name__}); "
            "restore it from a copy, or train again with --overwrite."
        ) from problem


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way in and out of checkpoint files: temporary file in the same folder, fsync, rename."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        remove_stale_temporaries(Path(path).parent)
        return read_checkpoint(Path(path), map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
