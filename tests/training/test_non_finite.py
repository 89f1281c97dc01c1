"""A loss that is not finite stops the run, names the step, and never reaches a checkpoint."""

import lightning as L
import pytest
import torch

from batchformer.errors import NonFiniteLoss
from batchformer.tasks import LongTailed
from batchformer.training.meter import Meter

from ..tasks.conftest import TinyData, make_trainer
from ..tasks.whole_step import WholeStep


class SaveEachStep(L.Callback):
    def __init__(self, folder) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, task, *_) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_ordinary_training_stops_at_the_step_with_finite_weights():
    task = LongTailed("resnet20")
    with pytest.raises(NonFiniteLoss, match=r"step 1 .*model\.optimizer\.lr"):
        make_trainer(max_epochs=1).fit(task, datamodule=TinyData(batch_size=4, spoil_image=5))
    assert all(torch.isfinite(p).all() for p in task.net.parameters())


@pytest.mark.parametrize("kind", [LongTailed, WholeStep])
def test_no_checkpoint_is_written_from_the_bad_step_on(tmp_path, kind):
    trainer = make_trainer(max_epochs=1, callbacks=[SaveEachStep(tmp_path)])
    with pytest.raises(NonFiniteLoss, match=r"step 1 "):
        trainer.fit(kind("resnet20"), datamodule=TinyData(batch_size=4, spoil_image=5))
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]


def test_the_whole_step_notices_before_validation_and_names_the_first_bad_step():
    class Watching(WholeStep):
        validated = False

        def validation_step(self, batch, batch_idx):
            self.validated = True

    task = Watching("resnet20")
    with pytest.raises(NonFiniteLoss, match=r"step 2 .*epoch 0"):
        make_trainer(max_epochs=2).fit(task, datamodule=TinyData(batch_size=4, spoil_image=9))
    assert not task.validated


def test_the_meter_counts_rows_steps_and_the_first_bad_one():
    meter = Meter(torch.device("cpu"), batches_per_step=2)
    meter.restart(global_step=10)
    meter.update({"loss": torch.tensor(1.0), "acc": torch.tensor([100.0, 0.0, 100.0, 100.0])}, 4)
    meter.update({"loss": torch.tensor(4.0), "acc": torch.tensor([0.0, 0.0])}, 2)
    assert meter.values() == {"loss": pytest.approx((4 * 1 + 2 * 4) / 6), "acc": 50.0}
    meter.raise_if_not_finite(epoch=0)
    again = Meter(torch.device("cpu"), batches_per_step=2)
    again.load_state_dict(meter.state_dict())
    assert again.values() == meter.values()
    for bad in ("nan", "inf"):
        again.update({"loss": torch.tensor(float(bad))}, 1)
    with pytest.raises(NonFiniteLoss, match=r"step 11 "):
        again.raise_if_not_finite(epoch=3)
    again.restart(20)
    again.raise_if_not_finite(epoch=4)
