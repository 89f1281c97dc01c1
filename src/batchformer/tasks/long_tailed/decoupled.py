"""Decoupled training: a new classifier is trained on the frozen features of a trained network.

Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition" (ICLR 2020): cRT; and the decoupled
Balanced Softmax of Ren et al., "Balanced Meta-Softmax" (NeurIPS 2020). `rescaled.py` has LWS and tau-norm.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.attach.contexts import evaluating, run_eagerly
from batchformer.attach.insertion import InstanceForward
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import EpochLoader, as_batch
from batchformer.errors import UserError
from batchformer.hub import PRETRAINED
from batchformer.tasks.long_tailed.algorithm import Algorithm, Sampling, accuracy_of_plain_rows
from batchformer.training.optimizers import build_sgd
from batchformer.training.task import Batch

if TYPE_CHECKING:
    from batchformer.tasks.long_tailed.task import LongTailed


@dataclass
class DecoupledOptions:
    """How a classifier is trained on frozen features.

    Args:
        features: "forward" computes them in every step, of images augmented as in training (as published); "cached"
            computes those of every training image once, without augmentation: then thousands of steps take seconds.
        backbone_mode: "eval": nothing of the network changes; "train" as released: dropout is on, BatchNorm normalises
            by the batch and its statistics move.
        tau: tau_norm: the power of the lengths; null: the one of 0, 0.1, ..., 2 with the lowest class-balanced loss on
            the training images.
    """

    features: Literal["forward", "cached"] = "forward"
    backbone_mode: Literal["eval", "train"] = "eval"
    tau: float | None = None

    def check(self) -> None:
        if self.features == "cached" and self.backbone_mode == "train":
            raise UserError("model.decoupled.features=cached is computed once, in eval mode: leave backbone_mode out.")
        if self.tau is not None and self.tau < 0:
            raise UserError(f"model.decoupled.tau={self.tau} must be 0 or more, or null to have it chosen.")


class ClassifierInput(InstanceForward):
    """Instance `forward` that records what enters the classifier, before BatchFormer, in forwards called through `of`.

    To be put after BatchFormer is attached, so that it runs first.
    """

    wanted = False
    features: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.wanted:
            self.features = args[0]
        return self.original(*args, **kwargs)

    def of(self, net: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        """The output of the network, and the features."""
        self.wanted = True
        try:
            outputs, features = net(images), self.features
        finally:
            self.wanted, self.features = False, None
        assert features is not None
        return outputs, features

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "features": None}


class ClassifierStage(Algorithm):
    """Base class of methods that train the classifier (and the module before it) on the features of a trained network.

    With BatchFormer the module relates the features before the classifier, and the loss is that of both streams.
    """

    #: whether the classifier begins anew; else it is that of the trained network
    new_classifier = True
    shardable = False  # features are computed, scales applied and samplers learnt outside of steps

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        names = bf.find_classifiers(task.net)
        paths = names if task.attachment is None else list(task.attachment.paths)
        if len(names) != 1 or paths != names or not isinstance(task.net.get_submodule(names[0]), nn.Linear):
            raise UserError(
                f"model.algorithm {self.name_in(task)} needs a network with one linear classifier and the module right "
                f"before it: {task.backbone} has {', '.join(names)}, and the module is before {', '.join(paths)}."
            )
        self.path = names[0]
        self._fresh = {name: p.detach().clone() for name, p in self.classifier(task).named_parameters(recurse=False)}
        self._input = ClassifierInput(self.classifier(task))
        self._input.put()
        trained = set(self.trained(task))
        for parameter in task.net.parameters():
            parameter.requires_grad_(parameter in trained)

    def trained(self, task: "LongTailed") -> list[nn.Parameter]:
        """The parameters of the network that are trained; the others are frozen."""
        return [*self.classifier(task).parameters(recurse=False), *task.module_parameters]

    def is_frozen(self, task: "LongTailed") -> bool:
        """Whether the features stay as they are."""
        return True

    def name_in(self, task: "LongTailed") -> str:
        return task.hparams["algorithm"]

    def classifier(self, task: "LongTailed") -> nn.Linear:
        return task.net.get_submodule(self.path)  # type: ignore[return-value]

    def check_data(self, task: "LongTailed", data: Any) -> None:
        sources = set(task.init_from.values())
        if not self.is_frozen(task) or task.restored or sources - {PRETRAINED}:
            return
        if self.new_classifier and (PRETRAINED in sources or task.backbone_args.get("pretrained")):
            return
        pretrained = " or --init-from pretrained" if self.new_classifier else ""
        raise UserError(
            f"model.algorithm {self.name_in(task)} works on the features of a trained network, and this one is not "
            f"trained: give it with --init-from RUN{pretrained}."
        )

    def load_part(self, task: "LongTailed", part: str, source: str) -> None:
        super().load_part(task, part, source)
        if self.new_classifier and self.is_frozen(task):
            with torch.no_grad():
                for name, parameter in self.classifier(task).named_parameters(recurse=False):
                    parameter.copy_(self._fresh[name])

    def optimizer(self, task: "LongTailed") -> torch.optim.Optimizer:
        return build_sgd(task.optimizer_options, self.trained(task), task.module_parameters, task.fused)

    # ---- features

    def features_of(self, task: "LongTailed", batch: Batch) -> Float[Tensor, "batch dim"]:
        """What enters the classifier: from the batch where it was computed before, else computed without gradients."""
        if "features" in batch:
            return batch["features"]
        with torch.no_grad(), self._mode(task):
            return self._input.of(task, batch["images"])[1]

    def _mode(self, task: "LongTailed") -> AbstractContextManager[Any]:
        if task.decoupled_options.backbone_mode == "eval":
            return evaluating(task.net)
        return nullcontext() if task.attachment is None else task.attachment.disabled()

    def chooses_samples(self, task: "LongTailed") -> bool:
        return task.decoupled_options.features == "cached" or super().chooses_samples(task)

    def training_loader(self, task: "LongTailed", data: Any) -> EpochLoader | Mapping[str, EpochLoader] | None:
        if task.decoupled_options.features == "forward":
            return None
        return data.feature_loader(self.cached(task, data, "train"))

    def cached(self, task: "LongTailed", data: Any, name: str) -> Float[Tensor, "samples dim"]:
        """The features of all images of a set, as they are evaluated, in the order of the set; the same everywhere."""
        trainer, found = task.trainer, []
        with evaluating(task.net), run_eagerly(task.net):
            for batch in data.evaluation_loader(name):
                batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(as_batch(batch)))
                with trainer.precision_plugin.val_step_context():
                    found.append(self.features_of(task, batch))
        count = len(data.set_labels[name])
        features = torch.cat(found)
        if trainer.world_size == 1:
            return features
        padded = features.new_zeros(-(-count // trainer.world_size), features.shape[1])
        padded[: len(features)] = features
        every = task.all_gather(padded)  # (process, sample, dim); process r has the samples r, r + world, ...
        assert isinstance(every, Tensor)
        return every.transpose(0, 1).reshape(-1, features.shape[1])[:count].contiguous()

    # ---- training

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        return self.losses(task, self.classifier(task)(self.features_of(task, batch)), batch["labels"])

    def losses(self, task: "LongTailed", logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = task.loss_weight * task.stream_criterion(logits, labels)
        return {"loss": loss, "acc": accuracy_of_plain_rows(task, logits, labels)}


class DecoupledLoss(ClassifierStage):
    """A new classifier with the loss and the sampling of the recipe: Ren et al.'s decoupled Balanced Softmax."""


class BalancedRetraining(ClassifierStage):
    """cRT (Kang et al., section 4.1): a new classifier, every class drawn equally often, cross entropy.

    The loss of the recipe is not used: its class counts are those of the data, not those of what is drawn.
    """

    sampling: Sampling = "class_balanced"

    def criterion(self, task: "LongTailed", data: DataInfo) -> nn.Module:
        if task.normed_classifier:
            raise UserError(
                f"model.algorithm {self.name_in(task)} is for linear classifiers, and loss.name=ldam has cosines: take "
                "another loss for both stages."
            )
        return nn.CrossEntropyLoss()


def by_frequency(task: "LongTailed", title: str, lines: Mapping[str, Tensor], label: str) -> dict[str, Any]:
    """A section of the page: a value of every class, the classes from the most frequent one to the rarest."""
    order = sorted(range(len(task.class_counts)), key=lambda c: -task.class_counts[c])
    shown = {name: [float(values[c]) for c in order] for name, values in lines.items()}
    ranks = list(range(1, len(order) + 1))
    series = {"x": ranks, "lines": shown, "xlabel": "class, the most frequent one first", "ylabel": label}
    return {"title": title, "series": series}
