"""Object detection with transformers' DETR family, with or without BatchFormerV2."""

import warnings
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.data import DetectionData
from batchformer.data.loading.order import check_batches
from batchformer.errors import NonFiniteLoss, UserError
from batchformer.metrics import CocoAP
from batchformer.metrics.coco_ap import AP_NAMES
from batchformer.models.detectors import PUBLISHED_FROZEN, create_detector, parameter_groups
from batchformer.tasks.detection.options import DetectorModuleOptions, DetectorOptimizerOptions, detector_schedule
from batchformer.training.image_task import CHECK_EVERY, ImageTask
from batchformer.training.options import ScheduleOptions, as_options
from batchformer.training.schedule import check_schedule, lr_factor, total_epochs_of
from batchformer.training.stream_meter import StreamMeter

Batch = dict[str, Any]  # pixel_values, pixel_mask and labels: see `DetectionData`
_SET_ELSEWHERE = {
    "name": "the detector is model.detector",
    "num_labels": "the classes are those of the data",
    "id2label": "the classes are those of the data",
    "backbone": "it is model.backbone",
    "backbone_weights": "they are model.backbone_weights",
    "frozen_stages": "they are model.frozen_stages",
}


class Detection(ImageTask):
    """Trains a detector as its paper does; logs `train/loss loss_plain loss_related lr` and `val/loss ap ap50 ...`.

    V2, section 4.1: BatchFormerV2 after encoder layers, all else as in DETR, Conditional DETR, SMCA and Deformable
    DETR; the loss is the mean over both streams, and at test time there is the plain detector. Average precisions are
    COCO's, in percent, of the plain detector. Released code clips gradients at a norm of 0.1, which is for the
    trainer: trainer.gradient_clip_val.

    Args:
        detector: one of `batchformer.models.DETECTORS`.
        detector_args: fields of its configuration in transformers: num_queries, encoder_layers, dropout, ...
        backbone: any name that timm can build with features_only.
        backbone_weights: a local file of timm or torchvision, "pretrained" for timm's download, or null: random.
        frozen_stages: of the backbone, or "all"; null: stem and first stage if there are weights, as published.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how and where the module is attached.
        evaluate_with_batch: evaluate a second time with the module over the batches of images (V2's Table 12); those
            metrics end in `_batch`.
        stream_loss: the loss is the mean over both streams, in the released code too.
        optimizer: AdamW, its learning rates and weight decay.
        schedule: of the learning rate, per epoch.
        seed: decides initial weights and dropout.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training; elsewhere no difference.
        cuda_graph: not for detectors, whose boxes are matched on the host.
    """

    checkpoint_key = "detection"
    shown_metrics = ("ap", "ap50")
    data_class: ClassVar[type] = DetectionData
    metric: Any

    def __init__(
        self,
        detector: str = "detr",
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
        super().__init__(backbone, None, method, stream_loss, seed, channels_last, compile, cuda_graph)
        if cuda_graph:
            raise UserError("cuda_graph=true is not for detectors: their boxes are matched on the host in every step.")
        self.detector, self.detector_args = detector, dict(detector_args or {})
        for name in _SET_ELSEWHERE.keys() & self.detector_args.keys():
            raise UserError(f"model.detector_args cannot hold {name!r}: {_SET_ELSEWHERE[name]}.")
        self.backbone_weights, self.frozen_stages = backbone_weights, frozen_stages
        self.module_options = as_options(DetectorModuleOptions, batchformer)
        self.evaluate_with_batch = evaluate_with_batch and method == "batchformer"
        self.optimizer_options = as_options(DetectorOptimizerOptions, optimizer)
        self.optimizer_options.check()
        self.schedule_options = as_options(ScheduleOptions, schedule)
        self.category_ids: list[int] = []
        self.is_thing: list[bool] = []
        self.restored = False  # whether the weights come from a checkpoint of this very task
        # plain dicts: a checkpoint must load with weights_only=True
        self.save_hyperparameters(
            {
                "detector": detector,
                "detector_args": self.detector_args,
                "backbone": backbone,
                "backbone_weights": backbone_weights,
                "frozen_stages": frozen_stages,
                "method": method,
                "batchformer": asdict(self.module_options),
                "evaluate_with_batch": evaluate_with_batch,
                "stream_loss": stream_loss,
                "optimizer": asdict(self.optimizer_options),
                "schedule": asdict(self.schedule_options),
                "seed": seed,
                "channels_last": channels_last,
                "compile": compile,
                "cuda_graph": cuda_graph,
            }
        )

    # ---- what a related task may change

    def build_model(self, num_classes: int) -> nn.Module:
        """The detector without the module."""
        frozen = self.frozen_stages
        if frozen is None and self.backbone_weights is not None:
            frozen = PUBLISHED_FROZEN  # also where the weights come from a checkpoint
        return create_detector(
            self.detector,
            num_labels=num_classes,
            backbone=self.backbone,
            backbone_weights=None if self.restored else self.backbone_weights,
            frozen_stages=frozen,
            **self.detector_args,
        )

    def make_metric(self) -> Any:
        return CocoAP(len(self.class_counts))

    def update_metrics(self, metric: Any, outputs: Any, batch: Batch) -> None:
        metric.update(self.predictions(outputs, self._sizes(batch)), batch["labels"])

    def compute_metrics(self, metric: Any) -> dict[str, float]:
        """In percent, the one that stands for all of them first; `per_class_accuracy` is set beside."""
        values = metric.compute()
        self.per_class_accuracy = (100 * values["per_class"]).tolist()
        percent = {name: 100 * float(values[name]) for name in AP_NAMES}
        return {"all": percent["ap"], **percent}

    def predictions(self, outputs: Any, sizes: Tensor, threshold: float = 0.0) -> list[dict[str, Tensor]]:
        """Of each image `scores`, `labels` and `boxes` (x1, y1, x2, y2) in pixels of an image of that (height, width).

        At most 100 of them, as COCO counts: with a focal loss the best pairs of query and class, else one a query.
        """
        import transformers

        kind = "Detr" if self.detector == "detr" else "DeformableDetr"
        process = getattr(transformers, f"{kind}ImageProcessor")().post_process_object_detection
        outputs = type(outputs)(logits=outputs.logits.float(), pred_boxes=outputs.pred_boxes.float())
        return process(outputs, threshold=threshold, target_sizes=sizes)

    @property
    def metric_names(self) -> tuple[str, ...]:
        names = ("all", *AP_NAMES)
        return (*names, *(f"{name}_batch" for name in names)) if self.evaluate_with_batch else names

    # ---- building

    def before_build(self, data: Any, resumes: bool) -> None:
        self.restored = resumes
        check_batches(data.train_images, data.batch_size, 1, data.drop_last)

    @property
    def before_classifier(self) -> bool:
        return False

    def plain_net(self, num_classes: int) -> nn.Module:
        return self.build_model(num_classes)

    def _attach(self, net: nn.Module) -> Any:
        return bf.attach(net, **self.module_options.keywords())

    def build(self, num_classes: int, class_counts: list[int]) -> None:
        super().build(num_classes, class_counts)
        self.metric, self.batch_metric = self.make_metric(), self.make_metric()

    def _check_schedule(self) -> None:
        check_schedule(self.schedule_options, total_epochs_of(self.trainer))

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
        own = {id(p) for p in self.attachment.parameters()} if self.attachment is not None else set()
        made: list[dict[str, Any]] = []
        for group in parameter_groups(self.net, options.lr, options.backbone_lr, sampling_lr, options.weight_decay):
            rates = {False: group["lr"], True: options.lr * options.module_lr_factor}
            for of_module, lr in rates.items():
                if some := [p for p in group["params"] if (id(p) in own) == of_module]:
                    made.append({**group, "params": some, "lr": lr, "lr_factor": lr / options.lr})
        return torch.optim.AdamW(made, lr=options.lr, betas=tuple(options.betas), fused=self._fused or None)  # type: ignore[arg-type]

    def _lr(self) -> float:
        epochs = total_epochs_of(self.trainer)
        return self.optimizer_options.lr * lr_factor(self.schedule_options, self.current_epoch, epochs)

    # ---- training

    def on_fit_start(self) -> None:
        if self.compile_net and self.device.type == "cuda":
            self.net.compile()  # in place: no key changes; sizes differ from batch to batch
        data = getattr(self.trainer, "datamodule", None)
        self.category_ids = list(getattr(data, "category_ids", []))
        self.is_thing = list(getattr(data, "is_thing", []))
        begins = self.trainer.ckpt_path is None and getattr(self, "detector_from", None) is None
        if begins and self.backbone_weights is None and self.trainer.is_global_zero:
            warnings.warn(
                f"{self.backbone} begins with random weights, which a backbone with frozen BatchNorm does not recover "
                f"from: give a file with ImageNet weights as model.backbone_weights.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_meter(self) -> StreamMeter:
        return StreamMeter(self.device, self.trainer.accumulate_grad_batches)

    def forward(self, batch: Batch) -> Any:  # type: ignore[override]
        images = batch["pixel_values"]
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        rest = {name: batch[name] for name in ("pixel_mask", "labels") if name in batch}
        return self.net(pixel_values=images, **rest)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        try:
            loss = self(batch).loss
        except ValueError as problem:  # of transformers' GIoU, which compares the corners of boxes
            if "boxes" not in str(problem):
                raise
            raise NonFiniteLoss(
                f"the boxes of step {self.trainer.global_step} (epoch {self.current_epoch}) are not numbers: try a "
                f"lower model.optimizer.lr, more model.schedule.warmup_epochs, or trainer.precision=32-true"
            ) from problem
        self._measure(loss.detach(), len(batch["pixel_values"]))
        if not loss.is_cuda or (batch_idx + 1) % CHECK_EVERY == 0:
            self._raise_if_not_finite()
        return loss

    def _measure(self, loss: Tensor, images: int) -> None:
        meter = self._meter
        assert isinstance(meter, StreamMeter)
        meter.update(loss, torch.zeros(images, dtype=torch.bool, device=loss.device))
        losses: tuple[Tensor | None, Tensor | None] = (loss, None)
        if self.attachment is not None:
            one_stream = self.attachment.points[0].module.streams == "single"
            losses = (None, loss) if one_stream else self.attachment.stream_losses() or (loss, None)
        plain, related = (None if one is None else one.expand(images) for one in losses)
        meter.update_streams(plain, related)

    def _train_values(self) -> dict[str, float]:
        assert isinstance(self._meter, StreamMeter)
        streams = {f"train/loss_{name}": value for name, value in self._meter.stream_losses().items() if value == value}
        return {"train/loss": self._meter.values()[0], "lr": self._last_lr, **streams}

    # ---- evaluation

    def _evaluate(self, batch: Batch, stage: str) -> None:  # type: ignore[override]
        count, several = len(batch["pixel_values"]), self.trainer.world_size > 1
        outputs = self._test_outputs(batch)
        self.update_metrics(self.metric, outputs, batch)
        self.log(f"{stage}/loss", outputs.loss.float(), on_epoch=True, batch_size=count, sync_dist=several)
        if self.evaluate_with_batch:
            with self.attachment.infer_with_batch():
                self.update_metrics(self.batch_metric, self._test_outputs(batch), batch)

    def _test_outputs(self, batch: Batch) -> Any:
        with torch.compiler.set_stance("force_eager") if self.compile_net else nullcontext():
            return self(batch)

    def _log_accuracies(self, stage: str) -> None:
        values = {}
        if self.evaluate_with_batch:
            values = {f"{name}_batch": value for name, value in self.compute_metrics(self.batch_metric).items()}
            self.batch_metric.reset()
        values = {**self.compute_metrics(self.metric), **values}
        self.metric.reset()
        self._log_metrics(stage, {name: torch.tensor(value, device=self.device) for name, value in values.items()})

    def predict_step(self, batch: Batch, batch_idx: int, threshold: float = 0.0) -> list[dict[str, Any]]:  # type: ignore[override]
        """What is in each image, in pixels of the original one; `labels` need `orig_size` only."""
        outputs = self._test_outputs({name: value for name, value in batch.items() if name != "labels"})
        return self.predictions(outputs, self._sizes(batch), threshold)

    def _sizes(self, batch: Batch) -> Tensor:
        return torch.stack([label["orig_size"] for label in batch["labels"]])

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[self.checkpoint_key] |= {"category_ids": self.category_ids, "is_thing": self.is_thing}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored = True
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint[self.checkpoint_key]
        self.category_ids, self.is_thing = saved["category_ids"], saved["is_thing"]
