"""Classification on a CUDA device: captured, compiled, in half precision."""

import pytest
import torch

from batchformer.tasks import AdamWOptions, Classification, InsertionOptions, MixOptions

from .conftest import TinyData, make_trainer
from .tiny_vit import vit_task

pytestmark = pytest.mark.gpu
ALL_STABLE = InsertionOptions(blocks="all", variant="stable")


def fit(precision: str = "32-true", epochs: int = 6, clip: float | None = None, **arguments) -> tuple:
    task = vit_task(optimizer=AdamWOptions(lr=1e-3, lr_per=None), ema=0.9, **arguments)
    trainer = make_trainer(
        accelerator="cuda", devices=1, max_epochs=epochs, precision=precision, gradient_clip_val=clip
    )
    trainer.fit(task, datamodule=TinyData(batch_size=6))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {name: value.cpu() for name, value in task.state_dict().items()}, trainer.global_step, metrics


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_graph_and_eager_training_agree(method, precision):
    plain, graphed = (fit(precision, method=method, cuda_graph=on) for on in (False, True))
    assert graphed[1] == plain[1] == 18
    tolerance = 2e-3 if precision == "32-true" else 5e-2
    for name in ("train/loss", "train/loss_plain"):
        assert graphed[2][name] == pytest.approx(plain[2][name], rel=tolerance)
    for name, value in plain[0].items():
        torch.testing.assert_close(graphed[0][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mixing", ["transmix", "puzzlemix", "saliencymix"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_mixing_in_and_before_a_graph_is_as_without_one(mixing, precision):
    """With mixup beside it: the graph holds for batches of both. Stale weights in the graph would show in the loss."""
    plain, graphed = (fit(precision, mix=MixOptions(mixing), cuda_graph=on) for on in (False, True))
    tolerance = 2e-3 if precision == "32-true" else 5e-2
    assert graphed[2]["train/loss"] == pytest.approx(plain[2]["train/loss"], rel=tolerance)
    for name, value in plain[0].items():
        torch.testing.assert_close(graphed[0][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mixing", ["transmix", "puzzlemix"])
def test_mixing_with_a_compiled_network_in_a_graph(mixing):
    eager, compiled = (fit("32-true", mix=MixOptions(mixing), cuda_graph=True, compile=on) for on in (False, True))
    assert compiled[2]["train/loss"] == pytest.approx(eager[2]["train/loss"], rel=1e-2)


def test_the_step_is_captured_and_the_average_follows_it():
    seen = []

    class Watching(Classification):
        def on_train_epoch_end(self):
            seen.append((self._captured.captured, self.ema.module.head.weight.clone()))
            super().on_train_epoch_end()

    task = vit_task(Watching, cuda_graph=True, ema=0.5)
    make_trainer(accelerator="cuda", devices=1, max_epochs=4).fit(task, datamodule=TinyData())
    assert [captured for captured, _ in seen] == [False, True, True, True]
    assert not torch.equal(seen[2][1], seen[3][1])


def test_compiled_in_a_graph():
    weights, steps, metrics = fit("bf16-mixed", compile=True, cuda_graph=True, batchformer=ALL_STABLE)
    assert steps == 18
    assert metrics["train/loss_related"] == pytest.approx(metrics["train/loss_plain"], rel=0.5)
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("places", [ALL_STABLE, InsertionOptions(blocks="all")], ids=["stable", "published"])
def test_fp16_trains(places, clip):
    weights, steps, metrics = fit("16-mixed", batchformer=places, clip=clip)
    assert steps == 18
    assert metrics["train/loss"] < 2.0
    assert all(torch.isfinite(value).all() for value in weights.values())
