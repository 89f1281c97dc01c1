"""The network of MoCo-v2 and MoCo-v3: a backbone, a projector and a predictor."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from batchformer.nn import BatchFormer

Version = Literal["v2", "v3"]


class ContrastiveNet(nn.Module):
    """Embeddings of images: `predictor(projector(features))`; in training with two streams where there is a module.

    MoCo-v3 (Chen et al., "An Empirical Study of Training Self-Supervised Vision Transformers"): the module is the first
    layer of the projector, so that projector and predictor see plain and related rows. MoCo-v2 the same; there the
    released code also gives the head another layer where the module is (`extra_layer`).

    Args:
        encoder: gives features (batch, dim); exported under its stock keys.
        dim: width of the features.
        version: "v2": Linear, ReLU, Linear; "v3": layers without bias with BatchNorm, the last one without parameters,
            and a predictor.
        hidden_dim, out_dim: of projector and predictor.
        layers: linear layers of v3's projector: 2 for ResNets, 3 for ViTs.
        last_norm: v3: BatchNorm at the end of the predictor, for ViTs only.
        extra_layer: v2: a further Linear, BatchNorm and ReLU in front.
        module: the BatchFormer; None without.
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int,
        version: Version = "v3",
        hidden_dim: int = 4096,
        out_dim: int = 256,
        layers: int = 2,
        last_norm: bool = False,
        extra_layer: bool = False,
        module: BatchFormer | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.batchformer = encoder, module
        if version == "v3":
            self.projector = _norm_mlp([dim, *[hidden_dim] * (layers - 1), out_dim], last_norm=True)
            self.predictor: nn.Module = _norm_mlp([out_dim, hidden_dim, out_dim], last_norm=last_norm)
        else:
            extra = [nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU()] if extra_layer else []
            self.projector = nn.Sequential(
                *extra, nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, out_dim)
            )
            self.predictor = nn.Identity()

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "rows dim"]:
        return self.predictor(self.project(self.encoder(images), self.batchformer))

    def project(self, features: Float[Tensor, "batch dim"], module: BatchFormer | None) -> Float[Tensor, "rows out"]:
        """Embeddings of the features; with a module those of plain and then of related rows, in training."""
        return self.projector(features if module is None else module(features))


def _norm_mlp(widths: list[int], last_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(zip(widths, widths[1:], strict=False), start=2):
        layers.append(nn.Linear(before, after, bias=False))
        if number < len(widths):
            layers += [nn.BatchNorm1d(after), nn.ReLU(inplace=True)]
        elif last_norm:
            layers.append(nn.BatchNorm1d(after, affine=False))
    return nn.Sequential(*layers)
