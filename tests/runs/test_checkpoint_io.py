"""Checkpoints: read without running code, damage told in a sentence, a full disk harmless."""

import os
import resource
import signal

import lightning.pytorch as L
import pytest
import torch

from batchformer.errors import UserError
from batchformer.runs.checkpoints import AtomicCheckpointIO, LastCheckpoint, read_checkpoint

from ..tasks.conftest import make_trainer


def test_what_was_saved_is_read_again(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "checkpoints" / "last.ckpt"
    io.save_checkpoint({"weights": torch.arange(5), "epoch": 3}, path)
    loaded = io.load_checkpoint(path)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["weights"], torch.arange(5))
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_loading_cleans_up_after_a_killed_write(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"epoch": 1}, path)
    (tmp_path / "last.ckpt.77.partial").write_bytes(b"half")
    io.load_checkpoint(path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_missing_checkpoint_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no checkpoint at"):
        read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, keep):
    path = tmp_path / "last.ckpt"
    torch.save({"weights": torch.randn(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else keep])
    with pytest.raises(UserError, match="damaged") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


class _RunsCode:
    def __reduce__(self):
        return (os.system, ("true",))


def test_a_checkpoint_cannot_run_code(tmp_path):
    torch.save({"x": _RunsCode()}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_no_room_for_a_checkpoint_keeps_the_one_before(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"epoch": 1}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="disk is full"):
            io.save_checkpoint({"epoch": 2, "weights": torch.zeros(1_000_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert read_checkpoint(path)["epoch"] == 1


class OneWeight(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.weight * batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("often", "length", "expected"),
    [
        ({}, {"max_epochs": 3}, [5, 10, 15]),
        ({"every_epochs": 2}, {"max_epochs": 3}, [10, 15]),
        ({"every_epochs": 2, "every_steps": 2}, {"max_epochs": 3}, [2, 4, 6, 8, 10, 12, 14, 15]),
        (
            {"every_epochs": 9, "every_steps": 5},
            {"max_epochs": 3},
            [15],
        ),  # the end of an epoch comes after its last step
        ({"every_epochs": 9}, {"max_epochs": 3, "max_steps": 7}, [7]),
    ],
)
def test_checkpoints_are_written_as_often_as_asked_and_after_the_last_step(often, length, expected, tmp_path):
    steps = []

    class Noted(LastCheckpoint):
        def _save(self, trainer):
            super()._save(trainer)
            steps.append(read_checkpoint(self.path)["global_step"])

    last = Noted(tmp_path / "last.ckpt", **often)
    trainer = make_trainer(**length, callbacks=[last], enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(OneWeight(), torch.utils.data.DataLoader(torch.zeros(5, 1)))
    assert steps == expected
