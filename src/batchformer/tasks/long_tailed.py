"""Long-tailed recognition: one backbone, one loss for imbalanced classes, with or without BatchFormer."""

from dataclasses import asdict
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.losses import LDAMLoss
from batchformer.metrics import ShotAccuracy
from batchformer.models import create_backbone, use_normed_classifier
from batchformer.tasks.criterion import build_criterion
from batchformer.tasks.graph_step import GraphedStep
from batchformer.tasks.optimizer import build_sgd, set_lr
from batchformer.tasks.options import BatchFormerOptions, LossOptions, OptimizerOptions, ScheduleOptions, as_options
from batchformer.tasks.reseed import reseed
from batchformer.tasks.schedule import check_schedule, lr_factor, total_epochs_of
from batchformer.tasks.step_count import align_step_counts, count_step
from batchformer.tasks.train_meter import TrainMeter

CHECK_EVERY = 50  # steps between two looks at whether the loss is finite, where looking waits for the device
CHECKPOINT_KEY = "long_tailed"


class LongTailed(L.LightningModule):
    """Trains a classifier on imbalanced classes; logs `train/loss train/acc lr` and `val/all many medium few loss`.

    The paper's setting (section 4.1): BatchFormer before the classifier, its learning rate a tenth of the network's,
    the loss over both streams; at test time the plain network. Accuracies are in percent and count plain rows only;
    the released code counts both streams in training.

    Everything random is a function of the seed: the initial weights (the same for both methods), and the dropout of
    step k, of (seed, k). The learning rate is a function of the epoch.

    Args:
        backbone: resnet20, resnet32, resnet44, resnet56 (CIFAR), resnet10, or any name timm knows.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        loss: which loss.
        stream_loss: "mean" over the rows of both streams (Algorithm 1), or "released": 1.5 (L_plain + L_related), three
            times the mean, as the published code has it. With one stream (baseline, streams single or split) both are
            the loss itself.
        loss_weight: the whole loss is multiplied by this; 3 gives the baseline the scale that "released" gives to two
            streams, the control for it.
        optimizer: SGD and its learning rates.
        schedule: learning rate per epoch.
        seed: decides initial weights and dropout.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training; elsewhere no difference.
        cuda_graph: on a CUDA device, run each training step as one CUDA graph; elsewhere no difference.
    """

    net: nn.Module
    criterion: nn.Module
    metric: ShotAccuracy
    attachment: Any
    class_counts: list[int]
    per_class_accuracy: list[float]

    def __init__(
        self,
        backbone: str = "resnet32",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        loss: LossOptions = LossOptions(),
        stream_loss: Literal["mean", "released"] = "mean",
        loss_weight: float = 1.0,
        optimizer: OptimizerOptions = OptimizerOptions(),
        schedule: ScheduleOptions = ScheduleOptions(),
        seed: int = 0,
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__()
        if method not in ("batchformer", "baseline"):
            raise UserError(f'method={method!r} must be "batchformer" or "baseline".')
        self.backbone, self.backbone_args, self.method = backbone, dict(backbone_args or {}), method
        self.module_options = as_options(BatchFormerOptions, batchformer)
        self.loss_options = as_options(LossOptions, loss)
        self.optimizer_options = as_options(OptimizerOptions, optimizer)
        self.schedule_options = as_options(ScheduleOptions, schedule)
        self.stream_loss: Literal["mean", "released"] = stream_loss
        self.loss_weight = loss_weight
        self.seed = seed
        self.channels_last, self.compile_net, self.cuda_graph = channels_last, compile, cuda_graph
        # plain dicts: a checkpoint must load with weights_only=True
        self.save_hyperparameters(
            {
                "backbone": backbone,
                "backbone_args": self.backbone_args,
                "method": method,
                "batchformer": asdict(self.module_options),
                "loss": asdict(self.loss_options),
                "stream_loss": stream_loss,
                "loss_weight": loss_weight,
                "optimizer": asdict(self.optimizer_options),
                "schedule": asdict(self.schedule_options),
                "seed": seed,
                "channels_last": channels_last,
                "compile": compile,
                "cuda_graph": cuda_graph,
            }
        )
        self.attachment = None
        self.class_counts, self.per_class_accuracy = [], []
        self._whole_step = False
        self._meter: TrainMeter | None = None
        self._meter_state: dict[str, float] | None = None
        self._graphed: GraphedStep | None = None

    # ---- building

    @property
    def built(self) -> bool:
        return "net" in self._modules

    def build(self, num_classes: int, class_counts: list[int]) -> None:
        """Make network, loss and metrics; a second call with the same number of classes keeps the network."""
        if len(class_counts) != num_classes:
            raise UserError(f"{len(class_counts)} class counts for {num_classes} classes: there must be one per class.")
        if self.built and num_classes != len(self.class_counts):
            raise UserError(
                f"this task was built for {len(self.class_counts)} classes and cannot take {num_classes}: use the data "
                f"it was trained on, or a new task."
            )
        self.class_counts = [int(count) for count in class_counts]
        # on the CPU whatever the device of the run: the same seed gives the same weights everywhere
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            if not self.built:
                reseed(self.seed, 0)
                net = self.plain_net(num_classes)
                if self.method == "batchformer":
                    reseed(self.seed, 1)
                    self.attachment = bf.attach(net, **asdict(self.module_options))
                if self.channels_last:
                    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                self.net = net
            self.criterion = build_criterion(self.loss_options, self.class_counts).to(self.device)
            self.metric = ShotAccuracy(self.class_counts).to(self.device)
        self.stream_criterion = bf.TwoStreamLoss(self.criterion, scale=self.stream_loss)

    def plain_net(self, num_classes: int) -> nn.Module:
        """A fresh network of this task's kind without the module: what an exported file loads into."""
        net = create_backbone(self.backbone, num_classes, **self.backbone_args)
        return use_normed_classifier(net) if self.loss_options.name == "ldam" else net

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        if self.cuda_graph:
            self._refuse_what_a_graph_cannot_do()
        check_schedule(self.schedule_options, total_epochs_of(self.trainer))
        self._whole_step = self.cuda_graph and self.trainer.strategy.root_device.type == "cuda"
        self.automatic_optimization = not self._whole_step

    def _refuse_what_a_graph_cannot_do(self) -> None:
        trainer = self.trainer
        for given, what in (
            (trainer.accumulate_grad_batches != 1, "trainer.accumulate_grad_batches"),
            (bool(trainer.gradient_clip_val), "trainer.gradient_clip_val"),
            (trainer.world_size > 1, "several devices"),
            (trainer.precision == "16-mixed", "precision 16-mixed (use bf16-mixed)"),
        ):
            if given:
                raise UserError(
                    f"cuda_graph=true cannot be combined with {what}: set model.cuda_graph=false or drop it."
                )

    def configure_model(self) -> None:
        if self.built or self._trainer is None:  # without a trainer a checkpoint is being loaded, which builds
            return
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and hasattr(data, "class_counts"):
            self.build(data.num_classes, list(data.class_counts))
        elif self.trainer.training:
            raise UserError(
                "LongTailed does not know its classes: give the trainer a data module with num_classes and "
                "class_counts, or call task.build(num_classes, class_counts) before."
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [] if self.attachment is None else self.attachment.parameters()
        return build_sgd(self.optimizer_options, self.net.parameters(), own, self._fused)

    # ---- training

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "rows classes"]:
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.net(images)

    def on_fit_start(self) -> None:
        if self.compile_net and self.device.type == "cuda":
            self.net.compile(dynamic=False)  # in place: no key changes

    def on_train_start(self) -> None:
        align_step_counts(self.trainer)
        self._meter = TrainMeter(self.device, self.trainer.accumulate_grad_batches)
        self._meter.restart(self.trainer.global_step)
        if self._meter_state is not None:  # resumed within an epoch
            self._meter.load_state_dict(self._meter_state)
            self._meter_state = None
        self._begin_epoch()
        if self._whole_step:
            layout = torch.channels_last if self.channels_last else torch.preserve_format
            self._graphed = GraphedStep(self._train_on, memory_format=layout)

    def on_train_epoch_start(self) -> None:
        self._begin_epoch()
        assert self._meter is not None
        self._meter.restart(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        part = batch_idx % self.trainer.accumulate_grad_batches
        reseed(self.seed, self.global_rank, self.trainer.global_step, part)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        images, labels = batch
        if self._whole_step:
            assert self._graphed is not None
            self._graphed(images, labels)
            count_step(self.trainer)
            return None
        loss = self._loss(images, labels)
        if not loss.is_cuda or (batch_idx + 1) % CHECK_EVERY == 0:
            self._raise_if_not_finite()
        return loss

    def _loss(self, images: Float[Tensor, "batch channels height width"], labels: Int[Tensor, " batch"]) -> Tensor:
        logits = self(images)
        loss = self.loss_weight * self.stream_criterion(logits, labels)
        with torch.no_grad():
            targets = bf.repeat_targets(labels, logits)
            if self.attachment is not None:
                logits, targets = self.attachment.plain((logits, targets))
            assert self._meter is not None
            self._meter.update(loss, logits.argmax(1) == targets)
        return loss

    def _train_on(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Forward, backward and update, as Lightning's automatic optimisation does them, without a synchronisation."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad(set_to_none=True)
        loss = self._loss(images, labels)
        # Lightning's autocast surrounds this method; outside a graph the backward pass runs without it
        with torch.autocast(images.device.type, enabled=False):
            loss.backward()
        optimizer.step()
        return (loss.detach(),)

    def on_train_epoch_end(self) -> None:
        self._raise_if_not_finite()
        assert self._meter is not None
        loss, accuracy = self._meter.values()
        values = {"train/loss": loss, "train/acc": accuracy, "lr": self._lr()}
        self.log_dict(values, sync_dist=self.trainer.world_size > 1)

    def on_train_end(self) -> None:
        self._graphed = None  # its memory, and what cannot be copied or pickled
        self._meter = None

    def _begin_epoch(self) -> None:
        if isinstance(self.criterion, LDAMLoss):
            self.criterion.set_epoch(self.current_epoch)
        set_lr(self.trainer.optimizers[0], self._lr(), self._fused, self.device if self._whole_step else None)

    def _lr(self) -> float:
        return self.optimizer_options.lr * lr_factor(
            self.schedule_options, self.current_epoch, total_epochs_of(self.trainer)
        )

    @property
    def _fused(self) -> bool:
        return self.device.type == "cuda" and self.trainer.precision != "16-mixed"

    def _raise_if_not_finite(self) -> None:
        if self._meter is not None:
            self._meter.raise_if_not_finite(self.current_epoch)

    # ---- evaluation

    def on_validation_start(self) -> None:
        self._raise_if_not_finite()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self._log_accuracies("val")

    def on_test_epoch_end(self) -> None:
        self._log_accuracies("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Float[Tensor, "batch classes"]:
        images = batch[0] if isinstance(batch, tuple | list) else batch
        return self._test_logits(images).softmax(1)

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        images, labels = batch
        logits = self._test_logits(images)
        self.metric.update(logits, labels)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}/loss", loss, on_epoch=True, batch_size=len(labels), sync_dist=self.trainer.world_size > 1)

    def _test_logits(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Logits of the plain network, nothing added; cosines are scaled as in training."""
        with torch.compiler.set_stance("force_eager" if self.compile_net else "default"):
            logits = self(images).float()
        return logits * self.criterion.scale if isinstance(self.criterion, LDAMLoss) else logits

    def _log_accuracies(self, stage: str) -> None:
        values = self.metric.compute()
        self.per_class_accuracy = values.pop("per_class").tolist()
        # every process has the sums of all already; the mean over them changes nothing
        logged = {f"{stage}/{name}": value.float() for name, value in values.items()}
        self.log_dict(logged, sync_dist=self.trainer.world_size > 1)
        self.metric.reset()

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._raise_if_not_finite()  # a checkpoint that exists is a good one
        checkpoint[CHECKPOINT_KEY] = {"num_classes": len(self.class_counts), "class_counts": self.class_counts}
        if self._meter is not None:
            checkpoint[CHECKPOINT_KEY]["meter"] = self._meter.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if CHECKPOINT_KEY not in checkpoint:
            raise UserError("this checkpoint was not written by LongTailed: it has no class counts.")
        saved = checkpoint[CHECKPOINT_KEY]
        self.build(saved["num_classes"], saved["class_counts"])
        self._meter_state = saved.get("meter")
