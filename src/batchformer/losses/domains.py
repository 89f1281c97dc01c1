"""Penalties on what differs between domains, and the disparity of two classifiers; all without host synchronisation.

A batch holds as many rows of every domain, domain by domain. With two streams the plain rows of all domains come first,
then the related ones; `rows_by_domain` puts the rows of each domain together.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_SMALLEST = 1e-6  # TLL's, added to a probability before its logarithm


def rows_by_domain(rows: Tensor, domains: int, streams: int = 1, mixed: bool = False) -> Tensor:
    """Regroup (streams * domains * n, ...) rows as (domains, streams * n, ...): all streams of a domain together.

    `mixed` cuts the rows into as many parts as there are domains, as the released code does for IRM: with two streams a
    part then holds rows of two domains (of three domains 1, 2, 3: 1 + half of 2, half of 2 + 3, and so on).
    """
    rest = rows.shape[1:]
    if mixed:
        return rows.reshape(domains, -1, *rest)
    return rows.reshape(streams, domains, -1, *rest).transpose(0, 1).flatten(1, 2)


def coral_penalty(features: Float[Tensor, "domains n dim"]) -> Float[Tensor, ""]:
    """CORAL of Sun & Saenko, "Deep CORAL" (2016), between every two domains, as DomainBed and TLL compute it:

        mean over pairs (i, j) of  mean (mu_i - mu_j)^2 + mean (C_i - C_j)^2

    with mu the mean and C the covariance (n - 1) of a domain's features. The paper has the covariances alone, divided
    by 4 d^2, and no means.
    """
    count = features.shape[0]
    features = features.float()
    means = features.mean(1, keepdim=True)
    centred = features - means
    with torch.autocast(features.device.type, enabled=False):
        covariances = centred.transpose(1, 2) @ centred / (features.shape[1] - 1)
    first, second = torch.triu_indices(count, count, 1, device=features.device)
    of_means = (means[first] - means[second]).square().mean()
    return of_means + (covariances[first] - covariances[second]).square().mean()


def irm_penalty(logits: Float[Tensor, "domains n classes"], labels: Int[Tensor, "domains n"]) -> Float[Tensor, ""]:
    """IRM penalty of Arjovsky et al., "Invariant Risk Minimization" (2019), as DomainBed and TLL have it:

        mean over domains of  g(even rows) g(odd rows),     g = d/ds CE(s z, y) at s = 1

    which may be below zero. The derivative in closed form, the mean over rows of sum_c softmax(z)_c z_c - z_y, needs no
    second backward pass.
    """
    logits = logits.float()
    of_label = logits.gather(2, labels[..., None]).squeeze(2)
    slopes = (logits.softmax(2) * logits).sum(2) - of_label
    return (slopes[:, ::2].mean(1) * slopes[:, 1::2].mean(1)).mean()


def vrex_penalty(risks: Float[Tensor, " domains"]) -> Float[Tensor, ""]:
    """Krueger et al., "Out-of-Distribution Generalization via Risk Extrapolation" (2021): mean (R_d - mean R)^2."""
    return (risks - risks.mean()).square().mean()


def margin_disparity(
    source: Float[Tensor, "rows classes"],
    source_adversary: Float[Tensor, "rows classes"],
    target: Float[Tensor, "rows classes"],
    target_adversary: Float[Tensor, "rows classes"],
    margin: float = 4.0,
) -> Float[Tensor, ""]:
    """MDD of Zhang et al., "Bridging Theory and Algorithm for Domain Adaptation" (ICML 2019), eq. 29 and 30:

        margin * CE(f'(x_s), argmax f(x_s)) - mean log(1 - softmax(f'(x_t))[argmax f(x_t)])

    for the classifier f and its adversary f', which reads the features through a gradient reversal; the argmax is not
    differentiated. TLL adds 1e-6 under the logarithm and clips at 1.
    """
    on_source = F.cross_entropy(source_adversary, source.argmax(1))
    chosen = target_adversary.float().softmax(1).gather(1, target.argmax(1, keepdim=True)).squeeze(1)
    return margin * on_source - (1 - chosen + _SMALLEST).clamp(max=1).log().mean()
