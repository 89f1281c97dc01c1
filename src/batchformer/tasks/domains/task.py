"""Base class of both tasks: optimizer, schedule, frozen BatchNorm, scores, selection on source data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.metrics import DomainScores
from batchformer.metrics.measures import DOMAINS, Measure
from batchformer.tasks.domains.options import DomainOptimizerOptions
from batchformer.training.averaging import SWAD
from batchformer.training.classifier_task import ClassifierTask
from batchformer.training.optimizers import rated_groups, without
from batchformer.training.options import BatchFormerOptions, as_options
from batchformer.training.schedules import check_has_end, half_cosine, place_in_run, steps_per_epoch
from batchformer.training.task import Batch

SOURCE = "source"


class DomainTask(ClassifierTask):
    """Reports target accuracy after the last step, and at the step best on the source domains' validation.

    The target is never used for selection: `oracle=True` adds the best accuracy on it, under a name that says so.

    Args:
        backbone: any name timm knows.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        optimizer: optimizer and learning rate.
        freeze_batch_norm: keep the BatchNorm statistics of the backbone's initial weights.
        judge_by: the primary measure of comparisons: accuracy after the "last" step, at the best step on "source"
            validation, or of the weights averaged by "swad".
        oracle: also report the best accuracy on the target over the steps (selected on test data).
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    shardable = True

    measures: Sequence[Measure] = DOMAINS
    main_picture: ClassVar[Mapping[str, Any]] = {"targets": True}
    analyses: Sequence[Any] = ("class_failures", "domain_planes")
    valley_set = SOURCE
    in_checkpoint: ClassVar[Mapping[str, str]] = {"best": "_best", "seen": "_seen"}

    def __init__(
        self,
        backbone: str,
        backbone_args: dict[str, Any] | None,
        method: Literal["batchformer", "baseline"],
        batchformer: BatchFormerOptions,
        optimizer: DomainOptimizerOptions,
        freeze_batch_norm: bool = False,
        judge_by: Literal["last", "source", "swad"] = "last",
        oracle: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, "mean", **options)
        self.save_hyperparameters({"freeze_batch_norm": freeze_batch_norm, "judge_by": judge_by, "oracle": oracle})
        self.module_options = as_options(BatchFormerOptions, batchformer, "batchformer")
        self.optimizer_options = as_options(DomainOptimizerOptions, optimizer, "optimizer")
        self.freeze_batch_norm, self.judge_by, self.oracle = freeze_batch_norm, judge_by, oracle
        keys = {"last": "accuracy", "source": "accuracy_selected", "swad": "accuracy_swad"}
        if judge_by not in keys:
            raise UserError(f"model.judge_by={judge_by!r} must be one of {', '.join(keys)}.")
        decides = keys[judge_by]
        if decides not in (measure.key for measure in self.measures):
            raise UserError("model.judge_by swad needs the average it judges by: set model.swad, {} for the defaults.")
        self.measures = [replace(measure, primary=measure.key == decides) for measure in self.measures]
        self._source: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._seen: list[list[float]] = []  # step, accuracy on source validation and on the target

    # ---- building

    def build(self, data: DataInfo) -> None:
        if not data.get("domains"):
            raise UserError(
                f"{type(self).__name__} needs data with domains: your own images in DIR/domain/class/ "
                f"(folders-domains), PACS, VLCS, OfficeHome, TerraIncognita or the embedded digits-domains."
            )
        super().build(data)
        self.train(self.training)

    def build_criterion(self, data: DataInfo) -> nn.Module:
        return nn.CrossEntropyLoss()

    def _build_losses_and_metrics(self, data: DataInfo) -> None:
        super()._build_losses_and_metrics(data)
        self.source_scores = DomainScores(len(data.domains))

    def attach_to(self, net: nn.Module) -> Any:
        return bf.attach(net, **asdict(self.module_options))

    def train(self, mode: bool = True) -> "DomainTask":
        super().train(mode)
        if self.freeze_batch_norm and hasattr(self, "net"):
            for layer in self.net.modules():
                if isinstance(layer, _BatchNorm) and self._is_backbone(layer):
                    layer.eval()
        return self

    def _is_backbone(self, layer: nn.Module) -> bool:
        return True

    @property
    def feature_layer(self) -> str:
        """The submodule that the features enter, for the analysis of domains."""
        return bf.find_classifiers(self.net)[0]

    # ---- optimizer

    def new_parameters(self) -> list[nn.Parameter]:
        """Parameters outside the backbone (classifiers, bottlenecks), which are trained at the full learning rate."""
        names = bf.find_classifiers(self.net)
        return [parameter for name in names for parameter in self.net.get_submodule(name).parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options, own = self.optimizer_options, self.module_parameters
        plain = without((p for p in self.net.parameters() if p.requires_grad), own)
        backbone = without(plain, self.new_parameters())
        parts = (backbone, options.backbone_lr_factor), (without(plain, backbone), 1.0), (own, options.module_lr_factor)
        made = rated_groups(options.lr, *parts)
        decay, fused = options.weight_decay, self.fused or None
        if options.name == "adam":
            return torch.optim.Adam(made, options.lr, weight_decay=decay, fused=fused)
        return torch.optim.SGD(made, options.lr, momentum=0.9, weight_decay=decay, nesterov=True, fused=fused)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.attachment is not None and self.optimizer_options.module_lr_factor == 0:
            self.attachment.expect_no_training()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_learning_rate()

    def learning_rate(self) -> float:
        options, trainer = self.optimizer_options, self.trainer
        epochs, total = place_in_run(trainer, "step")
        step, steps = epochs * steps_per_epoch(trainer), total * steps_per_epoch(trainer)
        began = self.schedule_began_at(round(step))
        step, steps = step - began, steps - began  # the cosine ends with the training
        if options.schedule == "cosine":
            return options.lr * half_cosine(step / steps)
        if options.schedule == "inverse":
            return options.lr * (1 + options.gamma * step) ** -0.75
        return options.lr * (0.1 if options.schedule == "step" and step >= 0.8 * steps else 1.0)

    def schedule_began_at(self, step: int) -> int:
        """The step at which the schedule last restarted."""
        return 0

    def check_trainer(self) -> None:
        if self.optimizer_options.schedule in ("cosine", "step"):
            check_has_end(self.trainer)

    # ---- evaluation

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        logits, labels = self.test_logits(batch["images"]), batch["labels"]
        self.metrics[name].update(logits, labels)  # type: ignore[operator]
        if name == SOURCE:
            self.source_scores.update(logits, labels, batch["domains"])
        return {"loss": F.cross_entropy(logits, labels)}

    def results(self, name: str) -> dict[str, Any]:
        found = super().results(name)
        if name == SOURCE:  # evaluated before the target
            self._source = {key: float(value) for key, value in self.source_scores.compute().items()}
            self.source_scores.reset()
            return {"accuracy": torch.tensor(self._source["accuracy"])}
        classes = torch.tensor(self.per_class)
        values = {"accuracy": found["accuracy"], "accuracy_classes": classes.nanmean()}
        if not (self.trainer.sanity_checking or self.only_tested):
            self._select(float(values["accuracy"]))
        values |= {key: torch.tensor(self._best[key]) for key in ("accuracy_selected", "accuracy_oracle")
                   if key in self._best}  # fmt: skip
        return values

    def _select(self, accuracy: float) -> None:
        self._seen.append([self.trainer.global_step, self._source["accuracy"], accuracy])
        if self._source["accuracy"] > self._best.get("source", -1.0):
            self._best |= {"source": self._source["accuracy"], "accuracy_selected": accuracy,
                           "step": self.trainer.global_step}  # fmt: skip
        if self.oracle:
            self._best["accuracy_oracle"] = max(accuracy, self._best.get("accuracy_oracle", -1.0))

    def valley_loss(self) -> float:
        """The mean over the source domains of their validation losses."""
        return float(self.source_scores.compute()["loss"])

    def _evaluate_average(self, swad: SWAD) -> None:
        before = self._source, dict(self._best), list(self._seen)
        super()._evaluate_average(swad)
        self._source, self._best, self._seen = before  # the averaged weights take no part in selection

    def sections(self) -> list[dict[str, Any]]:
        if not self._seen:
            return super().sections()
        steps, source, target = (list(column) for column in zip(*self._seen, strict=True))
        series = {"x": steps, "lines": {"target": target, "source validation": source}, "xlabel": "step",
                  "ylabel": self.measures[0].title.lower()}  # fmt: skip
        best, selected = self._best["step"], self._best["accuracy_selected"]
        text = f"Best on source validation at step {best}: {selected:.1f} % on the target."
        return [{"title": "Source and target along the training", "text": text, "series": series}, *super().sections()]
