"""Image classification with DeiT's recipe, with or without BatchFormer."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.errors import UserError
from batchformer.losses import DistillationLoss
from batchformer.metrics import TopAccuracy
from batchformer.models import create_backbone
from batchformer.models.teacher import load_teacher
from batchformer.tasks.classification.backbone_heads import heads_at
from batchformer.tasks.classification.mixing import LateTargets, Mixing, build_mixing
from batchformer.tasks.classification.options import (
    AdamWOptions,
    CosineOptions,
    DistillationOptions,
    InsertionOptions,
    MixOptions,
)
from batchformer.training.labelled_task import LabelledTask
from batchformer.training.layer_groups import Rule, build_optimizer, layer_rules
from batchformer.training.options import as_options
from batchformer.training.stream_meter import StreamMeter
from batchformer.training.warm_cosine import check_has_end, place_in_run, warm_cosine


class Classification(LabelledTask):
    """Trains a classifier as DeiT does; logs `train/loss loss_plain loss_related acc lr` and `val/top1 top5 all loss`.

    V2, section 4.4: BatchFormerV2 after blocks of a vision transformer, trained by DeiT's recipe; the loss is the mean
    over both streams, and at test time there is the plain network. The loss of the plain and of the related rows is
    measured by itself all along, and a warning comes once when the related one stays at chance (`bf.StreamGuard`).
    Accuracies are in percent and count plain rows only; of mixed images the larger part counts as the label.

    Args:
        backbone: any name timm knows (deit_tiny_patch16_224, ...), or one of `batchformer.models`.
        backbone_args: passed on to the backbone: drop_path_rate, img_size, patch_size, pretrained, ...
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how and where the module is attached.
        mix: mixup and CutMix, TransMix and the others.
        label_smoothing: of the labels, also of mixed ones.
        distillation: DeiT's, for backbones with a distillation token.
        stream_loss: "mean" over the rows of both streams, or "released", three times that (see LongTailed).
        optimizer: AdamW, its learning rates and weight decays.
        schedule: warm-up and cosine.
        ema: decay of a moving average of the weights, evaluated beside them (DeiT: 0.99996); null: none.
        seed: decides initial weights, mixing and dropout.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training, and the extractor of Attentive CutMix;
            elsewhere no difference.
        cuda_graph: on a CUDA device, run each training step as one CUDA graph; elsewhere no difference.
    """

    checkpoint_key = "classification"
    shown_metrics = ("top1", "top1_ema")
    metric: TopAccuracy

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
        seed: int = 0,
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__(backbone, backbone_args, method, stream_loss, seed, channels_last, compile, cuda_graph)
        self.module_options = as_options(InsertionOptions, batchformer)
        self.mix_options = as_options(MixOptions, mix)
        self.mix_options.check()
        self.distillation_options = as_options(DistillationOptions, distillation)
        self.distillation_options.check()
        self.optimizer_options = as_options(AdamWOptions, optimizer)
        self.optimizer_options.check()
        self.schedule_options = as_options(CosineOptions, schedule)
        self.schedule_options.check()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"model.label_smoothing={label_smoothing} must be 0 or more and less than 1.")
        if ema is not None and not 0 <= ema < 1:
            raise UserError(f"model.ema={ema} must be 0 or more and less than 1; null switches it off.")
        self.label_smoothing, self.ema_decay = label_smoothing, ema
        # plain dicts: a checkpoint must load with weights_only=True
        self.save_hyperparameters(
            {
                "backbone": backbone,
                "backbone_args": self.backbone_args,
                "method": method,
                "batchformer": asdict(self.module_options),
                "mix": asdict(self.mix_options),
                "label_smoothing": label_smoothing,
                "distillation": asdict(self.distillation_options),
                "stream_loss": stream_loss,
                "optimizer": asdict(self.optimizer_options),
                "schedule": asdict(self.schedule_options),
                "ema": ema,
                "seed": seed,
                "channels_last": channels_last,
                "compile": compile,
                "cuda_graph": cuda_graph,
            }
        )
        self._rules: dict[str, Rule] = {}
        self._mixing: Mixing | None = None
        self._guard: bf.StreamGuard | None = None
        self._guard_state: dict[str, Any] | None = None
        self._teacher: list[nn.Module] = []  # in a list: no part of the task's own weights and checkpoints

    # ---- building

    @property
    def before_classifier(self) -> bool:
        return not self.module_options.inside

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*self.metric.names, *(("top1_ema", "top5_ema") if self.ema_decay is not None else ()))

    @property
    def distils(self) -> bool:
        return self.distillation_options.kind != "none"

    def plain_net(self, num_classes: int) -> nn.Module:
        net = create_backbone(self.backbone, num_classes, **self.backbone_args)
        if self.distils:
            if not hasattr(net, "set_distilled_training"):
                raise UserError(
                    f"distillation needs a backbone with a head for it, which {self.backbone} has not: take one such "
                    f"as deit_tiny_distilled_patch16_224, or set model.distillation.kind none."
                )
            net.set_distilled_training(True)  # type: ignore[operator]
        return net

    def _before_attach(self, net: nn.Module) -> None:
        self._rules = layer_rules(net, self.optimizer_options)

    def _attach(self, net: nn.Module) -> Any:
        options = self.module_options
        return bf.attach(net, **{**options.keywords(), "heads": heads_at(net, options)})

    def _build_net(self, num_classes: int) -> nn.Module:
        net = super()._build_net(num_classes)
        if self.ema_decay is not None:
            from timm.utils import ModelEmaV3

            self.ema = ModelEmaV3(net, decay=self.ema_decay).requires_grad_(False)
        return net

    def _build_criterion(self) -> nn.Module:
        smoothing = 0.0 if self.mix_options.on else self.label_smoothing  # mixed labels are smoothed already
        criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
        if self.ema_decay is not None:
            self.ema_metric = self._build_metric()
        if not self.distils:
            return criterion
        options = self.distillation_options
        return DistillationLoss(criterion, options.kind, options.alpha, options.tau)  # type: ignore[arg-type]

    def _build_metric(self) -> TopAccuracy:
        return TopAccuracy(self.class_counts)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.built:  # so that what is wrong with them is told before anything is written
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
        """Mean and std of the images, where the data tells them."""
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

    def _check_schedule(self) -> None:
        check_has_end(self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(
            self.optimizer_options, self.net, self._rules, self.attachment, self._peak_lr(), self._fused
        )

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

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.schedule_options.per == "step" and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._set_lr()

    def _prepare_batch(self, images: Tensor, labels: Tensor, batch_idx: int) -> tuple[Tensor, Tensor | LateTargets]:
        if self._mixing is None:
            return images, labels
        return self._mixing(images, labels, *self._random_numbers_of(batch_idx))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self._guard is not None:
            self._guard.tick()
        return loss

    def _loss(self, images: Float[Tensor, "batch channels height width"], targets: Tensor | LateTargets) -> Tensor:
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
        self._measure(loss.detach(), outputs[0] if isinstance(outputs, tuple) else outputs, labels)
        return loss

    @torch.no_grad()
    def _measure(self, loss: Tensor, logits: Float[Tensor, "rows classes"], targets: Tensor) -> None:
        targets = bf.repeat_targets(targets, logits)
        smoothing = 0.0 if targets.ndim > 1 else self.label_smoothing
        losses = F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=smoothing)
        right = logits.argmax(1) == (targets.argmax(1) if targets.ndim > 1 else targets)
        plain: Tensor | None = losses
        related: Tensor | None = None
        if self.attachment is not None:
            related = self.attachment.related(losses)
            one_stream = self.attachment.points[0].module.streams == "single"
            plain = None if one_stream else self.attachment.plain(losses)
            right = self.attachment.plain(right)
        assert isinstance(self._meter, StreamMeter)
        self._meter.update(loss, right)
        self._meter.update_streams(plain, related)
        if self._guard is not None and plain is not None and related is not None:
            self._guard.add(plain.mean(), related.mean())

    def _make_meter(self) -> StreamMeter:
        return StreamMeter(self.device, self.trainer.accumulate_grad_batches)

    def _train_values(self) -> dict[str, float]:
        assert isinstance(self._meter, StreamMeter)
        streams = {f"train/loss_{name}": value for name, value in self._meter.stream_losses().items() if value == value}
        return {**super()._train_values(), **streams}

    def _after_step(self) -> None:
        if self.ema_decay is not None:
            self.ema.update(self.net)

    def _peak_lr(self) -> float:
        """The highest learning rate, for the images that one update sees."""
        options, trainer = self.optimizer_options, self.trainer
        if options.lr_per is None:
            return options.lr
        batch = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
        if batch is None:
            raise UserError(
                "optimizer.lr_per scales the learning rate by the batch, which is not known here: give the trainer a "
                "data module with batch_size, or set lr_per null."
            )
        return options.lr * batch * trainer.world_size * trainer.accumulate_grad_batches / options.lr_per

    def _lr(self) -> float:
        schedule = self.schedule_options
        return warm_cosine(schedule, self._peak_lr(), *place_in_run(self.trainer, schedule.per))

    # ---- evaluation

    def _evaluate(self, batch: Any, stage: str) -> None:
        super()._evaluate(batch, stage)
        if self.ema_decay is not None:
            images, labels = images_and_labels(batch)
            self.ema_metric.update(self.ema.module(images).float(), labels)

    def _log_accuracies(self, stage: str) -> None:
        super()._log_accuracies(stage)
        if self.ema_decay is not None:
            values = self.ema_metric.compute()
            self._log_metrics(stage, {f"{name}_ema": values[name] for name in ("top1", "top5")})
            self.ema_metric.reset()

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._guard is not None:
            checkpoint[self.checkpoint_key]["guard"] = self._guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._guard_state = checkpoint[self.checkpoint_key].get("guard")
