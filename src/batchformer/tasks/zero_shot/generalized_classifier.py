"""The classifier of all classes, which every method ends in: its training, its accuracies, and what the page shows."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchformer.data import AttributeData
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError
from batchformer.metrics import ShotAccuracy
from batchformer.metrics.gather import gathered, process_and_count
from batchformer.metrics.measures import GENERALIZED
from batchformer.models.generalized import ZeroShotNet, linear
from batchformer.tasks.zero_shot.generalized_options import SoftmaxOptions
from batchformer.training.captured_step import CapturedStep
from batchformer.training.reseed import reseed
from batchformer.training.task import Batch, Task

SHOWN_CLASSES, SHOWN_ROWS = 3, 40  # on the plane of real and generated features
_PURPOSE = 1  # of the random numbers drawn here, apart from those of training steps


class SeenAndUnseen(Task):
    """Base class: before every evaluation a classifier of all classes is trained; accuracies are means over classes.

    A subclass builds its networks (`build`, which calls this one first) and trains the classifier (`fit_classifier`).
    """

    measures = GENERALIZED
    main_picture: ClassVar[Mapping[str, Any]] = {"bars": ["unseen", "seen", "harmonic"]}
    data_class: ClassVar[type] = AttributeData
    in_checkpoint: ClassVar[Mapping[str, str]] = {
        "best": "_best", "history": "_history", "plane": "_plane", "fitted_at": "_fitted_at"
    }  # fmt: skip
    attributes: Tensor
    seen: Tensor
    embedding_dim = 0  # that the classifier reads; 0: the scaled features

    def __init__(self, oracle_of: int, seed: int, cuda_graph: bool) -> None:
        super().__init__(seed, cuda_graph)
        self.oracle_of = oracle_of  # epochs of the classifier that the best one on the test set is chosen from; 0: none
        self._fitted_at: int | None = None  # the step of the weights that the classifier was trained for
        self._loaded_step = 0
        self._kept: list[tuple[Tensor, Tensor]] = []  # of the classifier being evaluated, after each of its epochs
        self._history: list[list[float]] = []  # epochs done, unseen, seen, harmonic
        self._best: dict[str, float] = {}
        self._real: dict[int, list[Tensor]] = {}
        self._generated: dict[int, Tensor] = {}
        self._plane: dict[str, Any] = {}

    @abstractmethod
    def fit_classifier(self, features: Tensor, labels: Tensor) -> None:
        """Set the weights of `net.classifier` from the scaled training features and their labels."""

    # ---- building

    def build(self, data: DataInfo) -> None:
        if "attributes" not in data:
            raise UserError(
                f"{type(self).__name__} needs features with attributes of their classes: xlsa17's files, an npz file "
                "(batchformer features IMAGES makes one) or the embedded digits-numbers."
            )
        self.register_buffer("attributes", torch.tensor(data.attributes), persistent=False)
        self.register_buffer("seen", torch.tensor(data.seen), persistent=False)
        self.net = self.make_network(data)
        self.net.scale_by(torch.tensor(data.feature_low), torch.tensor(data.feature_high))
        counts = data.class_counts
        self.accuracy, self.among_unseen = ShotAccuracy(counts), ShotAccuracy(counts)
        self.accuracies = nn.ModuleList(ShotAccuracy(counts) for _ in range(self.oracle_of))

    def make_network(self, data: DataInfo) -> ZeroShotNet:
        return ZeroShotNet(data.feature_dim, len(data.classes), self.embedding_dim)

    def set_data(self, data: DataInfo) -> None:
        if data.feature_dim != self.data_info.feature_dim:
            raise UserError(
                f"this task was trained on features of {self.data_info.feature_dim} numbers, the data have "
                f"{data.feature_dim}: extract them with the same network."
            )

    def training_set(self) -> tuple[Tensor, Tensor]:
        """All training features, scaled, and their labels, the same in all processes."""
        batches = [as_batch(b) for b in self.trainer.datamodule.evaluation_loader("train")]  # type: ignore[attr-defined]
        own = [torch.cat([b[name] for b in batches]) for name in ("features", "labels")]
        if process_and_count()[1] > 1:
            own = [torch.cat(parts) for parts in zip(*gathered([rows.cpu() for rows in own]), strict=True)]
        features, labels = (rows.to(self.device) for rows in own)
        return self.net.scaled(features), labels

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor]) -> None:
        """Take over what process 0 has trained: the same on the CPU, but on GPUs sums have no fixed order."""
        if process_and_count()[1] > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, 0)

    def train_classifier(
        self, features: Tensor, labels: Tensor, made: Tensor, made_labels: Tensor, options: SoftmaxOptions
    ) -> None:
        """Train the classifier on the embedding of real features of seen classes and of generated unseen ones."""
        shown = made_labels.unique()[:SHOWN_CLASSES].tolist()
        self._generated = {label: made[made_labels == label][:SHOWN_ROWS] for label in shown}
        rows = self.net.embedding(torch.cat([features, made]))
        every = torch.cat([labels, made_labels])
        self._kept = fit_softmax(self.net.classifier, rows, every, options, keep=self.oracle_of > 0)

    # ---- evaluation

    def on_validation_start(self) -> None:
        super().on_validation_start()
        step = self._loaded_step if self.only_tested else self.trainer.global_step
        if self.only_tested and self._fitted_at == step:  # the classifier that result.json is about
            return
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be trained on
            features, labels = self.training_set()
            reseed(self.seed, _PURPOSE, step)
            self.fit_classifier(features, labels)
            self.share([*self.net.classifier.parameters(), *(tensor for kept in self._kept for tensor in kept)])
        self._fitted_at = step

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        with torch.autocast(self.device.type, enabled=False):  # as the classifier was trained
            features, labels = self.net.scaled(batch["features"]), batch["labels"]
            rows = self.net.embedding(features)
            logits = self.net.classifier(rows)
            for metric, (weight, bias) in zip(self.accuracies, self._kept, strict=False):
                metric.update(F.linear(rows, weight, bias), labels)  # type: ignore[operator]
        self.accuracy.update(logits, labels)
        self.among_unseen.update(logits.masked_fill(self.seen, float("-inf")), labels)
        for label in self._generated:
            self._real.setdefault(label, []).append(features[labels == label])
        return {"loss": F.cross_entropy(logits, labels)}

    def results(self, name: str) -> dict[str, float]:
        metrics: list[Any] = [self.accuracy, self.among_unseen, *self.accuracies]
        for metric in metrics:
            metric.sync()
        self.per_class = self.accuracy.per_class().tolist()
        found = self._means(self.accuracy)
        found["zero_shot"] = float(self.among_unseen.per_class()[~self.seen].nanmean())
        if not (self.trainer.sanity_checking or self.only_tested):
            epoch = self.trainer.current_epoch + (self.trainer.state.fn == "fit")
            self._history.append([float(epoch), found["unseen"], found["seen"], found["harmonic"]])
            for metric in self.accuracies:
                again = self._means(metric)
                if again["harmonic"] > self._best.get("harmonic_oracle", -1.0):
                    self._best = {f"{key}_oracle": value for key, value in again.items()}
            self._plane = self._make_plane() or self._plane
        for metric in metrics:
            metric.reset()
        self._kept, self._real, self._generated = [], {}, {}
        return {**found, **self._best}

    def _means(self, metric: Any) -> dict[str, float]:
        """The means over unseen and over seen classes, in percent, and their harmonic mean."""
        each = metric.per_class()
        unseen, seen = (float(each[chosen].nanmean()) for chosen in (~self.seen, self.seen))
        return {"unseen": unseen, "seen": seen, "harmonic": 2 * unseen * seen / max(unseen + seen, 1e-12)}

    def _make_plane(self) -> dict[str, Any]:
        """Real and generated features of some unseen classes, on the first two principal components of the real."""
        real = {label: torch.cat(rows)[:SHOWN_ROWS].double() for label, rows in self._real.items()}
        if not real or sum(map(len, real.values())) < 3:
            return {}
        every = torch.cat(list(real.values()))
        _, _, axes = torch.linalg.svd(every - every.mean(0), full_matrices=False)
        axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()  # one of both directions
        groups = {}
        for label in real:
            for kind, rows in (("real", real[label]), ("generated", self._generated[label].double())):
                groups[f"{self.data_info.classes[label]}, {kind}"] = ((rows - every.mean(0)) @ axes.T).tolist()
        rounded = {
            group: [[round(value, 3) for value in point] for point in points] for group, points in groups.items()
        }
        return {"groups": rounded, "xlabel": "first component", "ylabel": "second component"}

    def sections(self) -> list[dict[str, Any]]:
        shown = []
        if len(self._history) > 1:
            epochs, *values = (list(column) for column in zip(*self._history, strict=True))
            lines = dict(zip(("unseen", "seen", "harmonic mean"), values, strict=True))
            series = {"x": epochs, "lines": lines, "xlabel": "epoch", "ylabel": "accuracy, %"}
            text = "Each a mean over classes, on the test set; the last epoch counts."
            shown.append({"title": "Seen and unseen classes along the training", "text": text, "series": series})
        if self._plane:
            text = "Test features and generated ones, on the two directions in which the former vary most."
            shown.append(
                {"title": "Real and generated features of unseen classes", "text": text, "points": self._plane}
            )
        return shown

    # ---- checkpoints and export

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._loaded_step = checkpoint["global_step"]

    def plain_network(self) -> nn.Module:
        return self.make_network(self.data_info)

    def trained_network(self, averaged: bool = False) -> nn.Module:
        if averaged:
            raise UserError("this task keeps no average of its weights: leave out --ema.")
        if self._fitted_at is None or (self.only_tested and self._fitted_at != self._loaded_step):
            raise UserError("the classifier of this checkpoint is not trained yet: resume the run and let it finish.")
        return self.net

    def export_inputs(self, data: Any) -> tuple[Any, ...]:
        return (torch.rand(4, self.data_info.feature_dim, generator=torch.Generator().manual_seed(0)),)

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        sizes = self.data_info.feature_dim, len(self.data_info.classes), self.embedding_dim
        return {}, f"ZeroShotNet{sizes}", "from batchformer.models.generalized import ZeroShotNet"


def fit_softmax(
    layer: nn.Linear, features: Tensor, labels: Tensor, options: SoftmaxOptions, keep: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Train a linear layer from new initial weights; with `keep` weights and biases after every epoch are returned.

    As released for f-CLSWGAN and CE-GZSL: weights N(0, 0.02), Adam with betas 0.5 and 0.999, batches of
    `options.batch_size`. Here an epoch leaves out the rows that do not fill a batch; there they begin the next one. On
    a CUDA device a step is a CUDA graph. Random numbers are those of the default generators, which the caller seeds.
    """
    size = min(options.batch_size or options.synthetic, len(features))
    fresh = linear(layer.in_features, layer.out_features)  # on the CPU: the same weights on every device
    kept = []
    with torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            layer.weight.copy_(fresh.weight)
            layer.bias.copy_(fresh.bias)
        on_cuda = features.is_cuda
        adam = torch.optim.Adam(
            [layer.weight, layer.bias], options.lr, betas=(0.5, 0.999), capturable=on_cuda, fused=on_cuda or None
        )

        def step(batch: dict[str, Tensor]) -> None:
            adam.zero_grad(set_to_none=True)
            with torch.autocast(features.device.type, enabled=False):
                F.cross_entropy(layer(batch["features"]), batch["labels"]).backward()
            adam.step()

        captured = CapturedStep(step)
        for _ in range(options.epochs):
            order = torch.randperm(len(features)).to(features.device)
            for chosen in order[: len(order) // size * size].split(size):
                captured({"features": features[chosen], "labels": labels[chosen]})
            if keep:
                kept.append((layer.weight.detach().clone(), layer.bias.detach().clone()))
        adam.zero_grad(set_to_none=True)
    return kept
