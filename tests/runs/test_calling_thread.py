"""`batchformer fit` runs backward passes on the thread that calls them, and leaves torch as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from batchformer import cli
from batchformer.tasks import LongTailed


def test_only_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()
    plain = LongTailed.training_step

    def watched(task: LongTailed, *given: Any, **named: Any) -> Any:
        seen.add(torch._C._is_multithreading_enabled())
        return plain(task, *given, **named)

    monkeypatch.setattr(LongTailed, "training_step", watched)
    words = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--no-analysis"]
    assert cli.main(["fit", "digits-lt", "--out", str(tmp_path / "run"), *words]) == 0
    assert seen == {False}
    assert torch._C._is_multithreading_enabled()
