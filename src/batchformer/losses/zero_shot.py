"""Losses of generators of features and of contrastive embeddings; all without host synchronisation."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

Critic = Callable[[Tensor], Tensor]


def supervised_contrast(
    embedded: Float[Tensor, "rows dim"], labels: Int[Tensor, " rows"], temperature: float
) -> Float[Tensor, ""]:
    """Supervised contrast of Khosla et al. (2020), eq. 2, of unit vectors z: the instance-level loss of CE-GZSL.

        mean over i of  - 1 / |P(i)| sum_{p in P(i)} log( exp(z_i z_p / t) / sum_{a != i} exp(z_i z_a / t) )

    with P(i) the other rows of the same class; rows without any are left out of the mean, as in the released code of
    CE-GZSL (Han et al., 2021).
    """
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positive = (labels[:, None] == labels) & ~itself
    with torch.autocast(embedded.device.type, enabled=False):
        scores = embedded.float() @ embedded.float().T / temperature
    likelihood = scores - scores.masked_fill(itself, float("-inf")).logsumexp(1, keepdim=True)
    count = positive.sum(1)
    of_rows = -torch.where(positive, likelihood, 0.0).sum(1) / count.clamp(min=1)
    return of_rows.sum() / (count > 0).sum().clamp(min=1)


def gradient_penalty(
    critic: Critic, real: Float[Tensor, "rows dim"], fake: Float[Tensor, "rows dim"]
) -> Float[Tensor, ""]:
    """The penalty of WGAN-GP (Gulrajani et al., 2017, eq. 3), to be multiplied by 10:

        mean over rows of  (|| grad_x critic(x) || - 1)^2,    x = u real + (1 - u) fake,   u ~ U(0, 1) for each row

    `critic` must score each row by itself: then the gradient of the sum of its scores holds that of each row.
    """
    share = torch.rand(len(real), 1, device=real.device, dtype=real.dtype)
    between = (share * real + (1 - share) * fake).detach().requires_grad_()
    (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slopes.float().norm(dim=1) - 1).square().mean()
