"""What a run records about its time: the throughput of training alone, also across a resume."""

import time

import lightning.pytorch as L
import pytest
import torch

from batchformer.runs.recorder import RunRecorder

from ..tasks.conftest import make_trainer

WARMING_UP, STEP, VALIDATION = 100.0, 2.0, 50.0  # seconds of the clock below


@pytest.fixture
def clock(monkeypatch):
    """Shows the time that the task below takes."""
    shown = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: shown[0])
    return shown


class Timed(L.LightningModule):
    all_measures, per_class = (), ()

    def __init__(self, clock, step):
        super().__init__()
        self.clock, self.step, self.warm, self.weight = clock, step, False, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.clock[0] += self.step if self.warm else WARMING_UP
        self.warm = True
        return self.weight * batch.sum()

    def validation_step(self, batch, batch_idx):
        self.clock[0] += VALIDATION

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trained(clock, epochs, recorder, resume=None, step=STEP):
    """Two batches of four images in every epoch."""
    trainer = make_trainer(max_epochs=epochs, callbacks=[recorder], enable_checkpointing=True)
    images = torch.utils.data.DataLoader(torch.zeros(8, 1), batch_size=4)
    trainer.fit(Timed(clock, step), images, images, ckpt_path=resume)
    return trainer


def test_the_time_of_a_run_is_counted_from_its_begin():
    begin = time.perf_counter()
    assert 0 <= RunRecorder().wall_s <= time.perf_counter() - begin


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
class TestThroughput:
    def test_it_is_that_of_training_without_the_first_epoch_and_the_validations(self, clock):
        recorder = RunRecorder()
        trained(clock, 3, recorder)
        assert recorder.images_per_s == 8 / (2 * STEP)

    def test_of_a_single_epoch_it_is_that_of_the_epoch(self, clock):
        recorder = RunRecorder()
        trained(clock, 1, recorder)
        assert recorder.images_per_s == 8 / (WARMING_UP + STEP)

    def test_nothing_is_known_of_a_run_that_was_not_trained(self):
        assert RunRecorder().images_per_s != RunRecorder().images_per_s  # not a number

    def test_a_resumed_run_goes_on_counting_and_leaves_out_its_own_first_epoch(self, clock, tmp_path):
        first = RunRecorder()
        trained(clock, 2, first).save_checkpoint(tmp_path / "last.ckpt")
        before, second = first.wall_s, RunRecorder()
        trained(clock, 4, second, resume=tmp_path / "last.ckpt", step=3 * STEP)
        assert second.images_per_s == 2 * 8 / (2 * STEP + 2 * 3 * STEP)
        assert second.wall_s == 2 * before + 3 * 2 * STEP
