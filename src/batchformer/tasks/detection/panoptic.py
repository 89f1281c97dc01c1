"""Panoptic segmentation: DETR's mask head on a trained detector, with or without BatchFormerV2."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from batchformer.data import CocoPanoptic
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.metrics import PanopticQuality, ThingsAP
from batchformer.metrics.measures import PANOPTIC
from batchformer.metrics.panoptic_quality import PQ_NAMES
from batchformer.models.panoptic_head import (
    freeze_detector,
    load_detector,
    only_matched_masks,
    quiet_detector,
    read_pretrained,
    with_mask_head,
)
from batchformer.models.panoptic_merge import panoptic_segments
from batchformer.tasks.detection.task import Detection
from batchformer.training.task import Batch
from batchformer.training.weights import read_weights

THINGS_NAMES = ("ap", "ap50", "ap75")  # of the masks of things


class PanopticMetrics:
    """V2's Table 5: PQ, SQ and RQ of all classes, of things and of stuff, and COCO's AP of the things' masks."""

    names = (*PQ_NAMES, *THINGS_NAMES)

    def __init__(self, is_thing: Sequence[bool]) -> None:
        self.quality, self.things = PanopticQuality(is_thing), ThingsAP(is_thing)

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        self.quality.update(predictions, targets)
        self.things.update(predictions, targets)

    def compute(self) -> dict[str, Tensor]:
        """Fractions; `per_class` is the PQ of every class."""
        quality, things = self.quality.compute(), self.things.compute()
        named = {name: quality[name] for name in PQ_NAMES} | {name: things[name] for name in THINGS_NAMES}
        return {**named, "per_class": quality["per_class"][:, 0]}

    @property
    def class_scores(self) -> dict[str, Any]:
        return self.quality.class_scores

    def reset(self) -> None:
        self.quality.reset()
        self.things.reset()


class Panoptic(Detection):
    """Trains the head as DETR does (its section 4.4); logs `val/pq sq rq`, the same of things and stuff, and `val/ap`.

    V2, section 4.3: a detector of all categories, things and stuff, is trained with BatchFormerV2 (a recipe of the task
    `detection` on panoptic data); then detector and module are frozen and the head is trained on both streams. Frozen
    means here: no gradient, and in eval mode, so that dropout is off (in the released code it is on).
    Mask losses are focal and dice, with weight 1 each, of the queries that the Hungarian matching of the detector
    chooses. All numbers are in percent, of the plain network; `ap` is COCO's AP of the things' masks. The trained
    detector is `init_from["detector"]`: a run folder, or a folder written by save_pretrained.

    Args:
        train: "head" as published, or "joint": detector, module and head together, from a detector if one is given.
        threshold: the lowest class score of queries that take part in the segmentation.
        detector: the head needs DETR.
        options: those of `Detection`: detector_args, backbone and batchformer as the detector was trained with;
            frozen_stages is for "joint".
    """

    measures = PANOPTIC
    main_picture: ClassVar[Mapping[str, Any]] = {"bars": ["pq", "sq", "rq", "pq_things", "pq_stuff"]}
    checkpoint_key_of_0_1 = "panoptic"
    data_class: ClassVar[type] = CocoPanoptic
    predict_options: ClassVar[Mapping[str, str]] = {
        **Detection.predict_options,
        "threshold": "how sure a query must be to take part (0.85)",
    }

    def __init__(
        self,
        train: Literal["head", "joint"] = "head",
        threshold: float = 0.85,
        detector: Literal["detr"] = "detr",
        **options: Any,
    ) -> None:
        if not 0 <= threshold < 1:
            raise UserError(f"model.threshold={threshold} must be from 0 to below 1.")
        super().__init__(detector, **options)
        self.trained_part, self.threshold = train, threshold
        self.save_hyperparameters({"train": train, "threshold": threshold})

    # ---- building

    @property
    def frozen(self) -> bool:
        """Whether the detector is frozen."""
        return self.trained_part == "head"

    @property
    def is_thing(self) -> list[bool]:
        return list(self.data_info.get("is_thing") or ())

    def plain_net(self, data: DataInfo) -> nn.Module:
        # losses of the decoder's other layers have no gradient at the head's parameters
        return with_mask_head(super().plain_net(data), auxiliary_loss=not self.frozen)

    def build(self, data: DataInfo) -> None:
        super().build(data)
        if self.frozen:
            freeze_detector(self.net)

    def load_part(self, part: str, source: str) -> None:
        if part != "detector":
            super().load_part(part, source)
            return
        folder = Path(source).expanduser()
        pretrained = (folder / "config.json").is_file()
        weights = read_pretrained(folder) if pretrained else read_weights(folder)
        load_detector(self.net, weights, source, with_module=self.attachment is not None)

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        if not getattr(data, "masks", True):
            raise UserError("data.masks=false gives boxes alone, and the mask head learns from masks: set it to true.")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.frozen and not self.init_from.get("detector") and not self.restored:
            raise UserError(
                "there is no detector to train the mask head on: name the run folder of a detector of all categories "
                "(a recipe of the task detection on panoptic data) with --init-from detector=RUN, or train both "
                "together with model.train=joint."
            )

    def make_metric(self, data: DataInfo) -> PanopticMetrics:
        is_thing = data.get("is_thing") or ()
        if len(is_thing) != len(data.classes):
            raise UserError(
                f"{len(data.classes)} classes, but {len(is_thing)} are known to be thing or stuff: take a "
                f"CocoPanoptic, or data that declare is_thing."
            )
        return PanopticMetrics(is_thing)

    # ---- training

    def on_train_start(self) -> None:
        super().on_train_start()
        self._quiet()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._quiet()

    def step(self, batch: Batch) -> dict[str, Tensor]:
        whole = self.compile_net and self.device.type == "cuda"  # a compiled network stays in one piece
        with nullcontext() if whole else only_matched_masks(self.net, batch["labels"]):
            return super().step(batch)

    def _quiet(self) -> None:
        if self.frozen:
            quiet_detector(self.net)

    # ---- evaluation

    def update_metrics(self, metric: PanopticMetrics, outputs: Any, batch: Batch) -> None:
        metric.update(self.segments(outputs, batch), batch["labels"])

    def compute_metrics(self, metric: PanopticMetrics) -> dict[str, float]:
        values = metric.compute()
        self.per_class = (100 * values.pop("per_class")).tolist()
        return {name: 100 * float(value) for name, value in values.items()}

    def segments(self, outputs: Any, batch: Batch, threshold: float | None = None) -> list[dict[str, Any]]:
        """The segmentation of each image in its original size: see `panoptic_segments`."""
        sizes, originals = (torch.stack([label[key] for label in batch["labels"]]) for key in ("size", "orig_size"))
        precise = type(outputs)(logits=outputs.logits.float(), pred_masks=outputs.pred_masks)
        canvas = batch["pixel_values"].shape[-2:]
        sure = self.threshold if threshold is None else threshold
        return panoptic_segments(precise, canvas, sizes, originals, self.is_thing, sure)

    def predict_step(  # type: ignore[override]
        self, batch: Batch, batch_idx: int, threshold: float | None = None
    ) -> list[dict[str, Any]]:
        """The segments of each image, in the size of the original one; `labels` need `size` and `orig_size` only."""
        outputs = self.test_outputs({name: value for name, value in batch.items() if name != "labels"})
        return self.segments(outputs, batch, threshold)

    # ---- commands

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        metadata, call, imports = super().export_notes()
        return metadata, f"with_mask_head({call})", f"{imports}, with_mask_head"
