"""Errors of meshes after alignment: PA-MPJPE, PA-MPVPE, F-scores and the area under the curve, as FreiHAND has them."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

Points = Float[Tensor, "batch points 3"]
_STEPS = 100  # thresholds of the curve from 0 to 50 mm, as in FreiHAND's evaluation
_LARGEST = 50.0
_MM = 1000.0


def align(points: Points, truth: Points, reflect: bool = False) -> Points:
    """The points after the shift, rotation and scale that bring them nearest to the truth (orthogonal Procrustes).

    FreiHAND's own script allows a reflection; Mesh Graphormer's metric, and the default here, does not.
    """
    mean, target = points.mean(1, keepdim=True), truth.mean(1, keepdim=True)
    own, other = points - mean, truth - target
    u, values, v = torch.linalg.svd(own.transpose(1, 2) @ other)
    signs = torch.ones_like(values)
    if not reflect:
        signs[:, 2] = torch.linalg.det(u @ v).sign()
    turn = u * signs[:, None] @ v
    scale = (values * signs).sum(1) / own.square().sum((1, 2)).clamp_min(1e-12)
    return scale[:, None, None] * (own @ turn) + target


def mean_pose(meshes: Points) -> Points:
    """The mean of meshes that are aligned to each other (generalised Procrustes), as a batch of one.

    Its error is a control: what is reached without looking at the pictures, by the best single answer.
    """
    mean = meshes[:1]
    for _ in range(4):  # it has converged
        mean = align(meshes, mean.expand_as(meshes)).mean(0, keepdim=True)
    return mean


def f_score(points: Points, truth: Float[Tensor, "batch others 3"], limit: float) -> Float[Tensor, " batch"]:
    """Harmonic mean of the share of points within `limit` of a true one, and of true ones within it of a point."""
    distances = torch.cdist(points, truth)
    precision, recall = ((distances.amin(axis) < limit).float().mean(1) for axis in (2, 1))
    return 2 * precision * recall / (precision + recall).clamp_min(1e-12)


class HandErrors(Metric):
    """PA-MPJPE and PA-MPVPE in mm, F@5 mm, F@15 mm and the AUC of both errors in percent, of points in metres.

    Joints and vertices are aligned separately. `compute` is over the images of all processes.
    """

    full_state_update = False

    def __init__(self, reflect: bool = False) -> None:
        super().__init__()
        self.reflect = reflect
        for name in ("joints", "vertices", "f5", "f15", "images"):
            self.add_state(f"sum_{name}", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("joints", "vertices"):
            self.add_state(f"curve_{name}", torch.zeros(_STEPS, dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state(f"points_{name}", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
        """`joints` and `vertices` of each."""
        limits = torch.linspace(0, _LARGEST, _STEPS, device=found["joints"].device)
        states: Any = self
        for name in ("joints", "vertices"):
            aligned = align(found[name].double(), truth[name].double(), self.reflect)
            errors = (aligned - truth[name]).norm(dim=-1) * _MM
            getattr(states, f"sum_{name}").add_(errors.mean(1).sum())
            getattr(states, f"curve_{name}").add_((errors.flatten()[:, None] <= limits).sum(0))
            getattr(states, f"points_{name}").add_(errors.numel())
        for name, limit in (("f5", 0.005), ("f15", 0.015)):
            getattr(states, f"sum_{name}").add_(f_score(aligned, truth["vertices"].double(), limit).sum())
        states.sum_images.add_(len(errors))

    def compute(self) -> dict[str, Tensor]:
        states: Any = self
        found = {f"pa_{key}": getattr(states, f"sum_{name}") / states.sum_images
                 for key, name in (("mpvpe", "vertices"), ("mpjpe", "joints"))}  # fmt: skip
        found |= {name: 100 * getattr(states, f"sum_{name}") / states.sum_images for name in ("f5", "f15")}
        for key, name in (("auc_vertices", "vertices"), ("auc_joints", "joints")):
            curve = getattr(states, f"curve_{name}") / getattr(states, f"points_{name}")
            found[key] = 100 * torch.trapezoid(curve) / (_STEPS - 1)
        return found
