"""A trainer of Lightning that says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def quiet_trainer(folder: Path, epochs: int, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
