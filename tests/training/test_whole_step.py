"""The captured step: on the CPU uncaptured against Lightning's own optimisation; on a CUDA device captured."""

import pytest
import torch

from batchformer.errors import UserError
from batchformer.tasks import LongTailed, LossOptions, OptimizerOptions
from batchformer.training.captured_step import CapturedStep

from ..tasks.conftest import TinyData, make_trainer
from ..tasks.whole_step import WholeStep


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("batch_size", [8, 6])  # 6: the last batch is smaller
def test_the_whole_step_ends_with_the_bits_of_the_ordinary_one(precision, batch_size):
    ends = []
    for kind in (LongTailed, WholeStep):
        task = kind("resnet20")
        trainer = make_trainer(max_epochs=2, precision=precision)
        trainer.fit(task, datamodule=TinyData(batch_size))
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        ends.append((task.net.state_dict(), trainer.global_step, metrics))
    (ordinary, steps, metrics), (whole, whole_steps, whole_metrics) = ends
    assert whole_steps == steps
    assert whole_metrics == metrics
    for name, value in ordinary.items():
        assert torch.equal(whole[name], value), name


def test_cuda_graph_on_the_cpu_is_the_ordinary_path():
    task = LongTailed("resnet20", cuda_graph=True)
    make_trainer(max_epochs=1, limit_val_batches=0).fit(task, datamodule=TinyData())
    assert task.automatic_optimization


@pytest.mark.parametrize("arguments", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_what_a_graph_cannot_do_is_refused(arguments):
    with pytest.raises(UserError, match=next(iter(arguments))):
        make_trainer(max_epochs=1, **arguments).fit(LongTailed("resnet20", cuda_graph=True), datamodule=TinyData())


def test_only_a_batch_like_the_first_is_captured_and_replayed(monkeypatch):
    """Which way each batch takes; no device is needed to see that."""

    class Graph:
        def replay(self) -> None:
            taken.append("replayed")

    class Recorded(CapturedStep):
        def _on_side_stream(self, batch):
            taken.append("warm")

        def _capture(self, leaves, structure):
            taken.append("captured")
            self._graph, self._inputs = Graph(), leaves

    taken: list[str] = []
    step = Recorded(lambda batch: taken.append("as it is"), warmup=2)
    step(torch.ones(5))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    for size in (5, 4, 5, 5, 4, 5):
        step(torch.ones(size))
    assert taken == ["as it is", "warm", "as it is", "warm", "captured", "replayed", "as it is", "replayed"]


@pytest.mark.gpu
class TestOnCuda:
    @pytest.fixture(autouse=True)
    def one_algorithm(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    @staticmethod
    def fit(cuda_graph: bool, method: str = "batchformer", precision: str = "32-true", **arguments) -> tuple:
        task = LongTailed(
            "resnet20", method=method, cuda_graph=cuda_graph, optimizer=OptimizerOptions(lr=0.02), **arguments
        )
        trainer = make_trainer(accelerator="cuda", devices=1, max_epochs=6, precision=precision)
        trainer.fit(task, datamodule=TinyData(batch_size=6))
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return {name: value.cpu() for name, value in task.net.state_dict().items()}, trainer.global_step, metrics

    @pytest.mark.parametrize("method", ["baseline", "batchformer"])
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    @pytest.mark.parametrize("loss", ["balanced_softmax", "ldam"])
    def test_graph_and_eager_training_agree(self, method, precision, loss):
        options = LossOptions(loss, reweight_epoch=3)
        plain, graphed = (
            self.fit(on, method, precision, loss=options, channels_last=precision != "32-true") for on in (False, True)
        )
        assert graphed[1] == plain[1] == 18
        tolerance = 1e-3 if precision == "32-true" else 5e-2
        for name, value in plain[0].items():
            torch.testing.assert_close(graphed[0][name], value, rtol=tolerance, atol=tolerance)
        assert graphed[2]["train/loss"] == pytest.approx(plain[2]["train/loss"], rel=tolerance)

    def test_the_task_does_capture(self):
        seen = []

        class Watching(LongTailed):
            def on_train_epoch_end(self):
                seen.append(self._captured.captured)
                super().on_train_epoch_end()

        task = Watching("resnet20", cuda_graph=True)
        trainer = make_trainer(accelerator="cuda", devices=1, max_epochs=3)
        trainer.fit(task, datamodule=TinyData())
        assert seen == [False, True, True]
        assert not task.automatic_optimization

    def test_compiled_training_in_a_graph(self):
        weights, steps, _ = self.fit(True, compile=True)
        assert steps == 18
        assert all(torch.isfinite(value).all() for value in weights.values())

    def test_replays_draw_the_dropout_of_their_seed(self):
        images, labels = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")

        def step(batch):
            return torch.nn.functional.dropout(batch["images"], 0.5) + batch["labels"]

        graphed, drawn = CapturedStep(step, warmup=1), []
        for seed in (1, 2, 3, 2):
            torch.manual_seed(seed)
            drawn.append(graphed({"images": images, "labels": labels}).clone())
        assert graphed.captured
        assert torch.equal(drawn[1], drawn[3])
        assert not torch.equal(drawn[1], drawn[2])
        for seed, values in zip((1, 2, 3), drawn, strict=False):
            torch.manual_seed(seed)
            assert torch.equal(step({"images": images, "labels": labels}), values)

    def test_replays_see_new_inputs_and_other_shapes_run_as_they_are(self):
        graphed = CapturedStep(lambda batch: 2 * batch["images"] + batch["nested"][0], warmup=1)
        for value in (1.0, 2.0, 3.0, 4.0):
            images = torch.full((5,), value, device="cuda")
            assert graphed({"images": images, "nested": (images,)}).tolist() == [3 * value] * 5
        assert graphed({"images": images[:2], "nested": (images[:2],)}).tolist() == [12.0, 12.0]
