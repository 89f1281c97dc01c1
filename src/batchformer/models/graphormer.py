"""Mesh Graphormer (Lin et al., ICCV 2021): from a picture to the joints and the mesh of a hand."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models.create import create_backbone
from batchformer.models.topology import MeshTopology

_GRID = 7
_CAMERA_DIM = 150
_MASKED = 0.01  # value of a masked query


class GraphConvolution(nn.Module):
    """Y = A X W, on the coarse vertices; A is the normalised adjacency of the mesh."""

    adjacency: Float[Tensor, "coarse coarse"]

    def __init__(self, dim: int, adjacency: Float[Tensor, "coarse coarse"]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(dim, dim)), nn.Parameter(torch.zeros(dim))
        limit = 6 / (2 * dim) ** 0.5  # as released
        nn.init.uniform_(self.weight, -limit, limit)
        self.register_buffer("adjacency", adjacency, persistent=False)

    def forward(self, x: Float[Tensor, "batch coarse dim"]) -> Float[Tensor, "batch coarse dim"]:
        return self.adjacency.to(x.dtype) @ (x @ self.weight.to(x.dtype)) + self.bias.to(x.dtype)


class GraphBlock(nn.Module):
    """A residual graph convolution at half of the width, before each layer a norm and a ReLU (paper, section 3.2)."""

    def __init__(self, dim: int, adjacency: Tensor) -> None:
        super().__init__()
        half = dim // 2
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for width in (dim, half, half))
        self.narrow, self.widen = nn.Linear(dim, half), nn.Linear(half, dim)
        for parameter in (*self.narrow.parameters(), *self.widen.parameters()):  # as released: nearly none at first
            nn.init.uniform_(parameter, -1 / (dim * half), 1 / (dim * half))
        self.convolution = GraphConvolution(half, adjacency)

    def forward(self, x: Float[Tensor, "batch coarse dim"]) -> Float[Tensor, "batch coarse dim"]:
        y = x
        for norm, layer in zip(self.norms, (self.narrow, self.convolution, self.widen), strict=True):
            y = layer(F.relu(norm(y)))
        return x + y


class GraphormerLayer(nn.Module):
    """A post-norm transformer layer, with a graph convolution of the coarse vertices behind the attention."""

    def __init__(self, dim: int, heads: int, dropout: float, graph: GraphBlock | None, vertices: slice) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, dropout, batch_first=True)
        self.graph, self.vertices = graph, vertices
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)
        self.expand, self.reduce = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        x = self.norm1(x + self.dropout(self.attention(x, x, x, need_weights=False)[0]))
        if self.graph is not None:
            before, after = self.vertices.start, self.vertices.stop
            x = torch.cat([x[:, :before], self.graph(x[:, self.vertices]), x[:, after:]], dim=1)
        return self.norm2(x + self.dropout(self.reduce(F.gelu(self.expand(x)))))


class GraphormerEncoder(nn.Module):
    """Layers of one width between two linear layers, with positions and a linear shortcut from input to output."""

    def __init__(
        self, inputs: int, dim: int, outputs: int, tokens: int, layers: int, heads: int, dropout: float,
        adjacency: Tensor | None, vertices: slice,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.out, self.shortcut = (
            nn.Linear(inputs, dim),
            nn.Linear(dim, outputs),
            nn.Linear(inputs, outputs),
        )
        self.positions, self.dropout = nn.Parameter(torch.empty(1, tokens, dim)), nn.Dropout(dropout)

        def graph() -> GraphBlock | None:
            return None if adjacency is None else GraphBlock(dim, adjacency)

        self.layers = nn.ModuleList(GraphormerLayer(dim, heads, dropout, graph(), vertices) for _ in range(layers))
        for name, parameter in self.named_parameters():
            if ".graph." in name or "norm" in name:
                continue
            if parameter.ndim < 2:
                nn.init.zeros_(parameter)
            else:  # as in BERT: so small that coordinates begin near the wrist
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Float[Tensor, "batch tokens inputs"]) -> Float[Tensor, "rows tokens outputs"]:
        x = self.dropout(self.embed(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x)
        tokens = bf.repeat_targets(tokens, x)  # a layer may have opened the streams
        if self.out.out_features > 3:
            return self.out(x) + self.shortcut(tokens)
        with torch.autocast(x.device.type, enabled=False):  # metres: bfloat16 has steps of half a millimetre at 10 cm
            return self.out(x.float()) + self.shortcut(tokens.float())


class MeshGraphormer(nn.Module):
    """Pictures in; joints, coarse and full mesh (metres, in the camera's frame but for a shift), and a camera out.

    Tokens: a query for each joint and coarse vertex (its place in the template, and the global feature of the picture),
    and the 7 x 7 features of the picture. Three encoders of falling width, the last one with graph convolutions. The
    full mesh is a linear map of the coarse one, which here begins as the mesh's own upsampling. BatchFormerV2 goes
    behind layers of the encoders: `bf.attach(net, after=["encoders.0.layers.0"])`. The released code has the 1,024 maps
    in front of HRNet's last layer for the picture's features, and begins with a random upsampling and camera.

    Args:
        backbone: any name timm knows; hrnet_w64 as published.
        topology: of the mesh.
        dims: widths of the encoders.
        layers, heads, dropout: of each encoder.
        backbone_args: passed on to the backbone.
    """

    backbone: nn.Module
    queries: Float[Tensor, "queries 3"]
    regressor: Float[Tensor, "joints vertices"]

    def __init__(
        self,
        backbone: str,
        topology: MeshTopology,
        dims: tuple[int, ...] = (1024, 256, 64),
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
        **backbone_args: Any,
    ) -> None:
        super().__init__()
        self.backbone = create_backbone(backbone, 0, **backbone_args)
        features = int(self.backbone.num_features)  # type: ignore[arg-type]
        if any(dim % heads or dim % 2 for dim in dims):
            raise UserError(f"the widths {list(dims)} of the encoders must be even and divisible by heads={heads}.")
        template = torch.as_tensor(topology.vertices, dtype=torch.float32)
        joints = torch.as_tensor(topology.joints, dtype=torch.float32)
        chosen = torch.as_tensor(topology.chosen)
        queries = torch.cat([joints, template[chosen]]) - joints[0]
        self.joints, self.coarse = len(joints), len(chosen)
        self.register_buffer("queries", queries, persistent=False)
        self.register_buffer("regressor", torch.as_tensor(topology.regressor, dtype=torch.float32), persistent=False)
        adjacency = torch.as_tensor(topology.adjacency, dtype=torch.float32)
        width, tokens = features + 3, len(queries) + _GRID**2
        self.grid = nn.Linear(features, width)
        outputs = [max(dim // 2, 3) for dim in dims[:-1]] + [3]
        vertices = slice(self.joints, len(queries))
        inputs = [width, *outputs[:-1]]
        self.encoders = nn.ModuleList(
            GraphormerEncoder(i, dim, o, tokens, layers, heads, dropout, adjacency if o == 3 else None, vertices)
            for i, dim, o in zip(inputs, dims, outputs, strict=True)
        )
        self.upsample = nn.Linear(self.coarse, len(template))
        with torch.no_grad():
            self.upsample.weight.copy_(torch.as_tensor(topology.upsampling))
            self.upsample.bias.zero_()
        self.camera_token, self.camera_mix = nn.Linear(3, 1), nn.Linear(len(queries), _CAMERA_DIM)
        self.camera = nn.Linear(_CAMERA_DIM, 3)
        with torch.no_grad():
            self.camera.bias.copy_(torch.tensor([5.0, 0.0, 0.0]))  # a hand of 20 cm fills an image

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], masked: Tensor | None = None
    ) -> dict[str, Float[Tensor, "rows ..."]]:
        """`masked` (batch, joints + coarse vertices) is True at queries that are hidden (masked vertex modelling)."""
        maps: Tensor = self.backbone.forward_features(images)  # type: ignore[operator]
        if maps.ndim == 3:
            raise UserError("Mesh Graphormer needs a backbone that gives maps (batch, channels, height, width): a CNN.")
        if maps.shape[1] != self.grid.in_features:  # channels last
            maps = maps.movedim(-1, 1)
        cells = F.adaptive_avg_pool2d(maps, _GRID).flatten(2).transpose(1, 2)
        whole = maps.mean((2, 3))
        queries = torch.cat(
            [
                self.queries.expand(len(images), -1, -1).to(whole.dtype),
                whole[:, None].expand(-1, len(self.queries), -1),
            ],
            dim=2,
        )
        if masked is not None:
            queries = torch.where(masked[..., None], queries.new_tensor(_MASKED), queries)
        x = torch.cat([queries, self.grid(cells)], dim=1)
        for encoder in self.encoders:
            x = encoder(x)
        found = x[:, : self.joints + self.coarse]
        coarse = found[:, self.joints :]
        with torch.autocast(x.device.type, enabled=False):
            full = self.upsample(coarse.transpose(1, 2)).transpose(1, 2)
            return {
                "joints": found[:, : self.joints],
                "coarse": coarse,
                "vertices": full,
                "mesh_joints": self.regressor @ full,
                "camera": self.camera(self.camera_mix(self.camera_token(found)[..., 0])),
            }


def project(
    points: Float[Tensor, "batch points 3"], camera: Float[Tensor, "batch 3"]
) -> Float[Tensor, "batch points 2"]:
    """Weak perspective: s (x + t_x, y + t_y), in units in which the image reaches from -1 to 1."""
    return camera[:, None, :1] * (points[..., :2] + camera[:, None, 1:])


def fit_camera(
    points: Float[Tensor, "batch points 3"], places: Float[Tensor, "batch points 2"]
) -> Float[Tensor, "batch 3"]:
    """The camera of `project` that brings the points nearest to their places in the image (least squares)."""
    centre, middle = points[..., :2].mean(1, keepdim=True), places.mean(1, keepdim=True)
    own = points[..., :2] - centre
    scale = (own * (places - middle)).sum((1, 2)) / own.square().sum((1, 2)).clamp_min(1e-12)
    return torch.cat([scale[:, None], (middle / scale[:, None, None] - centre)[:, 0]], dim=1)
