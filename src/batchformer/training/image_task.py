"""What every task on images shares: building, counting steps, metering, resuming."""

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from batchformer.errors import UserError
from batchformer.training.compiling import compile_in_place
from batchformer.training.evaluated_task import EvaluatedTask
from batchformer.training.graph_step import GraphedStep
from batchformer.training.optimizer import set_lr
from batchformer.training.patch_conv import convolve_again, cut_into_patches
from batchformer.training.reseed import reseed
from batchformer.training.step_count import align_step_counts
from batchformer.training.train_meter import TrainMeter

CHECK_EVERY = 50  # steps between two looks at whether the loss is finite, where looking waits for the device


class ImageTask(EvaluatedTask):
    """A network for images, with or without the module, trained by Lightning.

    Everything random is a function of the seed: the initial weights (the same for both methods), and the dropout of
    step k, of (seed, k). The learning rate is a function of the epoch, or of the step. So a run that was stopped and
    goes on from a checkpoint ends with the bits of one that never stopped.

    A subclass gives the network (`plain_net`), the places of the module (`_attach`), the step (`training_step`), the
    optimiser (`configure_optimizers`) and the learning rate (`_lr`).
    """

    #: where the task keeps its part of a checkpoint
    checkpoint_key: ClassVar[str]

    attachment: Any
    class_counts: list[int]

    def __init__(
        self,
        backbone: str,
        backbone_args: dict[str, Any] | None,
        method: Literal["batchformer", "baseline"],
        stream_loss: Literal["mean", "released"],
        seed: int,
        channels_last: bool,
        compile: bool,
        cuda_graph: bool,
    ) -> None:
        super().__init__()
        if method not in ("batchformer", "baseline"):
            raise UserError(f'method={method!r} must be "batchformer" or "baseline".')
        self.backbone, self.backbone_args, self.method = backbone, dict(backbone_args or {}), method
        self.stream_loss: Literal["mean", "released"] = stream_loss
        self.seed = seed
        self.channels_last, self.compile_net, self.cuda_graph = channels_last, compile, cuda_graph
        self.attachment = None
        self.class_counts, self.per_class_accuracy = [], []
        self._whole_step = False
        self._last_lr = 0.0
        self._meter: TrainMeter | None = None
        self._meter_states: list[dict[str, float]] = []
        self._graphed: GraphedStep | None = None
        self._patch_layers: list[nn.Conv2d] = []

    # ---- what a subclass gives

    @abstractmethod
    def plain_net(self, num_classes: int) -> nn.Module:
        """A fresh network of this task's kind without the module: what an exported file loads into."""

    @abstractmethod
    def _attach(self, net: nn.Module) -> Any:
        """Put the module into the network and return the handle."""

    @abstractmethod
    def _lr(self) -> float:
        """The learning rate now, before the factors of the groups."""

    @abstractmethod
    def _check_schedule(self) -> None:
        """Refuse a schedule that cannot work with this trainer."""

    def _make_meter(self) -> TrainMeter:
        return TrainMeter(self.device, self.trainer.accumulate_grad_batches)

    def _before_attach(self, net: nn.Module) -> None:
        """What is to be known of the network before the module is in it."""

    def _after_step(self) -> None:
        """Called right after each update of the weights."""

    def _train_values(self) -> dict[str, float]:
        """What is logged of an epoch of training; reading it waits for the device."""
        assert self._meter is not None
        loss, accuracy = self._meter.values()
        return {"train/loss": loss, "train/acc": accuracy, "lr": self._last_lr}

    # ---- building

    @property
    def before_classifier(self) -> bool:
        """Whether the module stands before the classifier, where the paper's gradient influence is defined."""
        return True

    @property
    def normed_classifier(self) -> bool:
        """Whether the backbone's classifier was turned into one of cosines."""
        return False

    @property
    def built(self) -> bool:
        return "net" in self._modules

    def build(self, num_classes: int, class_counts: list[int]) -> None:
        """Make the network; a second call with as many classes keeps it. Subclasses make loss and metrics."""
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
                self.net = self._build_net(num_classes)

    def _build_net(self, num_classes: int) -> nn.Module:
        reseed(self.seed, 0)
        net = self.plain_net(num_classes)
        self._before_attach(net)
        if self.method == "batchformer":
            reseed(self.seed, 1)
            self.attachment = self._attach(net)
        if self.channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        if self.cuda_graph:
            self._refuse_what_a_graph_cannot_do()
        self._check_schedule()
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
                f"{type(self).__name__} does not know its classes: give the trainer a data module with num_classes and "
                "class_counts, or call task.build(num_classes, class_counts) before."
            )

    # ---- training

    def on_fit_start(self) -> None:
        if self.compile_net and self.device.type == "cuda":
            self._patch_layers = cut_into_patches(self.net)
            compile_in_place(self.net)

    def on_train_start(self) -> None:
        align_step_counts(self.trainer)
        self._meter = self._make_meter()
        self._meter.restart(self.trainer.global_step)
        if self._meter_states:  # resumed within an epoch
            self._meter.load_state_dict(self._meter_states[self.global_rank % len(self._meter_states)])
            self._meter_states = []
        self._begin_epoch()

    def on_train_epoch_start(self) -> None:
        self._begin_epoch()
        assert self._meter is not None
        self._meter.restart(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        reseed(*self._random_numbers_of(batch_idx))

    def _random_numbers_of(self, batch_idx: int) -> tuple[int, int, int, int]:
        """What the random numbers of a training batch depend on."""
        part = batch_idx % self.trainer.accumulate_grad_batches
        return self.seed, self.global_rank, self.trainer.global_step, part

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        # not in on_train_batch_end: a checkpoint of this step may have been written by then
        super().optimizer_step(*args, **kwargs)
        self._after_step()

    def on_train_epoch_end(self) -> None:
        self._raise_if_not_finite()
        self.log_dict(self._train_values(), sync_dist=self.trainer.world_size > 1)

    def on_train_end(self) -> None:
        self._graphed = None  # its memory, and what cannot be copied or pickled
        self._meter = None
        convolve_again(self._patch_layers)
        self._patch_layers = []

    def _begin_epoch(self) -> None:
        self._set_lr()

    def _set_lr(self) -> None:
        self._last_lr = self._lr()
        set_lr(self.trainer.optimizers[0], self._last_lr, self._fused, self.device if self._whole_step else None)

    @property
    def _fused(self) -> bool:
        return self.device.type == "cuda" and self.trainer.precision != "16-mixed"

    def _raise_if_not_finite(self) -> None:
        if self._meter is not None:
            self._meter.raise_if_not_finite(self.current_epoch)

    def on_validation_start(self) -> None:
        self._raise_if_not_finite()

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._raise_if_not_finite()  # a checkpoint that exists is a good one
        state: dict[str, Any] = {"num_classes": len(self.class_counts), "class_counts": self.class_counts}
        if self._meter is not None:
            state["meter"] = self._of_all_processes(self._meter.state_dict())
        checkpoint[self.checkpoint_key] = state

    def _of_all_processes(self, own: dict[str, float]) -> list[dict[str, float]]:
        """One process writes the checkpoint, and each has counted the images of its own."""
        states = [own] * self.trainer.world_size
        if len(states) > 1:
            torch.distributed.all_gather_object(states, own)
        return states

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.checkpoint_key not in checkpoint:
            raise UserError(
                f"this checkpoint was not written by {type(self).__name__}: it has no class counts of its own."
            )
        saved = checkpoint[self.checkpoint_key]
        self.build(saved["num_classes"], saved["class_counts"])
        meter = saved.get("meter", [])
        self._meter_states = [meter] if isinstance(meter, dict) else meter  # one alone: of an older version
