"""BALMS: Balanced Softmax with a learnt sampler, on frozen features or end to end.

Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition" (NeurIPS 2020), section 3.3 and Algorithm 1.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.adam import adam

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import EpochLoader
from batchformer.data.loading.order import Sampler, class_order, derived_key, generator
from batchformer.errors import UserError
from batchformer.tasks.long_tailed.algorithm import build_criterion
from batchformer.tasks.long_tailed.decoupled import ClassifierStage, by_frequency
from batchformer.training.options import refuse_below
from batchformer.training.task import Batch

if TYPE_CHECKING:
    from batchformer.tasks.long_tailed.task import LongTailed


@dataclass
class BalmsOptions:
    """The meta sampler.

    Args:
        frozen: train a new classifier on the features of a trained network (see `decoupled`), as Ren et al. do; false:
            train the whole network.
        lr: learning rate of the sampler's logits, by Adam.
        init_pow: the initial probabilities are proportional to n^-init_pow, for classes of n images; 0: all one half.
        meta_batch: images of a meta batch, of one process.
        meta_set: the set that meta batches are drawn from: "train", or the name of another set of the data that is not
            evaluated ("meta" of list files: `data.meta_list`).
        meta_per_class: number of images per class in the meta set, drawn by the seed; null: all.
        meta_stream: with BatchFormer, the rows whose loss the sampler is to lower: "related" as released, or "plain",
            those that are tested.
    """

    frozen: bool = False
    lr: float = 0.01
    init_pow: float = 0.0
    meta_batch: int = 512
    meta_set: str = "train"
    meta_per_class: int | None = None
    meta_stream: Literal["related", "plain"] = "related"

    def check(self) -> None:
        refuse_below("balms", self, 0, "lr", "init_pow")
        refuse_below("balms", self, 1, "meta_batch", "meta_per_class")


class MetaSampler(nn.Module):
    """One probability per class, sigmoid(phi_c): an image of class c is drawn in proportion to it.

    phi is a buffer and so are Adam's moments, updated in place: the network's optimizer leaves them alone, checkpoints
    hold them. The draws of an epoch follow `drawn`, phi as it was when `epoch` began.
    """

    logits: Float[Tensor, " classes"]
    drawn: Float[Tensor, " classes"]
    mean: Float[Tensor, " classes"]
    square: Float[Tensor, " classes"]
    steps: Float[Tensor, ""]
    log_counts: Float[Tensor, " classes"]
    epoch: Int[Tensor, ""]

    def __init__(self, class_counts: list[int], init_pow: float) -> None:
        super().__init__()
        counts = torch.tensor(class_counts, dtype=torch.float64)
        begin = (counts / counts.sum()) ** -init_pow
        begin = begin / (begin.min() + begin.max())
        logits = begin.logit().float()
        for name, value in (("logits", logits), ("drawn", logits), ("mean", 0 * logits), ("square", 0 * logits)):
            self.register_buffer(name, value.clone())
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("epoch", torch.tensor(-1))
        self.register_buffer("log_counts", counts.log().float(), persistent=False)

    def log_weights(self, logits: Tensor) -> Float[Tensor, " classes"]:
        """Log of the probability of each class in a draw, up to a constant: its images times their probability."""
        return self.log_counts + F.logsigmoid(logits)

    def begin_epoch(self, epoch: int) -> None:
        if int(self.epoch) != epoch:  # where a run resumes within the epoch its draws stay
            self.drawn.copy_(self.logits)
            self.epoch.fill_(epoch)

    def update(self, gradient: Tensor, lr: float) -> None:
        """One step of Adam."""
        step: Any = partial(adam, [self.logits], [gradient], [self.mean], [self.square], [], [self.steps])
        with torch.no_grad():
            step(capturable=gradient.is_cuda, amsgrad=False, beta1=0.9,
                 beta2=0.999, lr=lr, weight_decay=0.0, eps=1e-8, maximize=False)  # fmt: skip


class LearntOrder:
    """The order of an epoch's training images, drawn from the probabilities that the sampler had when it began."""

    learnt = True

    def __init__(self, sampler: MetaSampler, labels: np.ndarray, seed: int) -> None:
        self.sampler, self.labels, self.seed = sampler, labels, seed

    def __call__(self, epoch: int) -> np.ndarray:
        weights = self.sampler.log_weights(self.sampler.drawn).double().exp().cpu().numpy()
        return class_order(epoch, labels=self.labels, weights=weights, seed=self.seed, purpose="balms")


class Balms(ClassifierStage):
    """Balanced Softmax whose batches are drawn by a sampler that is learnt with the classifier.

    Before each step, on the batch drawn (losses l_i of its features, Balanced Softmax) and a meta batch:

        W' = SGD(W, grad_W mean_i s_i l_i(W)),    phi <- Adam(phi, grad_phi CE(W', meta batch))

    W is the classifier; SGD is its own next step, momentum and weight decay included. s_i is 1, with the gradient of a
    Gumbel-softmax draw (`straight_through`). Then the ordinary step. The meta batch has every class equally often, of
    training images by default; the released code takes the val list for ImageNet-LT and Places-LT.

    With BatchFormer the ordinary step is that of both streams and W' comes from plain rows, as released; there the
    meta loss is that of rows that went through the module (`meta_stream`).

    Differences to the released code: the images of an epoch are drawn when it begins, not batch by batch (so a resumed
    run draws the same); the relaxation is over classes, not over all images, whose draws have the same distribution;
    its schedule steps before each epoch, so that its last epoch has a learning rate of 0.
    """

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        if task.sampling is not None:
            raise UserError("model.algorithm balms learns how to draw: leave model.sampling out.")
        super().build(task, data)
        self.meta = MetaSampler(data.class_counts, task.balms_options.init_pow)

    def is_frozen(self, task: "LongTailed") -> bool:
        return task.balms_options.frozen

    def trained(self, task: "LongTailed") -> list[nn.Parameter]:
        return super().trained(task) if self.is_frozen(task) else list(task.net.parameters())

    def criterion(self, task: "LongTailed", data: DataInfo) -> nn.Module:
        if task.normed_classifier:
            raise UserError(
                "model.loss.name=ldam cannot be combined with model.algorithm=balms, which needs the loss of each "
                "image by itself: take balanced_softmax or another one."
            )
        self.row_criterion = build_criterion(task.loss_options, data.class_counts, "none")
        return super().criterion(task, data)

    # ---- data

    def check_data(self, task: "LongTailed", data: Any) -> None:
        super().check_data(task, data)
        self.meta_samples(task, data)
        if not self.is_frozen(task) and task.decoupled_options.features == "cached":
            raise UserError("model.decoupled.features=cached is for frozen features: set model.balms.frozen to true.")

    def chooses_samples(self, task: "LongTailed") -> bool:
        return True

    def sampler(self, task: "LongTailed", data: Any) -> Sampler:
        return LearntOrder(self.meta, data.train_labels, data.seed)

    def training_loader(self, task: "LongTailed", data: Any) -> Mapping[str, EpochLoader]:
        name, batch = task.balms_options.meta_set, task.balms_options.meta_batch
        labels = data.set_labels[name]
        order: Any = partial(
            class_order,
            labels=labels,
            weights=np.ones(data.num_classes),
            seed=data.seed,
            length=max(len(labels), batch * task.trainer.world_size),
            among=self.meta_samples(task, data),
            purpose="meta",
        )
        own = {"sampler": order, "batch_size": batch, "seed": derived_key(data.seed, "meta") % 2**63}
        if task.decoupled_options.features == "forward":
            return {"train": data.training_loader(), "meta": data.loader_in_order(name, **own)}
        train = self.cached(task, data, "train")
        meta = train if name == "train" else self.cached(task, data, name)
        return {"train": data.feature_loader(train), "meta": data.feature_loader(meta, name, **own)}

    def meta_samples(self, task: "LongTailed", data: Any) -> np.ndarray | None:
        """The numbers of the images in the meta set; None: all of the set it is drawn from."""
        name, each = task.balms_options.meta_set, task.balms_options.meta_per_class
        others = [known for known in data.set_labels if known not in data.evaluation_sets]
        if name not in others:
            why = "results are measured on it" if name in data.evaluation_sets else "there is no such set"
            raise UserError(f"model.balms.meta_set={name}: {why}; there are: {', '.join(others)}.")
        labels = data.set_labels[name]
        counts = np.bincount(labels, minlength=data.num_classes)
        if counts.min() < (each or 1):
            rare = int(counts.argmin())
            wanted = f"model.balms.meta_per_class={each}" if each else "the meta set needs every class"
            raise UserError(
                f"{wanted}, and of class {rare} ({data.class_names[rare]}) the set {name} has {counts[rare]} images: "
                + (f"take {counts[rare]} or fewer, or null for all." if each and counts[rare] else "add some.")
            )
        if each is None:
            return None
        shuffled = generator(data.seed, "meta set").permutation(len(labels))
        members = shuffled[np.argsort(labels[shuffled], kind="stable")]
        first = np.cumsum(counts) - counts
        return np.sort(np.concatenate([members[start : start + each] for start in first]))

    # ---- training

    def begin_epoch(self, task: "LongTailed") -> None:
        self.meta.begin_epoch(task.current_epoch)

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        train, meta = batch["train"], batch["meta"]
        if self.is_frozen(task):
            features = self.features_of(task, train)
        else:
            logits, features = self._input.of(task, train["images"])
        meta_features = self.features_of(task, meta)
        meta_loss = self._meta_step(task, features.detach(), train["labels"], meta_features, meta["labels"])
        if self.is_frozen(task):
            logits = self.classifier(task)(features)
        return {**self.losses(task, logits, train["labels"]), "meta_loss": meta_loss}

    def _meta_step(
        self, task: "LongTailed", features: Tensor, labels: Tensor, meta_features: Tensor, meta_labels: Tensor
    ) -> Tensor:
        """Update the sampler; returns the loss of the meta batch after the inner step."""
        layer, disabled = self.classifier(task), nullcontext
        if task.attachment is not None:
            disabled = task.attachment.disabled
        optimizer: Any = task.optimizers(use_pl_optimizer=False)
        with torch.autocast(features.device.type, enabled=False):
            phi = self.meta.logits.clone().requires_grad_()
            weights = straight_through(self.meta.log_weights(phi), labels)
            with disabled():
                updated = inner_step(
                    layer, optimizer, weights, features.to(layer.weight.dtype), labels, self.row_criterion
                )
            plain = task.attachment is None or task.balms_options.meta_stream == "plain"
            with disabled() if plain else nullcontext():
                logits = functional_call(layer, updated, (meta_features.to(layer.weight.dtype),))
            targets = bf.repeat_targets(meta_labels, logits)
            if not plain:
                logits, targets = task.attachment.related((logits, targets))
            loss = F.cross_entropy(logits, targets)
            (gradient,) = torch.autograd.grad(loss, phi)
        if task.trainer.world_size > 1:
            gradient = task.trainer.strategy.reduce(gradient, reduce_op="mean")
        self.meta.update(gradient, task.balms_options.lr)
        return loss.detach()

    def sections(self, task: "LongTailed") -> list[dict[str, Any]]:
        counts, drawn = self.meta.log_counts.exp(), self.meta.log_weights(self.meta.logits).exp()
        shares = {"of what is drawn": drawn / drawn.sum(), "of the training images": counts / counts.sum()}
        return [by_frequency(task, "What the meta sampler learnt to draw", shares, "share of the class")]


def straight_through(
    log_weights: Float[Tensor, " classes"], drawn: Int[Tensor, " batch"], temperature: float = 1.0
) -> Float[Tensor, " batch"]:
    """Ones with the gradient of a hard Gumbel-softmax draw that gave the classes `drawn` (Jang et al., ICLR 2017).

    The noise g is drawn given that log_weights + g is largest at the class drawn (Maddison et al., "A* Sampling"):
    the largest value is a Gumbel variable around logsumexp(log_weights), the others are Gumbel variables cut off at it.
    So draws may be made elsewhere, and earlier, than their gradient. The value 1 has the gradient of
    softmax((log_weights + g) / temperature) at the class drawn.
    """
    with torch.no_grad():
        exponential = log_weights.new_empty(len(drawn), len(log_weights)).exponential_()
        top = log_weights.logsumexp(0) - torch.empty_like(exponential[:, 0]).exponential_().log()
        others = -torch.logaddexp(-top[:, None], exponential.log() - log_weights)
        noise = others.scatter(1, drawn[:, None], top[:, None]) - log_weights
    soft = ((log_weights + noise) / temperature).softmax(1).gather(1, drawn[:, None])[:, 0]
    return 1 + (soft - soft.detach())


def inner_step(
    layer: nn.Linear,
    optimizer: torch.optim.Optimizer,
    weights: Float[Tensor, " batch"],
    features: Float[Tensor, "batch dim"],
    labels: Int[Tensor, " batch"],
    row_criterion: nn.Module,
) -> dict[str, Tensor]:
    """The layer's parameters after the optimizer's next step on mean(weights * losses), as functions of `weights`.

    The step of torch's SGD with all its settings; momentum buffers are constants. Neither layer nor optimizer change.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(layer.named_parameters(recurse=False))
    values = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    losses = row_criterion(functional_call(layer, values, (features,)), labels)
    gradients = torch.autograd.grad((weights * losses).mean(), list(values.values()), create_graph=True)
    updated = {}
    for (name, parameter), value, gradient in zip(parameters.items(), values.values(), gradients, strict=True):
        group, before = groups[parameter], optimizer.state[parameter].get("momentum_buffer")
        gradient = gradient + group["weight_decay"] * value
        moved = gradient if before is None else group["momentum"] * before + (1 - group["dampening"]) * gradient
        if group["momentum"] != 0:
            gradient = gradient + group["momentum"] * moved if group["nesterov"] else moved
        updated[name] = value - group["lr"] * gradient
    return updated
