"""Meshes of hands from pictures, with or without BatchFormerV2."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.info import DataInfo
from batchformer.data.sets.hands import HandData, make_topology
from batchformer.errors import UserError
from batchformer.metrics.gather import gathered
from batchformer.metrics.hands import HandErrors, align, mean_pose
from batchformer.metrics.measures import HANDS
from batchformer.models.graphormer import MeshGraphormer, project
from batchformer.tasks.hands.predict import predict_meshes
from batchformer.training.network_task import NetworkTask
from batchformer.training.optimizers import rated_groups, refuse_bad_betas, refuse_negative_rates, without
from batchformer.training.options import InnerModuleOptions, as_options, plain_values
from batchformer.training.schedules import ScheduleOptions
from batchformer.training.task import Batch


@dataclass
class MeshModuleOptions(InnerModuleOptions):
    """Where BatchFormerV2 goes and how it is made.

    Args:
        after: behind these layers of the network. The paper does not say which; the first one of all here, as in its
            detectors.
    """

    after: list[str] = field(default_factory=lambda: ["encoders.0.layers.0"])


@dataclass
class GraphormerOptions:
    """The network behind the backbone.

    Args:
        dims: widths of the encoders.
        layers: layers of each.
        heads: attention heads of each.
        dropout: in all of them.
        masked: part of the queries that is hidden in training (masked vertex modelling): 0 for hands as released. Each
            is hidden with this probability; the released code draws a part up to this for every picture.
    """

    dims: list[int] = field(default_factory=lambda: [1024, 256, 64])
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1
    masked: float = 0.0

    def check(self) -> None:
        if not 0 <= self.masked < 1:
            raise UserError(f"model.graphormer.masked={self.masked} must be 0 or more and less than 1.")


@dataclass
class AdamOptions:
    """Adam.

    Args:
        lr: peak learning rate.
        weight_decay: of all weights.
        betas: its two.
        module_lr_factor: the module's learning rate is this times lr.
    """

    lr: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    module_lr_factor: float = 1.0

    def check(self) -> None:
        refuse_negative_rates(self)
        refuse_bad_betas(self.betas)


class HandMesh(NetworkTask):
    """Trains Mesh Graphormer; logs `train/loss loss_joints loss_vertices loss_2d` and `val/pa_mpvpe pa_mpjpe f5 f15`.

    V2, Table 9: BatchFormerV2 behind a layer, two streams through the heads and the losses. The loss, as released for
    the baseline: the squared error of joints in space (those of the network, and those of its mesh), half the absolute
    error of the full and of the coarse mesh, and the squared error of both sets of joints in the image, all weighted
    alike (`projection_weight`: of the last). Coordinates are relative to the wrist. Errors are in mm after Procrustes
    alignment; joints are regressed from the mesh. `val/pa_mpvpe_mean_pose` is a control: the error of the test set's
    mean mesh.

    Args:
        backbone: any CNN of timm; hrnet_w64 as published.
        backbone_args: passed on to the backbone.
        method: "batchformer", or "baseline" for the same training without the module.
        batchformer: how and where the module is attached.
        graphormer: the network behind the backbone.
        projection_weight: of the error of joints in the image; 1 as released. In metres the other errors are so small
            that at 1 this one decides over most of a short training; then the mesh is learnt late.
        reflect: alignment may mirror, as FreiHAND's own script does.
        optimizer: Adam and its learning rates.
        schedule: learning rate per epoch.
        options: `seed`, `channels_last`, `compile` and `cuda_graph` (see `NetworkTask`).
    """

    shardable = True

    measures = HANDS
    main_picture: ClassVar[Mapping[str, Any]] = {"bars": ["pa_mpvpe", "pa_mpjpe"]}
    analyses = ("hand_meshes",)
    data_class: ClassVar[type] = HandData
    predict_options: ClassVar[Mapping[str, str]] = {"strict": "stop at the first image that cannot be read"}

    def __init__(
        self,
        backbone: str = "hrnet_w64",
        backbone_args: dict[str, Any] | None = None,
        method: Literal["batchformer", "baseline"] = "batchformer",
        batchformer: MeshModuleOptions = MeshModuleOptions(),
        graphormer: GraphormerOptions = GraphormerOptions(),
        projection_weight: float = 1.0,
        reflect: bool = False,
        optimizer: AdamOptions = AdamOptions(),
        schedule: ScheduleOptions = ScheduleOptions("step", milestones=[100]),
        **options: Any,
    ) -> None:
        super().__init__(backbone, backbone_args, method, "mean", **options)
        self.module_options = batchformer = as_options(MeshModuleOptions, batchformer, "batchformer")
        self.graphormer = graphormer = as_options(GraphormerOptions, graphormer, "graphormer")
        self.optimizer_options = optimizer = as_options(AdamOptions, optimizer, "optimizer")
        self.schedule_options = schedule = as_options(ScheduleOptions, schedule, "schedule")
        if not projection_weight >= 0:
            raise UserError(f"model.projection_weight={projection_weight} must be 0 or more.")
        self.projection_weight, self.reflect = projection_weight, reflect
        self.save_hyperparameters(plain_values(locals()))

    # ---- building

    def plain_net(self, data: DataInfo) -> nn.Module:
        if not data.get("topology"):
            raise UserError("HandMesh needs data with a mesh: hands-rendered, or FreiHAND.")
        self.topology = make_topology(**data.topology)
        options = self.graphormer
        sizes = tuple(options.dims), options.layers, options.heads, options.dropout
        return MeshGraphormer(self.backbone, self.topology, *sizes, **self.backbone_args)

    def attach_to(self, net: nn.Module) -> Any:
        return bf.attach(net, **self.module_options.keywords())

    def build(self, data: DataInfo) -> None:
        super().build(data)
        names = data.get("evaluation_sets") or ("val",)
        self._true_meshes: dict[str, list[Tensor]] = {}
        self.metrics = nn.ModuleDict({name: HandErrors(self.reflect) for name in names})
        self.register_buffer("chosen", torch.as_tensor(self.topology.chosen), persistent=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options, own = self.optimizer_options, self.module_parameters
        parts = (without(self.net.parameters(), own), 1.0), (own, options.module_lr_factor)
        groups = rated_groups(options.lr, *parts)
        keywords: dict[str, Any] = {"betas": tuple(options.betas), "weight_decay": options.weight_decay}
        return torch.optim.Adam(groups, options.lr, fused=self.fused or None, **keywords)

    # ---- training

    def step(self, batch: Batch) -> dict[str, Tensor]:
        masked = None
        if self.graphormer.masked:
            shape = len(batch["images"]), len(self.net.queries)  # type: ignore[arg-type]
            masked = torch.rand(*shape, device=batch["images"].device) < self.graphormer.masked
        found = self.net(batch["images"], masked)
        parts = self.losses(found, bf.repeat_targets(self.truth(batch), found))
        return {"loss": self.total(parts), **{name: v.detach() for name, v in parts.items()}}

    def truth(self, batch: Batch) -> dict[str, Tensor]:
        """Joints and vertices relative to the wrist, and the joints in the image."""
        wrist = batch["joints"][:, :1]
        named = {"joints": batch["joints"] - wrist, "vertices": batch["vertices"] - wrist}
        return {**named, "joints_2d": batch["joints_2d"]}

    def losses(self, found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, Tensor]:
        vertices, coarse = truth["vertices"], truth["vertices"][:, self.chosen]  # type: ignore[index]
        of_joints = [found["joints"], found["mesh_joints"]]
        wrists = [joints - joints[:, :1] for joints in of_joints]
        seen = [project(joints, found["camera"]) for joints in of_joints]
        return {
            "loss_joints": sum(F.mse_loss(joints, truth["joints"]) for joints in wrists),  # type: ignore[dict-item]
            "loss_vertices": 0.5 * (F.l1_loss(found["vertices"], vertices) + F.l1_loss(found["coarse"], coarse)),
            "loss_2d": sum(F.mse_loss(joints, truth["joints_2d"]) for joints in seen),  # type: ignore[dict-item]
        }

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["loss_joints"] + parts["loss_vertices"] + self.projection_weight * parts["loss_2d"]

    # ---- evaluation

    def evaluate(self, batch: Batch, name: str) -> Mapping[str, Tensor]:
        found, truth = self.net(batch["images"]), self.truth(batch)
        outputs = {"joints": found["mesh_joints"], "vertices": found["vertices"]}
        self.metrics[name].update(outputs, truth)  # type: ignore[operator]
        self._true_meshes.setdefault(name, []).append(truth["vertices"].cpu())
        return {"loss": self.total(self.losses(found, truth))}

    def results(self, name: str) -> dict[str, Tensor]:
        metric: Any = self.metrics[name]
        values = metric.compute()
        metric.reset()
        meshes = torch.cat(gathered(torch.cat(self._true_meshes.pop(name)))).double()
        errors = (align(mean_pose(meshes).expand_as(meshes), meshes, self.reflect) - meshes).norm(dim=-1)
        return {**values, "pa_mpvpe_mean_pose": 1000 * errors.mean()}

    # ---- commands

    def predict(self, images: list[Path], data: Any, out: Path | None, line: Any, **options: str) -> str:
        """Write a folder with a picture of the mesh over each image, and the meshes as files: see `predict`."""
        return predict_meshes(self, images, data, out or Path("predictions"), line, **options)
