"""The network of MoCo-v2 and MoCo-v3: a backbone, a projector and a predictor."""

from itertools import pairwise
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn


class ContrastiveNet(nn.Module):
    """Embeddings of images: `predictor(projector(encoder(images)))`.

    Args:
        encoder: gives features (batch, dim); exported under its stock keys.
        dim: width of the features.
        version: "v2" (Chen et al., "Improved Baselines with Momentum Contrastive Learning"): Linear, ReLU, Linear;
            "v3" (Chen et al., "An Empirical Study of Training Self-Supervised Vision Transformers"): linear layers
            without bias, each with BatchNorm, the last one of the projector without parameters; and a predictor.
        hidden_dim, out_dim: of projector and predictor.
        layers: linear layers of v3's projector: 2 for ResNets, 3 for ViTs.
        last_norm: v3: BatchNorm at the end of the predictor, which only ViTs have.
        extra_layer: v2: a further Linear, BatchNorm and ReLU in front.
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int,
        version: Literal["v2", "v3"] = "v3",
        hidden_dim: int = 4096,
        out_dim: int = 256,
        layers: int = 2,
        last_norm: bool = False,
        extra_layer: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector, self.predictor = nn.Sequential(), nn.Sequential()
        if version == "v3":
            self.projector = _norm_mlp([dim, *[hidden_dim] * (layers - 1), out_dim], last_norm=True)
            self.predictor = _norm_mlp([out_dim, hidden_dim, out_dim], last_norm)
        else:
            extra = [nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU()] if extra_layer else []
            last = [nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, out_dim)]
            self.projector = nn.Sequential(*extra, *last)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "rows dim"]:
        return self.predictor(self.projector(self.encoder(images)))


def _norm_mlp(widths: list[int], last_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths), start=2):
        layers.append(nn.Linear(before, after, bias=False))
        if number < len(widths):
            layers += [nn.BatchNorm1d(after), nn.ReLU()]
        elif last_norm:
            layers.append(nn.BatchNorm1d(after, affine=False))
    return nn.Sequential(*layers)
