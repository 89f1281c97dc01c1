"""Detection with Faster R-CNN from pre-trained weights: the transfer experiment of MoCo."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError
from batchformer.metrics import VocAP
from batchformer.metrics.measures import VOC
from batchformer.models.faster_rcnn import FasterRCNN
from batchformer.tasks.detection.task import Detection
from batchformer.training.optimizers import OptimizerOptions
from batchformer.training.options import as_options, plain_values
from batchformer.training.reseed import reseed
from batchformer.training.schedules import ScheduleOptions, lr_factor, steps_per_epoch, total_epochs_of
from batchformer.training.task import Batch
from batchformer.training.weights import load_weights, read_weights, without_outer_name

_NORM_STREAM = 1  # of random numbers: other ones than those of a training step


class RegionDetection(Detection):
    """Trains Faster R-CNN (C4) as MoCo's transfer to VOC does; logs `train/loss lr` and `val/voc_ap voc_ap50 ap ...`.

    BatchFormer, appendix Table 2: the weights of the backbone come from pre-training with or without the module
    (`--init-from backbone=RUN`), the detector itself has none. Settings of detectron2's pascal_voc R50-C4 24k: SGD 0.02
    for 16 images, a tenth at 3/4 and 11/12 of the steps, warm-up of 100 steps from a thousandth, BatchNorm trained.
    Before the last evaluation the statistics of BatchNorm are averaged over training batches, as in detectron2
    (PreciseBN): the running ones weigh the last few batches most, whose regions differ from step to step.

    Args:
        backbone: a ResNet of timm.
        backbone_args: passed on to the backbone.
        optimizer: SGD.
        schedule: steps of the learning rate: milestones count steps of the run, warm-up too.
        precise_norm: so many training batches, or an epoch if that is less; 0 evaluates with the running statistics.
        options: `seed`, `channels_last`, `compile` (see `NetworkTask`).
    """

    schedule_options: ScheduleOptions
    measures = VOC
    main_picture: ClassVar[Mapping[str, Any]] = {"bars": ["voc_ap", "voc_ap50", "voc_ap75"]}

    def __init__(
        self,
        backbone: str = "resnet50",
        backbone_args: dict[str, Any] | None = None,
        optimizer: OptimizerOptions = OptimizerOptions(lr=0.02, weight_decay=1e-4),
        schedule: ScheduleOptions = ScheduleOptions("step", 100, 0.001, [18000, 22000]),
        precise_norm: int = 200,
        **options: Any,
    ) -> None:
        super().__init__("faster_rcnn", None, backbone, None, "baseline", **options)
        self.backbone_args = dict(backbone_args or {})
        self.sgd = optimizer = as_options(OptimizerOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(ScheduleOptions, schedule, "schedule")
        if precise_norm < 0:
            raise UserError(f"model.precise_norm={precise_norm} counts batches: 0 or more.")
        self.precise_norm = precise_norm
        self.hparams.clear()
        self.save_hyperparameters(plain_values({**locals(), **options}))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        return FasterRCNN(self.backbone, len(data.classes), **self.backbone_args)

    def load_part(self, part: str, source: str) -> None:
        if part != "backbone":
            super().load_part(part, source)
            return
        weights = without_outer_name(read_weights(source), self.net.backbone.state_dict())  # type: ignore[union-attr]
        load_weights(self.net, part, source, False, {k: v for k, v in weights.items() if not k.startswith("fc.")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = self.sgd
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        norms = {id(p) for m in self.net.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
        for parameter in self.net.parameters():
            (others if id(parameter) in norms else decayed).append(parameter)
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        keywords: dict[str, Any] = {"momentum": options.momentum, "nesterov": options.nesterov}
        return torch.optim.SGD(
            groups, options.lr, weight_decay=options.weight_decay, fused=self.fused or None, **keywords
        )

    # ---- training

    def on_fit_start(self) -> None:
        pass  # from random weights, too: BatchNorm is trained

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_learning_rate()

    def learning_rate(self) -> float:
        trainer, steps = self.trainer, self.trainer.max_steps
        if steps <= 0:
            steps = total_epochs_of(trainer) * int(steps_per_epoch(trainer))
        return self.sgd.lr * lr_factor(self.schedule_options, trainer.global_step, steps)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        found = self(batch)
        return {"loss": found.loss, **{name: value.detach() for name, value in found.losses.items()}}

    # ---- evaluation

    def expect_checkpoint(self) -> None:
        super().expect_checkpoint()
        self.precise_norm = 0  # the checkpoint has them

    def on_validation_start(self) -> None:
        super().on_validation_start()
        trainer = self.trainer
        if not self.precise_norm or trainer.sanity_checking or not self._training_is_over:
            return
        reseed(self.seed, self.global_rank, trainer.global_step, _NORM_STREAM)
        precision = trainer.precision_plugin

        def batches() -> Iterator[Any]:
            for batch in islice(trainer.datamodule.training_loader(), self.precise_norm):  # type: ignore[attr-defined]
                yield trainer.strategy.batch_to_device(precision.convert_input(batch))

        with precision.train_step_context():
            average_statistics(self.net, lambda batch: self(as_batch(batch)), batches())
        for norm in _norms(self.net):
            for statistic in (norm.running_mean, norm.running_var):
                statistic.copy_(trainer.strategy.reduce(statistic, reduce_op="mean"))  # type: ignore[union-attr]

    def make_metric(self, data: DataInfo) -> Any:
        return VocAP(len(data.classes))

    def compute_metrics(self, metric: Any) -> dict[str, float]:
        values = metric.compute()
        self.per_class = (100 * values["per_class"]).tolist()
        return {name: 100 * float(values[name]) for name in metric.names}

    def evaluate(self, batch: Batch, name: str) -> None:  # type: ignore[override]
        self.update_metrics(self.metrics[name], self.test_outputs(batch), batch)

    def predictions(self, outputs: Any, sizes: Tensor, threshold: float = 0.0) -> list[dict[str, Tensor]]:
        found = []
        for one, (height, width), seen in zip(outputs.detections, sizes.tolist(), outputs.sizes, strict=True):
            scale = one["boxes"].new_tensor([width / seen[1], height / seen[0]] * 2)
            kept = one["scores"] >= threshold
            found.append({name: value[kept] for name, value in {**one, "boxes": one["boxes"] * scale}.items()})
        return found

    # ---- commands

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        metadata = {"backbone": self.backbone, "backbone_args": json.dumps(self.backbone_args)}
        arguments = "".join(f", {name}={value!r}" for name, value in self.backbone_args.items())
        call = f"FasterRCNN({self.backbone!r}, {len(self.class_counts)}{arguments})"
        return metadata, call, "from batchformer.models.faster_rcnn import FasterRCNN"


def _norms(net: nn.Module) -> list[_BatchNorm]:
    return [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


@torch.no_grad()
def average_statistics(net: nn.Module, forward: Callable[[Any], Any], batches: Iterable[Any]) -> None:
    """Replace BatchNorm's running mean and variance by their plain means over these batches, in training mode.

    torch's `update_bn` does the same for networks that take images alone. Weights, modes and counts stay as they are.
    """
    norms, modes = _norms(net), {module: module.training for module in net.modules()}
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]  # type: ignore[union-attr]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
    net.train()
    for batch in batches:
        forward(batch)
    for norm, (momentum, count) in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.num_batches_tracked.copy_(count)  # type: ignore[union-attr, operator]
    for module, mode in modes.items():
        module.training = mode
