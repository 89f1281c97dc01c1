"""`Task`, the base class of all tasks: what a subclass implements and what the base class does."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn

from batchformer.data.images import open_image
from batchformer.data.info import HOLDOUT, DataInfo, refuse_other_classes
from batchformer.data.loading.epoch_loader import Batch, as_batch, samples_in
from batchformer.errors import UserError
from batchformer.hub import PRETRAINED
from batchformer.metrics.gather import gathered
from batchformer.metrics.measures import Measure, primary_of
from batchformer.training.captured_step import CapturedStep, align_step_counts, count_step, refuse_uncapturable
from batchformer.training.meter import Meter
from batchformer.training.optimizers import set_lr
from batchformer.training.reseed import reseed
from batchformer.training.sharding import divide, gather, refuse_unshardable, shard, share_statistics

CHECK_EVERY = 50  # steps between checks that the loss is finite, where a check synchronises with the device
Analysis = Callable[["Task", Any, L.Trainer], dict[str, Any]]


class Task(L.LightningModule):
    """Base class of tasks, a LightningModule: networks, losses, evaluation. All `batchformer` commands run with it.

    A task implements:

    - `build(data)`: networks, losses and metrics, from the description of the data (a `DataInfo`). It runs once, on the
      CPU, with random numbers that depend only on the seed. To build manually, call `construct(data)`.
    - `step(batch)`: takes a dict (`images` or `views`, `labels`, `domains`, ...) and returns a dict with `loss`, which
      is minimised, and other values to be logged as `train/NAME`: a scalar is a mean over the batch, a vector has one
      entry per sample.
    - `evaluate(batch, name)`: update the metrics of that evaluation set with a batch; returns values to be logged as a
      mean over the set (`loss`), or None. `results(name)`: return the measures of that set and reset its metrics.
    - `measures`: the metrics of a run, with unit and direction; tables, verdicts and pages read only these.
    - `configure_optimizers()`, and `learning_rate()` if it follows a schedule.

    Optional: `prepare(batch, batch_idx)` (outside a captured step), `after_step()`, `plain_network()` (for
    export), `predict(...)`, `analyses`, `sections()`, `sampler(data)`, `training_loader(data)`.

    For several optimizers that step alternately, set `automatic_optimization = False`, override `training_step` with
    Lightning's manual optimisation, and pass the losses to `record`. Momentum encoders, queues and averages are
    submodules and buffers of the task and therefore in its checkpoints.

    All random numbers are functions of the seed: those of the initial weights, and those of step k, of (seed, k). A run
    resumed from a checkpoint therefore ends bit-identical to an uninterrupted one.

    Args:
        seed: determines initial weights and the random numbers of each step.
        cuda_graph: on a CUDA device, run each training step as one CUDA graph; elsewhere no difference.
    """

    #: the metrics of a run; a result holds those that `results` returned
    measures: Sequence[Measure] = ()
    #: the picture of the page's first screen, see `report.first_screen`; empty: chosen by the measures
    main_picture: ClassVar[Mapping[str, Any]] = {}
    #: what is measured after training for result.json: names in `batchformer.analysis.ANALYSES`, or functions
    analyses: Sequence[str | Analysis] = ()
    #: base class of the data modules that a recipe of this task may name
    data_class: ClassVar[type] = L.LightningDataModule
    #: how many views of each image a training batch holds, where the data leave that to the task (`data.views: null`)
    views: int = 1
    #: whether it trains with `trainer.strategy fsdp`: see `batchformer.training.sharding`
    shardable: bool = False
    #: options of `batchformer predict` that `predict` takes, with their help text
    predict_options: ClassVar[Mapping[str, str]] = {}
    #: what a checkpoint holds besides weights and buffers: name there -> attribute, a list, dict or number
    in_checkpoint: ClassVar[Mapping[str, str]] = {}
    #: where version 0.1 kept the task's part of a checkpoint
    checkpoint_key_of_0_1: ClassVar[str] = ""

    def __init__(self, seed: int = 0, cuda_graph: bool = False) -> None:
        super().__init__()
        self.seed, self.cuda_graph = seed, cuda_graph
        self.data_info = DataInfo()  # what the data declared, once it is built
        self.built = False
        self.init_from: dict[str, str] = {}  # part of the network ("network": all of it) -> its weights
        self.restored = False  # whether all weights come from a checkpoint of this task
        self.only_tested = False  # whether it is loaded without training: what was found in training stays
        self.unreadable: dict[Path, str] = {}  # images that `predict` could not read, with the reason
        self.per_class: list[float] = []  # of the primary measure, where it has a value for each class
        self._whole_step = False
        self._last_lr: float | None = None
        self._meter: Meter | None = None
        self._meter_states: list[dict[str, Any]] = []
        self._captured: CapturedStep | None = None

    # ---- implemented by a task

    @abstractmethod
    def build(self, data: DataInfo) -> None:
        """Make networks, losses and metrics."""

    @abstractmethod
    def step(self, batch: Batch) -> dict[str, Tensor]:
        """The losses of a training batch: `loss`, and parts to be logged."""

    @abstractmethod
    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor] | None:
        """Update the metrics of the evaluation set `name` with a batch."""

    @abstractmethod
    def results(self, name: str) -> Mapping[str, float | Tensor]:
        """The measures of the evaluation set `name`, by key; resets its metrics."""

    def prepare(self, batch: Batch, batch_idx: int) -> Batch:
        """Transform a training batch before the step, outside a captured graph."""
        return batch

    def learning_rate(self) -> float | None:
        """The learning rate now, before the factors of the groups; None leaves the optimizers as they are."""
        return None

    def after_step(self) -> None:
        """Called right after each update of the weights."""

    def check_data(self, data: Any) -> None:
        """Refuse data that this task cannot be trained on; called before anything is written."""

    def check_trainer(self) -> None:
        """Refuse trainer settings that cannot work; called before anything is written."""

    def load_part(self, part: str, source: str) -> None:
        """Load weights from a run, a file or a folder into a part of the network; "network" is all of it."""
        raise UserError(f"{type(self).__name__} takes no weights from elsewhere: leave out --init-from {source}.")

    def plain_network(self) -> nn.Module:
        """A fresh network as it is after training, without the module: what an exported file loads into."""
        raise UserError(f"{type(self).__name__} has no plain network, so there is nothing to export.")

    def trained_network(self, averaged: bool = False) -> nn.Module:
        """The network with the trained weights; `averaged`: with the moving average of them."""
        raise UserError(f"{type(self).__name__} has no plain network, so there is nothing to export.")

    def export_inputs(self, data: Any) -> tuple[Any, ...]:
        """Inputs (positional) for the check of an export: the plain and the trained network must agree on them."""
        side = min(data.image_size, 256)  # detectors take 800 and more
        return (torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0)),)

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        """(metadata of the file, expression that makes the plain network, imports it needs); from the run if empty."""
        return {}, "", ""

    def predict(self, images: list[Path], data: Any, out: Path | None, line: Any, **options: str) -> str:
        """Predict on a user's images and write files; returns the message to print. `line` shows progress."""
        raise UserError(
            f"{type(self).__name__} cannot predict on images: take its network into a program of yours (batchformer "
            "export)."
        )

    def read_image(self, path: Path, strict: bool = False) -> Any:
        """A user's image for `predict`, as viewers show it.

        One that cannot be read is an error where `strict`, else None, with the reason in `unreadable`: one of thousands
        must not stop the others, and the command lists them at its end.
        """
        try:
            return open_image(path, upright=True)
        except UserError as problem:
            if strict:
                raise
            self.unreadable[path] = str(problem)
            return None

    def result_entries(self) -> dict[str, Any]:
        """Entries of result.json of the task's own, known without another pass over the data (else: `analyses`)."""
        return {}

    def sections(self) -> list[dict[str, Any]]:
        """Own parts of the page: dicts with title, text, table, series, points (see docs/your-own-task.md)."""
        return []

    # ---- building

    def construct(self, data: Any) -> None:
        """Build from a data module or a `DataInfo`, once: the same seed gives the same weights on every device."""
        info = DataInfo.of(data)
        if self.built:
            refuse_other_classes(info, self.data_info)
            self.set_data(info)
            self.data_info = info
            return
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            reseed(self.seed, 0)
            self.build(info)
            self.data_info, self.built = info, True  # only now: a build that failed may be tried again
            if not self.restored:
                for part, source in self.init_from.items():
                    if source != PRETRAINED:  # which the network was built with
                        self.load_part(part, source)

    def set_data(self, data: DataInfo) -> None:
        """Called in place of `build` when the task is built already and is given other data with the same classes."""

    def expect_checkpoint(self) -> None:
        """Prepare for loading a checkpoint without training: fetch no weights, compile and capture nothing."""
        self.restored, self.only_tested, self.cuda_graph = True, True, False

    def configure_model(self) -> None:
        if self._trainer is None:  # without a trainer a checkpoint is being loaded, which builds
            return
        data = getattr(self.trainer, "datamodule", None)
        if not self.built and data is not None:
            self.construct(data)
        elif not self.built and self.trainer.training:
            raise UserError(
                f"{type(self).__name__} does not know its data: give the trainer a data module, or call "
                "task.construct(data) before."
            )
        if self.device_mesh is not None:
            shard(self, self.device_mesh)

    def setup(self, stage: str) -> None:
        if stage != "fit":
            data = getattr(self.trainer, "datamodule", None)
            if self.built and data is not None and (info := DataInfo.of(data)).get("classes"):
                refuse_other_classes(info, self.data_info)
            return
        if self.cuda_graph:
            refuse_uncapturable(self.trainer)
        refuse_unshardable(self)
        self.check_trainer()
        self._whole_step = self.cuda_graph and self.trainer.strategy.root_device.type == "cuda"
        if self._whole_step:
            self.automatic_optimization = False

    # ---- training

    def on_train_start(self) -> None:
        align_step_counts(self.trainer)
        self._meter = Meter(self.device, self.trainer.accumulate_grad_batches)
        self._meter.restart(self.trainer.global_step)
        if self._meter_states:  # resumed within an epoch
            self._meter.load_state_dict(self._meter_states[self.global_rank % len(self._meter_states)])
            self._meter_states = []
        if self._whole_step:
            self._captured = CapturedStep(self._train_on, memory_format=self._captured_format())
        self._begin_epoch()

    def on_train_epoch_start(self) -> None:
        self._begin_epoch()
        assert self._meter is not None
        self._meter.restart(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        reseed(*self.random_numbers_of(batch_idx))

    def _begin_epoch(self) -> None:
        gather(self)
        self.begin_epoch()
        divide(self)

    def begin_epoch(self) -> None:
        """Called at the start of every epoch, and where a run resumes within one."""
        self.set_learning_rate()

    def random_numbers_of(self, batch_idx: int) -> tuple[int, int, int, int]:
        """The numbers that seed a training batch: (seed, rank, step, part of an accumulated step)."""
        part = batch_idx % self.trainer.accumulate_grad_batches
        return self.seed, self.global_rank, self.trainer.global_step, part

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        prepared = self.prepare(as_batch(batch), batch_idx)
        if self._whole_step:
            assert self._captured is not None
            self._captured(prepared)
            count_step(self.trainer)
            return None
        losses = self._counted(prepared)
        if not losses["loss"].is_cuda or (batch_idx + 1) % CHECK_EVERY == 0:
            self._raise_if_not_finite()
        return losses["loss"]

    def record(self, losses: Mapping[str, Tensor], samples: int) -> None:
        """Add the losses of a batch to the means of the epoch; a loss that is not finite ends the run."""
        assert self._meter is not None
        self._meter.update({name: value.detach() for name, value in losses.items()}, samples)

    def _counted(self, batch: Batch) -> dict[str, Tensor]:
        losses = self.step(batch)
        self.record(losses, samples_in(batch))
        return losses

    def _train_on(self, batch: Batch) -> Tensor:
        """Forward, backward and update, as Lightning's automatic optimisation does them; no host synchronisation."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad(set_to_none=True)
        loss = self._counted(batch)["loss"]
        # Lightning's autocast surrounds this method; outside a graph the backward pass runs without it
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        optimizer.step()
        self.after_step()
        return loss.detach()

    def _captured_format(self) -> torch.memory_format:
        return torch.preserve_format

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        # not in on_train_batch_end: a checkpoint of this step may have been written by then
        super().optimizer_step(*args, **kwargs)
        self.after_step()

    def on_train_epoch_end(self) -> None:
        self._raise_if_not_finite()
        assert self._meter is not None
        values = {f"train/{name}": value for name, value in self._meter.values().items()}
        if self._last_lr is not None:
            values["lr"] = self._last_lr
        self.log_dict(values, sync_dist=self.trainer.world_size > 1)

    def on_train_end(self) -> None:
        self._captured = None  # frees its memory; a CUDA graph cannot be copied or pickled
        self._meter = None

    def set_learning_rate(self) -> None:
        self._last_lr = self.learning_rate()
        if self._last_lr is not None:
            for optimizer in self.trainer.optimizers:
                set_lr(optimizer, self._last_lr, self.fused, self.device if self._whole_step else None)

    def running_values(self) -> dict[str, float]:
        """The mean loss of this epoch so far and the learning rate, for the progress line; waits for the device."""
        values = {} if self._meter is None else self._meter.values()
        if "loss" not in values:  # before the first step, which sets the learning rate
            return {}
        lr = self._last_lr
        if lr is None:
            lr = next((float(group["lr"]) for each in self.trainer.optimizers for group in each.param_groups), None)
        return {"loss": values["loss"]} if lr is None else {"loss": values["loss"], "lr": lr}

    @property
    def fused(self) -> bool:
        """Whether optimizers take torch's fused kernels."""
        return self.device.type == "cuda" and self.trainer.precision != "16-mixed"

    def _raise_if_not_finite(self) -> None:
        if self._meter is not None:
            self._meter.raise_if_not_finite(self.current_epoch)

    # ---- evaluation

    @property
    def evaluation_sets(self) -> Sequence[str]:
        return self.data_info.get("evaluation_sets") or ("val",)

    def on_validation_start(self) -> None:
        gather(self)
        share_statistics(self)
        self._raise_if_not_finite()

    def on_test_start(self) -> None:
        gather(self)
        share_statistics(self)

    def on_validation_end(self) -> None:
        divide(self)

    def on_test_end(self) -> None:
        divide(self)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val", dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test", dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._log_results("val")

    def on_test_epoch_end(self) -> None:
        self._log_results("test")

    def _evaluate(self, batch: Any, stage: str, dataloader_idx: int) -> None:
        batch = as_batch(batch)
        name = self.evaluation_sets[dataloader_idx]
        for key, value in (self.evaluate(batch, name) or {}).items():
            self.log(
                f"{stage}/{self._prefix(name)}{key}",
                value,
                on_epoch=True,
                batch_size=samples_in(batch),
                sync_dist=self.trainer.world_size > 1,
                add_dataloader_idx=False,
            )

    def _log_results(self, stage: str) -> None:
        for name in reversed(self.evaluation_sets):  # the first set last: `per_class` is that of the first set
            values = {
                f"{stage}/{self._prefix(name)}{key}": torch.as_tensor(value, device=self.device).float()
                for key, value in self.results(name).items()
            }
            # every process has the global values already; the mean over processes changes nothing
            self.log_dict(values, sync_dist=self.trainer.world_size > 1)

    def _prefix(self, name: str) -> str:
        """Prefix of the keys of an evaluation set: empty for the first set, else its name."""
        return "" if name == self.evaluation_sets[0] else f"{name}/"

    @property
    def all_measures(self) -> list[Measure]:
        """The measures of the first evaluation set, then those of the others; of a holdout only the primary one."""
        others = [
            measure.of(name)
            for name in self.evaluation_sets[1:]
            for measure in ([primary_of(self.measures)] if name == HOLDOUT else self.measures)
        ]
        return [*self.measures, *others]

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._raise_if_not_finite()  # no checkpoint of a run that has diverged
        state: dict[str, Any] = {"data": self.data_info.as_dict(), "init_from": dict(self.init_from)}
        if self._meter is not None:
            # rank 0 writes the checkpoint, and each process has counted its own samples
            state["meter"] = gathered(self._meter.state_dict())
        state |= {name: copy.copy(getattr(self, attribute)) for name, attribute in self.in_checkpoint.items()}
        checkpoint["task"] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["task"] = self._saved_state(checkpoint)
        if self.built:  # resumed
            refuse_other_classes(self.data_info, DataInfo(**saved["data"]))
        self.restored = True
        self.init_from = self.init_from or dict(saved.get("init_from") or {})  # what is frozen may depend on it
        self.construct(DataInfo(**saved["data"]))
        for name in self.in_checkpoint.keys() & saved.keys():
            setattr(self, self.in_checkpoint[name], copy.copy(saved[name]))
        meter = saved.get("meter", [])
        self._meter_states = [meter] if isinstance(meter, dict) else meter  # a single dict: of an older version

    def _saved_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        if "task" in checkpoint:
            return checkpoint["task"]
        if self.checkpoint_key_of_0_1 not in checkpoint:
            raise UserError(f"this checkpoint was not written by {type(self).__name__}: it does not know its data.")
        saved = dict(checkpoint[self.checkpoint_key_of_0_1])
        counts = saved.pop("class_counts")
        data = {"classes": [str(label) for label in range(saved.pop("num_classes"))], "class_counts": counts}
        data |= {name: saved.pop(name) for name in ("category_ids", "is_thing") if name in saved}
        return {**saved, "data": data}
