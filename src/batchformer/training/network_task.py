"""Tasks with one network that BatchFormer may be attached to."""

import copy
import warnings
from abc import abstractmethod
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError, check_choice
from batchformer.hub import PRETRAINED
from batchformer.metrics.measures import primary_of
from batchformer.training.averaging import SWAD, SwadOptions
from batchformer.training.compiling import compile_in_place, convolve_again, cut_into_patches
from batchformer.training.optimizers import AdamWOptions, Rule, build_optimizer, layer_rules, scaled_lr
from batchformer.training.options import as_options
from batchformer.training.reseed import reseed
from batchformer.training.schedules import CosineOptions, ScheduleOptions
from batchformer.training.task import Task
from batchformer.training.weights import load_weights


class NetworkTask(Task):
    """Base class: one network (`net`), with or without the module (`attachment`), from the same initial weights.

    A subclass defines the network (`plain_net`) and the position of the module (`attach_to`). The learning rate is
    given by `optimizer_options` and `schedule_options`, with `AdamWOptions` the optimizer too.

    Args:
        backbone: name of the network.
        backbone_args: passed on to it.
        method: "batchformer", or "baseline" for the same training without the module.
        stream_loss: how the losses of both streams are combined.
        seed: determines initial weights and the random numbers of each step.
        channels_last: keep weights and images in channels-last layout.
        compile: on a CUDA device, torch.compile the network for training, and the extractor of Attentive CutMix;
            elsewhere no difference.
        cuda_graph: on a CUDA device, run each training step as one CUDA graph; elsewhere no difference. Not for
            detectors, whose boxes are matched on the host.
        swad: average the weights over the valley of the loss on `valley_set`, in tasks that name one, and evaluate the
            average after the last step: `accuracy_swad` in addition to `accuracy`. null: no average.
    """

    #: the evaluation set whose loss determines what SWAD averages; not the one that results are about
    valley_set: ClassVar[str] = ""

    net: nn.Module
    attachment: Any
    optimizer_options: Any = None
    schedule_options: ScheduleOptions | CosineOptions | None = None

    def __init__(
        self,
        backbone: str,
        backbone_args: dict[str, Any] | None,
        method: Literal["batchformer", "baseline"],
        stream_loss: Literal["mean", "released"],
        seed: int = 0,
        channels_last: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
        swad: SwadOptions | None = None,
    ) -> None:
        super().__init__(seed, cuda_graph)
        check_choice("method", method, ("batchformer", "baseline"))
        self.backbone, self.backbone_args, self.method = backbone, dict(backbone_args or {}), method
        self.stream_loss: Literal["mean", "released"] = stream_loss
        self.channels_last, self.compile_net = channels_last, compile
        self.attachment = None
        self._patch_layers: list[nn.Conv2d] = []
        self._rules: dict[str, Rule] = {}
        self.swad = None if swad is None else self._make_swad(as_options(SwadOptions, swad, "swad"))
        settings = {"seed": seed, "channels_last": channels_last, "compile": compile, "cuda_graph": cuda_graph}
        self.save_hyperparameters({**settings, "swad": None if self.swad is None else asdict(self.swad.options)})

    def _make_swad(self, options: SwadOptions) -> SWAD:
        if not self.valley_set:
            raise UserError(
                f"model.swad needs an evaluation set that decides what is averaged, and {type(self).__name__} names "
                "none (valley_set): leave model.swad out."
            )
        primary = primary_of(self.measures)
        self._averaged_measure = primary.key
        averaged = replace(
            primary,
            key=f"{primary.key}_swad",
            label=f"{primary.label}, SWAD",
            name=f"{primary.words} of the averaged weights",
            primary=False,
            in_progress=False,
            reading_of=primary.key,
        )
        self.measures = [*self.measures, averaged]
        return SWAD(options)

    # ---- what a subclass gives

    @abstractmethod
    def plain_net(self, data: DataInfo) -> nn.Module:
        """A fresh network without the module, for these data."""

    @abstractmethod
    def attach_to(self, net: nn.Module) -> Any:
        """Attach the module to the network and return the handle."""

    def before_attach(self, net: nn.Module) -> None:
        """Called before the module is attached, to read properties of the plain network."""

    def networks(self) -> list[nn.Module]:
        """The networks that a training step runs: what `compile` compiles."""
        return [self.net]

    # ---- building

    def build(self, data: DataInfo) -> None:
        sets = data.get("evaluation_sets") or ("val",)
        if self.swad is not None and self.valley_set not in sets:
            raise UserError(
                f"model.swad needs the evaluation set {self.valley_set!r}, and these data have: {', '.join(sets)}; "
                "leave model.swad out."
            )
        arguments = self.backbone_args
        if PRETRAINED in self.init_from.values() and not self.restored:
            self.backbone_args = {**arguments, "pretrained": True}
        try:
            self.net = self.plain_net(data)
        finally:
            self.backbone_args = arguments
        self._compare_statistics(data)
        if isinstance(self.optimizer_options, AdamWOptions):
            self._rules = layer_rules(self.net, self.optimizer_options)
        self.before_attach(self.net)
        if self.method == "batchformer":
            reseed(self.seed, 1)
            self.attachment = self.attach_to(self.net)
        if self.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _compare_statistics(self, data: DataInfo) -> None:
        """Warn where pretrained weights were trained on images that were normalised otherwise."""
        trained: Any = getattr(self.net, "pretrained_cfg", None) or {}
        differ = [key for key in ("mean", "std") if key in data and key in trained and [*data[key]] != [*trained[key]]]
        if differ and PRETRAINED in self.init_from.values() and not self.restored:
            given = " ".join(f"--data.{key} {list(trained[key])}" for key in ("mean", "std"))
            warnings.warn(
                f"the pretrained weights of {self.backbone} are for images with another {' and '.join(differ)}: add "
                f"{given}.",
                UserWarning,
                stacklevel=2,
            )

    @property
    def class_counts(self) -> list[int]:
        return self.data_info.get("class_counts", [])

    def expect_checkpoint(self) -> None:
        super().expect_checkpoint()
        for name in ("pretrained", "pretrained_cfg_overlay"):
            self.backbone_args.pop(name, None)

    def check_data(self, data: Any) -> None:
        """Refuse another number of views than the task's, and images of another size than the network's.

        Both would raise only at the first batch (timm's ViTs for the size).
        """
        views = getattr(data, "views", None)
        given = len(views) if isinstance(views, list) else views
        if given not in (None, self.views):
            raise UserError(
                f"data.views={views} gives {given} view{'s' * (given != 1)} of each image, and {type(self).__name__} "
                f"trains on {self.views} with these settings: set data.views to {self.views}."
            )
        size = getattr(data, "image_size", None)
        inside = getattr(self.net, "backbone", getattr(self.net, "encoder", self.net))
        embedding: Any = getattr(inside, "patch_embed", None)
        built: Any = getattr(embedding, "img_size", None)
        if size is None or not getattr(embedding, "strict_img_size", False) or built in (None, (size, size)):
            return
        other_way = f", or set data.image_size to {built[0]}" if built[0] == built[1] else ""
        raise UserError(
            f"{self.backbone} is built for images of {built[0]} x {built[1]} pixels, and data.image_size is {size}: "
            f"add --model.backbone_args.img_size {size}{other_way}."
        )

    def load_part(self, part: str, source: str) -> None:
        load_weights(self.net, part, source, attached=self.attachment is not None)

    # ---- optimizer

    def configure_optimizers(self) -> Any:
        options = self.optimizer_options
        if not isinstance(options, AdamWOptions):
            return super().configure_optimizers()
        return build_optimizer(
            options, self.net, self._rules, self.attachment, scaled_lr(options, self.trainer), self.fused
        )

    def check_trainer(self) -> None:
        if self.schedule_options is not None:
            self.schedule_options.check_end(self.trainer)

    def learning_rate(self) -> float | None:
        if self.schedule_options is None:
            return super().learning_rate()
        return self.schedule_options.rate(scaled_lr(self.optimizer_options, self.trainer), self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        per_step = self.schedule_options is not None and self.schedule_options.per == "step"
        if per_step and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.set_learning_rate()

    # ---- training

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.swad is None:
            return
        self.swad.begin(self.net)
        if any(isinstance(module, _BatchNorm) and module.training for module in self.net.modules()):
            warnings.warn(
                "SWAD averages parameters, and the statistics of BatchNorm, which are not frozen here, stay those of "
                "the last step: the averaged network may be far worse than its parts. Freeze BatchNorm.",
                UserWarning,
                stacklevel=1,
            )

    def after_step(self) -> None:
        if self.swad is not None:  # captured with the step: it changes tensors in place and nothing else
            self.swad.update()

    def on_fit_start(self) -> None:
        if self.compile_net and self.device.type == "cuda":
            for net in self.networks():
                self._patch_layers += cut_into_patches(net)
                compile_in_place(net)

    def on_train_end(self) -> None:
        super().on_train_end()
        convolve_again(self._patch_layers)
        self._patch_layers = []

    def _captured_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.preserve_format

    @property
    def module_parameters(self) -> list[nn.Parameter]:
        return [] if self.attachment is None else list(self.attachment.parameters())

    # ---- evaluation

    def valley_loss(self) -> float:
        """The loss on `valley_set` of the validation that is ending, the same in all processes.

        The mean over the samples, as `evaluate` returned it; a task may give another one. Called before `results`.
        """
        return float(self.trainer.callback_metrics[f"val/{self._prefix(self.valley_set)}loss"])

    def on_validation_epoch_end(self) -> None:
        if self.swad is None or self.trainer.sanity_checking:
            super().on_validation_epoch_end()
            return
        loss = self.valley_loss()
        super().on_validation_epoch_end()
        self.swad.close_segment(loss)
        if self.swad.losses and self._training_is_over:
            self._evaluate_average(self.swad)

    @property
    def _training_is_over(self) -> bool:
        """Whether this validation is the last one of a run, or is outside of training."""
        trainer = self.trainer
        if trainer.state.fn != "fit" or trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step:
            return True
        last_epoch = trainer.max_epochs is not None and trainer.current_epoch == trainer.max_epochs - 1
        return last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def _evaluate_average(self, swad: SWAD) -> None:
        """Another pass over the evaluation sets, with the averaged weights: the primary measure of each."""
        trainer, per_class, key = self.trainer, self.per_class, self._averaged_measure
        loaders = trainer.val_dataloaders
        loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
        precision = trainer.precision_plugin
        with swad.applied_to(self.net):
            for k, (name, loader) in enumerate(zip(self.evaluation_sets, loaders, strict=True)):
                for number, batch in enumerate(loader):
                    if number >= trainer.num_val_batches[k]:
                        break
                    batch = trainer.strategy.batch_to_device(precision.convert_input(batch), dataloader_idx=k)
                    with precision.val_step_context():
                        self.evaluate(as_batch(batch), name)
                value = torch.as_tensor(self.results(name)[key], device=self.device).float()
                self.log(f"val/{self._prefix(name)}{key}_swad", value, sync_dist=trainer.world_size > 1)
        self.per_class = per_class

    def result_entries(self) -> dict[str, Any]:
        return super().result_entries() if self.swad is None else {"swad": self.swad.summary()}

    def sections(self) -> list[dict[str, Any]]:
        if self.swad is None or not self.swad.losses:
            return super().sections()
        return [*super().sections(), self.swad.section(self.valley_set)]

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.swad is not None:
            checkpoint["task"]["swad"] = self.swad.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.swad is not None and "swad" in checkpoint["task"]:
            self.swad.load_state_dict(checkpoint["task"]["swad"])

    # ---- export

    def plain_network(self) -> nn.Module:
        return self.plain_net(self.data_info)

    def trained_network(self, averaged: bool = False) -> nn.Module:
        if not averaged:
            return self.net
        if self.swad is None:
            raise UserError(
                "this run kept no average of its weights: image classification (the vit-* and deit-* recipes) can keep "
                "one, with --model.ema 0.9999, and tasks with a validation set of their own, with model.swad."
            )
        net = copy.deepcopy(self.net)
        self.swad.put_into(net)
        return net
