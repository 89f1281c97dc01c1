"""Compositional zero-shot recognition: pairs of an attribute and an object, some of them unseen, with BatchFormer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data import CompositionalData
from batchformer.data.info import DataInfo
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError
from batchformer.metrics.compositional import CompositionalScores, Outcome
from batchformer.metrics.measures import COMPOSITIONAL, Measure
from batchformer.models import create_backbone
from batchformer.models.compositional import (
    CompositionalNet,
    CosineScorer,
    GraphScorer,
    LabelEmbeddingScorer,
    PairScorer,
    ProductScorer,
    feature_width,
)
from batchformer.tasks.zero_shot.compositional_options import NEEDS_WORDS, PairMethodOptions, PairOptimizerOptions
from batchformer.tasks.zero_shot.compositional_page import CURVE, pair_name, sections_of, summary_of
from batchformer.tasks.zero_shot.fixed_features import fixed_features
from batchformer.training.classifier_task import ClassifierTask
from batchformer.training.optimizers import rated_groups, without
from batchformer.training.options import BatchFormerOptions, as_options, plain_values
from batchformer.training.schedules import check_has_end, half_cosine, place_in_run
from batchformer.training.task import Batch

VAL = "val"
_THRESHOLDS = 50  # of feasibility, tried on the validation set


class CompositionalZeroShot(ClassifierTask):
    """Scores all pairs of an attribute and an object; logs `train/loss lr` and `val/auc hm seen unseen ...`.

    BatchFormer's Table 5: the module on the image feature before the scorer (and its image embedder); labels of pairs,
    attributes and objects are repeated for the related rows, and the loss is the mean over both streams; at test time
    the plain network. In the code released for CGE only `--add_bt 2` does so.

    Results are those on the test set after the last epoch, over all biases on unseen pairs (`metrics.compositional`).
    The papers take the epoch that is best on the validation set, which has unseen pairs of its own: `*_selected`.

    Args:
        backbone: any name timm knows, or resnet50_stride_in_1x1.
        backbone_args: passed on to the backbone.
        features: "trained": the backbone is trained too; "fixed": its features are computed once, without
            augmentation, and only the scorer and the module are trained.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how the module is attached.
        pairs: how pairs are scored.
        optimizer: learning rates.
        judge_by: the primary measures of comparisons: of the "last" epoch, or of the one best on "val".
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    shardable = True

    measures: Sequence[Measure] = COMPOSITIONAL
    main_picture: ClassVar[Mapping[str, Any]] = {"section": CURVE}
    analyses = ("mistakes",)
    data_class: ClassVar[type] = CompositionalData
    in_checkpoint: ClassVar[Mapping[str, str]] = {"best": "_best", "shown": "_shown", "feasible": "_feasible"}
    bias: Float[Tensor, ""]
    candidate_of: Tensor

    def __init__(
        self,
        backbone: str = "resnet18",
        backbone_args: dict[str, Any] | None = None,
        features: Literal["trained", "fixed"] = "trained",
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: BatchFormerOptions = BatchFormerOptions(),
        pairs: PairMethodOptions = PairMethodOptions(),
        optimizer: PairOptimizerOptions = PairOptimizerOptions(),
        judge_by: Literal["last", "val"] = "last",
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, "mean", **options)
        self.module_options = batchformer = as_options(BatchFormerOptions, batchformer, "batchformer")
        self.pair_options = pairs = as_options(PairMethodOptions, pairs, "pairs")
        self.optimizer_options = optimizer = as_options(PairOptimizerOptions, optimizer, "optimizer")
        self.save_hyperparameters(plain_values(locals()))
        for name, value, known in (("features", features, ("trained", "fixed")), ("judge_by", judge_by, ("last", VAL))):
            if value not in known:
                raise UserError(f"model.{name}={value!r} must be one of {', '.join(known)}.")
        self.fixed = features == "fixed"
        self.measures = [_shown_as(measure, judge_by) for measure in self.measures]
        self.register_buffer("bias", torch.zeros(()))  # of the best harmonic mean on the validation set
        self._best: dict[str, float] = {}
        self._trial = 0  # the threshold of feasibility that is best on the validation set
        self._shown: dict[str, Any] = {}  # of the last evaluation, for the page
        self._feasible: tuple[int, Tensor] | None = None  # an epoch, and the feasibility of the pairs when it began

    @property
    def all_measures(self) -> list[Measure]:
        """Of the validation set tables have the area alone."""
        others = [replace(measure.of(VAL), detail=measure.key != "auc") for measure in self.measures]
        return [*self.measures, *others]

    # ---- building

    def build(self, data: DataInfo) -> None:
        if not data.get("pairs"):
            raise UserError(
                f"{type(self).__name__} needs data of pairs: your own images in DIR/images/<attribute>_<object>/ "
                f"(folders-pairs), MIT-States, UT-Zappos, C-GQA or the embedded digits-states."
            )
        if self.pair_options.name in NEEDS_WORDS and data.get("word_vectors") is None:
            raise UserError(
                f"model.pairs.name={self.pair_options.name} needs word vectors of attributes and objects: name a file "
                f"with --data.words '[FILE]', or random ones, '[random]'."
            )
        super().build(data)
        self.train(self.training)

    def build_criterion(self, data: DataInfo) -> nn.Module:
        return nn.Identity()  # the scorer has the loss

    def plain_net(self, data: DataInfo) -> nn.Module:
        backbone: Any = create_backbone(self.backbone, 0, **self.backbone_args)
        if self.fixed:
            backbone.requires_grad_(False)
        return CompositionalNet(backbone, self._make_scorer(feature_width(backbone), data))

    def _make_scorer(self, width: int, data: DataInfo) -> PairScorer:
        options, counts = self.pair_options, (len(data.attributes), len(data.objects))
        pairs, seen = candidate_pairs(data, options.world)
        common: dict[str, Any] = {"counts": counts, "pairs": pairs, "seen": seen, "dropout": options.dropout}
        if options.name == "visual_product":
            return ProductScorer(width, hidden_dim=options.hidden_dim, log_scores=options.log_scores, **common)
        common |= {"words": data.word_vectors, "embed_dim": options.embed_dim}
        if options.name == "cge":
            return GraphScorer(width, hidden_dims=options.graph_dims, **common)
        common |= {"hidden_dim": options.hidden_dim, "margin": options.margin}
        if options.name == "label_embedding":
            return LabelEmbeddingScorer(width, **common)
        open_world = options.world == "open"
        return CosineScorer(
            width, scale=options.scale, open_world=open_world, margin_epochs=options.margin_epochs, **common
        )

    def attach_to(self, net: Any) -> Any:
        width = feature_width(net.backbone)
        chosen = {**asdict(self.module_options), "before": self.module_options.before or "scorer"}
        return bf.attach(net, dim=width, example_inputs=torch.zeros(2, width), **chosen)  # features are enough

    def _build_losses_and_metrics(self, data: DataInfo) -> None:
        super()._build_losses_and_metrics(data)
        pairs = torch.tensor(data.pairs)
        opened = self.pair_options.world == "open"
        place = pairs[:, 0] * len(data.objects) + pairs[:, 1] if opened else torch.arange(len(pairs))
        self.register_buffer("candidate_of", place, persistent=False)
        trials = _THRESHOLDS if self.pair_options.feasibility_threshold == VAL else 1
        self.metrics = nn.ModuleDict(
            {name: nn.ModuleList(self._make_metric(data, name) for _ in range(trials)) for name in data.evaluation_sets}
        )

    def _make_metric(self, data: DataInfo, name: str) -> CompositionalScores:
        pairs, seen = candidate_pairs(data, self.pair_options.world)
        candidates = torch.ones_like(seen)
        if self.pair_options.world == "closed":
            candidates = seen.clone()
            candidates[data.evaluated[name]] = True
        return CompositionalScores(pairs, seen, candidates)

    def train(self, mode: bool = True) -> "CompositionalZeroShot":
        super().train(mode)
        if self.fixed and self.built:
            self.net.backbone.eval()  # type: ignore[operator, union-attr]
        return self

    def check_trainer(self) -> None:
        if self.fixed and self.trainer.world_size > 1:
            raise UserError("model.features fixed trains in one process: set trainer.devices to 1.")
        if self.optimizer_options.schedule == "cosine":
            check_has_end(self.trainer, ", or model.optimizer.schedule to constant")

    # ---- training

    def on_fit_start(self) -> None:
        super().on_fit_start()
        data: Any = getattr(self.trainer, "datamodule", None)
        if self.fixed and hasattr(data, "hold_features"):
            data.hold_features(fixed_features(self.net.backbone, data, self.device))  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options, own = self.optimizer_options, self.module_parameters
        net: Any = self.net
        backbone = [] if self.fixed else list(net.backbone.parameters())
        scorer = without(net.scorer.parameters(), own)
        parts = (scorer, 1.0), (backbone, options.backbone_lr_factor), (own, options.module_lr_factor)
        made = rated_groups(options.lr, *parts)
        return torch.optim.Adam(made, options.lr, weight_decay=options.weight_decay, fused=self.fused or None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.set_learning_rate()

    def learning_rate(self) -> float:
        options = self.optimizer_options
        if options.schedule == "constant":
            return options.lr
        now, total = place_in_run(self.trainer, "step")
        return options.lr * half_cosine(now / total)

    def begin_epoch(self) -> None:
        scorer: Any = self.net.scorer
        scorer.begin_epoch(self.current_epoch)
        if isinstance(scorer, CosineScorer):
            if self._feasible is not None and self._feasible[0] == self.current_epoch:  # resumed within it
                scorer.feasible.copy_(self._feasible[1])
            self._feasible = self.current_epoch, scorer.feasible
        super().begin_epoch()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.ndim == 4 else self.net(x)

    def step(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self(_inputs(batch))
        targets = {name: batch[name] for name in ("labels", "attributes", "objects")}
        targets["labels"] = self.candidate_of[targets["labels"]]
        return self.net.scorer.losses(outputs, bf.repeat_targets(targets, outputs))  # type: ignore[operator, union-attr]

    # ---- evaluation

    def on_validation_start(self) -> None:
        super().on_validation_start()
        threshold = self.pair_options.feasibility_threshold
        if threshold is None:
            return
        scorer: Any = self.net.scorer
        feasible = scorer.feasibility()
        unseen = feasible[~scorer.seen]
        limits = torch.linspace(float(unseen.min()), float(unseen.max()), _THRESHOLDS).tolist()
        groups: Any = self.metrics.values()
        for trials in groups:
            for metric, limit in zip(trials, limits if threshold == VAL else [threshold], strict=True):
                metric.candidates.copy_((feasible >= limit) | scorer.seen)

    on_test_start = on_validation_start

    def evaluate(self, batch: Batch, name: str) -> None:  # type: ignore[override]
        scores, labels = self.test_logits(_inputs(batch)), self.candidate_of[batch["labels"]]
        trials: Any = self.metrics[name]
        for metric in trials:
            metric.update(scores, labels)

    def results(self, name: str) -> dict[str, float]:  # type: ignore[override]
        trials: Any = self.metrics[name]
        outcomes: list[Outcome] = [metric.compute() for metric in trials]
        for metric in trials:
            metric.reset()
        found = [outcome.measures() for outcome in outcomes]
        if name == VAL:  # evaluated before the test set
            areas = [values["auc"] for values in found]
            self._trial = int(np.nanargmax(areas)) if not np.isnan(areas).all() else 0
            if outcomes[self._trial].is_complete:
                self.bias.fill_(outcomes[self._trial].best_bias())
            self._val_area = areas[self._trial]
            return found[self._trial]
        values, outcome = found[self._trial], outcomes[self._trial]
        may_select = not (self.trainer.sanity_checking or self.only_tested)
        if may_select and self._val_area > self._best.get(VAL, -1.0):  # nan is not
            self._best = {VAL: self._val_area, **{f"{key}_selected": value for key, value in values.items()}}
        self.per_class = outcome.accuracy_of_pairs(float(self.bias))[self.candidate_of.cpu().numpy()].tolist()
        if outcome.is_complete:
            self._shown = summary_of(outcome, float(self.bias))
        kept = {measure.key for measure in self.measures}
        return values | {key: value for key, value in self._best.items() if key in kept}

    def predict_step(self, batch: Any, batch_idx: int) -> Float[Tensor, "batch classes"]:
        """Probabilities of the known pairs; unseen ones get the bias that was best on the validation set."""
        images = batch if isinstance(batch, Tensor) else _inputs(as_batch(batch))
        scorer: Any = self.net.scorer
        scores = self.test_logits(images) + self.bias * ~scorer.seen
        return scores[:, self.candidate_of].softmax(1)

    # ---- the page

    def mistakes(self, data: Any) -> list[tuple[Any, str, str]]:
        """For the most frequent confusions on the test set: an image, the predicted pair and the true one."""
        if self.trainer.world_size > 1:  # images are numbered in the order of one process
            return []
        name = self.evaluation_sets[0]
        return [
            (data.picture(name, each["image"]), *(pair_name(self.data_info, each[key]) for key in ("said", "true")))
            for each in self._shown.get("confusions", [])
        ]

    def sections(self) -> list[dict[str, Any]]:
        own = sections_of(self.data_info, self._shown, self.per_class) if self._shown else []
        return [*own, *super().sections()]

    # ---- export

    def export_notes(self) -> tuple[dict[str, str], str, str]:
        return {}, "", ""  # made from the run folder, which has the pairs and the word vectors


def candidate_pairs(data: Mapping[str, Any], world: str) -> tuple[Tensor, Tensor]:
    """The pairs that are scored, and which of them are trained on: the known ones, or all combinations."""
    pairs, seen = torch.tensor(data["pairs"]), torch.tensor(data["seen"])
    if world == "closed":
        return pairs, seen
    attributes, objects = len(data["attributes"]), len(data["objects"])
    everything = torch.cartesian_prod(torch.arange(attributes), torch.arange(objects))
    trained = torch.zeros(attributes * objects, dtype=torch.bool)
    trained[pairs[seen, 0] * objects + pairs[seen, 1]] = True
    return everything, trained


def _shown_as(measure: Measure, judge_by: str) -> Measure:
    """The measures that decide are in the tables; of the others only the area is."""
    name = measure.key.removesuffix("_selected")
    if name not in ("auc", "hm", "seen", "unseen", "attribute", "object"):
        return measure
    decides = (measure.key != name) == (judge_by == VAL)
    return replace(measure, primary=decides and name == "auc", detail=not decides and name != "auc")


def _inputs(batch: Mapping[str, Any]) -> Tensor:
    return batch["features"] if "features" in batch else batch["images"]
