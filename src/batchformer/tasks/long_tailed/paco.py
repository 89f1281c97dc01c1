"""PaCo, parametric contrastive learning: a classifier, and a momentum encoder and a queue to contrast with."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import PaCoLoss
from batchformer.models.domains import FeatureRecorder
from batchformer.tasks.long_tailed.algorithm import Algorithm, accuracy_of_plain_rows
from batchformer.training.momentum import MomentumEncoder, Queue, check_queue, of_all_processes, own_rows
from batchformer.training.optimizers import build_sgd
from batchformer.training.options import refuse_below
from batchformer.training.task import Batch

if TYPE_CHECKING:
    from batchformer.tasks.long_tailed.task import LongTailed


@dataclass
class PacoOptions:
    """Parametric contrastive learning; the defaults are the published ones for CIFAR-100-LT.

    Args:
        contrast: false trains with the balanced loss only ("without PaCo loss", BatchFormer's appendix, Table 10): no
            contrasts, projection, momentum encoder or queue, and one view.
        alpha: weight of every contrast of the anchor's class.
        beta: weight of the anchor's class logit.
        gamma: weight of the contrasts in the denominator.
        temperature: of the contrasts.
        dim: width of the projection.
        queue: number of keys: a multiple of the batch, over all processes.
        momentum: of the momentum encoder.
        related_keys: keys and queue also contain the related rows of the momentum encoder, not only its plain rows.
        trained_convolutions: submodule whose convolutions alone are trained, as released for Places-LT (layer4.2 of
            ResNet-152); null: all are.
    """

    contrast: bool = True
    alpha: float = 0.01
    beta: float = 1.0
    gamma: float = 1.0
    temperature: float = 0.05
    dim: int = 32
    queue: int = 1024
    momentum: float = 0.999
    related_keys: bool = False
    trained_convolutions: str | None = None

    def check(self) -> None:
        refuse_below("paco", self, 1, "dim", "queue")
        if not 0 <= self.momentum <= 1:
            raise UserError(f"model.paco.momentum={self.momentum} must lie between 0 and 1.")


class PaCo(Algorithm):
    """Cui et al., "Parametric Contrastive Learning" (ICCV 2021), with or without BatchFormer.

    The first view of an image gives the query: class logits by the network's classifier, whose weights are the
    parametric centres, and a unit vector by a projection (Linear, BatchNorm, ReLU, Linear) of the classifier's input.
    The second view gives the key, by the momentum encoder. Each query is contrasted with the other queries, the keys
    and the queue (`PaCoLoss`). At test time the plain network is left, with its classifier.

    BatchFormer: the appendix says that it is "in the query encoder, momentum encoder and prediction head" and shared
    among these; there is no released code. Read so: one module, before the classifier. Its related rows are additional
    queries with the same labels, for classifier and projection; the loss is the mean of both streams, and the queries
    of a stream are contrasted within it. Keys and queue are plain rows; with `related_keys` the same module gives the
    keys a related row each, as the released code for MoCo-v2 does.

    With several processes queries, keys and queue are those of all of them: the loss is that of one process with the
    whole batch, except that BatchNorm uses the statistics of each process (`trainer.sync_batchnorm` for those of all).
    The released code contrasts with the queries and keys of its own process only, and shuffles images between processes
    for the BatchNorm of the keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorder: FeatureRecorder | None = None

    def views(self, task: "LongTailed") -> int:
        return 2 if task.paco_options.contrast else 1

    # ---- building

    def before_attach(self, task: "LongTailed", net: nn.Module) -> None:
        options = task.paco_options
        if options.trained_convolutions is not None:
            train_convolutions_of(net, options.trained_convolutions)
        if not options.contrast:
            return
        found = bf.find_classifiers(net)
        classifier = net.get_submodule(found[0])
        if len(found) > 1 or not isinstance(classifier, nn.Linear):
            raise UserError(
                f"model.algorithm=paco needs a network with one linear classifier, and {task.backbone} has "
                f"{' and '.join(found)} ({type(classifier).__name__}): choose another model.backbone."
            )
        dim = classifier.in_features
        self.projection = nn.Sequential(
            nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, options.dim)
        )
        features = copy.deepcopy(net)
        features.set_submodule(found[0], nn.Identity())
        self.key_net = MomentumEncoder(features, options.momentum)
        self.key_projection = MomentumEncoder(self.projection, options.momentum)
        self.queue = Queue(options.queue, options.dim, classifier.out_features)
        self._recorder = FeatureRecorder(classifier)
        self._recorder.put()

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        if task.channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self._relates_keys(task) and task.attachment.paths != tuple(bf.find_classifiers(task.net)):
            raise UserError("model.paco.related_keys needs the module before the classifier: leave its place out.")

    def networks(self, task: "LongTailed") -> list[nn.Module]:
        return [task.net, self.key_net.encoder] if task.paco_options.contrast else [task.net]

    def criterion(self, task: "LongTailed", data: DataInfo) -> nn.Module:
        options = task.paco_options
        if not options.contrast:
            return super().criterion(task, data)
        if task.loss_options.name != "balanced_softmax":
            raise UserError(
                f"model.loss.name={task.loss_options.name} cannot be combined with model.algorithm=paco, which has a "
                f"loss of its own: leave one of them out."
            )
        return PaCoLoss(data.class_counts, options.alpha, options.beta, options.gamma, options.temperature)

    def check_data(self, task: "LongTailed", data: Any) -> None:
        if not task.paco_options.contrast:
            return
        if not getattr(data, "drop_last", True):
            raise UserError("PaCo's queue needs batches of one size: set data.drop_last to true.")
        if hasattr(data, "batch_size"):
            rows = data.batch_size * (2 if self._relates_keys(task) else 1)
            check_queue(task.paco_options.queue, rows, "model.paco.queue")

    def optimizer(self, task: "LongTailed") -> torch.optim.Optimizer:
        own = self.projection.parameters() if task.paco_options.contrast else ()
        return build_sgd(task.optimizer_options, [*task.net.parameters(), *own], task.module_parameters, task.fused)

    def begin_epoch(self, task: "LongTailed") -> None:
        super().begin_epoch(task)
        if task.paco_options.contrast and task.trainer.global_step == 0:  # weights may come from --init-from
            self.key_net.copy_from(task.net)
            self.key_projection.copy_from(self.projection)

    # ---- training

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        views, labels = batch.get("views") or [batch["images"]], batch["labels"]
        if not task.paco_options.contrast:
            return super().step(task, {**batch, "images": views[0]})
        if len(views) < 2:
            raise UserError("PaCo trains on two views of each image, and a batch has one: set data.views to 2.")
        assert self._recorder is not None
        logits = task(views[0])
        streams = len(logits) // len(labels)
        queries = [_unit(self.projection(features)) for features in self._recorder.take().chunk(streams)]
        keys, key_labels = self._keys(task, views[1], labels)
        assert self.queue.labels is not None
        others = torch.cat([keys, self.queue.keys])
        all_labels = torch.cat([of_all_processes(labels), key_labels, self.queue.labels])
        own = own_rows(len(labels), labels.device)
        self.queue.push(keys, key_labels)  # `others` is a copy of what was in it
        losses = [
            task.criterion(of_stream, labels, query, torch.cat([of_all_processes(query), others]), all_labels, own)
            for of_stream, query in zip(logits.chunk(streams), queries, strict=True)
        ]
        scale = 3.0 if streams > 1 and task.stream_loss == "released" else 1.0
        loss = task.loss_weight * scale * torch.stack(losses).mean()
        return {"loss": loss, "acc": accuracy_of_plain_rows(task, logits, labels)}

    @torch.no_grad()
    def _keys(
        self, task: "LongTailed", images: Tensor, labels: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "keys dim"], Int[Tensor, " keys"]]:
        """The keys of all processes and their labels."""
        self.key_net.follow(task.net)
        self.key_projection.follow(self.projection)
        layout = torch.channels_last if task.channels_last else torch.contiguous_format
        features = self.key_net(images.contiguous(memory_format=layout))
        if self._relates_keys(task):
            features = task.attachment.points[0].module(features)
        repeated = bf.repeat_targets(labels, features)
        keys = [_unit(self.key_projection(rows)) for rows in features.chunk(len(repeated) // len(labels))]
        return of_all_processes(torch.cat(keys)), of_all_processes(repeated)

    @staticmethod
    def _relates_keys(task: "LongTailed") -> bool:
        return task.paco_options.contrast and task.paco_options.related_keys and task.attachment is not None


def train_convolutions_of(net: nn.Module, part: str) -> None:
    """Freeze all convolutions but those of a submodule."""
    if part not in dict(net.named_modules()):
        inside = ", ".join(name for name, _ in net.named_children())
        raise UserError(f"model.paco.trained_convolutions={part}: the network has no such part; it has: {inside}.")
    trained = {id(module) for module in net.get_submodule(part).modules()}
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and id(module) not in trained:
            module.requires_grad_(False)


def _unit(rows: Tensor) -> Float[Tensor, "rows dim"]:
    return F.normalize(rows.float(), dim=1)
