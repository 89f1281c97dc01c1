"""Panoptic segmentation: DETR's mask head on a trained detector, with or without BatchFormerV2."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from batchformer.data import CocoPanoptic
from batchformer.errors import UserError
from batchformer.models.panoptic_head import (
    freeze_detector,
    load_detector,
    only_matched_masks,
    quiet_detector,
    read_detector,
    with_mask_head,
)
from batchformer.models.panoptic_merge import panoptic_segments
from batchformer.tasks.detection import Batch, Detection
from batchformer.tasks.detection_options import DetectorModuleOptions, DetectorOptimizerOptions, detector_schedule
from batchformer.tasks.options import ScheduleOptions
from batchformer.tasks.panoptic_metrics import PanopticMetrics


class Panoptic(Detection):
    """Trains the head as DETR does (its section 4.4); logs `val/pq sq rq`, the same of things and stuff, and `val/ap`.

    V2, section 4.3: a detector of all categories, things and stuff, is trained with BatchFormerV2 (a recipe of the task
    `detection` on panoptic data); then detector and module are frozen and the head is trained on both streams. Frozen
    means here: no gradient, and in the mode of testing, so that dropout does not act (in the released code it does).
    Mask losses are focal and dice, with weight 1 each, of the queries that the Hungarian matching of the detector
    chooses. All numbers are in percent, of the plain network; `ap` is COCO's AP of the things' masks.

    Args:
        detector_from: the trained detector: a run folder, or a folder written by save_pretrained.
        train: "head" as published, or "joint": detector, module and head together, from `detector_from` if it is given.
        threshold: how sure a query must be of its class to take part in the segmentation.
        detector: the head stands on DETR.
        detector_args: as the detector was trained with.
        backbone: as the detector was trained with.
        backbone_weights: for "joint" without a detector.
        frozen_stages: for "joint"; see `Detection`.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: as the detector was trained with.
        evaluate_with_batch: evaluate a second time with the module over the batches of images; those metrics end in
            `_batch`.
        stream_loss: the loss is the mean over both streams.
        optimizer: AdamW, its learning rates and weight decay.
        schedule: of the learning rate, per epoch.
        seed: decides initial weights and dropout.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training; elsewhere no difference.
        cuda_graph: not for detectors, whose boxes are matched on the host.
    """

    checkpoint_key = "panoptic"
    shown_metrics = ("pq", "pq_things")
    data_class: ClassVar[type] = CocoPanoptic

    def __init__(
        self,
        detector_from: str | None = None,
        train: Literal["head", "joint"] = "head",
        threshold: float = 0.85,
        detector: Literal["detr"] = "detr",
        detector_args: dict[str, Any] | None = None,
        backbone: str = "resnet50",
        backbone_weights: str | None = None,
        frozen_stages: int | Literal["all"] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: DetectorModuleOptions = DetectorModuleOptions(),
        evaluate_with_batch: bool = False,
        stream_loss: Literal["mean"] = "mean",
        optimizer: DetectorOptimizerOptions = DetectorOptimizerOptions(),
        schedule: ScheduleOptions = detector_schedule(),
        seed: int = 0,
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        if not 0 <= threshold < 1:
            raise UserError(f"model.threshold={threshold} must be from 0 to below 1.")
        super().__init__(
            detector=detector, detector_args=detector_args, backbone=backbone, backbone_weights=backbone_weights,
            frozen_stages=frozen_stages, method=method, batchformer=batchformer,
            evaluate_with_batch=evaluate_with_batch, stream_loss=stream_loss, optimizer=optimizer, schedule=schedule,
            seed=seed, channels_last=channels_last, compile=compile, cuda_graph=cuda_graph,
        )  # fmt: skip
        self.detector_from, self.trained_part, self.threshold = detector_from, train, threshold
        self.save_hyperparameters({"detector_from": detector_from, "train": train, "threshold": threshold})

    # ---- building

    @property
    def frozen(self) -> bool:
        """Whether the detector is left as it is."""
        return self.trained_part == "head"

    def build_model(self, num_classes: int) -> nn.Module:
        # losses of the decoder's other layers move nothing that is trained with the head
        return with_mask_head(super().build_model(num_classes), auxiliary_loss=not self.frozen)

    def _build_net(self, num_classes: int) -> nn.Module:
        net = super()._build_net(num_classes)
        if self.detector_from is not None and not self.restored:
            weights = read_detector(Path(self.detector_from).expanduser())
            load_detector(net, weights, self.detector_from, with_module=self.attachment is not None)
        if self.frozen:
            freeze_detector(net)
        return net

    def before_build(self, data: Any, resumes: bool) -> None:
        super().before_build(data, resumes)
        if not getattr(data, "masks", True):
            raise UserError("data.masks=false gives boxes alone, and the mask head learns from masks: set it to true.")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.frozen and self.detector_from is None and not self.restored:
            raise UserError(
                "model.detector_from is not set: name the run folder of a detector of all categories (a recipe of the "
                "task detection on panoptic data), or train both together with model.train=joint."
            )

    def make_metric(self) -> PanopticMetrics | None:
        """None as long as nobody has said which classes are things: see `on_validation_start`."""
        return PanopticMetrics(self.is_thing) if self.is_thing else None

    # ---- training

    def on_train_start(self) -> None:
        super().on_train_start()
        self._quiet()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._quiet()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        whole = self.compile_net and self.device.type == "cuda"  # a compiled network stays in one piece
        with nullcontext() if whole else only_matched_masks(self.net, batch["labels"]):
            return super().training_step(batch, batch_idx)

    def _quiet(self) -> None:
        if self.frozen:
            quiet_detector(self.net)

    # ---- evaluation

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._know_the_things()

    def on_test_start(self) -> None:
        self._know_the_things()

    def _know_the_things(self) -> None:
        if self.metric is not None:
            return
        self.is_thing = self.is_thing or list(getattr(getattr(self.trainer, "datamodule", None), "is_thing", []))
        if len(self.is_thing) != len(self.class_counts):
            raise UserError(
                f"{len(self.class_counts)} classes, but {len(self.is_thing)} are known to be thing or stuff: give the "
                f"trainer a CocoPanoptic, or set task.is_thing."
            )
        self.metric, self.batch_metric = self.make_metric(), self.make_metric()

    @property
    def metric_names(self) -> tuple[str, ...]:
        names = ("all", *PanopticMetrics.names)
        return (*names, *(f"{name}_batch" for name in names)) if self.evaluate_with_batch else names

    def update_metrics(self, metric: PanopticMetrics, outputs: Any, batch: Batch) -> None:
        metric.update(self.segments(outputs, batch), batch["labels"])

    def compute_metrics(self, metric: PanopticMetrics) -> dict[str, float]:
        values = metric.compute()
        self.per_class_accuracy = (100 * values.pop("per_class")).tolist()
        percent = {name: 100 * float(value) for name, value in values.items()}
        return {"all": percent["pq"], **percent}

    def segments(self, outputs: Any, batch: Batch, threshold: float | None = None) -> list[dict[str, Any]]:
        """One segmentation of each image in its original size: see `panoptic_segments`."""
        sizes, originals = (torch.stack([label[key] for label in batch["labels"]]) for key in ("size", "orig_size"))
        precise = type(outputs)(logits=outputs.logits.float(), pred_masks=outputs.pred_masks)
        canvas = batch["pixel_values"].shape[-2:]
        sure = self.threshold if threshold is None else threshold
        return panoptic_segments(precise, canvas, sizes, originals, self.is_thing, sure)

    def predict_step(  # type: ignore[override]
        self, batch: Batch, batch_idx: int, threshold: float | None = None
    ) -> list[dict[str, Any]]:
        """The segments of each image, in the size of the original one; `labels` need `size` and `orig_size` only."""
        outputs = self._test_outputs({name: value for name, value in batch.items() if name != "labels"})
        return self.segments(outputs, batch, threshold)

    def predictions(self, outputs: Any, sizes: Tensor, threshold: float = 0.0) -> list[dict[str, Tensor]]:
        """The boxes of the detector below the head: see `Detection`."""
        return super().predictions(outputs, sizes, threshold)

    # ---- checkpoints

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.built:
            self.is_thing = list(checkpoint.get(self.checkpoint_key, {}).get("is_thing", []))
        super().on_load_checkpoint(checkpoint)
