"""Image classification with DeiT's recipe, with or without BatchFormer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import DistillationLoss
from batchformer.metrics import TopAccuracy
from batchformer.metrics.measures import CLASSIFICATION
from batchformer.models import create_backbone
from batchformer.models.create import load_teacher
from batchformer.tasks.classification.mixing import LateTargets, Mixing, build_mixing
from batchformer.tasks.classification.options import DistillationOptions, InsertionOptions, MixOptions, heads_at
from batchformer.training.classifier_task import ClassifierTask
from batchformer.training.optimizers import AdamWOptions
from batchformer.training.options import as_options, plain_values
from batchformer.training.schedules import CosineOptions
from batchformer.training.task import Batch


class Classification(ClassifierTask):
    """Trains a classifier as DeiT does; logs `train/loss loss_plain loss_related acc lr` and `val/top1 top5 loss`.

    V2, section 4.4: BatchFormerV2 after blocks of a vision transformer, trained by DeiT's recipe; the loss is the mean
    over both streams, and at test time there is the plain network. The losses of the plain and of the related
    rows are logged separately, and one warning is given when the related one stays at chance (`bf.StreamGuard`).
    Accuracies are in percent and count plain rows only; of mixed images the larger part counts as the label.

    Args:
        backbone: any name timm knows (deit_tiny_patch16_224, ...), or one of `batchformer.models`.
        backbone_args: passed on to the backbone: drop_path_rate, img_size, patch_size, pretrained, ...
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how and where the module is attached.
        mix: mixup and CutMix, TransMix and the others.
        label_smoothing: of the labels, including mixed ones.
        distillation: DeiT's, for backbones with a distillation token.
        stream_loss: "mean" over the rows of both streams, or "released", three times that (see LongTailed).
        optimizer: AdamW, its learning rates and weight decays.
        schedule: warm-up and cosine.
        ema: decay of a moving average of the weights, which is evaluated too (DeiT: 0.99996); null: none.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    shardable = True
    schedule_options: CosineOptions

    measures = CLASSIFICATION
    main_picture: ClassVar[Mapping[str, Any]] = {"curve": "top1"}
    checkpoint_key_of_0_1 = "classification"

    def __init__(
        self,
        backbone: str = "deit_tiny_patch16_224",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: InsertionOptions = InsertionOptions(),
        mix: MixOptions = MixOptions(),
        label_smoothing: float = 0.1,
        distillation: DistillationOptions = DistillationOptions(),
        stream_loss: Literal["mean", "released"] = "mean",
        optimizer: AdamWOptions = AdamWOptions(),
        schedule: CosineOptions = CosineOptions(),
        ema: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, stream_loss, **options)
        self.module_options = batchformer = as_options(InsertionOptions, batchformer, "batchformer")
        self.mix_options = mix = as_options(MixOptions, mix, "mix")
        self.distillation_options = distillation = as_options(DistillationOptions, distillation, "distillation")
        self.optimizer_options = optimizer = as_options(AdamWOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(CosineOptions, schedule, "schedule")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"model.label_smoothing={label_smoothing} must be 0 or more and less than 1.")
        if ema is not None and not 0 <= ema < 1:
            raise UserError(f"model.ema={ema} must be 0 or more and less than 1; null switches it off.")
        self.label_smoothing, self.ema_decay = label_smoothing, ema
        # the paper's gradient influence is defined where the module stands before the classifier
        self.analyses = [*self.analyses, "stream_health" if batchformer.inside else "gradient_influence"]
        self.save_hyperparameters(plain_values(locals()))
        self._mixing: Mixing | None = None
        self._guard: bf.StreamGuard | None = None
        self._guard_state: dict[str, Any] | None = None
        self._teacher: list[nn.Module] = []  # in a list: not registered as a submodule, so not in checkpoints

    # ---- building

    @property
    def distils(self) -> bool:
        return self.distillation_options.kind != "none"

    def plain_net(self, data: DataInfo) -> nn.Module:
        net = create_backbone(self.backbone, len(data.classes), **self.backbone_args)
        if self.distils:
            if not hasattr(net, "set_distilled_training"):
                raise UserError(
                    f"distillation needs a backbone with a head for it, which {self.backbone} has not: take one such "
                    f"as deit_tiny_distilled_patch16_224, or set model.distillation.kind none."
                )
            net.set_distilled_training(True)  # type: ignore[operator]
        return net

    def attach_to(self, net: nn.Module) -> Any:
        options = self.module_options
        return bf.attach(net, **{**options.keywords(), "heads": heads_at(net, options)})

    def build(self, data: DataInfo) -> None:
        super().build(data)
        if self.ema_decay is not None:
            from timm.utils import ModelEmaV3

            self.ema = ModelEmaV3(self.net, decay=self.ema_decay).requires_grad_(False)

    def _build_losses_and_metrics(self, data: DataInfo) -> None:
        super()._build_losses_and_metrics(data)
        if self.ema_decay is not None:
            self.ema_metrics = nn.ModuleDict({name: self.build_metric(data) for name in self.metrics})

    def load_part(self, part: str, source: str) -> None:
        super().load_part(part, source)
        if self.ema_decay is not None:
            self.ema.set(self.net)

    def build_criterion(self, data: DataInfo) -> nn.Module:
        smoothing = 0.0 if self.mix_options.on else self.label_smoothing  # mixed labels are smoothed already
        criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
        if not self.distils:
            return criterion
        options = self.distillation_options
        return DistillationLoss(criterion, options.kind, options.alpha, options.tau)  # type: ignore[arg-type]

    def build_metric(self, data: DataInfo) -> TopAccuracy:
        return TopAccuracy(data.class_counts)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.built:  # so that errors come before anything is written
            self._load_teacher()
            self._make_mixing()

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        if self._mixing is not None:
            self._mixing.close()
            self._mixing = None

    def _make_mixing(self) -> None:
        if self.mix_options.on and self._mixing is None:
            self._mixing = build_mixing(
                self.mix_options, self.net, len(self.class_counts), self.label_smoothing, *self._normalisation
            )

    @property
    def _normalisation(self) -> tuple[Sequence[float] | None, Sequence[float] | None]:
        """Mean and std of the images, where the data declare them."""
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        return getattr(data, "mean", None), getattr(data, "std", None)

    def _load_teacher(self) -> None:
        if self.distils and not self._teacher:
            options = self.distillation_options
            classes = len(self.class_counts)
            teacher = load_teacher(
                options.teacher, classes, options.checkpoint, options.teacher_args, *self._normalisation
            )
            self._teacher.append(teacher)

    # ---- training

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._load_teacher()
        self._make_mixing()
        if self._mixing is not None and self.compile_net and self.device.type == "cuda":
            self._mixing.compile()
        for teacher in self._teacher:
            teacher.to(self.device)

    def on_train_start(self) -> None:
        super().on_train_start()
        attachment = self.attachment
        if attachment is not None and attachment.points[0].module.streams != "single" and self.trainer.is_global_zero:
            share = self.label_smoothing * sum(self.class_counts) / len(self.class_counts)
            counts = [(1 - self.label_smoothing) * count + share for count in self.class_counts]
            warmup = self.schedule_options.warmup_epochs * float(self.trainer.num_training_batches)
            self._guard = bf.StreamGuard(counts, warmup=round(warmup))
            if self._guard_state is not None:
                self._guard.load_state_dict(self._guard_state, self.device)
                self._guard_state = None

    def prepare(self, batch: Batch, batch_idx: int) -> Batch:
        if self._mixing is None:
            return batch
        images, targets = self._mixing(batch["images"], batch["labels"], *self.random_numbers_of(batch_idx))
        return {**batch, "images": images, "labels": targets}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self._guard is not None:
            self._guard.tick()
        return loss

    def step(self, batch: Batch) -> dict[str, Tensor]:
        images, targets = batch["images"], batch["labels"]
        late = None
        if isinstance(targets, LateTargets):  # TransMix: known after the forward pass
            assert self._mixing is not None
            late = self._mixing.expect(images, targets)
        outputs = self(images)
        labels: Any = targets if late is None else late.targets()
        wanted = labels
        if self._teacher:
            with torch.no_grad():
                wanted = (labels, self._teacher[0](images))
        loss = self.stream_criterion(outputs, wanted)
        return {"loss": loss, **self._parts(outputs[0] if isinstance(outputs, tuple) else outputs, labels)}

    @torch.no_grad()
    def _parts(self, logits: Float[Tensor, "rows classes"], targets: Tensor) -> dict[str, Tensor]:
        """Per sample: whether it was classified correctly, and the loss of its row in each stream."""
        targets = bf.repeat_targets(targets, logits)
        smoothing = 0.0 if targets.ndim > 1 else self.label_smoothing
        losses = F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=smoothing)
        right = logits.argmax(1) == (targets.argmax(1) if targets.ndim > 1 else targets)
        if self.attachment is None:
            return {"acc": 100.0 * right, "loss_plain": losses}
        parts = {"acc": 100.0 * self.attachment.plain(right)}
        if self.attachment.points[0].module.streams != "single":
            parts["loss_plain"] = self.attachment.plain(losses)
        if (related := self.attachment.related(losses)) is not None:
            parts["loss_related"] = related
            if self._guard is not None and "loss_plain" in parts:
                self._guard.add(parts["loss_plain"].mean(), related.mean())
        return parts

    def after_step(self) -> None:
        super().after_step()
        if self.ema_decay is not None:
            self.ema.update(self.net)

    # ---- evaluation

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        if self.ema_decay is not None:
            metric: Any = self.ema_metrics[name]
            metric.update(self.ema.module(batch["images"]).float(), batch["labels"])
        return super().evaluate(batch, name)

    def results(self, name: str) -> dict[str, Tensor]:
        found = super().results(name)
        if self.ema_decay is None:
            return found
        metric: Any = self.ema_metrics[name]
        averaged = metric.compute()
        metric.reset()
        return {**found, **{f"{key}_ema": averaged[key] for key in ("top1", "top5")}}

    def trained_network(self, averaged: bool = False) -> nn.Module:
        return self.ema.module if averaged and self.ema_decay is not None else super().trained_network(averaged)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._guard is not None:
            checkpoint["task"]["guard"] = self._guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._guard_state = checkpoint["task"].get("guard")
