"""The learning rate of every step and epoch, against timm's scheduler."""

import lightning as L
import pytest
import torch
from timm.scheduler import CosineLRScheduler

from batchformer.errors import UserError
from batchformer.tasks import MAE, AdamWOptions, CosineAfterWarmupOptions, CosineOptions, MoCo
from batchformer.training.schedules import warm_cosine

from ..tasks.conftest import TinyData, info, make_trainer
from ..tasks.tiny_vit import built, fit, vit_task


def timm_scheduler(total: int, warmup: int, per_step: bool = False) -> CosineLRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=6e-4)
    return CosineLRScheduler(
        optimizer, total, lr_min=1e-5, warmup_t=warmup, warmup_lr_init=1e-6, t_in_epochs=not per_step
    )


@pytest.mark.parametrize("warmup", [0, 5])
def test_by_epochs_it_is_the_schedule_deit_gets_from_timm(warmup):
    schedule, reference = CosineOptions(warmup_epochs=warmup), timm_scheduler(40, warmup)
    for epoch in range(41):
        reference.step(epoch)
        expected = reference.optimizer.param_groups[0]["lr"]
        assert warm_cosine(schedule, 6e-4, epoch, 40) == pytest.approx(expected, rel=1e-9)


def test_by_steps_it_is_timms_with_steps_for_epochs():
    schedule, reference = CosineOptions(warmup_epochs=1.5), timm_scheduler(4 * 6, 9, per_step=True)
    for step in range(25):
        reference.step_update(step)
        expected = reference.optimizer.param_groups[0]["lr"]
        assert warm_cosine(schedule, 6e-4, step / 6, 4) == pytest.approx(expected, rel=1e-9)


def test_that_of_pretraining_falls_from_the_top_at_the_end_of_the_warmup():
    """As MoCo-v3 and MAE have it: lr e / W, then lr (1 + cos(pi (e - W) / (T - W))) / 2."""
    schedule = CosineAfterWarmupOptions(warmup_epochs=10.0, warmup_lr=0.0, min_lr=0.0)
    for epoch, expected in ((5, 0.5), (9.99, 0.999), (10, 1.0), (55, 0.5), (100, 0.0)):
        assert warm_cosine(schedule, 1.0, epoch, 100) == pytest.approx(expected)
    for task in (MoCo(), MAE(), MoCo(schedule={"warmup_epochs": 10.0, "warmup_lr": 0.0, "min_lr": 0.0})):
        assert warm_cosine(task.schedule_options, 1.0, 40.0, 40.0 + 1e6) == pytest.approx(1.0)
        assert task.schedule_options.begins_after_warmup


class Watch(L.Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer, task, *_) -> None:
        self.seen.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 6, "max_epochs": -1}])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_every_group_follows_it_at_its_own_rate(limit, per):
    watch = Watch()
    schedule = CosineOptions(warmup_epochs=1, per=per)
    task = vit_task(schedule=schedule, optimizer=AdamWOptions(lr=0.01, lr_per=None, module_lr_factor=0.25))
    trainer = fit(task, callbacks=[watch], **limit)
    assert len(watch.seen) == 6
    factors = [0.25 if group["of_module"] else 1.0 for group in trainer.optimizers[0].param_groups]
    assert set(factors) == {0.25, 1.0}
    for step, rates in enumerate(watch.seen):
        expected = warm_cosine(schedule, 0.01, step / 2 if per == "step" else step // 2, 3)
        assert rates == pytest.approx([expected * factor for factor in factors])
    assert trainer.callback_metrics["lr"].item() == pytest.approx(expected)


def test_the_parts_of_an_accumulated_step_have_one_learning_rate():
    watch = Watch()
    fit(vit_task(), TinyData(batch_size=4), callbacks=[watch], accumulate_grad_batches=2)
    rates = [seen[0] for seen in watch.seen]
    assert rates[0] == rates[1]
    assert rates[2] == rates[3] < rates[0]


@pytest.mark.parametrize(("lr_per", "expected"), [(None, 0.01), (512, 0.01 * 8 * 2 / 512)])
def test_the_learning_rate_is_for_so_many_images_a_step(lr_per, expected):
    watch = Watch()
    task = vit_task(optimizer=AdamWOptions(lr=0.01, lr_per=lr_per))
    fit(task, callbacks=[watch], accumulate_grad_batches=2)
    assert watch.seen[0][0] == pytest.approx(expected)


def test_the_images_of_a_step_are_those_of_all_processes():
    task, trainer = built(optimizer=AdamWOptions(lr=0.01, lr_per=512)), make_trainer(max_epochs=1, devices=3)
    trainer.datamodule, task.trainer = TinyData(batch_size=8), trainer
    trainer.fit_loop.max_batches = 2  # as many steps an epoch
    assert task.learning_rate() == pytest.approx(0.01 * 8 * 3 / 512)


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(UserError, match="max_epochs"):
        fit(vit_task(), max_epochs=-1)
    task = vit_task(optimizer=AdamWOptions())
    task.construct(info([5, 5, 5, 5]))
    with pytest.raises(UserError, match="lr_per"):
        make_trainer(max_epochs=1).fit(task, train_dataloaders=TinyData().train_dataloader())
