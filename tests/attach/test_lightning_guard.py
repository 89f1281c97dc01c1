"""Lightning's callback watches the two streams and says once when the related one carries nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.attach.lightning import BatchFormerCallback, StreamGuardHook
from tests.training import quiet_trainer

CLASSES = 3


class Task(L.LightningModule):
    """Learns which of the three inputs is large; the module may be made to give the same for every row."""

    def __init__(self, dead: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(CLASSES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.criterion = bf.TwoStreamLoss(F.cross_entropy)
        self.dead = dead

    def on_fit_start(self) -> None:
        last_norm = bf.attachment_of(self.model).points[0].module.layers[0].norm2
        if self.dead:
            last_norm.weight.requires_grad_(False).zero_()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.criterion(self.model(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.criterion(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)


def fit(
    folder: Path, epochs: int, dead: bool = True, ckpt_path: str | None = None, **settings
) -> tuple[int, L.Trainer]:
    """How many warnings of the guard a training of ten steps an epoch gave."""
    torch.manual_seed(0)
    labels = torch.arange(60) % CLASSES
    data = torch.utils.data.TensorDataset(3 * F.one_hot(labels).float(), labels)
    callback = BatchFormerCallback(heads=2, dropout=0.0, **settings)
    trainer = quiet_trainer(folder, epochs, callback, num_sanity_val_steps=0)
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(Task(dead), loader, loader, ckpt_path=ckpt_path)
    return sum("related stream stays at chance" in str(w.message) for w in seen), trainer


def guard() -> bf.StreamGuard:
    return bf.StreamGuard(CLASSES, every=5, warmup=10)


def test_it_warns_once_where_the_module_carries_nothing(tmp_path: Path) -> None:
    assert fit(tmp_path, 6, guard=guard())[0] == 1


def test_it_is_silent_where_the_module_lives_and_where_it_was_switched_off(tmp_path: Path) -> None:
    assert fit(tmp_path, 6, dead=False, guard=guard())[0] == 0
    assert fit(tmp_path, 6, guard=False)[0] == 0


def test_a_run_that_goes_on_from_a_checkpoint_does_not_warn_again(tmp_path: Path) -> None:
    warned, trainer = fit(tmp_path, 4, guard=guard())
    assert warned == 1
    again, longer = fit(tmp_path, 8, guard=guard(), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert longer.global_step == 80
    assert again == 0


def test_by_default_the_guard_learns_the_classes_from_the_logits_and_leaves_no_hook(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, 1)
    watched = trainer.callbacks[0]._guard_hook
    assert watched.guard.chance == pytest.approx(torch.tensor(CLASSES).log().item())
    assert watched.guard.state_dict()["steps"] == 10  # of training; evaluation has one stream
    assert not trainer.lightning_module.criterion._forward_hooks


def test_rows_of_another_model_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(CLASSES, 8), nn.Linear(8, CLASSES)).train()
    hook = StreamGuardHook(bf.attach(model, heads=2))
    loss = bf.TwoStreamLoss(F.cross_entropy)
    hook.register([loss])
    loss(torch.cat([model(torch.randn(4, CLASSES))] * 3), torch.arange(12) % CLASSES)
    assert hook.guard is None
    loss(model(torch.randn(4, CLASSES)), torch.arange(4) % CLASSES)
    assert hook.guard is not None


@pytest.mark.parametrize(
    "targets",
    [torch.rand(4), torch.ones(4, 1, dtype=torch.long), torch.ones(4, CLASSES, dtype=torch.long), torch.rand(4, 2)],
    ids=["one number each", "ids in a column", "counts", "other classes"],
)
def test_losses_of_other_targets_than_classes_are_not_watched(targets):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    hook = StreamGuardHook(bf.attach(model, heads=2))
    logits = model(torch.randn(4, 3))
    hook(nn.MSELoss(), (logits, targets), None)
    assert hook.guard is None
    hook(nn.CrossEntropyLoss(), (logits, torch.tensor([0, 1, 2, 0])), None)
    assert hook.guard is not None


def test_losses_of_other_outputs_than_scores_of_classes_are_not_watched():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    hook = StreamGuardHook(bf.attach(model, heads=2))
    logits, ids = model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])
    for outputs in (logits[:, :1], logits[:, 0], logits[..., None], list(logits), {"logits": logits}):
        hook(nn.MSELoss(), (outputs, ids), None)
        hook(nn.MSELoss(), (outputs, ids.float()), None)
    hook(nn.CrossEntropyLoss(), (logits, ids.tolist()), None)
    assert hook.guard is None
