"""The common interface of long-tailed methods, and the plain method: a single network with one loss."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import EpochLoader
from batchformer.data.loading.order import Sampler, class_order
from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, LDAMLoss, LogitAdjustedLoss
from batchformer.metrics.measures import LONG_TAILED, Measure
from batchformer.models import create_backbone, use_normed_classifier
from batchformer.training.optimizers import build_sgd
from batchformer.training.task import Batch
from batchformer.training.weights import load_weights

if TYPE_CHECKING:
    from batchformer.tasks.long_tailed.task import LongTailed

Sampling = Literal["instance", "class_balanced", "square_root"]
#: a class of n training images is drawn in proportion to n to this power
POWERS: dict[str, float] = {"instance": 1.0, "square_root": 0.5, "class_balanced": 0.0}


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


def build_criterion(loss: LossOptions, class_counts: Sequence[int], reduction: str = "mean") -> nn.Module:
    """The loss; with `reduction="none"` that of each row, which LDAM does not give."""
    if loss.name == "cross_entropy":
        return nn.CrossEntropyLoss(reduction=reduction)
    if loss.name == "balanced_softmax":
        return BalancedSoftmaxLoss(class_counts, reduction)
    if loss.name == "logit_adjustment":
        return LogitAdjustedLoss(class_counts, loss.tau, reduction)
    if loss.name == "ldam" and reduction == "mean":
        return LDAMLoss(class_counts, loss.max_margin, loss.scale, loss.reweight_epoch, loss.beta)
    raise UserError(f"loss.name={loss.name!r} must be one of cross_entropy, balanced_softmax, logit_adjustment, ldam.")


class Algorithm(nn.Module):
    """A method of long-tailed recognition: network, losses of a step, optimizer, test-time logits.

    `LongTailed` calls these methods and does the rest. This class is the plain method, one network with the loss of the
    recipe over both streams; other methods override what they do differently. Parameters and buffers (momentum
    encoders, queues) are part of the task's checkpoints. Methods get the task as an argument: the task owns its
    algorithm.
    """

    #: the measures of a run, in the order of the table
    measures: Sequence[Measure] = LONG_TAILED
    #: how training images are drawn where the recipe does not say (`model.sampling`)
    sampling: Sampling = "instance"
    #: whether it trains with `trainer.strategy fsdp`, as `Task.shardable`
    shardable = True

    def views(self, task: "LongTailed") -> int:
        """How many views of each image a training batch holds."""
        return 1

    def plain_net(self, task: "LongTailed", data: DataInfo) -> nn.Module:
        """A fresh network without the module."""
        net = create_backbone(task.backbone, len(data.classes), **task.backbone_args)
        return use_normed_classifier(net) if task.normed_classifier else net

    def attach_to(self, task: "LongTailed", net: nn.Module) -> Any:
        """Attach the module to the network and return the handle."""
        return bf.attach(net, **asdict(task.module_options))

    def before_attach(self, task: "LongTailed", net: nn.Module) -> None:
        """Called before the module is attached, so that random numbers are the same with and without it."""

    def networks(self, task: "LongTailed") -> list[nn.Module]:
        """The networks that a training step runs: what `compile` compiles."""
        return [task.net]

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        """Create the method's own parameters and buffers; called once, after the network was built."""

    def criterion(self, task: "LongTailed", data: DataInfo) -> nn.Module:
        """The loss of one stream."""
        return build_criterion(task.loss_options, data.class_counts)

    def sampling_of(self, task: "LongTailed") -> Sampling:
        """How training images are drawn: as set in the recipe, else the method's default."""
        return task.sampling or self.sampling

    def sampler(self, task: "LongTailed", data: Any) -> Sampler | None:
        """The order of the training samples; None: that of the data, each image once an epoch."""
        power = POWERS[self.sampling_of(task)]
        if power == 1:
            return None
        weights = np.asarray(data.class_counts, np.float64) ** power
        return partial(class_order, labels=data.train_labels, weights=weights, seed=data.seed)

    def training_loader(self, task: "LongTailed", data: Any) -> EpochLoader | Mapping[str, EpochLoader] | None:
        """A training loader of the method's own, or several that are read together; None: that of the data."""
        return None

    def chooses_samples(self, task: "LongTailed") -> bool:
        """Whether `sampler` or `training_loader` give anything: then the data must be a data module of this package."""
        return self.sampling_of(task) != "instance"

    def check_data(self, task: "LongTailed", data: Any) -> None:
        """Refuse data that the method cannot be trained on."""

    def load_part(self, task: "LongTailed", part: str, source: str) -> None:
        """Load weights from elsewhere into a part of the network (`--init-from`)."""
        load_weights(task.net, part, source, attached=task.attachment is not None)

    def before_training(self, task: "LongTailed") -> None:
        """Load what only training needs, such as a teacher; called before anything is written, perhaps twice."""

    def optimizer(self, task: "LongTailed") -> torch.optim.Optimizer:
        return build_sgd(task.optimizer_options, task.net.parameters(), task.module_parameters, task.fused)

    def begin_epoch(self, task: "LongTailed") -> None:
        """Called at the start of every epoch, and where a run resumes within one."""
        if isinstance(task.criterion, LDAMLoss):
            task.criterion.set_epoch(task.current_epoch)

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        """The losses of a training batch, and the accuracy of its plain rows."""
        logits = task(batch["images"])
        loss = task.loss_weight * task.stream_criterion(logits, batch["labels"])
        return {"loss": loss, "acc": accuracy_of_plain_rows(task, logits, batch["labels"])}

    def after_step(self, task: "LongTailed") -> None:
        """Called right after each update of the weights."""

    def test_logits(self, task: "LongTailed", logits: Any) -> Float[Tensor, "batch classes"]:
        """From the output of the network in eval mode to the logits that are evaluated."""
        scale = task.criterion.scale if isinstance(task.criterion, LDAMLoss) else 1.0
        return logits.float() * scale

    def observe(self, task: "LongTailed", batch: Batch, name: str) -> None:
        """Update metrics of the method's own with a batch of an evaluation set."""

    def results(self, task: "LongTailed", name: str) -> dict[str, Tensor]:
        """Further measures of an evaluation set, besides the accuracies."""
        return {}

    def export_notes(self, task: "LongTailed") -> tuple[dict[str, str], str, str] | None:
        """See `Task.export_notes`; None: those of the backbone."""
        return None

    def sections(self, task: "LongTailed") -> list[dict[str, Any]]:
        """The method's own parts of the page."""
        return []


@torch.no_grad()
def accuracy_of_plain_rows(task: "LongTailed", logits: Tensor, labels: Tensor) -> Tensor:
    """100 for each sample whose plain row is classified correctly, 0 for the others."""
    targets = bf.repeat_targets(labels, logits)
    if task.attachment is not None:
        logits, targets = task.attachment.plain((logits, targets))
    return 100.0 * (logits.argmax(1) == targets)
