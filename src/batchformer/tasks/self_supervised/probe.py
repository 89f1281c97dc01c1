"""Linear evaluation: a linear classifier on a frozen backbone, by the protocols of MoCo-v2, MoCo-v3 and MAE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.data.loading.order import Sampler, generator
from batchformer.errors import UserError
from batchformer.metrics import TopAccuracy
from batchformer.metrics.measures import CLASSIFICATION
from batchformer.models import create_backbone
from batchformer.training.classifier_task import ClassifierTask
from batchformer.training.optimizers import refuse_negative_rates, scaled_lr
from batchformer.training.options import as_options, plain_values
from batchformer.training.schedules import ScheduleOptions
from batchformer.training.task import Batch
from batchformer.training.weights import NETWORK, load_weights, read_weights, without_outer_name


@dataclass
class ProbeOptimizerOptions:
    """The optimizer of the classifier.

    Args:
        name: "sgd" with momentum (MoCo), or "lars" (MAE).
        lr: peak learning rate, for a batch of lr_per. MoCo-v2: 30; MoCo-v3 and MAE: 0.1.
        lr_per: lr is multiplied by the images of a step, over all devices, and divided by this; null: taken as it is.
        momentum: momentum.
        weight_decay: of the classifier; none as published.
    """

    name: Literal["sgd", "lars"] = "sgd"
    lr: float = 0.1
    lr_per: int | None = 256
    momentum: float = 0.9
    weight_decay: float = 0.0

    def check(self) -> None:
        refuse_negative_rates(self)


class LinearProbe(ClassifierTask):
    """Trains a linear classifier on frozen features; logs `train/loss acc lr` and `val/top1 top5 loss`.

    BatchFormer, Table 8 and Fig. 4; V2, Table 10. The backbone is in eval mode and gets no gradient. Its weights come
    from a pre-training run, a file or timm: `--init-from RUN`, or `backbone_args: {pretrained: true}`.

    Args:
        backbone: any name timm knows.
        backbone_args: passed on to the backbone.
        batch_norm: normalise the features by a BatchNorm without parameters, as MAE does.
        labels: the part of the training images whose labels are used, drawn by class and seed: 1 is all of them.
        optimizer: of the classifier.
        schedule: learning rate per epoch.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    shardable = True

    measures = CLASSIFICATION
    main_picture: ClassVar[Mapping[str, Any]] = {"curve": "top1"}

    def __init__(
        self,
        backbone: str = "resnet50",
        backbone_args: dict[str, Any] | None = None,
        batch_norm: bool = False,
        labels: float = 1.0,
        optimizer: ProbeOptimizerOptions = ProbeOptimizerOptions(),
        schedule: ScheduleOptions = ScheduleOptions(),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, "baseline", "mean", **options)
        self.optimizer_options = optimizer = as_options(ProbeOptimizerOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(ScheduleOptions, schedule, "schedule")
        if not 0 < labels <= 1:
            raise UserError(f"model.labels={labels} is the part of the labels that is used: above 0, at most 1.")
        self.batch_norm, self.labels = batch_norm, labels
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        net = create_backbone(self.backbone, len(data.classes), **self.backbone_args)
        paths = bf.find_classifiers(net)
        if len(paths) != 1 or not isinstance(classifier := net.get_submodule(paths[0]), nn.Linear):
            raise UserError(f"a linear probe needs a backbone with one linear classifier; {self.backbone} has none.")
        nn.init.normal_(classifier.weight, std=0.01)
        nn.init.zeros_(classifier.bias)
        if self.batch_norm:
            parent, _, name = paths[0].rpartition(".")
            norm = nn.BatchNorm1d(classifier.in_features, affine=False, eps=1e-6)
            setattr(net.get_submodule(parent), name, nn.Sequential(norm, classifier))  # other keys: not exported
        self._classifier_path = paths[0]
        return net

    def attach_to(self, net: nn.Module) -> Any:
        raise AssertionError("a probe has no module")

    def build(self, data: DataInfo) -> None:
        super().build(data)
        self.net.requires_grad_(False)
        self.classifier.requires_grad_(True)
        self.train(self.training)

    @property
    def classifier(self) -> nn.Module:
        return self.net.get_submodule(self._classifier_path)

    def build_criterion(self, data: DataInfo) -> nn.Module:
        return nn.CrossEntropyLoss()

    def build_metric(self, data: DataInfo) -> TopAccuracy:
        return TopAccuracy(data.class_counts)

    def load_part(self, part: str, source: str) -> None:
        """Load the backbone, also that of a pre-training run; the classifier is always trained anew."""
        weights = without_outer_name(read_weights(source), self.net.state_dict())
        own = {f"{self._classifier_path}.{key}": value for key, value in self.classifier.state_dict().items()}
        load_weights(self.net, NETWORK if part == "backbone" else part, source, False, {**weights, **own})

    def train(self, mode: bool = True) -> "LinearProbe":
        super().train(mode)
        if hasattr(self, "net"):
            self.net.eval()
            self.classifier.train(mode)
        return self

    def sampler(self, data: Any) -> Sampler | None:
        if self.labels == 1:
            return None
        labels = np.asarray(data.train_labels)
        rows = labelled_part(labels, self.labels, self.seed)
        return lambda epoch: generator(self.seed, epoch, "labelled").permutation(rows)

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        if self.batch_norm:
            raise UserError("this probe has a BatchNorm in its classifier, which the stock network has not.")
        return super().export_notes()

    # ---- training

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options, lr = self.optimizer_options, scaled_lr(self.optimizer_options, self.trainer)
        parameters = list(self.classifier.parameters())
        if options.name == "sgd":
            keywords: dict[str, Any] = {"momentum": options.momentum, "weight_decay": options.weight_decay}
            return torch.optim.SGD(parameters, lr, fused=self.fused or None, **keywords)
        from batchformer.training.lars import Lars

        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "always_adapt": True},
            {"params": [p for p in parameters if p.ndim < 2], "always_adapt": False, "weight_decay": 0.0},
        ]
        return Lars(groups, lr, momentum=options.momentum, weight_decay=options.weight_decay)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch["images"])
        with torch.no_grad():
            right = 100.0 * (logits.argmax(1) == batch["labels"])
        return {"loss": self.criterion(logits.float(), batch["labels"]), "acc": right}


def labelled_part(labels: np.ndarray, part: float, seed: int) -> np.ndarray:
    """Numbers of the samples whose labels are used: of each class this part, at least one, drawn by the seed."""
    chosen = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(1, round(part * len(members)))
        chosen.append(generator(seed, int(label), "labels").permutation(members)[:count])
    return np.sort(np.concatenate(chosen))
