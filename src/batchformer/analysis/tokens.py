"""Numbers that say whether tokens still carry something: norm, effective rank, the share that tells samples apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class TokenStats:
    """Of the tokens of one stream at one depth: norm, effective rank and share between samples, over positions."""

    norm: float
    effective_rank: float
    between_samples: float


def token_stats(tokens: Float[Tensor, "batch position dim"]) -> TokenStats:
    tokens = tokens.detach().float()
    return TokenStats(
        norm=tokens.norm(dim=-1).mean().item(),
        effective_rank=effective_rank(tokens).mean().item(),
        between_samples=between_samples(tokens).mean().item(),
    )


def effective_rank(tokens: Float[Tensor, "batch position dim"]) -> Float[Tensor, " position"]:
    """Per position: exp of the entropy of the normalised singular values of its (batch, dim) matrix, nothing removed.

    1: all samples are one direction; min(batch, dim): all directions alike. From the eigenvalues of the smaller Gram
    matrix in double precision, which is much faster than singular values on a GPU.
    """
    rows = tokens.detach().double().transpose(0, 1)
    gram = rows @ rows.mT if rows.shape[1] <= rows.shape[2] else rows.mT @ rows
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    share = singular / singular.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def between_samples(tokens: Float[Tensor, "batch position dim"]) -> Float[Tensor, " position"]:
    """Per position: 1 - |mean over the batch|^2 / mean |x|^2, the share of the energy that differs between samples.

    0: every sample has the same token, so nothing behind it can tell them apart.
    """
    tokens = tokens.detach().double()
    return 1 - tokens.mean(0).square().sum(-1) / tokens.square().sum(-1).mean(0)


def relative_change(after: Tensor, before: Tensor) -> float:
    """|after - before| / |before|, Frobenius norms over all tokens."""
    after, before = after.detach().float(), before.detach().float()
    return ((after - before).norm() / before.norm()).item()


def mean_cosine(one: Float[Tensor, "*token dim"], other: Float[Tensor, "*token dim"]) -> float:
    """Cosine between each token and its counterpart, averaged."""
    return torch.cosine_similarity(one.detach().float(), other.detach().float(), dim=-1).mean().item()


def sample_signal(one: Float[Tensor, "batch position dim"], other: Float[Tensor, "batch position dim"]) -> float:
    """Cosine between two runs of what tells samples apart: tokens minus their mean over the batch, at all positions.

    Tokens that differ between samples only because each drew another dropout mask look healthy by norm, rank and
    share between samples; here they give 0. What is below the noise of dropout cannot be learnt from.
    """
    one, other = (x.detach().double() - x.detach().double().mean(0) for x in (one, other))
    return (one * other).sum().div(one.norm() * other.norm()).item()
