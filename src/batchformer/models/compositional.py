"""Networks that score (attribute, object) pairs: CGE, CompCos, the visual product, label embedding.

A network is a backbone and a scorer. The scorer takes the feature of an image, embeds it, and compares it with every
pair, also with pairs that no training image has. BatchFormer is attached before the scorer.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Losses = dict[str, Float[Tensor, ""]]


class CompositionalNet(nn.Module):
    """Scores of all pairs, from images or from the backbone's features of them.

    In training it returns what `scorer.losses` takes.
    """

    def __init__(self, backbone: nn.Module, scorer: "PairScorer") -> None:
        super().__init__()
        self.backbone, self.scorer = backbone, scorer

    def forward(
        self, x: Float[Tensor, "batch channels height width"] | Float[Tensor, "batch dim"]
    ) -> Float[Tensor, "rows pairs"] | Any:
        features = self.backbone(x) if x.ndim == 4 else x
        if self.training:
            return self.scorer(features)
        with torch.autocast(features.device.type, enabled=False):  # in 16 bits many pairs would have the same score
            return self.scorer(features.float())


def feature_width(backbone: Any) -> int:
    """Width of what a timm network without a classifier gives."""
    return int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)


class PairScorer(nn.Module):
    """Base class: the pairs, and cross entropy over those that are trained on.

    `forward` gives the scores of all pairs; in training what `losses` takes: the scores of the pairs trained on.

    Args:
        pairs: attribute and object of each pair.
        seen: whether a pair is trained on.
    """

    pairs: Int[Tensor, "pairs 2"]
    seen: Bool[Tensor, " pairs"]
    trained_on: Int[Tensor, " seen"]
    place: Int[Tensor, " pairs"]

    def __init__(self, pairs: Int[Tensor, "pairs 2"], seen: Bool[Tensor, " pairs"]) -> None:
        super().__init__()
        place = torch.full((len(pairs),), -1)
        place[seen] = torch.arange(int(seen.sum()))
        known = {"pairs": pairs, "seen": seen, "trained_on": seen.nonzero()[:, 0], "place": place}
        for name, values in known.items():
            self.register_buffer(name, values, persistent=False)

    def losses(self, outputs: Any, targets: Mapping[str, Tensor]) -> Losses:
        """`loss`, and its parts where it has any; targets are `labels` (pairs), `attributes`, `objects` of the rows."""
        return {"loss": F.cross_entropy(outputs.float(), self.place[targets["labels"]])}

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first step of an epoch, which is counted from 0, and where a run resumes within one."""


class GraphScorer(PairScorer):
    """CGE (Naeem et al., CVPR 2021): embeddings of the pairs from a graph of attributes, objects and pairs.

    Eq. 1 to 3: two graph convolutions, H' = relu(A H W), over nodes that are word vectors (of a pair: the mean of its
    two words); the score is the product of an image's embedding and a pair's, and cross entropy is over the pairs
    trained on. As released: dropout before each convolution, no ReLU after the last, pairs of length 1 and images not,
    no temperature. The weights begin as Xavier's, there as those of torch's Linear. `embed_dim` None takes the feature
    itself (MIT-States, C-GQA), else it is Linear and ReLU (300 for UT-Zappos).
    """

    nodes: Float[Tensor, "nodes words"]
    neighbours: Int[Tensor, " edges"]
    begins: Int[Tensor, " nodes"]
    degree: Float[Tensor, "nodes 1"]

    def __init__(
        self,
        feature_dim: int,
        words: Float[Tensor, "names words"],
        counts: tuple[int, int],
        pairs: Int[Tensor, "pairs 2"],
        seen: Bool[Tensor, " pairs"],
        hidden_dims: Sequence[int] = (4096,),
        embed_dim: int | None = None,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(pairs, seen)
        attributes, objects = words.split(counts)
        nodes = torch.cat([words, (attributes[pairs[:, 0]] + objects[pairs[:, 1]]) / 2])
        self.register_buffer("nodes", nodes)
        neighbours, degree = composition_graph(pairs, *counts)
        begins = degree.cumsum(0) - degree
        for name, values in (("neighbours", neighbours), ("begins", begins), ("degree", degree.float()[:, None])):
            self.register_buffer(name, values, persistent=False)
        widths = [words.shape[1], *hidden_dims, embed_dim or feature_dim]
        self.layers = nn.ModuleList(nn.Linear(*both) for both in pairwise(widths))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.dropout = dropout
        self.embedder: nn.Module = nn.Identity()
        if embed_dim is not None:
            self.embedder = nn.Sequential(nn.Linear(feature_dim, embed_dim), nn.ReLU())

    def pair_embeddings(self) -> Float[Tensor, "pairs dim"]:
        x = self.nodes
        for number, layer in enumerate(self.layers):
            x = F.dropout(x if number == 0 else F.relu(x), self.dropout, self.training)
            x = self._convolved(x, layer)  # type: ignore[arg-type]
        return F.normalize(x[-len(self.pairs) :], dim=1)

    def _convolved(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """A x W + b, the smaller of the two products first."""
        if layer.in_features < layer.out_features:
            return F.linear(self._averaged(x), layer.weight, layer.bias)
        return self._averaged(F.linear(x, layer.weight)) + layer.bias

    def _averaged(self, x: Float[Tensor, "nodes dim"]) -> Float[Tensor, "nodes dim"]:
        """D^-1 A x: the mean over a node and its neighbours."""
        return _NeighbourSum.apply(x.float(), self.neighbours, self.begins) / self.degree

    def forward(self, features: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows pairs"]:
        embedded, pairs = self.embedder(features), self.pair_embeddings()
        return embedded @ (pairs[self.trained_on] if self.training else pairs).t().to(embedded.dtype)


class _NeighbourSum(torch.autograd.Function):
    """Sum over the neighbours of each node: a sparse product whose result does not depend on the order of threads.

    The graph is not directed, so its matrix is its own transpose, which the gradient needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: Tensor, begins: Tensor) -> Tensor:
        ctx.save_for_backward(neighbours, begins)
        return F.embedding_bag(neighbours, x, begins, mode="sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return F.embedding_bag(ctx.saved_tensors[0], gradients[0], ctx.saved_tensors[1], mode="sum"), None, None


def composition_graph(
    pairs: Int[Tensor, "pairs 2"], attributes: int, objects: int
) -> tuple[Int[Tensor, " edges"], Int[Tensor, " nodes"]]:
    """The graph of CGE, as the neighbours of the first node, of the second ..., and the degree of each node.

    Nodes are attributes, objects and pairs, in this order. Every pair is connected with its attribute and its object,
    these two with one another, and every node with itself.
    """
    a, o = pairs[:, 0], attributes + pairs[:, 1]
    nodes = attributes + objects + len(pairs)
    p = torch.arange(attributes + objects, nodes)
    edges = torch.cat([torch.stack(ends) for ends in ((a, o), (p, a), (p, o))], 1)
    loops = torch.arange(nodes).expand(2, -1)
    edges = torch.cat([edges, edges.flip(0), loops], 1).unique(dim=1)  # sorted by the first node
    return edges[1].contiguous(), torch.bincount(edges[0], minlength=nodes)


class CosineScorer(PairScorer):
    """CompCos (Mancini et al., CVPR 2021): cosine between the embeddings of an image and of a pair, times `scale`.

    A pair's embedding is a linear map of the embeddings of its two words, which start as word vectors and are trained.
    In the closed world cross entropy is over the pairs trained on. In the open world (`open_world`, eq. 6 to 9) it is
    over all pairs: those not trained on are left out in the first epoch and then get the margin

        - margin min(1, epoch / margin_epochs) feasibility(pair),

    added to their cosine; feasibility (`feasibility`) is computed from the embeddings at the start of every epoch.
    """

    feasible: Float[Tensor, " pairs"]
    weight_of_margin: Float[Tensor, ""]
    left_out: Float[Tensor, ""]

    def __init__(
        self,
        feature_dim: int,
        words: Float[Tensor, "names words"],
        counts: tuple[int, int],
        pairs: Int[Tensor, "pairs 2"],
        seen: Bool[Tensor, " pairs"],
        hidden_dim: int | None = 768,
        embed_dim: int | None = None,
        dropout: float = 0.5,
        scale: float = 20.0,
        open_world: bool = False,
        margin: float = 0.4,
        margin_epochs: int = 15,
    ) -> None:
        super().__init__(pairs, seen)
        width = embed_dim or words.shape[1]
        self.embedder = _image_embedder(feature_dim, hidden_dim, width, dropout)
        self.words = nn.Parameter(words.clone())
        self.compose = nn.Linear(2 * words.shape[1], width)
        self.counts, self.scale, self.open_world = counts, scale, open_world
        self.margin, self.margin_epochs = margin, margin_epochs
        self.register_buffer("feasible", seen.float(), persistent=False)
        self.register_buffer("weight_of_margin", torch.zeros(()), persistent=False)
        self.register_buffer("left_out", torch.zeros(()), persistent=False)

    def forward(self, features: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows pairs"]:
        only_seen = self.training and not self.open_world
        a, o = (self.pairs[self.trained_on] if only_seen else self.pairs).unbind(1)
        attributes, objects = self.words.split(self.counts)
        pairs = F.normalize(self.compose(torch.cat([attributes[a], objects[o]], 1)), dim=1)
        cosines = F.normalize(self.embedder(features), dim=1) @ pairs.t()
        if self.training and self.open_world:
            unseen = (~self.seen).to(cosines.dtype)
            cosines = cosines - unseen * (self.weight_of_margin * self.feasible + self.left_out)
        return self.scale * cosines

    def losses(self, outputs: Any, targets: Mapping[str, Tensor]) -> Losses:
        if not self.open_world:
            return super().losses(outputs, targets)
        return {"loss": F.cross_entropy(outputs.float(), targets["labels"])}

    @torch.no_grad()
    def begin_epoch(self, epoch: int) -> None:
        if self.open_world:  # in place: a captured step reads these tensors
            self.left_out.fill_(10.0 if epoch == 0 else 0.0)  # as released: far below any cosine
            self.weight_of_margin.fill_(self.margin * min(1.0, epoch / self.margin_epochs))
            self.feasible.copy_(self.feasibility())

    @torch.no_grad()
    def feasibility(self) -> Float[Tensor, " pairs"]:
        attributes, objects = self.words.detach().split(self.counts)
        return feasibility(attributes, objects, self.pairs, self.seen)


def feasibility(
    attributes: Float[Tensor, "attributes dim"],
    objects: Float[Tensor, "objects dim"],
    pairs: Int[Tensor, "pairs 2"],
    seen: Bool[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """How likely a pair exists (CompCos, eq. 4 and 5): 1 for seen pairs, else the mean of two similarities.

    Of the object to the most similar object that is seen with this attribute, and of the attribute to the most similar
    one that is seen with this object; -1 where nothing is seen with it.
    """
    table = torch.zeros(len(attributes), len(objects), dtype=torch.bool, device=attributes.device)
    table[pairs[seen, 0], pairs[seen, 1]] = True
    found = (_most_similar(objects, table) + _most_similar(attributes, table.t()).t()) / 2
    return found.masked_fill(table, 1.0)[pairs[:, 0], pairs[:, 1]]


def _most_similar(words: Float[Tensor, "n dim"], seen_with: Bool[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """For each of m others and each word: the highest cosine of the word to one that is seen with that other."""
    unit = F.normalize(words, dim=1)
    cosines = unit @ unit.t()
    rows = [cosines[:, row].max(1).values if row.any() else -torch.ones_like(cosines[0]) for row in seen_with]
    return torch.stack(rows)


class ProductScorer(PairScorer):
    """Visual product: a classifier of attributes and one of objects; a pair's score is the product of both, in logs.

    The baseline without word vectors: log p(attribute | image) + log p(object | image), trained by cross entropy
    of both (Misra et al., CVPR 2017, "individual"). The released code multiplies probabilities without the logarithm:
    the same order of pairs, another curve over the bias (`log_scores` False).
    """

    def __init__(
        self,
        feature_dim: int,
        counts: tuple[int, int],
        pairs: Int[Tensor, "pairs 2"],
        seen: Bool[Tensor, " pairs"],
        hidden_dim: int | None = None,
        dropout: float = 0.5,
        log_scores: bool = True,
    ) -> None:
        super().__init__(pairs, seen)
        self.attributes, self.objects = (_image_embedder(feature_dim, hidden_dim, n, dropout) for n in counts)
        self.log_scores = log_scores

    def forward(self, features: Float[Tensor, "rows dim"]) -> Any:
        logits = self.attributes(features), self.objects(features)
        if self.training:
            return logits
        attributes, objects = (each.log_softmax(1) for each in logits)
        scores = attributes[:, self.pairs[:, 0]] + objects[:, self.pairs[:, 1]]
        return scores if self.log_scores else scores.exp()

    def losses(self, outputs: Any, targets: Mapping[str, Tensor]) -> Losses:
        attribute = F.cross_entropy(outputs[0].float(), targets["attributes"])
        object_ = F.cross_entropy(outputs[1].float(), targets["objects"])
        return {"loss": attribute + object_, "attribute": attribute, "object": object_}


class LabelEmbeddingScorer(PairScorer):
    """Label embedding (LE+ of Nagarajan & Grauman, ECCV 2018): distance of an image to a pair, embedded from its words.

    The two word vectors go through a network of two layers; training is by triplets,

        max(0, |x - pair|^2 - |x - other|^2 + margin),

    with another pair that is trained on, drawn for each image; the score is the negative distance.
    """

    vectors: Float[Tensor, "names words"]

    def __init__(
        self,
        feature_dim: int,
        words: Float[Tensor, "names words"],
        counts: tuple[int, int],
        pairs: Int[Tensor, "pairs 2"],
        seen: Bool[Tensor, " pairs"],
        hidden_dim: int | None = None,
        embed_dim: int | None = None,
        dropout: float = 0.5,
        margin: float = 0.5,
    ) -> None:
        super().__init__(pairs, seen)
        width = embed_dim or words.shape[1]
        self.register_buffer("vectors", words)
        self.embedder = _image_embedder(feature_dim, hidden_dim, width, dropout)
        self.compose = nn.Sequential(nn.Linear(2 * words.shape[1], width), nn.ReLU(), nn.Linear(width, width))
        self.counts, self.margin = counts, margin

    def forward(self, features: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows pairs"]:
        a, o = (self.pairs[self.trained_on] if self.training else self.pairs).unbind(1)
        attributes, objects = self.vectors.split(self.counts)
        pairs = self.compose(torch.cat([attributes[a], objects[o]], 1))
        x = self.embedder(features)
        return 2 * x @ pairs.t() - x.square().sum(1, keepdim=True) - pairs.square().sum(1)

    def losses(self, outputs: Any, targets: Mapping[str, Tensor]) -> Losses:
        own, count = self.place[targets["labels"]][:, None], outputs.shape[1]
        other = (own + torch.randint(1, max(count, 2), own.shape, device=own.device)) % count
        return {"loss": F.relu(outputs.gather(1, other) - outputs.gather(1, own) + self.margin).mean()}


def _image_embedder(feature_dim: int, hidden_dim: int | None, width: int, dropout: float) -> nn.Module:
    """One linear layer, or with `hidden_dim` a second one behind LayerNorm, ReLU and dropout."""
    if hidden_dim is None:
        return nn.Linear(feature_dim, width)
    hidden = [nn.Linear(feature_dim, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*hidden, nn.Linear(hidden_dim, width))
