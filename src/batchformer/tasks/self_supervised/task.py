"""Base class of pre-training: no labels in training, features evaluated by neighbours and a linear classifier."""

import json
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.data import ClassificationData
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError
from batchformer.metrics.features import knn_scores, linear_scores
from batchformer.metrics.gather import gathered
from batchformer.metrics.measures import SELF_SUPERVISED, Measure, primary_of
from batchformer.models import create_backbone
from batchformer.models.create import creation_code
from batchformer.training.network_task import NetworkTask
from batchformer.training.options import as_options
from batchformer.training.task import Batch

_COLLAPSED = 0.1  # of the deviation that directions drawn at random have
_CURVE = "Of the plain backbone on test images, at every validation."
_FIRST_STEPS = 500  # embeddings of random weights are nearly the same, too


@dataclass
class JudgeOptions:
    """How the features are evaluated whenever the run is validated; labels are read here and nowhere else.

    Args:
        neighbours: k of the weighted k-NN classifier; 0 leaves it out.
        temperature: of its weights.
        linear: also fit a linear classifier to the features of unaugmented training images.
        images: use at most so many training images, evenly spaced over the set; null: all.
    """

    neighbours: int = 200
    temperature: float = 0.1
    linear: bool = True
    images: int | None = None

    def check(self) -> None:
        if self.neighbours < 0 or not self.temperature > 0 or (self.images is not None and self.images < 1):
            raise UserError(
                f"model.judge: neighbours={self.neighbours} must be 0 or more, temperature={self.temperature} above 0, "
                f"and images={self.images} 1 or more, or null."
            )
        if not (self.neighbours or self.linear):
            raise UserError("model.judge evaluates nothing: set neighbours above 0, or linear to true.")


class Pretraining(NetworkTask):
    """Base class: training batches have no labels, and validation evaluates the features of the plain backbone.

    A subclass gives, besides what `NetworkTask` requires, `features(images)`, `encoder(net)` and `step`.
    """

    shardable = True

    measures: Sequence[Measure] = SELF_SUPERVISED
    main_picture: ClassVar[Mapping[str, Any]] = {"curve": "knn"}
    data_class: ClassVar[type] = ClassificationData
    in_checkpoint: ClassVar[Mapping[str, str]] = {"curve": "_curve"}

    def __init__(
        self,
        backbone: str,
        backbone_args: dict[str, Any] | None,
        method: Any,
        judge: JudgeOptions,
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, "mean", **options)
        self.judge = as_options(JudgeOptions, judge, "judge")
        self._held: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._known: tuple[Tensor, Tensor] | None = None
        self._warned = False
        self._curve: dict[int, dict[str, float]] = {}  # by epoch, what the features were worth

    # ---- what a subclass gives

    @abstractmethod
    def features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Features of the plain backbone."""

    @abstractmethod
    def encoder(self, net: nn.Module) -> nn.Module:
        """The part of the network that is exported: the backbone."""

    def plain_backbone(self, data: DataInfo) -> nn.Module:
        return create_backbone(self.backbone, 0, **self.backbone_args)

    # ---- training

    def prepare(self, batch: Batch, batch_idx: int) -> Batch:
        """The batch without its labels, so that no loss can use them by accident."""
        return {name: value for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def spread_of(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, ""]:
        """Mean deviation of the normalised embeddings over the batch, as a part of that of random directions.

        About 1 where the directions are those of random vectors, 0 where all embeddings are the same: a collapse.
        """
        unit = F.normalize(embeddings.float(), dim=1)
        return unit.std(0).mean() * unit.shape[1] ** 0.5

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        spread = self.trainer.callback_metrics.get("train/spread")
        late = self.trainer.global_step >= _FIRST_STEPS
        if spread is not None and spread < _COLLAPSED and late and not self._warned:
            self._warned = True
            warnings.warn(
                f"the embeddings of a batch are nearly the same (deviation {float(spread):.3f} of that of random "
                "directions): the representation has collapsed; lower the learning rate, or check the augmentation.",
                UserWarning,
                stacklevel=1,
            )

    # ---- evaluation

    def on_validation_epoch_start(self) -> None:
        self._remember_training_set()

    def on_test_epoch_start(self) -> None:
        self._remember_training_set()

    def _remember_training_set(self) -> None:
        """Features and labels of the training images, unaugmented, of all processes."""
        if self.trainer.sanity_checking:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self._known = self._gather(self._features_of(data.spaced_train_loader(self.judge.images)))

    def _features_of(self, loader: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
        trainer, precision = self.trainer, self.trainer.precision_plugin
        found: list[tuple[Tensor, Tensor]] = []
        for batch in loader:
            batch = as_batch(trainer.strategy.batch_to_device(precision.convert_input(batch)))
            with precision.val_step_context(), torch.no_grad():
                found.append((self.features(batch["images"]).float(), batch["labels"]))
        return found

    def _gather(self, held: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        features, labels = (torch.cat(part) for part in zip(*held, strict=True))
        if self.trainer.world_size == 1:
            return features, labels
        parts = gathered((features.cpu(), labels.cpu()))
        return tuple(torch.cat(part).to(self.device) for part in zip(*parts, strict=True))  # type: ignore[return-value]

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor] | None:
        self._held.setdefault(name, []).append((self.features(batch["images"]).float(), batch["labels"]))
        return None

    def results(self, name: str) -> dict[str, Tensor]:
        held = self._held.pop(name, [])
        if self._known is None or not held:
            return {}
        features, labels = self._gather(held)
        classes, (known, known_labels) = len(self.data_info.classes), self._known
        if name == self.evaluation_sets[0]:
            self._known = None
        scores = {}
        if self.judge.neighbours:
            options = self.judge.neighbours, self.judge.temperature
            scores["knn"] = knn_scores(features, known, known_labels, classes, *options)
        if self.judge.linear:
            scores["linear"] = linear_scores(features, known, known_labels, classes)
        right = {key: 100 * (each.argmax(1) == labels).float() for key, each in scores.items()}
        found = {key: each.mean() for key, each in right.items()}
        decisive = right.get(primary_of(self.measures).key, next(iter(right.values())))
        sums = torch.zeros(classes, device=labels.device).index_add(0, labels, decisive)
        self.per_class = (sums / torch.bincount(labels, minlength=classes)).tolist()
        if name == self.evaluation_sets[0] and self.trainer.state.fn == "fit":
            self._curve[self.current_epoch + 1] = {key: float(value) for key, value in found.items()}
        return found

    # ---- the page

    def sections(self) -> list[dict[str, Any]]:
        """The curve of what the other measures say (the primary one is drawn for every task): the paper's Fig. 4."""
        return [*(section for one in self.measures if (section := self._curve_of(one))), *super().sections()]

    def _curve_of(self, measure: Measure) -> dict[str, Any] | None:
        epochs = [epoch for epoch, values in self._curve.items() if measure.key in values]
        if measure.primary or len(epochs) < 2:
            return None
        series = {
            "x": epochs,
            "lines": {measure.label: [self._curve[epoch][measure.key] for epoch in epochs]},
            "xlabel": "epoch of the pre-training",
            "ylabel": measure.title,
            "together": True,
        }
        name = measure.words
        return {"title": f"{name[0].upper()}{name[1:]} while training", "text": _CURVE, "series": series}

    # ---- export

    def plain_network(self) -> nn.Module:
        return self.plain_backbone(self.data_info)

    def trained_network(self, averaged: bool = False) -> nn.Module:
        if averaged:
            return super().trained_network(averaged)
        return self.encoder(self.net)

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        metadata = {"backbone": self.backbone, "backbone_args": json.dumps(self.backbone_args)}
        return metadata, *creation_code(self.backbone, 0, self.backbone_args)
