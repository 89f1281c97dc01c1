"""Networks of generalized zero-shot learning: generator, critic, comparator, and the classifier of all classes."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

_SLOPE = 0.2  # of every leaky ReLU
_PAIRS_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 28}  # numbers of a block of pairs: the caches of a core, 1 GiB


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer with weights N(0, 0.02) and biases 0, as the released code of f-CLSWGAN and CE-GZSL has all of them."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class Generator(nn.Module):
    """Features from noise and the attributes of a class: one hidden layer, outputs of 0 or more (f-CLSWGAN)."""

    def __init__(self, attributes: int, features: int, noise: int | None, width: int) -> None:
        super().__init__()
        self.noise = attributes if noise is None else noise
        self.layers = nn.Sequential(
            linear(self.noise + attributes, width), nn.LeakyReLU(_SLOPE), linear(width, features), nn.ReLU()
        )

    def forward(self, attributes: Float[Tensor, "rows attributes"]) -> Float[Tensor, "rows features"]:
        noise = torch.randn(len(attributes), self.noise, device=attributes.device, dtype=attributes.dtype)
        return self.layers(torch.cat([noise, attributes], 1))


class Critic(nn.Module):
    """Scores of features under the attributes of their class, each row by itself, as the gradient penalty needs."""

    def __init__(self, attributes: int, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(features + attributes, width), nn.LeakyReLU(_SLOPE), linear(width, 1))

    def forward(
        self, features: Float[Tensor, "rows features"], attributes: Float[Tensor, "rows attributes"]
    ) -> Float[Tensor, " rows"]:
        return self.layers(torch.cat([features, attributes], 1)).squeeze(1).float()  # of autocast


class Comparator(nn.Module):
    """How well each embedded row fits each class: an MLP of one hidden layer on [row; attributes] (CE-GZSL).

    The first layer is linear in both, so it is applied to rows and to classes alone and the two are added for each
    pair: of 2048 rows and 150 classes that is a matrix product of 2048 rows in place of 307,200. What is left per pair
    is 2.5 GB of sums, which are never stored (`SumOfReLU`).
    """

    def __init__(self, embedded: int, attributes: int, width: int) -> None:
        super().__init__()
        self.hidden, self.score = linear(embedded + attributes, width), linear(width, 1)
        self.embedded = embedded

    def forward(
        self, rows: Float[Tensor, "rows embedded"], attributes: Float[Tensor, "classes attributes"]
    ) -> Float[Tensor, "rows classes"]:
        weight = self.hidden.weight
        of_rows = F.linear(rows, weight[:, : self.embedded])
        of_classes = F.linear(attributes, weight[:, self.embedded :], self.hidden.bias)
        with torch.autocast(rows.device.type, enabled=False):
            of_rows, of_classes, score = of_rows.to(weight.dtype), of_classes.to(weight.dtype), self.score.weight[0]
            # leaky(s) = slope s + (1 - slope) relu(s), the first of which needs no pairs
            plain = (of_rows @ score)[:, None] + of_classes @ score
            positive = SumOfReLU.apply(of_rows, of_classes, score)
            return _SLOPE * plain + (1 - _SLOPE) * positive + self.score.bias


class SumOfReLU(torch.autograd.Function):
    """sum_d w_d relu(u_id + v_cd) for all rows i and classes c.

    The backward pass computes the pairs again. With p_ic the gradient, a_id = sum_c p_ic [u_id + v_cd > 0] and b_cd the
    same over rows, the gradients of u, v, w are a w, b w and sum_i u a + sum_c v b.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(u, v, w)
        if (kernels := _kernels(u)) is not None:
            return kernels.relu_sums(u, v, w)
        return torch.cat([(part[:, None] + v).relu_() @ w for part in _blocks(u, v)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (u, v, w), (given,) = ctx.saved_tensors, gradients
        if (kernels := _kernels(u)) is not None:
            of_u, of_v = kernels.gated_sums(u, v, given.T), kernels.gated_sums(v, u, given)
        else:
            of_u, of_v, blocks = [], torch.zeros_like(v), _blocks(u, v)
            for part, of_part in zip(blocks, given.split([len(part) for part in blocks]), strict=True):
                passed = (part[:, None] + v > 0) * of_part[..., None]
                of_u.append(passed.sum(1))
                of_v += passed.sum(0)
            of_u = torch.cat(of_u)
        return of_u * w, of_v * w, (u * of_u).sum(0) + (v * of_v).sum(0)


def _blocks(u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    most = _PAIRS_AT_ONCE.get(u.device.type, _PAIRS_AT_ONCE["cuda"])
    return u.split(max(1, most // v.numel()))


def _kernels(rows: Tensor) -> Any:
    """The Triton kernels, where they run."""
    if not rows.is_cuda or rows.dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return None
    from batchformer.models import pair_kernels

    return pair_kernels


class ZeroShotNet(nn.Module):
    """The network that is left after training: scaled features, an embedding or none, a linear classifier.

    Args:
        features: width of a feature.
        classes: seen and unseen ones.
        embedding: width of the embedding (CE-GZSL: a layer and ReLU); 0: the classifier reads the scaled features.
    """

    low: Float[Tensor, " features"]
    extent: Float[Tensor, " features"]

    def __init__(self, features: int, classes: int, embedding: int = 0) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(features))
        self.register_buffer("extent", torch.ones(features))
        self.embedding = nn.Sequential(linear(features, embedding), nn.ReLU()) if embedding else nn.Identity()
        self.classifier = linear(embedding or features, classes)

    def scale_by(self, low: Tensor, high: Tensor) -> None:
        """Scale so that these limits, of the training set, become 0 and 1; a constant feature becomes 0."""
        self.low.copy_(low)
        self.extent.copy_(torch.where(high > low, high - low, 1.0))

    def scaled(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
        return (features - self.low) / self.extent

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows classes"]:
        return self.classifier(self.embedding(self.scaled(features)))


def linear_map(
    features: Float[Tensor, "rows features"],
    labels: Int[Tensor, " rows"],
    attributes: Float[Tensor, "classes attributes"],
    seen: Bool[Tensor, " classes"],
    ridge: float,
    attribute_ridge: float,
) -> Float[Tensor, "classes features"]:
    """ESZSL of Romera-Paredes & Torr (2015): weights of a linear classifier of all classes, in closed form.

        V = (X'X + g I)^-1 X'Y S (S'S + l I)^-1,    weights of class c: V a_c

    for features X, labels Y of 1 and -1, and attributes S of the seen classes; g is `ridge`, l `attribute_ridge`.
    Computed in double precision.
    """
    x, s = features.double(), attributes[seen].double()
    y = torch.where(labels[:, None] == seen.nonzero().T, 1.0, -1.0).to(x)
    left = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], device=x.device, dtype=x.dtype), x.T @ (y @ s))
    square = s.T @ s + attribute_ridge * torch.eye(s.shape[1], device=s.device, dtype=s.dtype)
    v = torch.linalg.solve(square, left.T).T
    return (attributes.double() @ v.T).to(attributes.dtype)
