"""Long-tailed recognition: one backbone, one loss for imbalanced classes, with or without BatchFormer."""

from dataclasses import asdict
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import batchformer as bf
from batchformer.losses import LDAMLoss
from batchformer.models import create_backbone, use_normed_classifier
from batchformer.tasks.long_tailed.criterion import build_criterion
from batchformer.training.labelled_task import LabelledTask
from batchformer.training.optimizer import build_sgd
from batchformer.training.options import BatchFormerOptions, LossOptions, OptimizerOptions, ScheduleOptions, as_options
from batchformer.training.schedule import check_schedule, lr_factor, total_epochs_of


class LongTailed(LabelledTask):
    """Trains a classifier on imbalanced classes; logs `train/loss train/acc lr` and `val/all many medium few loss`.

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
        seed: decides initial weights and dropout.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training; elsewhere no difference.
        cuda_graph: on a CUDA device, run each training step as one CUDA graph; elsewhere no difference.
    """

    checkpoint_key = "long_tailed"

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
        seed: int = 0,
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__(backbone, backbone_args, method, stream_loss, seed, channels_last, compile, cuda_graph)
        self.module_options = as_options(BatchFormerOptions, batchformer)
        self.loss_options = as_options(LossOptions, loss)
        self.optimizer_options = as_options(OptimizerOptions, optimizer)
        self.optimizer_options.check()
        self.schedule_options = as_options(ScheduleOptions, schedule)
        self.loss_weight = loss_weight
        # plain dicts: a checkpoint must load with weights_only=True
        self.save_hyperparameters(
            {
                "backbone": backbone,
                "backbone_args": self.backbone_args,
                "method": method,
                "batchformer": asdict(self.module_options),
                "loss": asdict(self.loss_options),
                "stream_loss": stream_loss,
                "loss_weight": loss_weight,
                "optimizer": asdict(self.optimizer_options),
                "schedule": asdict(self.schedule_options),
                "seed": seed,
                "channels_last": channels_last,
                "compile": compile,
                "cuda_graph": cuda_graph,
            }
        )

    # ---- building

    def plain_net(self, num_classes: int) -> nn.Module:
        net = create_backbone(self.backbone, num_classes, **self.backbone_args)
        return use_normed_classifier(net) if self.normed_classifier else net

    @property
    def normed_classifier(self) -> bool:
        return self.loss_options.name == "ldam"

    def _attach(self, net: nn.Module) -> Any:
        return bf.attach(net, **asdict(self.module_options))

    def _build_criterion(self) -> nn.Module:
        return build_criterion(self.loss_options, self.class_counts)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [] if self.attachment is None else self.attachment.parameters()
        return build_sgd(self.optimizer_options, self.net.parameters(), own, self._fused)

    # ---- training

    def _loss(self, images: Float[Tensor, "batch channels height width"], labels: Int[Tensor, " batch"]) -> Tensor:
        logits = self(images)
        loss = self.loss_weight * self.stream_criterion(logits, labels)
        with torch.no_grad():
            targets = bf.repeat_targets(labels, logits)
            if self.attachment is not None:
                logits, targets = self.attachment.plain((logits, targets))
            assert self._meter is not None
            self._meter.update(loss, logits.argmax(1) == targets)
        return loss

    def _begin_epoch(self) -> None:
        if isinstance(self.criterion, LDAMLoss):
            self.criterion.set_epoch(self.current_epoch)
        super()._begin_epoch()

    def _check_schedule(self) -> None:
        check_schedule(self.schedule_options, total_epochs_of(self.trainer))

    def _lr(self) -> float:
        return self.optimizer_options.lr * lr_factor(
            self.schedule_options, self.current_epoch, total_epochs_of(self.trainer)
        )

    # ---- evaluation

    def _test_logits(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Logits of the plain network, nothing added; cosines are scaled as in training."""
        logits = super()._test_logits(images)
        return logits * self.criterion.scale if isinstance(self.criterion, LDAMLoss) else logits
