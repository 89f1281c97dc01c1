"""Object detection with transformers' DETR family, with or without BatchFormerV2."""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.data import DetectionData
from batchformer.data.info import DataInfo
from batchformer.data.loading.order import check_batches
from batchformer.errors import NonFiniteLoss, UserError
from batchformer.metrics import CocoAP
from batchformer.metrics.coco_ap import AP_NAMES
from batchformer.metrics.measures import DETECTION
from batchformer.models.detectors import PUBLISHED_FROZEN, create_detector, parameter_groups
from batchformer.models.panoptic_head import read_pretrained
from batchformer.tasks.detection.predict import predict_objects
from batchformer.training.network_task import NetworkTask
from batchformer.training.optimizers import refuse_bad_betas, refuse_negative_rates
from batchformer.training.options import InnerModuleOptions, as_options, plain_values
from batchformer.training.schedules import ScheduleOptions
from batchformer.training.task import Batch
from batchformer.training.weights import NETWORK, load_weights

_SET_ELSEWHERE = {
    "name": "the detector is model.detector",
    "num_labels": "the classes are those of the data",
    "id2label": "the classes are those of the data",
    "backbone": "it is model.backbone",
    "backbone_weights": "they are given by --init-from backbone=FILE",
    "frozen_stages": "they are model.frozen_stages",
}


@dataclass
class DetectorModuleOptions(InnerModuleOptions):
    """How and where BatchFormerV2 is attached to a detector.

    Args:
        encoder_layers: numbers of the encoder layers to insert the module after, counted from 0, or "all". The paper
            counts from 1: its L1 is 0, its L3-6 are 2, 3, 4, 5.
        mask_padding: padded positions of smaller images take no part; as published they do.
        layer_scale: initial value of a learnt factor on both branches.
    """

    encoder_layers: list[int] | Literal["all"] = field(default_factory=lambda: [0])
    mask_padding: bool = False
    layer_scale: float | None = None

    def keywords(self) -> dict[str, Any]:
        if not self.encoder_layers:
            raise UserError(
                'model.batchformer.encoder_layers names no layer: give their numbers, as in [0], or "all"; without the '
                "module it is model.method=baseline."
            )
        return super().keywords()


@dataclass
class DetectorOptimizerOptions:
    """AdamW with the groups of the released code. Every parameter is decayed, as there.

    Args:
        lr: of encoder, decoder and heads.
        backbone_lr: of what is trained of the backbone.
        sampling_lr: of sampling offsets and reference points (Deformable DETR); null: a tenth of lr, as published.
        weight_decay: of all.
        module_lr_factor: the module's learning rate is this times lr (released: 1).
        betas: of AdamW.
    """

    lr: float = 1e-4
    backbone_lr: float = 1e-5
    sampling_lr: float | None = None
    weight_decay: float = 1e-4
    module_lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)

    def check(self) -> None:
        if self.lr <= 0:
            raise UserError(f"model.optimizer.lr={self.lr} must be more than 0.")
        refuse_negative_rates(self)
        refuse_bad_betas(self.betas)


class Detection(NetworkTask):
    """Trains a detector as its paper does; logs `train/loss loss_plain loss_related lr` and `val/loss ap ap50 ...`.

    V2, section 4.1: BatchFormerV2 after encoder layers, all else as in DETR, Conditional DETR, SMCA and Deformable
    DETR; the loss is the mean over both streams, and at test time there is the plain detector. Average precisions are
    COCO's, in percent, of the plain detector. Released code clips gradients at a norm of 0.1: set
    trainer.gradient_clip_val. `init_from["backbone"]` is a local file of timm or torchvision, or "pretrained"
    for timm's download.

    Args:
        detector: one of `batchformer.models.DETECTORS`.
        detector_args: fields of its configuration in transformers: num_queries, encoder_layers, dropout, ...
        backbone: any name that timm can build with features_only.
        frozen_stages: of the backbone, or "all"; null: stem and first stage if it begins with weights, as published.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how and where the module is attached.
        evaluate_with_batch: evaluate a second time with the module over the batches of images (V2's Table 12); those
            metrics end in `_batch`.
        stream_loss: the loss is the mean over both streams, in the released code too.
        optimizer: AdamW, its learning rates and weight decay.
        schedule: of the learning rate, per epoch: a tenth from epoch 40 on, as all but DETR have it in 50 epochs.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    shardable = True

    measures = DETECTION
    main_picture: ClassVar[Mapping[str, Any]] = {"bars": ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"]}
    analyses: Sequence[Any] = ("box_failures",)
    in_checkpoint: ClassVar[Mapping[str, str]] = {"class_scores": "class_scores"}
    checkpoint_key_of_0_1 = "detection"
    data_class: ClassVar[type] = DetectionData
    predict_options: ClassVar[Mapping[str, str]] = {
        "threshold": "from which score on a box is drawn (0.5)",
        "strict": "stop at the first image that cannot be read",
    }

    def __init__(
        self,
        detector: str = "detr",
        detector_args: dict[str, Any] | None = None,
        backbone: str = "resnet50",
        frozen_stages: int | Literal["all"] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: DetectorModuleOptions = DetectorModuleOptions(),
        evaluate_with_batch: bool = False,
        stream_loss: Literal["mean"] = "mean",
        optimizer: DetectorOptimizerOptions = DetectorOptimizerOptions(),
        schedule: ScheduleOptions = ScheduleOptions(name="step", milestones=[40]),
        **options: Any,
    ) -> None:
        super().__init__(backbone, None, method, stream_loss, **options)
        if self.cuda_graph:
            raise UserError("cuda_graph=true is not for detectors: their boxes are matched on the host in every step.")
        self.detector, self.detector_args = detector, dict(detector_args or {})
        for name in _SET_ELSEWHERE.keys() & self.detector_args.keys():
            raise UserError(f"model.detector_args cannot hold {name!r}: {_SET_ELSEWHERE[name]}.")
        self.frozen_stages = frozen_stages
        self.module_options = batchformer = as_options(DetectorModuleOptions, batchformer, "batchformer")
        self.evaluate_with_batch = evaluate_with_batch and method == "batchformer"
        self.optimizer_options = optimizer = as_options(DetectorOptimizerOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(ScheduleOptions, schedule, "schedule")
        self.class_scores: dict[str, Any] = {}  # of the last evaluation: columns of the table of classes
        self.metrics: dict[str, Any] = {}
        self.batch_metrics: dict[str, Any] = {}
        self.save_hyperparameters(plain_values(locals()))

    # ---- overridden by related tasks

    def plain_net(self, data: DataInfo) -> nn.Module:
        """The detector without the module."""
        frozen = self.frozen_stages
        if frozen is None and self.init_from.get("backbone") is not None:
            frozen = PUBLISHED_FROZEN  # also where the weights come from a checkpoint
        return create_detector(
            self.detector,
            num_labels=len(data.classes),
            backbone=self.backbone,
            backbone_weights=None if self.restored or NETWORK in self.init_from else self.init_from.get("backbone"),
            frozen_stages=frozen,
            **self.detector_args,
        )

    def make_metric(self, data: DataInfo) -> Any:
        return CocoAP(len(data.classes))

    def update_metrics(self, metric: Any, outputs: Any, batch: Batch) -> None:
        metric.update(self.predictions(outputs, self._sizes(batch)), batch["labels"])

    def compute_metrics(self, metric: Any) -> dict[str, float]:
        """In percent; also sets `per_class`."""
        values = metric.compute()
        self.per_class = (100 * values["per_class"]).tolist()
        return {name: 100 * float(values[name]) for name in AP_NAMES}

    def predictions(self, outputs: Any, sizes: Tensor, threshold: float = 0.0) -> list[dict[str, Tensor]]:
        """Of each image `scores`, `labels` and `boxes` (x1, y1, x2, y2) in pixels of an image of that (height, width).

        At most 100 of them, as COCO counts: with a focal loss the best pairs of query and class, else one a query.
        """
        import transformers

        kind = "Detr" if self.detector == "detr" else "DeformableDetr"
        process = getattr(transformers, f"{kind}ImageProcessor")().post_process_object_detection
        outputs = type(outputs)(logits=outputs.logits.float(), pred_boxes=outputs.pred_boxes.float())
        return process(outputs, threshold=threshold, target_sizes=sizes)

    # ---- building

    @property
    def category_ids(self) -> list[int]:
        return list(self.data_info.get("category_ids") or ())

    def check_data(self, data: Any) -> None:
        check_batches(data.train_images, data.batch_size, 1, data.drop_last)

    def attach_to(self, net: nn.Module) -> Any:
        return bf.attach(net, **self.module_options.keywords())

    def build(self, data: DataInfo) -> None:
        super().build(data)
        names = data.get("evaluation_sets") or ("val",)
        self.metrics, self.batch_metrics = ({name: self.make_metric(data) for name in names} for _ in range(2))

    def load_part(self, part: str, source: str) -> None:
        if part == "backbone":  # which the detector was made with
            return
        weights = None
        if (folder := Path(source).expanduser()).joinpath("config.json").is_file():
            # transformers' files have other keys than its models, and its loader maps them
            weights = read_pretrained(folder, type(self.net))
        load_weights(self.net, part, source, self.attachment is not None, weights)

    def setup(self, stage: str) -> None:
        if str(self.trainer.precision) in ("bf16-true", "16-true"):
            mixed = str(self.trainer.precision).replace("true", "mixed")
            raise UserError(
                f"trainer.precision {self.trainer.precision} rounds the boxes of the data, too: use {mixed}, which "
                f"computes in half precision and keeps weights and boxes."
            )
        super().setup(stage)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = self.optimizer_options
        sampling_lr = options.lr / 10 if options.sampling_lr is None else options.sampling_lr
        own = {id(p) for p in self.module_parameters}
        made: list[dict[str, Any]] = []
        for group in parameter_groups(self.net, options.lr, options.backbone_lr, sampling_lr, options.weight_decay):
            rates = {False: group["lr"], True: options.lr * options.module_lr_factor}
            for of_module, lr in rates.items():
                if some := [p for p in group["params"] if (id(p) in own) == of_module]:
                    made.append({**group, "params": some, "lr": lr, "lr_factor": lr / options.lr})
        return torch.optim.AdamW(made, lr=options.lr, betas=tuple(options.betas), fused=self.fused or None)  # type: ignore[arg-type]

    # ---- training

    def on_fit_start(self) -> None:
        if self.compile_net and self.device.type == "cuda":
            self.net.compile()  # in place: no key changes; sizes differ from batch to batch
        begins = self.trainer.ckpt_path is None and not any(self.init_from.values())
        if begins and self.trainer.is_global_zero:
            warnings.warn(
                f"{self.backbone} begins with random weights, which a backbone with frozen BatchNorm does not recover "
                f"from: give a file with ImageNet weights, --init-from backbone=FILE.",
                RuntimeWarning,
                stacklevel=2,
            )

    def forward(self, batch: Batch) -> Any:  # type: ignore[override]
        images = batch["pixel_values"]
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        rest = {name: batch[name] for name in ("pixel_mask", "labels") if name in batch}
        return self.net(pixel_values=images, **rest)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        try:
            loss = self(batch).loss
        except ValueError as problem:  # of transformers' GIoU, which compares the corners of boxes
            if "boxes" not in str(problem):
                raise
            raise NonFiniteLoss(
                f"the boxes of step {self.trainer.global_step} (epoch {self.current_epoch}) are not numbers: try a "
                f"lower model.optimizer.lr, more model.schedule.warmup_epochs, or trainer.precision=32-true"
            ) from problem
        streams: tuple[Tensor | None, Tensor | None] = (loss, None)
        if self.attachment is not None:
            one_stream = self.attachment.points[0].module.streams == "single"
            streams = (None, loss) if one_stream else self.attachment.stream_losses() or (loss, None)
        named = zip(("loss_plain", "loss_related"), streams, strict=True)
        return {"loss": loss, **{name: value for name, value in named if value is not None}}

    # ---- evaluation

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        outputs = self.test_outputs(batch)
        self.update_metrics(self.metrics[name], outputs, batch)
        if self.evaluate_with_batch:
            with self.attachment.infer_with_batch():
                self.update_metrics(self.batch_metrics[name], self.test_outputs(batch), batch)
        return {"loss": outputs.loss.float()}

    def test_outputs(self, batch: Batch) -> Any:
        with torch.compiler.set_stance("force_eager") if self.compile_net else nullcontext():
            return self(batch)

    def results(self, name: str) -> dict[str, float]:
        values = {}
        if self.evaluate_with_batch:
            values = {f"{key}_batch": value for key, value in self.compute_metrics(self.batch_metrics[name]).items()}
            self.batch_metrics[name].reset()
        values = {**self.compute_metrics(self.metrics[name]), **values}
        self.class_scores = self.metrics[name].class_scores
        self.metrics[name].reset()
        return values

    def predict_step(self, batch: Batch, batch_idx: int, threshold: float = 0.0) -> list[dict[str, Any]]:  # type: ignore[override]
        """Detections of each image, in pixels of the original one; `labels` need `orig_size` only."""
        outputs = self.test_outputs({name: value for name, value in batch.items() if name != "labels"})
        return self.predictions(outputs, self._sizes(batch), threshold)

    def _sizes(self, batch: Batch) -> Tensor:
        return torch.stack([label["orig_size"] for label in batch["labels"]])

    # ---- commands

    def predict(self, images: list[Path], data: Any, out: Path | None, line: Any, **options: str) -> str:
        """Write a folder with one picture per image and files of detections in COCO's format: see `predict`."""
        return predict_objects(self, images, data, out or Path("predictions"), line, **options)

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        metadata = {
            "detector": self.detector,
            "detector_args": json.dumps(self.detector_args),
            "backbone": self.backbone,
            "backbone_args": json.dumps(self.backbone_args),
        }
        arguments = "".join(f", {name}={value!r}" for name, value in self.detector_args.items())
        classes = len(self.class_counts)
        call = f"create_detector({self.detector!r}, num_labels={classes}, backbone={self.backbone!r}{arguments})"
        return metadata, call, "from batchformer.models import create_detector"
