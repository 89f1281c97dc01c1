"""The topology of a mesh: its graph, a coarser version of it, the upsampling from that, and its joints."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from batchformer.errors import UserError
from batchformer.models.rig import Rig, Skeleton, joints_of_freihand

_NEIGHBOURS = 3  # coarse vertices that a vertex is put together from
_POSES, _RIDGE = 60, 1e-6


@dataclass(frozen=True)
class MeshTopology:
    """What a network for meshes needs: template, faces, joints, coarse vertices. Arrays on the host, metres.

    Args:
        vertices: of the template, in the rest pose.
        faces: triangles.
        regressor: joints = regressor @ vertices.
        chosen: which vertices are the coarse ones.
        upsampling: vertices = upsampling @ coarse vertices, about.
        adjacency: of the coarse vertices, with self loops: D^(-1/2) (A + I) D^(-1/2). (Mesh Graphormer's code has
            D^(-1) (A + I).)
        joint_names: of the joints.
    """

    vertices: Float[np.ndarray, "vertices 3"]
    faces: Int[np.ndarray, "faces 3"]
    regressor: Float[np.ndarray, "joints vertices"]
    chosen: Int[np.ndarray, " coarse"]
    upsampling: Float[np.ndarray, "vertices coarse"]
    adjacency: Float[np.ndarray, "coarse coarse"]
    joint_names: list[str]

    @property
    def joints(self) -> Float[np.ndarray, "joints 3"]:
        return self.regressor @ self.vertices


def topology_of(
    vertices: np.ndarray, faces: np.ndarray, regressor: np.ndarray, joint_names: list[str], coarse: int
) -> MeshTopology:
    """Choose `coarse` vertices that are far from each other on the surface, and join those whose regions touch.

    Farthest-point sampling by the length of paths along edges; a vertex belongs to the nearest chosen one. Each vertex
    is put together from the chosen ones nearest to it, with weights that reproduce a chosen vertex exactly. (Mesh
    Graphormer has a precomputed matrix of a mesh simplification by quadric errors for MANO, and learns the upsampling.)
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import dijkstra

    count = len(vertices)
    if not 4 <= coarse <= count:
        raise UserError(f"a mesh of {count} vertices can have 4 to {count} coarse ones, not {coarse}.")
    edges = _edges(faces)
    lengths = np.linalg.norm(vertices[edges[:, 0]] - vertices[edges[:, 1]], axis=1)
    graph = coo_matrix((lengths, edges.T), (count, count)).tocsr()
    chosen, rows = [0], [dijkstra(graph, directed=False, indices=0)]
    if not np.isfinite(rows[0]).all():
        raise UserError("the mesh is not in one piece: its vertices are not all connected by edges.")
    nearest = rows[0].copy()
    while len(chosen) < coarse:
        chosen.append(int(nearest.argmax()))
        rows.append(dijkstra(graph, directed=False, indices=chosen[-1]))
        nearest = np.minimum(nearest, rows[-1])
    distances = np.stack(rows, axis=1)  # vertices x coarse
    region = distances.argmin(1)
    touching = np.unique(np.sort(region[edges], axis=1), axis=0)
    touching = touching[touching[:, 0] != touching[:, 1]]
    joined = np.eye(coarse)
    joined[touching[:, 0], touching[:, 1]] = joined[touching[:, 1], touching[:, 0]] = 1.0
    degree = joined.sum(1) ** -0.5
    return MeshTopology(
        vertices, faces, regressor, np.array(chosen), _way_back(vertices, distances, np.array(chosen)),
        degree[:, None] * joined * degree, joint_names,
    )  # fmt: skip


def _edges(faces: np.ndarray) -> np.ndarray:
    return np.unique(np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1), axis=0)


def _way_back(vertices: np.ndarray, distances: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Weights of the nearest coarse vertices that sum to 1 and reproduce a vertex of the template best."""
    matrix = np.zeros(distances.shape)
    near = np.argsort(distances, axis=1, kind="stable")[:, :_NEIGHBOURS]
    for vertex, group in enumerate(near):
        offsets = vertices[chosen[group]] - vertices[vertex]
        gram = offsets @ offsets.T
        gram += np.eye(len(group)) * (1e-3 * np.trace(gram) / len(group) + 1e-12)
        share = np.linalg.solve(gram, np.ones(len(group)))
        matrix[vertex, group] = share / share.sum()
    matrix[chosen] = 0.0
    matrix[chosen, np.arange(len(chosen))] = 1.0
    return matrix


def hand_topology(rig: Rig, coarse: int = 195) -> MeshTopology:
    """The topology of a rigged hand, with FreiHAND's 21 joints.

    A rig has no joint regressor: it is fitted to random poses, in which the joints are known.
    """
    names = joints_of_freihand()
    places = [rig.joint(name) for name in names]
    generator = torch.Generator().manual_seed(0)
    turns = torch.randn(_POSES, len(rig.names), 3, generator=generator, dtype=torch.float64) * 0.3
    vertices, found = Skeleton(rig, dtype=torch.float64).pose(torch.matrix_exp(_cross(turns)))
    seen = vertices.transpose(1, 2).reshape(-1, len(rig.vertices)).numpy()
    wanted = found[:, places].transpose(1, 2).reshape(-1, len(places)).numpy()
    start = _near_joints(rig, places)
    centred = seen - seen.mean(1, keepdims=True)  # so that weights sum to 1, and joints move as the mesh does
    gram = centred @ centred.T
    gram += np.eye(len(gram)) * _RIDGE * np.trace(gram) / len(gram)
    regressor = (start + centred.T @ np.linalg.solve(gram, wanted - seen @ start)).T
    return topology_of(rig.vertices, rig.faces, regressor, names, coarse)


def _near_joints(rig: Rig, places: list[int]) -> np.ndarray:
    """For each joint weights of the vertices that follow it; of one without any (a tip) its nearest vertex."""
    weights = rig.weights[:, places].copy()
    for column in np.flatnonzero(weights.sum(0) == 0):
        distances = np.linalg.norm(rig.vertices - rig.frames[places[column], :3, 3], axis=1)
        weights[distances.argmin(), column] = 1.0
    return weights / weights.sum(0)


def _cross(axes: torch.Tensor) -> torch.Tensor:
    """The matrices whose exponentials turn about these axes by their lengths."""
    x, y, z = axes.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))


class _Plain(pickle.Unpickler):
    """Reads arrays and containers of a pickle and refuses everything else, so that no code in it is executed."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("scipy.sparse.csc", "csc_matrix"), ("scipy.sparse._csc", "csc_matrix")):
            from scipy.sparse import csc_matrix

            return csc_matrix
        if (module.split(".")[0], name) in {("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np if name != "_reconstruct" else np._core.multiarray, name)  # type: ignore[attr-defined]
        if (module, name) == ("_codecs", "encode"):  # of byte strings in pickles of Python 2
            import _codecs

            return _codecs.encode
        if module.split(".")[0] == "chumpy":
            return _Array
        raise UserError(f"names {module}.{name}, which is not read: MANO's files hold arrays alone.")


class _Array:
    """In place of chumpy's arrays, which MANO's files have: keeps the state, of which `x` is the array."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.x = state.get("x", state.get("a"))


def mano_topology(path: str | Path, coarse: int = 195) -> MeshTopology:
    """The topology of MANO_RIGHT.pkl, for users with its licence. Its 16 joints are joined by five finger tips.

    The file is a pickle; only arrays are read from it and no code runs. FreiHAND's order of joints.
    """
    try:
        with open(path, "rb") as file:
            content = _Plain(file, encoding="latin1").load()
        vertices, faces = _plain_array(content["v_template"]), _plain_array(content["f"]).astype(np.int64)
        regressor = content["J_regressor"]
        regressor = regressor.toarray() if hasattr(regressor, "toarray") else _plain_array(regressor)
    except UserError as problem:
        raise UserError(f"{path} {problem}") from None
    except OSError as problem:
        raise UserError(f"{path} cannot be read ({problem.strerror}): give MANO_RIGHT.pkl.") from None
    except (KeyError, TypeError, AttributeError, pickle.UnpicklingError, EOFError, IndexError, ValueError) as problem:
        raise UserError(f"{path} is not a file of MANO's ({type(problem).__name__}): give MANO_RIGHT.pkl.") from problem
    tips = np.zeros((5, len(vertices)))
    tips[np.arange(5), [744, 320, 443, 555, 672]] = 1.0  # thumb, index, ..., little finger, as FreiHAND has them
    order = [0, 13, 14, 15, 16, 1, 2, 3, 17, 4, 5, 6, 18, 10, 11, 12, 19, 7, 8, 9, 20]
    return topology_of(vertices, faces, np.concatenate([regressor, tips])[order], joints_of_freihand(), coarse)


def _plain_array(value: Any) -> np.ndarray:
    return np.asarray(value.x if isinstance(value, _Array) else value, dtype=np.float64)
