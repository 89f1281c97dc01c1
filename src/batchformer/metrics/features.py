"""Evaluation of frozen features: weighted nearest neighbours, and a linear classifier on them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError

_ROWS = 512  # queries that are compared with all stored features at once

Features = Float[Tensor, "rows dim"]
Labels = Int[Tensor, " rows"]


@torch.no_grad()
def knn_scores(
    queries: Float[Tensor, "queries dim"],
    features: Features,
    labels: Labels,
    classes: int,
    neighbours: int = 200,
    temperature: float = 0.1,
) -> Float[Tensor, "queries classes"]:
    """Votes of the nearest training features for each class: Wu et al., "Unsupervised Feature Learning" (2018), 3.4.

    With s_i the cosine of the query and feature i, each of the k nearest votes for its own class with the weight
    exp(s_i / temperature).
    """
    if len(features) == 0:
        raise UserError("nearest neighbours need at least one training feature.")
    queries, features = F.normalize(queries.float(), dim=1), F.normalize(features.float(), dim=1)
    neighbours = min(neighbours, len(features))
    votes = []
    for rows in queries.split(_ROWS):
        cosines, nearest = (rows @ features.T).topk(neighbours, dim=1)
        # relative to the nearest one, so that a small temperature does not overflow
        weights = ((cosines - cosines[:, :1]) / temperature).exp()
        empty = torch.zeros(len(rows), classes, device=rows.device)
        votes.append(empty.scatter_add(1, labels[nearest], weights))
    return torch.cat(votes)


def linear_scores(
    queries: Float[Tensor, "queries dim"],
    features: Features,
    labels: Labels,
    classes: int,
    decay: float = 1e-4,
    iterations: int = 100,
) -> Float[Tensor, "queries classes"]:
    """Logits of softmax regression on standardised features, fitted by L-BFGS: nothing is random.

    Minimises mean cross entropy + decay / 2 |W|^2. It sees each training image once and unaugmented, so it is not the
    papers' linear evaluation (`LinearProbe`), which trains on augmented images for 90 epochs or more.
    """
    mean, std = features.float().mean(0), features.float().std(0).clamp_min(1e-6)
    x, weight = (features.float() - mean) / std, torch.zeros(classes, features.shape[1], device=features.device)
    bias = torch.zeros(classes, device=features.device)
    with torch.inference_mode(False), torch.enable_grad():
        x, labels = x.clone(), labels.clone()
        parameters = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        fit = torch.optim.LBFGS(parameters, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            fit.zero_grad()
            value = F.cross_entropy(F.linear(x, *parameters), labels) + decay / 2 * parameters[0].square().sum()
            value.backward()
            return value

        fit.step(loss)  # type: ignore[arg-type]
    with torch.no_grad():
        return F.linear((queries.float() - mean) / std, *(parameter.detach() for parameter in parameters))
