"""Long-tailed recognition: one backbone, one loss for imbalanced classes, with or without BatchFormer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, LDAMLoss, LogitAdjustedLoss
from batchformer.metrics.measures import LONG_TAILED
from batchformer.models import create_backbone, use_normed_classifier
from batchformer.training.classifier_task import ClassifierTask
from batchformer.training.optimizers import OptimizerOptions, build_sgd
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.schedules import ScheduleOptions, lr_factor, total_epochs_of
from batchformer.training.task import Batch


@dataclass
class LossOptions:
    """The loss and its hyperparameters.

    Args:
        name: the loss; ldam also turns the classifier into a cosine classifier.
        tau: logit_adjustment: strength of the adjustment.
        max_margin: ldam: margin of the rarest class.
        scale: ldam: factor of the cosines.
        reweight_epoch: ldam: first epoch with class weights; null means never.
        beta: ldam: of the effective number behind the class weights.
    """

    name: Literal["cross_entropy", "balanced_softmax", "logit_adjustment", "ldam"] = "balanced_softmax"
    tau: float = 1.0
    max_margin: float = 0.5
    scale: float = 30.0
    reweight_epoch: int | None = None
    beta: float = 0.9999


def build_criterion(loss: LossOptions, class_counts: Sequence[int]) -> nn.Module:
    if loss.name == "cross_entropy":
        return nn.CrossEntropyLoss()
    if loss.name == "balanced_softmax":
        return BalancedSoftmaxLoss(class_counts)
    if loss.name == "logit_adjustment":
        return LogitAdjustedLoss(class_counts, loss.tau)
    if loss.name == "ldam":
        return LDAMLoss(class_counts, loss.max_margin, loss.scale, loss.reweight_epoch, loss.beta)
    raise UserError(f"loss.name={loss.name!r} must be one of cross_entropy, balanced_softmax, logit_adjustment, ldam.")


class LongTailed(ClassifierTask):
    """Trains a classifier on imbalanced classes; logs `train/loss acc lr` and `val/accuracy many medium few loss`.

    The paper's setting (section 4.1): BatchFormer before the classifier, its learning rate a tenth of the network's,
    the loss over both streams; at test time the plain network. Accuracies are in percent and count plain rows only;
    the released code counts both streams in training.

    Args:
        backbone: resnet20, resnet32, resnet44, resnet56 (CIFAR), resnet10, or any name timm knows.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        loss: which loss.
        stream_loss: "mean" over the rows of both streams (Algorithm 1), or "released": 1.5 (L_plain + L_related), three
            times the mean, as the published code has it. With one stream (baseline, streams single or split) both are
            the loss itself.
        loss_weight: the whole loss is multiplied by this; 3 gives the baseline the scale that "released" gives to two
            streams, the control for it.
        optimizer: SGD and its learning rates.
        schedule: learning rate per epoch.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    measures = LONG_TAILED
    analyses = ("gradient_influence",)
    checkpoint_key_of_0_1 = "long_tailed"

    def __init__(
        self,
        backbone: str = "resnet32",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        loss: LossOptions = LossOptions(),
        stream_loss: Literal["mean", "released"] = "mean",
        loss_weight: float = 1.0,
        optimizer: OptimizerOptions = OptimizerOptions(),
        schedule: ScheduleOptions = ScheduleOptions(),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, stream_loss, **options)
        self.module_options = batchformer = as_options(BatchFormerOptions, batchformer)
        self.loss_options = loss = as_options(LossOptions, loss)
        self.optimizer_options = optimizer = as_options(OptimizerOptions, optimizer)
        self.schedule_options = schedule = as_options(ScheduleOptions, schedule)
        self.loss_weight = loss_weight
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        net = create_backbone(self.backbone, len(data.classes), **self.backbone_args)
        return use_normed_classifier(net) if self.normed_classifier else net

    @property
    def normed_classifier(self) -> bool:
        return self.loss_options.name == "ldam"

    def attach_to(self, net: nn.Module) -> Any:
        return bf.attach(net, **asdict(self.module_options))

    def build_criterion(self, data: DataInfo) -> nn.Module:
        return build_criterion(self.loss_options, data.class_counts)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_sgd(self.optimizer_options, self.net.parameters(), self.module_parameters, self.fused)

    # ---- training

    def step(self, batch: Batch) -> dict[str, Tensor]:
        logits = self(batch["images"])
        loss = self.loss_weight * self.stream_criterion(logits, batch["labels"])
        with torch.no_grad():
            targets = bf.repeat_targets(batch["labels"], logits)
            if self.attachment is not None:
                logits, targets = self.attachment.plain((logits, targets))
            right = logits.argmax(1) == targets
        return {"loss": loss, "acc": 100.0 * right}

    def begin_epoch(self) -> None:
        if isinstance(self.criterion, LDAMLoss):
            self.criterion.set_epoch(self.current_epoch)
        super().begin_epoch()

    def check_trainer(self) -> None:
        self.schedule_options.check_end(self.trainer)

    def learning_rate(self) -> float:
        epochs = total_epochs_of(self.trainer)
        return self.optimizer_options.lr * lr_factor(self.schedule_options, self.current_epoch, epochs)

    # ---- evaluation

    def test_logits(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Logits of the plain network, nothing added; cosines are scaled as in training."""
        logits = super().test_logits(images)
        return logits * self.criterion.scale if isinstance(self.criterion, LDAMLoss) else logits
