"""Classifiers of a trained network with other lengths of their weights: LWS and tau-norm of Kang et al. (ICLR 2020)."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.data.info import DataInfo
from batchformer.tasks.long_tailed.algorithm import Sampling
from batchformer.tasks.long_tailed.decoupled import BalancedRetraining, by_frequency
from batchformer.training.optimizers import build_sgd
from batchformer.training.task import Batch

if TYPE_CHECKING:
    from batchformer.tasks.long_tailed.task import LongTailed

TAUS = torch.arange(21) / 10  # candidates of tau: 0 to 2


class RescaledClassifier(BalancedRetraining):
    """Base class of methods that keep the directions of the classifier's weights and change their lengths.

    The network always holds the rescaled weights, so it is evaluated, exported and loaded like any other. The module
    is not used: it acts in training only, and here only lengths are trained.
    """

    new_classifier = False
    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        super().build(task, data)
        layer = self.classifier(task)
        self.register_buffer("weight", layer.weight.detach().clone())
        self.register_buffer("bias", torch.zeros(len(layer.weight)))
        self._keep(layer)

    def trained(self, task: "LongTailed") -> list[nn.Parameter]:
        return []

    def load_part(self, task: "LongTailed", part: str, source: str) -> None:
        super().load_part(task, part, source)
        self._keep(self.classifier(task))

    def begin_epoch(self, task: "LongTailed") -> None:
        if task.trainer.global_step == 0:
            self._keep(self.classifier(task))
        if task.attachment is not None:
            task.attachment.expect_no_training()

    @torch.no_grad()
    def _keep(self, layer: nn.Linear) -> None:
        self.weight.copy_(layer.weight)
        if layer.bias is not None:
            self.bias.copy_(layer.bias)

    @torch.no_grad()
    def rescale(self, task: "LongTailed", factors: Tensor, bias_factors: Tensor) -> None:
        layer = self.classifier(task)
        layer.weight.copy_(self.weight * factors[:, None])
        if layer.bias is not None:
            layer.bias.copy_(self.bias * bias_factors)

    def sections(self, task: "LongTailed") -> list[dict[str, Any]]:
        layer = self.classifier(task)
        lengths = {"before": self.weight.norm(dim=1), "after": layer.weight.detach().norm(dim=1)}
        section = by_frequency(task, "Lengths of the classifier's weights", lengths, "length")
        return [{**section, "text": self.found()}]

    def found(self) -> str:
        """What was learnt or chosen, in a sentence."""
        return ""

    def losses(self, task: "LongTailed", logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The losses of one stream: the module is not used."""
        loss = task.loss_weight * task.criterion(logits, labels)
        return {"loss": loss, "acc": 100.0 * (logits.detach().argmax(1) == labels)}


class LearntScales(RescaledClassifier):
    """LWS (Kang et al., section 4.3): logits f_c z_c with one learnt scale f_c per class, class-balanced sampling.

    The scales begin at 1 and are all that is trained.
    """

    scales: nn.Parameter

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        super().build(task, data)
        self.scales = nn.Parameter(torch.ones(len(self.weight)))

    def optimizer(self, task: "LongTailed") -> torch.optim.Optimizer:
        return build_sgd(task.optimizer_options, [self.scales], [], task.fused)

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        logits = F.linear(self.features_of(task, batch), self.weight, self.bias) * self.scales
        return self.losses(task, logits, batch["labels"])

    def after_step(self, task: "LongTailed") -> None:
        self.rescale(task, self.scales, self.scales)


class TauNormalized(RescaledClassifier):
    """The tau-normalised classifier (Kang et al., eq. 5): w_c / |w_c|^tau, no bias; nothing is trained.

    Times a constant that keeps the mean length and changes no prediction, so that losses of different tau can be
    compared. The paper chooses tau on held-out images. Here it is given, or chosen by a rule on the training images, as
    they are augmented in the epochs of the run (one is enough): lowest cross entropy, averaged over the classes. A
    network that fits its training images perfectly makes the rule choose too small a tau.
    """

    sampling: Sampling = "instance"
    taus: Float[Tensor, " taus"]
    sums: Float[Tensor, "taus classes"]
    seen: Float[Tensor, " classes"]
    tau: Float[Tensor, ""]

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        super().build(task, data)
        self.register_buffer("sums", torch.zeros(len(TAUS), len(self.weight)))
        self.register_buffer("seen", torch.zeros(len(self.weight)))
        self.register_buffer("tau", torch.zeros(()))
        self.register_buffer("taus", TAUS.clone(), persistent=False)

    def trained(self, task: "LongTailed") -> list[nn.Parameter]:
        """The classifier, at a learning rate of 0: an optimizer needs a parameter."""
        return list(self.classifier(task).parameters(recurse=False))

    def optimizer(self, task: "LongTailed") -> torch.optim.Optimizer:
        group = {"params": self.trained(task), "lr_factor": 0.0}
        return torch.optim.SGD([group], lr=0.0, fused=task.fused or None)

    def factors(self, tau: Tensor) -> Float[Tensor, "*taus classes"]:
        """What the weights of each class are multiplied by."""
        lengths = self.weight.norm(dim=1)
        scaled = lengths ** (1 - tau[..., None])
        return lengths ** -tau[..., None] * (lengths.mean() / scaled.mean(-1, keepdim=True))

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        features, labels = self.features_of(task, batch), batch["labels"]
        with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            logits = F.linear(features.to(self.weight.dtype), self.weight)
            losses = [F.cross_entropy(logits * row, labels, reduction="none") for row in self.factors(self.taus)]
            sums = torch.zeros_like(self.sums).index_add_(1, labels, torch.stack(losses))
            seen = torch.zeros_like(self.seen).index_add_(0, labels, torch.ones_like(losses[0]))
            for total, part in ((self.sums, sums), (self.seen, seen)):
                total += task.trainer.strategy.reduce(part, reduce_op="sum") if task.trainer.world_size > 1 else part
        layer = self.classifier(task)
        return self.losses(task, F.linear(features, layer.weight, layer.bias), labels)

    def after_step(self, task: "LongTailed") -> None:
        given = task.decoupled_options.tau
        if given is None:
            present = self.seen > 0
            means = torch.where(present, self.sums / self.seen.clamp_min(1), 0.0).sum(1) / present.sum()
            self.tau.copy_(self.taus.gather(0, means.argmin(0, keepdim=True))[0])  # an index would be read by the host
        else:
            self.tau.fill_(given)
        self.rescale(task, self.factors(self.tau), torch.zeros_like(self.bias))

    def found(self) -> str:
        return f"tau = {self.tau.item():.2g}"
