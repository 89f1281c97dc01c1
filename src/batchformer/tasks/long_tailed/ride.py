"""RIDE: diverse experts that share early stages, and a router by which easy images use fewer of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.losses import LDAMLoss, RideLoss, RoutingLoss
from batchformer.metrics import ShotAccuracy
from batchformer.metrics.measures import LONG_TAILED, Measure
from batchformer.models.ride import ExpertNetwork, expert_network, experts_used, means_so_far
from batchformer.tasks.long_tailed.algorithm import Algorithm, Sampling, accuracy_of_plain_rows, build_criterion
from batchformer.training.optimizers import build_sgd
from batchformer.training.task import Batch
from batchformer.training.weights import NETWORK, load_weights, read_weights

if TYPE_CHECKING:
    from batchformer.tasks.long_tailed.task import LongTailed

TEACHER = "teacher"  # the part that `--init-from` names
_CURVE = tuple(round(0.05 * k, 2) for k in range(21))  # thresholds of the router that the page shows


@dataclass
class RideOptions:
    """RIDE; the loss of each expert is `model.loss` (ldam as published), its cosines times `model.loss.scale`.

    Args:
        experts: number of experts; 2 to 4 are published, and 6 for a teacher.
        width: channels of the experts' own stages, as a fraction of the backbone's.
        diversity: factor of the distance between each expert and the mean, -0.45 for CIFAR; 0: none.
        temperature_factor: how much the temperature of that distance depends on the class, from
            `model.loss.reweight_epoch` on; 0.05 for CIFAR, 0.02 for ImageNet-LT, 0.015 for iNaturalist.
        collaborative: one loss of the mean logits for all experts instead of one for each (an ablation).
        teacher_weight: of the distillation from a teacher, --init-from teacher=RUN: another RIDE network of this
            backbone and width, with any number of experts.
        teacher_temperature: of the distillation.
        times_experts: with a teacher, the whole loss times the number of experts, as RIDE's own code has it.
        train: "experts", or "router": the experts are those of --init-from (or of the previous stage) and do
            not change.
        router_top: how many of the largest logits the router reads: 30 for CIFAR, 50 for ImageNet.
        pos_weight: of images that a further expert helps, in the loss of the router; more means more experts used.
        threshold: an image is passed to the next expert while the router's probability is above this.
    """

    experts: int = 3
    width: float = 0.75
    diversity: float = -0.2
    temperature_factor: float = 0.02
    collaborative: bool = False
    teacher_weight: float = 0.0
    teacher_temperature: float = 1.5
    times_experts: bool = False
    train: Literal["experts", "router"] = "experts"
    router_top: int = 30
    pos_weight: float = 100.0
    threshold: float = 0.5

    def check(self) -> None:
        for name, fits, wanted in (
            ("experts", self.experts >= 2, "2 or more"),
            ("width", 0 < self.width <= 1, "above 0 and at most 1"),
            ("temperature_factor", 0 <= self.temperature_factor < 1, "0 or more and less than 1"),
            ("teacher_weight", self.teacher_weight >= 0, "0 or more"),
            ("teacher_temperature", self.teacher_temperature > 0, "above 0"),
            ("router_top", self.router_top >= 1, "1 or more"),
            ("pos_weight", self.pos_weight > 0, "above 0"),
            ("threshold", 0 <= self.threshold <= 1, "between 0 and 1"),
        ):
            if not fits:
                raise UserError(f"model.ride.{name}={getattr(self, name)} must be {wanted}.")


class Ride(Algorithm):
    """Wang et al., "Long-tailed Recognition by Routing Diverse Distribution-Aware Experts" (ICLR 2021).

    BatchFormer stands before the classifier of every expert, one module for all, as in the code released with
    BatchFormer; there with `streams: single` for ImageNet-LT and iNaturalist (no shared classifier) and, for CIFAR,
    where that fails, with both streams. A second stage (`train: router`) trains the router on frozen experts, without
    the module.
    """

    measures: Sequence[Measure] = (
        *LONG_TAILED,
        Measure("accuracy_all_experts", "All, every expert", name="accuracy without routing"),
        Measure("experts_used", "Experts used", unit="", better="lower", note="per image", bounds=(1.0, None)),
        Measure("gflops", "Cost", unit="GFLOPs", better="lower", note="multiply-adds per image", bounds=(0.0, None)),
    )

    def __init__(self) -> None:
        super().__init__()
        self._teacher: list[ExpertNetwork] = []  # in a list: not registered as a submodule, so not in checkpoints
        self._costs: list[float] = []  # of an image that leaves after one expert, after two, ...
        self._curve: list[dict[str, float]] = []

    # ---- building

    def plain_net(self, task: "LongTailed", data: DataInfo) -> ExpertNetwork:
        return self._network(task, len(data.classes))

    def _network(self, task: "LongTailed", classes: int, **changed: Any) -> ExpertNetwork:
        return expert_network(task.backbone, classes, **{**self._arguments(task), **changed}, **task.backbone_args)

    def _arguments(self, task: "LongTailed") -> dict[str, Any]:
        options = task.ride_options
        arguments = {"experts": options.experts, "width": options.width, "scale": task.loss_options.scale}
        return {**arguments, "top": options.router_top, "threshold": options.threshold} if _routes(task) else arguments

    def attach_to(self, task: "LongTailed", net: nn.Module) -> Any:
        return None if _routes(task) else bf.attach(net, share=True, **asdict(task.module_options))

    def build(self, task: "LongTailed", data: DataInfo) -> None:
        if not _routes(task):
            return
        names = data.get("evaluation_sets") or ("val",)
        thresholds = (task.ride_options.threshold, *_CURVE)
        self.routed = nn.ModuleDict(
            {name: nn.ModuleList(ShotAccuracy(data.class_counts) for _ in thresholds) for name in names}
        )
        self.used = nn.ModuleDict({name: nn.ModuleList(MeanMetric() for _ in thresholds) for name in names})

    def criterion(self, task: "LongTailed", data: DataInfo) -> nn.Module:
        options, loss, counts = task.ride_options, task.loss_options, data.class_counts
        if _routes(task):
            return RoutingLoss(options.pos_weight)
        if loss.name == "ldam":  # the logits are scaled in the network
            base: nn.Module = LDAMLoss(counts, loss.max_margin * loss.scale, 1.0, loss.reweight_epoch, loss.beta)
        else:
            base = build_criterion(loss, counts)
        return RideLoss(
            base, counts, options.diversity, options.temperature_factor, loss.reweight_epoch, options.collaborative,
            options.teacher_weight, options.teacher_temperature, options.times_experts,
        )  # fmt: skip

    def load_part(self, task: "LongTailed", part: str, source: str) -> None:
        if part == TEACHER:
            return  # loaded where a training begins, also one that goes on
        weights = read_weights(source)
        if part == NETWORK and _routes(task) and not any(key.startswith("router.") for key in weights):
            for inner in ("shared", "experts", "classifiers"):  # of the stage before, which has no router
                load_weights(task.net, inner, source, attached=False, weights=weights)
            return
        load_weights(task.net, part, source, attached=task.attachment is not None, weights=weights)

    def check_data(self, task: "LongTailed", data: Any) -> None:
        if _routes(task) and not task.restored and NETWORK not in task.init_from:
            raise UserError(
                "model.ride.train router trains the router alone, on experts that are trained already: begin with "
                "those of a run, --init-from RUN, or take a recipe with both stages (cifar100-lt-100-ride-routed)."
            )

    def sampling_of(self, task: "LongTailed") -> Sampling:
        return task.sampling or ("class_balanced" if _routes(task) else self.sampling)

    def optimizer(self, task: "LongTailed") -> torch.optim.Optimizer:
        learning = [parameter for parameter in task.net.parameters() if parameter.requires_grad]
        return build_sgd(task.optimizer_options, learning, task.module_parameters, task.fused)

    # ---- training

    def before_training(self, task: "LongTailed") -> None:
        source, options = task.init_from.get(TEACHER), task.ride_options
        if _routes(task):
            return
        if (source is None) != (options.teacher_weight == 0):
            raise UserError(
                f"model.ride.teacher_weight {options.teacher_weight:g} needs a teacher: add --init-from teacher=RUN."
                if source is None
                else f"--init-from teacher={source} has no effect at model.ride.teacher_weight 0: add "
                "--model.ride.teacher_weight 1."
            )
        if source is not None and not self._teacher:
            self._teacher.append(self._load_teacher(task, source))

    def _load_teacher(self, task: "LongTailed", source: str) -> ExpertNetwork:
        weights, classes = read_weights(source), len(task.class_counts)
        heads = [value for key, value in weights.items() if key.startswith("classifiers.")]
        if not heads or len(heads[0]) != classes:
            found = f"classifies {len(heads[0])} classes" if heads else "is no network of RIDE"
            raise UserError(
                f"--init-from teacher={source}: this {found}, and the teacher must be one of RIDE for the {classes} "
                "classes of the data."
            )
        teacher = self._network(task, classes, experts=len(heads))
        load_weights(teacher, NETWORK, f"teacher={source}", attached=False, weights=weights)
        return teacher.eval().requires_grad_(False)

    def begin_epoch(self, task: "LongTailed") -> None:
        if isinstance(task.criterion, RideLoss):
            task.criterion.set_epoch(task.current_epoch)
        for teacher in self._teacher:
            teacher.to(task.device)

    def step(self, task: "LongTailed", batch: Batch) -> dict[str, Tensor]:
        images, labels = batch["images"], batch["labels"]
        if _routes(task):
            logits, scores = task(images)
            right = means_so_far(logits).argmax(2) == labels[:, None]
            return {"loss": task.criterion(scores, right), "acc": 100.0 * right[:, -1]}
        logits, targets = task(images), labels
        for teacher in self._teacher:
            with torch.no_grad():
                targets = (labels, teacher(images))
        loss = task.loss_weight * task.stream_criterion(logits, targets)
        return {"loss": loss, "acc": accuracy_of_plain_rows(task, logits.mean(1), labels)}

    # ---- evaluation

    def observe(self, task: "LongTailed", batch: Batch, name: str) -> None:
        """The costs, once; and of a router, what every threshold gives: all experts, for all images."""
        net: Any = task.net
        if not self._costs:
            self._costs = net.giga_multiply_adds(batch["images"][:1])
        if not _routes(task):
            return
        logits, scores = net.with_all_experts(batch["images"])
        means = means_so_far(logits)
        for threshold, accuracy, used in self._by_threshold(task, name):
            count = experts_used(scores, threshold)
            accuracy.update(means[torch.arange(len(count), device=count.device), count - 1], batch["labels"])
            used.update(count)

    def _by_threshold(self, task: "LongTailed", name: str) -> list[tuple[float, Any, Any]]:
        metrics: tuple[Any, Any] = (self.routed[name], self.used[name])
        return list(zip((task.ride_options.threshold, *_CURVE), *metrics, strict=True))

    def results(self, task: "LongTailed", name: str) -> dict[str, Tensor]:
        if not _routes(task):
            return {"experts_used": torch.tensor(float(len(self._costs))), "gflops": torch.tensor(self._costs[-1])}
        found = []
        for threshold, accuracy, used in self._by_threshold(task, name):
            values = {key: float(value) for key, value in accuracy.compute().items() if key != "per_class"}
            found.append({"threshold": threshold, "experts": float(used.compute()), **values})
            accuracy.reset()
            used.reset()
        chosen, self._curve = found[0], found[1:]
        return {
            "accuracy_all_experts": torch.tensor(self._curve[0]["accuracy"]),  # a threshold of 0 lets none leave
            "experts_used": torch.tensor(chosen["experts"]),
            "gflops": torch.tensor(self._cost(chosen["experts"])),
        }

    def _cost(self, experts: float) -> float:
        """GFLOPs of an image that passes so many experts in the mean; experts all cost the same."""
        return self._costs[0] + (experts - 1) * (self._costs[1] - self._costs[0])

    def sections(self, task: "LongTailed") -> list[dict[str, Any]]:
        if not self._curve:
            return []
        series = {
            "x": [point["experts"] for point in self._curve],
            "lines": {"All": [point["accuracy"] for point in self._curve]},
            "xlabel": "experts used per image, mean",
            "ylabel": "accuracy, %",
        }
        header = ["threshold", "experts", "GFLOPs", "All", "Many", "Medium", "Few"]
        rows = [
            [f"{point['threshold']:g}", f"{point['experts']:.2f}", f"{self._cost(point['experts']):.3g}",
             *(f"{point[key]:.2f}" for key in ("accuracy", "many", "medium", "few"))]
            for point in self._curve
        ]  # fmt: skip
        text = (
            "An image is passed to the next expert while the router's probability that this helps is above the "
            f"threshold; this run has {task.ride_options.threshold:g}. At 0 every image passes all experts."
        )
        table = {"header": header, "rows": rows}
        return [{"title": "Accuracy against experts used", "text": text, "series": series, "table": table}]

    # ---- export

    def export_notes(self, task: "LongTailed") -> tuple[dict[str, str], str, str]:
        settings = {**self._arguments(task), **task.backbone_args}
        words = "".join(f", {name}={value!r}" for name, value in settings.items())
        call = f"expert_network({task.backbone!r}, {len(task.class_counts)}{words})"
        metadata = {"backbone": task.backbone, "arguments": json.dumps(settings)}
        return metadata, call, "from batchformer.models import expert_network"


def _routes(task: "LongTailed") -> bool:
    """Whether the network has a router, which is then all that learns."""
    return task.ride_options.train == "router"
