"""Scorers of pairs against slow, obvious references: outputs and gradients, and who takes part in the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchformer as bf
from batchformer.models.compositional import (
    CompositionalNet,
    CosineScorer,
    GraphScorer,
    LabelEmbeddingScorer,
    ProductScorer,
    composition_graph,
    feasibility,
)

COUNTS = (3, 4)
PAIRS = torch.tensor([[0, 0], [0, 1], [0, 3], [1, 1], [1, 2], [2, 0], [2, 3]])
SEEN = torch.tensor([True, True, False, True, True, False, True])
DIM, WORD = 6, 5


def words():
    return torch.randn(sum(COUNTS), WORD, generator=torch.Generator().manual_seed(1))


def make(kind, **options):
    torch.manual_seed(0)
    if kind is ProductScorer:
        return kind(DIM, COUNTS, PAIRS, SEEN, **options)
    return kind(DIM, words(), COUNTS, PAIRS, SEEN, **options)


def features(rows=5):
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(2)).abs()


def slow_adjacency():
    """D^-1 (A + I), by the definition: entry by entry."""
    attributes, objects = COUNTS
    size = attributes + objects + len(PAIRS)
    matrix = [[float(i == j) for j in range(size)] for i in range(size)]
    for number, (a, o) in enumerate(PAIRS.tolist()):
        p, o = attributes + objects + number, attributes + o
        for i, j in ((a, o), (p, a), (p, o)):
            matrix[i][j] = matrix[j][i] = 1.0
    return torch.tensor([[entry / sum(row) for entry in row] for row in matrix])


def test_the_graph_is_normalised_by_rows():
    neighbours, degree = composition_graph(PAIRS, *COUNTS)
    slow = slow_adjacency()
    dense = torch.zeros_like(slow)
    for row, (begin, count) in enumerate(zip((degree.cumsum(0) - degree).tolist(), degree.tolist(), strict=True)):
        dense[row, neighbours[begin : begin + count]] = 1 / count
    torch.testing.assert_close(dense, slow)
    torch.testing.assert_close(slow.sum(1), torch.ones(len(slow)))


@pytest.mark.parametrize("embed_dim", [None, 4])
@pytest.mark.parametrize("hidden", [[7], [3], [7, 3]])  # wider and narrower than the vectors: other orders of products
def test_graph_convolutions_are_dense_products(hidden, embed_dim):
    scorer = make(GraphScorer, hidden_dims=hidden, embed_dim=embed_dim, dropout=0.0).double().eval()
    x = features().double().requires_grad_()
    found = scorer(x)
    adjacency, vectors = slow_adjacency().double(), words().double()
    pairs = [(vectors[a] + vectors[COUNTS[0] + o]) / 2 for a, o in PAIRS.tolist()]
    nodes = torch.stack([*vectors, *pairs])
    for number, layer in enumerate(scorer.layers):
        nodes = adjacency @ (nodes if number == 0 else nodes.relu()) @ layer.weight.t() + layer.bias
    embedded = x if embed_dim is None else scorer.embedder[0](x).relu()
    wanted = embedded @ torch.stack([row / row.norm().clamp_min(1e-12) for row in nodes[-len(PAIRS) :]]).t()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    weights = [x, *scorer.parameters()]
    grads = [torch.autograd.grad(scores.square().sum(), weights, retain_graph=True) for scores in (found, wanted)]
    for ours, slow in zip(*grads, strict=True):
        torch.testing.assert_close(ours, slow, atol=1e-5, rtol=1e-5)


def test_dropout_is_before_each_graph_convolution_and_in_training_alone():
    scorer = make(GraphScorer, hidden_dims=[7], dropout=0.5)
    torch.manual_seed(3)
    found, (first, second) = scorer.pair_embeddings(), scorer.layers
    torch.manual_seed(3)
    hidden = F.linear(slow_adjacency() @ F.dropout(scorer.nodes), first.weight, first.bias)
    wanted = F.linear(slow_adjacency() @ F.dropout(hidden.relu()), second.weight, second.bias)
    torch.testing.assert_close(found, F.normalize(wanted[-len(PAIRS) :], dim=1))
    scorer.eval()
    assert torch.equal(scorer.pair_embeddings(), scorer.pair_embeddings())


def test_cosines_times_the_scale():
    scorer = make(CosineScorer, hidden_dim=None, scale=7.0).eval()
    found = scorer(features())
    embedded = scorer.embedder(features())
    for k, (a, o) in enumerate(PAIRS.tolist()):
        pair = scorer.compose(torch.cat([scorer.words[a], scorer.words[COUNTS[0] + o]]))
        torch.testing.assert_close(found[:, k], 7 * F.cosine_similarity(embedded, pair[None]))


def test_the_product_of_two_classifiers():
    scorer = make(ProductScorer).eval()
    attributes, objects = (layer(features()).softmax(1) for layer in (scorer.attributes, scorer.objects))
    wanted = torch.stack([attributes[:, a] * objects[:, o] for a, o in PAIRS.tolist()], 1)
    torch.testing.assert_close(scorer(features()).exp(), wanted)
    scorer.log_scores = False
    torch.testing.assert_close(scorer(features()), wanted)
    targets = targets_of([0, 1, 3, 4, 6])
    losses = scorer.train().losses(scorer(features()), targets)
    by_hand = [-probabilities[torch.arange(5), targets[name]].log().mean()
               for probabilities, name in ((attributes, "attributes"), (objects, "objects"))]  # fmt: skip
    torch.testing.assert_close(losses["loss"], sum(by_hand))
    torch.testing.assert_close([losses["attribute"], losses["object"]], by_hand)


def targets_of(labels):
    labels = torch.tensor(labels)
    return {"labels": labels, "attributes": PAIRS[labels, 0], "objects": PAIRS[labels, 1]}


def test_label_embedding_is_trained_by_triplets_of_squared_distances():
    scorer = make(LabelEmbeddingScorer, margin=0.5)
    vectors = scorer.vectors
    pairs = torch.stack([scorer.compose(torch.cat([vectors[a], vectors[COUNTS[0] + o]])) for a, o in PAIRS.tolist()])
    distances = (scorer.embedder(features())[:, None] - pairs[None]).square().sum(2)
    torch.testing.assert_close(scorer.eval()(features()), -distances)
    outputs, targets = scorer.train()(features()), targets_of([0, 1, 3, 4, 6])
    torch.testing.assert_close(outputs, -distances[:, SEEN])
    torch.manual_seed(3)
    loss = scorer.losses(outputs, targets)["loss"]
    torch.manual_seed(3)
    count, own = int(SEEN.sum()), torch.arange(5)
    other = (own + torch.randint(1, count, (5, 1))[:, 0]) % count
    assert (other != own).all()
    positive, negative = (distances[:, SEEN][torch.arange(5), place] for place in (own, other))
    torch.testing.assert_close(loss, (positive - negative + 0.5).clamp_min(0).mean())


@pytest.mark.parametrize("kind", [GraphScorer, CosineScorer])
def test_cross_entropy_is_over_the_pairs_trained_on(kind):
    scorer = make(kind, dropout=0.0)
    targets = targets_of([0, 1, 3, 4, 6])
    scores = scorer.eval()(features())
    scorer.train()
    loss = scorer.losses(scorer(features()), targets)["loss"]
    logs = [(scores[row, label] - torch.logsumexp(scores[row][SEEN], 0)) for row, label in enumerate(targets["labels"])]
    torch.testing.assert_close(loss, -torch.stack(logs).mean())


def slow_feasibility(attributes, objects):
    seen = {tuple(pair) for pair in PAIRS[SEEN].tolist()}
    found = []
    for a, o in PAIRS.tolist():
        if (a, o) in seen:
            found.append(1.0)
            continue
        by_object = [float(F.cosine_similarity(objects[o], objects[q], 0)) for q in range(4) if (a, q) in seen]
        by_attribute = [float(F.cosine_similarity(attributes[a], attributes[b], 0)) for b in range(3) if (b, o) in seen]
        found.append((max(by_object, default=-1.0) + max(by_attribute, default=-1.0)) / 2)
    return torch.tensor(found)


def test_feasibility_is_the_similarity_to_what_was_seen():
    attributes, objects = words().split(COUNTS)
    torch.testing.assert_close(feasibility(attributes, objects, PAIRS, SEEN), slow_feasibility(attributes, objects))
    alone = SEEN.clone()
    alone[6] = False  # the attribute 2 is now seen with nothing, so is the object 3
    found = feasibility(attributes, objects, PAIRS, alone)
    assert found[6] == -1


def test_in_the_open_world_unseen_pairs_wait_an_epoch_and_then_get_their_margin():
    scorer = make(CosineScorer, hidden_dim=None, scale=5.0, open_world=True, margin=0.3, margin_epochs=10)
    plain = scorer.eval()(features())
    scorer.train()
    feasible = slow_feasibility(*scorer.words.detach().split(COUNTS))
    for epoch, weight in ((4, 0.12), (30, 0.3)):
        scorer.begin_epoch(epoch)
        wanted = plain - 5 * weight * torch.where(SEEN, 0.0, feasible)
        torch.testing.assert_close(scorer(features()), wanted)
    scorer.begin_epoch(0)
    outputs, targets = scorer(features()), targets_of([0, 1, 3, 4, 6])
    only_seen = F.cross_entropy(plain[:, SEEN], torch.arange(5))
    torch.testing.assert_close(scorer.losses(outputs, targets)["loss"], only_seen, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [GraphScorer, CosineScorer, ProductScorer, LabelEmbeddingScorer])
def test_batchformer_before_the_scorer_doubles_rows_and_is_gone_in_eval(kind):
    net = CompositionalNet(nn.Linear(3, DIM), make(kind))
    images = torch.randn(5, DIM)
    plain = net.eval()(images)
    attachment = bf.attach(net, before="scorer", dim=DIM, heads=2, example_inputs=torch.zeros(2, DIM))
    outputs = net.train()(images)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    assert len(first) == 10
    targets = bf.repeat_targets(targets_of([0, 1, 3, 4, 6]), outputs)
    assert all(torch.equal(value[:5], value[5:]) for value in targets.values())
    net.scorer.losses(outputs, targets)["loss"].backward()
    assert all(parameter.grad is not None for parameter in attachment.parameters())
    assert torch.equal(net.eval()(images), plain)
    assert attachment.detach() is net
