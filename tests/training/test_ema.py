"""The moving average of the weights: what it is, that it is evaluated, and that it survives a stop to the bit."""

import lightning as L
import pytest
import torch

from batchformer.tasks import AdamWOptions, Classification, InsertionOptions

from ..tasks.conftest import TinyData, info, make_trainer
from ..tasks.tiny_vit import WholeClassification, fit, vit_task


class Weights(L.Callback):
    """The weights after every step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, trainer, task, *_) -> None:
        self.seen.append({name: value.clone() for name, value in task.net.state_dict().items()})


@pytest.mark.parametrize("kind", [Classification, WholeClassification])
def test_it_is_the_average_over_the_steps(kind):
    watch, task = Weights(), vit_task(kind, ema=0.7)
    task.construct(info(TinyData.class_counts))
    average = {name: value.clone() for name, value in task.net.state_dict().items()}
    fit(task, callbacks=[watch], max_epochs=2)
    assert len(watch.seen) == 4
    for weights in watch.seen:
        average = {name: 0.7 * value + 0.3 * weights[name] for name, value in average.items()}
    for name, value in task.ema.module.state_dict().items():
        torch.testing.assert_close(value, average[name])


def test_accumulated_batches_are_one_step():
    task, watch = vit_task(ema=0.5), Weights()
    task.construct(info(TinyData.class_counts))
    start = task.net.state_dict()["pos_embed"].clone()
    fit(task, callbacks=[watch], accumulate_grad_batches=2)
    torch.testing.assert_close(task.ema.module.pos_embed, 0.5 * start + 0.5 * task.net.pos_embed)


def test_it_is_evaluated_without_the_module_and_not_trained():
    data, task = TinyData(), vit_task(ema=0.2)
    trainer = fit(task, data, max_epochs=2, limit_val_batches=1.0)
    right = (task.ema.module.eval()(data.images).argmax(1) == data.labels).double()
    assert trainer.callback_metrics["val/top1_ema"].item() == pytest.approx(100 * right.mean().item())
    assert {"val/top1_ema", "val/top5_ema"} <= set(trainer.callback_metrics)
    assert not any(p.requires_grad for p in task.ema.parameters())
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert not trained & {id(p) for p in task.ema.parameters()}


class SaveAt(L.Callback):
    """A checkpoint after a training step (as `checkpoint_every_steps` writes them) or at the end of an epoch."""

    def __init__(self, path: str, step: int | None = None, epoch: int | None = None) -> None:
        self.path, self.step, self.epoch = path, step, epoch

    def on_train_batch_end(self, trainer, task, *_) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, task) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def train(task: Classification, resume: str | None = None, callbacks=()) -> dict:
    trainer = make_trainer(max_epochs=3, callbacks=list(callbacks), limit_val_batches=0)
    trainer.fit(task, datamodule=TinyData(), ckpt_path=resume)
    assert trainer.global_step == 6
    return {"weights": task.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"]}


@pytest.mark.parametrize("kind", [Classification, WholeClassification])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path, kind):
    path = str(tmp_path / "middle.ckpt")
    whole = train(vit_task(kind, ema=0.8), callbacks=[SaveAt(path, epoch=1)])
    resumed = train(vit_task(kind, ema=0.8), resume=path)
    assert any(name.startswith("ema.") for name in whole["weights"])
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
    for key, state in whole["optimizer"].items():
        assert all(torch.equal(resumed["optimizer"][key][name], value) for name, value in state.items())


def test_a_checkpoint_of_a_step_has_the_average_of_that_step(tmp_path):
    path, watch, task = str(tmp_path / "step.ckpt"), Weights(), vit_task(ema=0.5)
    task.construct(info(TinyData.class_counts))
    start = task.net.state_dict()["head.weight"].clone()
    fit(task, callbacks=[watch, SaveAt(path, step=1)])
    saved = torch.load(path, weights_only=True)["state_dict"]
    expected = 0.5 * start + 0.5 * watch.seen[0]["head.weight"]
    torch.testing.assert_close(saved["ema.module.head.weight"], expected)


def test_a_checkpoint_restores_the_task_without_data(tmp_path):
    path = str(tmp_path / "last.ckpt")
    task = vit_task(ema=0.5, batchformer=InsertionOptions(blocks="all", share=True), seed=3)
    fit(task, callbacks=[SaveAt(path, epoch=0)])
    restored = Classification.load_from_checkpoint(path, weights_only=True, map_location="cpu")
    assert restored.module_options == InsertionOptions(blocks="all", share=True)
    images = TinyData().images
    assert torch.equal(restored.eval()(images), task.eval()(images))
    assert torch.equal(restored.ema.module(images), task.ema.module(images))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_whole_step_does_what_the_ordinary_one_does(name):
    """With AdamW to the rounding of the learning rate: a float32 tensor there, a Python number here."""
    ends = []
    for kind in (Classification, WholeClassification):
        task = vit_task(kind, ema=0.9, optimizer=AdamWOptions(name=name, lr=1e-3, lr_per=None))
        trainer = fit(task, max_epochs=2, limit_val_batches=1.0)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        ends.append((task.state_dict(), metrics, trainer.global_step))
    (ordinary, metrics, steps), (whole, whole_metrics, whole_steps) = ends
    assert whole_steps == steps
    assert whole_metrics == (metrics if name == "sgd" else pytest.approx(metrics, rel=1e-3))
    for key, value in ordinary.items():
        torch.testing.assert_close(whole[key], value, rtol=0, atol=0 if name == "sgd" else 1e-3)
