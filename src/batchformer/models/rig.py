"""Rigged meshes from GLB files, and their poses by linear blend skinning."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError

_KINDS = {5120: np.int8, 5121: np.uint8, 5122: np.int16, 5123: np.uint16, 5125: np.uint32, 5126: np.float32}
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT4": 16}
_WELD = 1e-6  # metres
_FINGERS = ("index-finger", "middle-finger", "ring-finger", "pinky-finger")


@dataclass(frozen=True)
class Rig:
    """A mesh with a skeleton, in the rest pose: metres, and float64 on the host.

    Vertices at one place are one vertex: files split them along seams of the texture, which would leave
    holes in the graph of the mesh.
    """

    vertices: Float[np.ndarray, "vertices 3"]
    faces: Int[np.ndarray, "faces 3"]
    weights: Float[np.ndarray, "vertices joints"]
    names: list[str]
    parents: list[int]  # -1 for the root; a parent comes before its children
    frames: Float[np.ndarray, "joints 4 4"]  # of every joint in the rest pose

    def joint(self, name: str) -> int:
        if name not in self.names:
            raise UserError(f"the rig has no joint {name}; it has: {', '.join(self.names)}.")
        return self.names.index(name)


def read_rig(path: str | Path | None = None) -> Rig:
    """The rig of a GLB file with one skinned mesh; None: the hand of the WebXR input profiles, which ships here (MIT).

    Where the file has no hierarchy of joints, as that one, it follows from the names of WebXR's hand joints.
    """
    if path is None:
        content = resources.files("batchformer.models").joinpath("assets/hand.glb").read_bytes()
        name = "hand.glb"
    else:
        name = str(path)
        try:
            content = Path(path).read_bytes()
        except OSError as problem:
            raise UserError(
                f"{path} cannot be read ({problem.strerror}): give a GLB file with a rigged mesh."
            ) from None
    scene, binary = _chunks(content, name)
    skins = scene.get("skins") or []
    if not skins:
        raise UserError(f"{name} has no skin: give a rigged mesh, with joints and weights.")
    meshes = [one for mesh in scene.get("meshes", []) for one in mesh["primitives"] if "JOINTS_0" in one["attributes"]]
    if not meshes or "indices" not in meshes[0]:
        raise UserError(f"{name} has no mesh with triangles whose vertices belong to joints.")

    def read(accessor: int) -> np.ndarray:
        return _accessor(scene, binary, accessor, name)

    attributes = meshes[0]["attributes"]
    positions, owners, shares = (read(attributes[key]) for key in ("POSITION", "JOINTS_0", "WEIGHTS_0"))
    members: list[int] = skins[0]["joints"]
    weights = np.zeros((len(positions), len(members)))
    np.add.at(weights, (np.arange(len(positions))[:, None], owners.astype(np.int64)), shares.astype(np.float64))
    frames = np.linalg.inv(
        read(skins[0]["inverseBindMatrices"]).reshape(-1, 4, 4).transpose(0, 2, 1).astype(np.float64)
    )
    names = [scene["nodes"][node].get("name", str(node)) for node in members]
    parents = _parents(scene, members, names, name)
    order = _parents_first(parents, name)
    new = {old: place for place, old in enumerate(order)}
    vertices, faces, kept = _welded(
        positions.astype(np.float64), read(meshes[0]["indices"]).reshape(-1, 3).astype(np.int64)
    )
    return Rig(
        vertices,
        faces,
        (weights / weights.sum(1, keepdims=True))[kept][:, order],
        [names[old] for old in order],
        [-1 if parents[old] < 0 else new[parents[old]] for old in order],
        frames[order],
    )


def _chunks(content: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    """The JSON and the binary part of a GLB file."""
    try:
        magic, _, _ = struct.unpack_from("<4sII", content)
        length, kind = struct.unpack_from("<I4s", content, 12)
        if magic != b"glTF" or kind != b"JSON":
            raise ValueError
        scene = json.loads(content[20 : 20 + length])
        start = 20 + length
        size, kind = struct.unpack_from("<I4s", content, start) if len(content) > start else (0, b"BIN\0")
    except (struct.error, ValueError, UnicodeDecodeError):
        raise UserError(f"{name} is not a GLB file (binary glTF 2.0).") from None
    if any("uri" in buffer for buffer in scene.get("buffers", [])):
        raise UserError(f"{name} keeps its data in other files: export it as one GLB file with everything inside.")
    return scene, content[start + 8 : start + 8 + size]


def _accessor(scene: dict[str, Any], binary: bytes, number: int, name: str) -> np.ndarray:
    try:
        accessor = scene["accessors"][number]
        view = scene["bufferViews"][accessor["bufferView"]]
        kind, width = np.dtype(_KINDS[accessor["componentType"]]), _WIDTHS[accessor["type"]]
        start = view.get("byteOffset", 0) + accessor.get("byteOffset", 0)
        step = view.get("byteStride", kind.itemsize * width)
        rows = np.ndarray((accessor["count"], width), kind, binary, start, (step, kind.itemsize)).copy()
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(f"{name} is damaged: its part {number} cannot be read.") from None
    limit = np.iinfo(str(kind)).max if accessor.get("normalized") else 1
    return rows / limit if limit != 1 else rows


def _parents(scene: dict[str, Any], members: list[int], names: list[str], name: str) -> list[int]:
    above = {child: node for node, entry in enumerate(scene["nodes"]) for child in entry.get("children", ())}
    parents = [members.index(above[node]) if above.get(node) in members else -1 for node in members]
    if parents.count(-1) == 1:
        return parents
    known = {joint: place for place, joint in enumerate(names)}
    if not set(hand_chains()) <= known.keys():
        missing = sorted(set(hand_chains()) - known.keys())
        raise UserError(
            f"{name} has no hierarchy of joints, and no {missing[0]}: give a rig with one root, or WebXR's hand joints."
        )
    chains = hand_chains()
    return [known[chains[joint]] if chains.get(joint) else -1 for joint in names]


def hand_chains() -> dict[str, str]:
    """The joints of a hand as WebXR names them, each with its parent; the wrist has none."""
    thumb = ["thumb-metacarpal", "thumb-phalanx-proximal", "thumb-phalanx-distal", "thumb-tip"]
    parts = ("metacarpal", "phalanx-proximal", "phalanx-intermediate", "phalanx-distal", "tip")
    chains = [thumb, *([f"{finger}-{part}" for part in parts] for finger in _FINGERS)]
    return {
        "wrist": "",
        **{joint: above for chain in chains for joint, above in zip(chain, ["wrist", *chain], strict=False)},
    }


def joints_of_freihand() -> list[str]:
    """The 21 joints of FreiHAND in its order, by WebXR's names: wrist, then each finger from its root to its tip."""
    return [joint for joint in hand_chains() if "finger-metacarpal" not in joint]


def _parents_first(parents: list[int], name: str) -> list[int]:
    order: list[int] = []
    while len(order) < len(parents):
        ready = [k for k, parent in enumerate(parents) if k not in order and (parent < 0 or parent in order)]
        if not ready:
            raise UserError(f"{name}: the hierarchy of its joints has a cycle.")
        order += ready
    return order


def _welded(positions: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vertices at one place made one; returns positions, faces, and which of the old vertices were kept."""
    _, kept, new = np.unique(
        np.round(positions / _WELD).astype(np.int64), axis=0, return_index=True, return_inverse=True
    )
    faces = new.reshape(-1)[faces]
    whole = (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])
    return positions[kept], faces[whole], kept


class Skeleton:
    """Poses of a rig on a device: rotations of its joints, lengths of its bones, a size.

    Every joint turns in its own frame of the rest pose: G_j = G_parent L_j R_j, with L_j the rest pose of the joint
    relative to its parent. A vertex follows its joints by linear blend skinning: v' = sum_j w_j G_j G0_j^-1 v.
    """

    def __init__(self, rig: Rig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        def tensor(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, dtype=dtype, device=device)

        self.rig = rig
        self.vertices, self.weights = tensor(rig.vertices), tensor(rig.weights)
        self.faces = torch.as_tensor(rig.faces, device=device)
        above = [np.linalg.inv(rig.frames[p]) if p >= 0 else np.eye(4) for p in rig.parents]
        self.local = tensor(np.stack([up @ frame for up, frame in zip(above, rig.frames, strict=True)]))
        self.unposed = tensor(np.linalg.inv(rig.frames))

    def pose(
        self,
        rotations: Float[Tensor, "batch joints 3 3"],
        lengths: Float[Tensor, "batch joints"] | None = None,
        size: Float[Tensor, " batch"] | None = None,
    ) -> tuple[Float[Tensor, "batch vertices 3"], Float[Tensor, "batch joints 3"]]:
        """Vertices and joints. `lengths`: factors of the bone from the parent to each joint; `size`: of everything."""
        local = self.local.expand(len(rotations), -1, -1, -1).clone()
        if lengths is not None:
            moved = torch.tensor([parent >= 0 for parent in self.rig.parents], device=local.device)
            local[:, moved, :3, 3] *= lengths[:, moved, None]
        turned = torch.zeros_like(local)
        turned[..., :3, :3], turned[..., 3, 3] = rotations, 1.0
        local = local @ turned
        placed: list[Tensor] = []
        for joint, parent in enumerate(self.rig.parents):
            placed.append(local[:, joint] if parent < 0 else placed[parent] @ local[:, joint])
        frames = torch.stack(placed, dim=1)
        blended = torch.einsum("vj,bjrc->bvrc", self.weights, frames @ self.unposed)
        vertices = (blended[..., :3, :3] @ self.vertices[..., None])[..., 0] + blended[..., :3, 3]
        joints = frames[..., :3, 3]
        if size is not None:
            vertices, joints = vertices * size[:, None, None], joints * size[:, None, None]
        return vertices, joints
