"""The learning rate of each epoch."""

import math
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from batchformer.errors import UserError
from batchformer.tasks import LongTailed, OptimizerOptions, ScheduleOptions
from batchformer.training.optimizers import set_lr
from batchformer.training.schedules import lr_factor, place_in_run, steps_per_epoch, total_epochs_of

from ..tasks.conftest import TinyData, make_trainer


def test_the_released_cifar_schedule_warms_up_from_half_and_falls_to_zero():
    schedule = ScheduleOptions("cosine", warmup_epochs=37, warmup_start=0.5)
    lr = [0.1 * lr_factor(schedule, epoch, 591) for epoch in range(592)]
    assert lr[0] == pytest.approx(0.05)
    assert lr[37] == pytest.approx(0.1)
    assert max(lr) == lr[37]
    steps = [after - before for before, after in pairwise(lr[:38])]
    assert steps == pytest.approx([0.05 / 37] * 37)
    assert lr[(591 + 37) // 2] == pytest.approx(0.05)
    assert 0 < lr[590] < 1e-5
    assert lr[591] == 0


def test_steps_fall_at_their_milestones():
    schedule = ScheduleOptions("step", warmup_epochs=2, warmup_start=0.2, milestones=[4, 6], gamma=0.1)
    assert [lr_factor(schedule, e, 8) for e in range(8)] == pytest.approx([0.2, 0.6, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_constant_stays():
    assert {lr_factor(ScheduleOptions("constant"), e, 5) for e in range(9)} == {1.0}


class Watch(L.Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer, task, *_) -> None:
        self.seen.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 6}])
def test_network_and_module_follow_the_schedule_at_their_own_rates(limit):
    watch = Watch()
    task = LongTailed("resnet20", optimizer=OptimizerOptions(lr=0.2, module_lr_factor=0.25), schedule=ScheduleOptions())
    make_trainer(**limit, callbacks=[watch], limit_val_batches=0).fit(task, datamodule=TinyData())
    assert len(watch.seen) == 6
    for batch, (network, module) in enumerate(watch.seen):
        assert network == pytest.approx(0.2 * lr_factor(ScheduleOptions(), batch // 2, 3))
        assert module == pytest.approx(0.25 * network)


def test_the_last_batches_of_an_epoch_are_a_step_too_where_they_are_fewer_than_accumulated():
    """Three batches at two a step are two steps: six steps are three epochs, and the cosine ends with them."""
    watch = Watch()
    task = LongTailed("resnet20", optimizer=OptimizerOptions(lr=0.2), schedule=ScheduleOptions(), method="baseline")
    trainer = make_trainer(max_steps=6, accumulate_grad_batches=2, callbacks=[watch], limit_val_batches=0)
    trainer.fit(task, datamodule=TinyData(batch_size=6))
    assert (trainer.current_epoch, len(watch.seen)) == (3, 9)
    expected = [0.2 * lr_factor(ScheduleOptions(), batch // 3, 3) for batch in range(9)]
    assert [rates[0] for rates in watch.seen] == pytest.approx(expected)


def test_the_module_has_its_own_group_and_every_parameter_is_in_one():
    task = LongTailed("resnet20", optimizer=OptimizerOptions(momentum=0.8, nesterov=True))
    trainer = make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    trainer.fit(task, datamodule=TinyData())
    network, module = ([id(p) for p in group["params"]] for group in trainer.optimizers[0].param_groups)
    assert sorted(module) == sorted(id(p) for p in task.attachment.parameters())
    assert sorted(network + module) == sorted(id(p) for p in task.net.parameters())
    for group in trainer.optimizers[0].param_groups:
        assert (group["weight_decay"], group["momentum"], group["nesterov"]) == (5e-4, 0.8, True)


def test_groups_without_a_factor_of_their_own_get_the_learning_rate_itself():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **factor} for factor in ({}, {"lr_factor": 0.5})]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.2, fused=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_cosine_without_an_end_is_refused():
    with pytest.raises(UserError, match="max_epochs"):
        make_trainer(max_epochs=-1).fit(LongTailed("resnet20"), datamodule=TinyData())


@pytest.mark.parametrize(("given", "epochs"), [({"max_epochs": 3}, 3), ({"max_epochs": 0}, 0),
                                               ({"max_epochs": None}, 0),
                                               ({"max_steps": 7}, 2), ({"max_steps": 6}, 2), ({"max_steps": 1}, 1),
                                               ({"max_steps": 7, "num_training_batches": math.inf}, 1)])  # fmt: skip
def test_steps_are_whole_epochs_and_a_run_without_end_has_none(given, epochs):
    """Seven batches at two a step are four steps an epoch."""
    usual = {"max_epochs": -1, "max_steps": -1, "num_training_batches": 7, "accumulate_grad_batches": 2}
    assert total_epochs_of(SimpleNamespace(**usual | given)) == epochs


@pytest.mark.parametrize("batches", [0, math.inf])
def test_a_schedule_needs_epochs_of_known_length(batches):
    assert steps_per_epoch(SimpleNamespace(num_training_batches=1, accumulate_grad_batches=4)) == 1
    with pytest.raises(UserError, match="epochs of known length"):
        steps_per_epoch(SimpleNamespace(num_training_batches=batches, accumulate_grad_batches=1))


@pytest.mark.parametrize(("per", "limit", "place"), [("epoch", {"max_epochs": 5}, (2.0, 5.0)),
                                                     ("step", {"max_epochs": 5}, (2.25, 5.0)),
                                                     ("step", {"max_epochs": None}, (2.25, 2.5)),
                                                     ("step", {"max_epochs": -1}, (2.25, 2.5))])  # fmt: skip
def test_the_place_in_a_run_is_in_epochs(per, limit, place):
    trainer = SimpleNamespace(num_training_batches=4, accumulate_grad_batches=1, current_epoch=2, global_step=9,
                              max_steps=10, **limit)  # fmt: skip
    assert place_in_run(trainer, per) == place
