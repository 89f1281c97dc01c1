"""Pictures of posed hands: a rasteriser on torch, and random scenes that depend on (seed, index) alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.data.loading.order import generator
from batchformer.models.rig import Rig, Skeleton

_WINDOWS = tuple(1 << k for k in range(10))  # most faces of a hand cover a few pixels
_CELLS = 1 << 24  # of windows that are compared at once
_DEPTH_BITS = 31
_FOCAL = 2.2  # in image sides: about that of FreiHAND's cameras
_LIGHT_SKIN, _DARK_SKIN = (0.96, 0.80, 0.69), (0.30, 0.19, 0.13)
_LAMP, _MESH = (0.3, -0.4, -0.85), (0.55, 0.70, 0.95)  # direction of light on drawn meshes, and their colour
# flexion and spread of a joint in degrees, by the end of its name
_LIMITS = {
    "thumb-metacarpal": ((-10, 35), (-20, 20)),
    "thumb-phalanx-proximal": ((-10, 50), (-5, 5)),
    "thumb-phalanx-distal": ((-10, 70), (0, 0)),
    "phalanx-proximal": ((-15, 85), (-15, 15)),
    "phalanx-intermediate": ((0, 95), (0, 0)),
    "phalanx-distal": ((0, 65), (0, 0)),
    "wrist": ((0, 0), (0, 0)),
}


def rasterise(
    points: Float[Tensor, "batch vertices 3"], faces: Int[Tensor, "faces 3"], size: int
) -> tuple[Int[Tensor, "batch size size"], Float[Tensor, "batch size size 3"]]:
    """The face that is seen at the centre of every pixel (-1: none), and its barycentric coordinates there.

    Points are x, y in pixels (the first pixel reaches from 0 to 1) and a depth; the smallest depth is seen. Each face
    is compared with a window of pixels that holds it, and the nearest one kept: windows of one size are one operation.
    """
    corners = points[:, faces]  # batch, faces, 3, 3
    low = corners[..., :2].amin(2).sub(0.5).ceil().clamp(0, size - 1)
    high = corners[..., :2].amax(2).sub(0.5).floor().clamp(-1, size - 1)
    extent = (high - low + 1).amax(-1)
    nearest = torch.full((len(points), size * size), torch.iinfo(torch.int64).max, device=points.device)
    depths = corners[..., 2]
    start, span = depths.min(), (depths.max() - depths.min()).clamp_min(1e-12)
    below = 0
    for window in _WINDOWS:
        image, face = ((extent > below) & (extent <= window)).nonzero(as_tuple=True)
        below = window
        for part in torch.arange(len(image), device=points.device).split(max(1, _CELLS // window**2)):
            _draw(nearest, corners, low, image[part], face[part], window, size, start, span)
    seen = nearest != torch.iinfo(torch.int64).max
    face = torch.where(seen, nearest & ((1 << _DEPTH_BITS) - 1), -1).view(-1, size, size)
    centres = torch.arange(size, device=points.device) + 0.5
    pixels = torch.stack(torch.meshgrid(centres, centres, indexing="xy"), dim=-1)
    own = corners[torch.arange(len(points), device=points.device)[:, None, None], face.clamp_min(0)]
    return face, _barycentric(own[..., :2], pixels) * (face >= 0)[..., None]


def _draw(
    nearest: Tensor, corners: Tensor, low: Tensor, image: Tensor, face: Tensor, window: int, size: int,
    start: Tensor, span: Tensor,
) -> None:  # fmt: skip
    steps = torch.arange(window, device=nearest.device)
    first = low[image, face].long()
    columns, rows = (first[:, k, None] + steps for k in (0, 1))
    columns, rows = columns[:, None, :].expand(-1, window, -1), rows[:, :, None].expand(-1, -1, window)
    own = corners[image, face]
    inside = _barycentric(own[:, None, None, :, :2], torch.stack([columns, rows], dim=-1) + 0.5)
    depth = (inside * own[:, None, None, :, 2]).sum(-1)
    covered = (inside >= 0).all(-1) & (columns < size) & (rows < size)
    scaled = ((depth - start) / span * ((1 << _DEPTH_BITS) - 1)).clamp(0, (1 << _DEPTH_BITS) - 1).long()
    key = (scaled << _DEPTH_BITS) + face[:, None, None]
    place = (image * size * size)[:, None, None] + rows * size + columns
    nearest.view(-1).scatter_reduce_(0, place[covered], key[covered], "amin")


def _barycentric(corners: Float[Tensor, "... 3 2"], point: Float[Tensor, "... 2"]) -> Float[Tensor, "... 3"]:
    a, b, c = corners.unbind(-2)
    area = _cross(b - a, c - a)
    area = torch.where(area.abs() < 1e-12, torch.full_like(area, torch.inf), area)
    return torch.stack(
        [_cross(c - b, point - b) / area, _cross(a - c, point - c) / area, _cross(b - a, point - a) / area], -1
    )


def _cross(first: Tensor, second: Tensor) -> Tensor:
    return first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]


def draw_mesh(
    image: Float[Tensor, "3 size size"],
    vertices: Float[Tensor, "vertices 3"],
    camera: Float[Tensor, "3"],
    faces: Int[Tensor, "faces 3"],
    *,
    from_right: bool = False,
    colours: Float[Tensor, "vertices 3"] | None = None,
) -> Float[Tensor, "3 size size"]:
    """The mesh over a square picture, by a weak-perspective camera (s, t_x, t_y): s (x + t), from -1 to 1.

    Args:
        image: values from 0 to 1.
        vertices: in the camera's frame (x right, y down, z away) but for a shift.
        from_right: seen by an eye to the right of the hand instead, in the middle of the picture and at the same scale.
        colours: of the vertices, from 0 to 1, shaded lightly; None: blue.
    """
    size, (scale, *shift) = image.shape[-1], camera.unbind()
    if from_right:
        x, y, z = (vertices - vertices.mean(0)).unbind(1)
        points = torch.stack([z, y, -x], dim=1)
        plane = scale * points[:, :2]
    else:
        points, plane = vertices, scale * (vertices[:, :2] + torch.stack(shift))
    seen = torch.cat([(plane + 1) * size / 2, points[:, 2:]], dim=1)
    face, inside = (each[0] for each in rasterise(seen[None], faces, size))
    corners = faces[face.clamp_min(0)]
    normal = F.normalize((vertex_normals(points[None], faces)[0][corners] * inside[..., None]).sum(-2), dim=-1)
    facing = (normal @ torch.tensor(_LAMP, device=image.device)).clamp_min(0)
    if colours is None:
        mesh = torch.tensor(_MESH, device=image.device).view(3, 1, 1) * (0.35 + 0.65 * facing)
    else:
        mesh = (colours[corners] * inside[..., None]).sum(-2).movedim(-1, 0) * (0.7 + 0.3 * facing)
    return torch.where(face >= 0, mesh, image)


@dataclass
class HandScenes:
    """Random pictures of a rigged hand with the truth about them: the same for the same (seed, index) on a device.

    Poses within the limits of the joints, lengths of bones and size, any direction of view, a pinhole camera, one lamp
    and ambient light, skin tone, and a background of coloured noise.

    Args:
        rig: the hand.
        joints: names of the joints that are given.
        size: side of the pictures.
        seed: of everything random.
        device: where they are made.
        view: the hand is turned by at most so many degrees out of a view of its back, fingers up; 180: any direction.
    """

    rig: Rig
    joints: list[str]
    size: int = 224
    seed: int = 0
    device: torch.device | str = "cpu"
    view: float = 180.0

    def __post_init__(self) -> None:
        self.skeleton = Skeleton(self.rig, self.device)
        self._places = [self.rig.joint(name) for name in self.joints]
        self._limits = np.deg2rad(
            [_limits_of(name) for name in self.rig.names]
        )  # joints, (flexion, spread), (from, to)
        self._back = torch.as_tensor(_back_view(self.rig), dtype=torch.float32, device=self.device)

    def __call__(self, index: Int[np.ndarray, " batch"]) -> dict[str, Tensor]:
        """`images` (0 to 1), `vertices` and `joints` in metres in the camera's frame (x right, y down, z away),
        `joints_2d` in pixels, and the `focal` length in pixels (the principal point is the centre)."""
        drawn = self._send([self._draws(int(one)) for one in index])
        vertices, joints = self.skeleton.pose(self._rotations(drawn), drawn["lengths"], drawn["scale"])
        centre = vertices.mean(1, keepdim=True)
        turn = _rotation(drawn["view"]) if self.view >= 180 else self._near_the_back(drawn["view"])
        vertices, joints = ((points - centre) @ turn.transpose(1, 2) for points in (vertices, joints[:, self._places]))
        focal = _FOCAL * self.size
        radius = vertices.norm(dim=-1).amax(1)
        depth = focal * radius / (0.5 * self.size * drawn["cover"])
        shift = torch.stack([*(drawn["offset"] * (radius / drawn["cover"])[:, None]).unbind(1), depth], dim=1)[:, None]
        vertices, joints = vertices + shift, joints + shift
        projected, joints_2d = (self._project(points, focal) for points in (vertices, joints))
        images = self._shade(vertices, projected, drawn)
        truth = {"vertices": vertices, "joints": joints, "joints_2d": joints_2d[..., :2]}
        return {"images": images, **truth, "focal": torch.full((len(images),), focal, device=images.device)}

    def _near_the_back(self, view: Float[Tensor, "batch 4"]) -> Float[Tensor, "batch 3 3"]:
        """Directions of view that are drawn uniformly, as rotations with a part of their angle."""
        angle = torch.acos(view[:, :1].abs().clamp(max=1.0)) * (self.view / 180)
        axis = F.normalize(view[:, 1:] * view[:, :1].sign(), dim=1)
        return _rotation(torch.cat([angle.cos(), axis * angle.sin()], dim=1)) @ self._back

    def _project(self, points: Tensor, focal: float) -> Tensor:
        depth = points[..., 2:]
        return torch.cat([points[..., :2] / depth * focal + self.size / 2, depth], dim=-1)

    def _draws(self, index: int) -> dict[str, np.ndarray]:
        """All random numbers of one scene."""
        random = generator(self.seed, index, "hand")
        low, high = self._limits[..., 0], self._limits[..., 1]
        together = random.uniform(size=(1, 1))  # fingers bend together in part, as in a grasp
        share = np.where(random.uniform() < 0.5, 0.5, 0.0) * together + random.uniform(size=low.shape) * 0.5
        share = np.where(share.max() > 0, np.clip(share + random.uniform(-0.25, 0.25), 0, 1), share)
        tone = random.uniform()
        skin = np.array(_LIGHT_SKIN) * tone + np.array(_DARK_SKIN) * (1 - tone)
        lamp = random.normal(size=3)
        lamp[2] = -abs(lamp[2]) - 0.3
        view = random.normal(size=4)
        return {
            "angles": low + share * (high - low),
            "lengths": random.uniform(0.9, 1.1, len(low)),
            "scale": random.uniform(0.85, 1.15),
            "view": view / np.linalg.norm(view),
            "cover": random.uniform(0.55, 0.9),
            "offset": random.uniform(-0.15, 0.15, 2),
            "skin": np.clip(skin + random.normal(0, 0.03, 3), 0.05, 1.0),
            "lamp": lamp / np.linalg.norm(lamp),
            "lamp_colour": random.uniform(0.4, 1.0) * random.uniform(0.9, 1.1, 3),
            "ambient": random.uniform(0.15, 0.5),
            "coarse": random.uniform(size=(3, 6, 6)),
            "fine": random.uniform(size=(3, 40, 40)),
            "mottle": random.normal(0, 0.04, 3 * 8),
        }

    def _send(self, drawn: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            name: torch.as_tensor(np.stack([one[name] for one in drawn]), dtype=torch.float32, device=self.device)
            for name in drawn[0]
        }

    def _rotations(self, drawn: dict[str, Tensor]) -> Float[Tensor, "batch joints 3 3"]:
        """Flexion about the x axis of a joint's frame, towards the palm; spread about its y axis."""
        flexion, spread = drawn["angles"].unbind(-1)
        return _about(1, spread) @ _about(0, -flexion)

    def _shade(self, vertices: Tensor, projected: Tensor, drawn: dict[str, Tensor]) -> Float[Tensor, "batch 3 h w"]:
        face, inside = rasterise(projected, self.skeleton.faces, self.size)
        normals = vertex_normals(vertices, self.skeleton.faces)
        rows = torch.arange(len(face), device=face.device)[:, None, None, None]
        corner = self.skeleton.faces[face.clamp_min(0)]
        normal = F.normalize((normals[rows, corner] * inside[..., None]).sum(-2), dim=-1)
        lit = (normal * drawn["lamp"][:, None, None]).sum(-1).clamp_min(0)[..., None] * drawn["lamp_colour"][
            :, None, None
        ]
        light = lit + drawn["ambient"][:, None, None, None]
        waves = self.skeleton.vertices @ drawn["mottle"].view(-1, 3, 8)[:, :3] * 1500
        albedo = drawn["skin"][:, None] * (1 + 0.04 * waves.sin().sum(-1, keepdim=True) / 2)
        hand = (albedo[rows, corner] * inside[..., None]).sum(-2) * light
        coarse, fine = (
            F.interpolate(drawn[name], (self.size, self.size), mode="bilinear") for name in ("coarse", "fine")
        )
        behind = 0.75 * coarse + 0.25 * fine
        return torch.where((face >= 0)[:, None], hand.permute(0, 3, 1, 2), behind).clamp(0, 1)


def vertex_normals(
    vertices: Float[Tensor, "batch vertices 3"], faces: Int[Tensor, "faces 3"]
) -> Float[Tensor, "batch vertices 3"]:
    """Unit vectors that point outwards, for faces that are counter-clockwise seen from outside."""
    a, b, c = vertices[:, faces].unbind(2)
    of_faces = torch.linalg.cross(b - a, c - a)
    total = torch.zeros_like(vertices)
    for corner in range(3):
        total.index_add_(1, faces[:, corner], of_faces)
    return F.normalize(total, dim=-1)


def _back_view(rig: Rig) -> Float[np.ndarray, "3 3"]:
    """The rotation to a view of the back of a right hand: fingers up (-y), index finger left of the little one (-x)."""
    wrist, index, middle, little = (
        rig.frames[rig.joint(name), :3, 3]
        for name in ("wrist", *(f"{finger}-finger-phalanx-proximal" for finger in ("index", "middle", "pinky")))
    )
    up = (middle - wrist) / np.linalg.norm(middle - wrist)
    across = index - little - up * (up @ (index - little))
    across /= np.linalg.norm(across)
    return -np.stack([across, up, np.cross(up, across)])


def _limits_of(name: str) -> tuple[tuple[float, float], tuple[float, float]]:
    found = next((limits for end, limits in _LIMITS.items() if name.endswith(end)), None)
    return ((0, 0), (0, 0)) if found is None else found


def _about(axis: int, angle: Float[Tensor, "..."]) -> Float[Tensor, "... 3 3"]:
    turn = torch.eye(3, device=angle.device).repeat(*angle.shape, 1, 1)
    first, second = ((1, 2), (2, 0))[axis]
    turn[..., first, first] = turn[..., second, second] = angle.cos()
    turn[..., first, second], turn[..., second, first] = -angle.sin(), angle.sin()
    return turn


def _rotation(quaternion: Float[Tensor, "batch 4"]) -> Float[Tensor, "batch 3 3"]:
    w, x, y, z = quaternion.unbind(1)
    rows = [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]  # fmt: skip
    return torch.stack(rows, dim=1).view(-1, 3, 3)
