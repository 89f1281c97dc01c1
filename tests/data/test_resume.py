"""What a run sees after it was stopped and resumed from a checkpoint is what it would have seen."""

import lightning as L
import pytest
import torch

from batchformer.data import DigitsLT
from batchformer.errors import UserError
from tests.training import quiet_trainer

EPOCHS, BATCH = 3, 100


class Recorder(L.LightningModule):
    """Trains a little and records every batch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, 10)
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels = batch["images"], batch["labels"]
        self.seen.append((self.current_epoch, batch_idx, labels.tolist(), round(images.double().abs().sum().item(), 3)))
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saver(L.Callback):
    """A checkpoint at each of the moments callbacks write them."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"end-{trainer.current_epoch}.ckpt")

    def on_validation_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"val-{trainer.current_epoch}.ckpt")


def run(tmp_path, data, ckpt_path=None, callbacks=(), **options):
    model = Recorder()
    options |= {"enable_checkpointing": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(tmp_path, EPOCHS, *callbacks, **options)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model.seen


@pytest.fixture(scope="module", params=["device", "host", "device-repeats", "host-repeats"])
def uninterrupted(request, tmp_path_factory):
    """A whole run with a checkpoint after every step and after every epoch."""
    tmp_path = tmp_path_factory.mktemp("run")
    options = {"batch_size": BATCH, "on_device": "auto" if "device" in request.param else False}
    if "repeats" in request.param:
        options |= {"augment_repeats": 3, "erase_prob": 0.5}

    def make(seed=1):
        return DigitsLT(seed=seed, **options)

    return tmp_path, make, run(tmp_path, make(), callbacks=[Saver(tmp_path)])


def test_epochs_differ_and_cover_the_order(uninterrupted):
    _, _, seen = uninterrupted
    assert [(epoch, batch) for epoch, batch, _, _ in seen] == [(e, b) for e in range(EPOCHS) for b in range(4)]
    assert len({tuple(labels) for _, _, labels, _ in seen}) == len(seen)


@pytest.mark.parametrize("step", [1, 3, 4, 5, 6, 8, 11])
def test_resumed_after_any_step_it_goes_on_with_the_next_batch(uninterrupted, step):
    folder, make, seen = uninterrupted
    resumed = run(folder, make(), ckpt_path=folder / f"step-{step}.ckpt")
    assert resumed == seen[step:]


@pytest.mark.parametrize("name", ["end-0", "end-1", "val-0", "val-1"])
def test_resumed_after_an_epoch_it_starts_the_next(uninterrupted, name):
    folder, make, seen = uninterrupted
    resumed = run(folder, make(), ckpt_path=folder / f"{name}.ckpt")
    assert resumed == seen[4 * (int(name[-1]) + 1) :]


def test_resuming_with_another_seed_or_other_data_is_refused(uninterrupted):
    folder, make, _ = uninterrupted
    with pytest.raises(UserError, match=r"data\.seed 1"):
        run(folder, make(seed=2), ckpt_path=folder / "step-3.ckpt")
    with pytest.raises(UserError, match="fingerprint"):
        run(folder, DigitsLT(imbalance=10, batch_size=BATCH, seed=1), ckpt_path=folder / "step-3.ckpt")


def test_limited_epochs_still_follow_the_trainers_count(tmp_path):
    data = DigitsLT(batch_size=BATCH, seed=1)
    seen = run(tmp_path, data, limit_train_batches=2)
    assert [(epoch, batch) for epoch, batch, _, _ in seen] == [(e, b) for e in range(EPOCHS) for b in range(2)]
    assert len({tuple(labels) for _, _, labels, _ in seen}) == len(seen)


def test_by_default_an_epoch_has_every_image_once_in_full_batches():
    batches = list(DigitsLT(index=True).train_dataloader())
    assert {tuple(batch) for batch in batches} == {("images", "labels", "index")}
    read = torch.cat([batch["index"] for batch in batches]).tolist()
    assert [len(batch["labels"]) for batch in batches] == [128] * 3  # of 490 images
    assert len(set(read)) == len(read)
    rest = DigitsLT(index=True, drop_last=False).train_dataloader()
    assert sorted(torch.cat([batch["index"] for batch in rest]).tolist()) == list(range(490))


def test_without_lightning_the_data_module_restores_its_loader():
    first, second = DigitsLT(batch_size=BATCH), DigitsLT(batch_size=BATCH)
    iterator = iter(first.train_dataloader())
    next(iterator)
    second.load_state_dict(first.state_dict())
    rest = [batch["labels"].tolist() for batch in iterator]
    assert [batch["labels"].tolist() for batch in second.train_dataloader()] == rest
