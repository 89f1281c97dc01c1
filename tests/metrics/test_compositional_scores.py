"""Seen against unseen accuracy: equal to the published algorithm step by step, exact at every bias, right on ties."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from batchformer.errors import UserError
from batchformer.metrics.compositional import CompositionalScores, Curve, Outcome


def outcome_of(scores, labels, pairs, seen, candidates=None) -> Outcome:
    metric = CompositionalScores(pairs, seen, candidates)
    for part in range(0, len(labels), 7):  # in batches
        metric.update(scores[part : part + 7], labels[part : part + 7])
    return metric.compute()


def example(seed, images=60, attributes=4, objects=5, whole=False):
    """Scores that know something, of pairs of which some are unseen."""
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.cartesian_prod(torch.arange(attributes), torch.arange(objects))
    seen = torch.rand(len(pairs), generator=draw) < 0.6
    seen[:2] = torch.tensor([True, False])
    labels = torch.randint(len(pairs), (images,), generator=draw)
    labels[:2] = torch.tensor([0, 1])
    scores = torch.randn(images, len(pairs), generator=draw)
    scores += 1.5 * torch.nn.functional.one_hot(labels, len(pairs)) + 0.7 * seen
    return (scores.mul(2).round() if whole else scores), labels, pairs, seen


def best_pairs(row, bias, seen, top=1):
    """Pairs by falling score; at equal scores seen ones first, then the lower number."""
    order = sorted(range(len(row)), key=lambda p: (-(row[p] + (0 if seen[p] else bias)), not seen[p], p))
    return order[:top]


def accuracies(scores, labels, seen, bias, top=1):
    right = [label in best_pairs(row, bias, seen, top) for row, label in zip(scores, labels, strict=True)]
    of = {
        side: [r for r, label in zip(right, labels, strict=True) if bool(seen[label]) == side] for side in (True, False)
    }
    return np.mean(of[True]), np.mean(of[False])


def published(scores, labels, pairs, seen):
    """The steps of the released evaluator."""
    scores, labels, pairs, seen = scores.double().numpy(), labels.numpy(), pairs.numpy(), seen.numpy()
    last_seen, last_unseen = accuracies(scores, labels, seen, 1e3)
    distances = []
    for row, label in zip(scores, labels, strict=True):
        if not seen[label] and best_pairs(row, 1e3, seen)[0] == label:  # an unseen image, right at the largest bias
            distances.append(max(row[p] for p in range(len(row)) if seen[p]) - row[label] - 1e-4)
    distances.sort()
    points = [accuracies(scores, labels, seen, bias) for bias in distances[:: max(len(distances) // 20, 1)]]
    points.append((last_seen, last_unseen))
    area = sum((b[1] - a[1]) * (a[0] + b[0]) / 2 for a, b in pairwise(points))
    means = [2 * s * u / (s + u) if s + u else 0.0 for s, u in points]
    found = {"auc_released": area, "hm_released": max(means)}
    for suffix, bias in (("", 0.0), ("_released", 1e3)):
        said = [best_pairs(row, bias, seen)[0] for row in scores]
        for k, part in enumerate(("attribute", "object")):
            found[part + suffix] = np.mean([pairs[a][k] == pairs[b][k] for a, b in zip(said, labels, strict=True)])
    return {name: 100 * value for name, value in found.items()}


def everywhere(scores, labels, seen, top):
    """Both accuracies between all biases at which any seen and any unseen score are equal."""
    scores, labels, seen = scores.double().numpy(), labels.numpy(), seen.numpy()
    at = sorted({s - u for row in scores for s in row[seen] for u in row[~seen]})
    biases = [at[0] - 1, *((a + b) / 2 for a, b in pairwise(at)), at[-1] + 1]
    return [accuracies(scores, labels, seen, bias, top) for bias in biases]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_gives_what_the_published_steps_give(seed, whole):
    scores, labels, pairs, seen = example(seed, whole=whole)
    found = outcome_of(scores, labels, pairs, seen).measures()
    for name, value in published(scores, labels, pairs, seen).items():
        assert found[name] == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("top", [1, 2, 3])
def test_the_curve_has_every_bias(top, whole):
    scores, labels, pairs, seen = example(9, images=18, attributes=3, objects=3, whole=whole)
    outcome = outcome_of(scores, labels, pairs, seen)
    points = everywhere(scores, labels, seen, top)
    area = sum((b[1] - a[1]) * (a[0] + b[0]) / 2 for a, b in pairwise(points))
    curve = outcome.curve(top)
    assert curve.area == pytest.approx(area)
    assert set(zip(curve.seen, curve.unseen, strict=True)) <= {(s, u) for s, u in points}
    measures = outcome.measures()
    assert measures["auc" if top == 1 else f"auc_top{top}"] == pytest.approx(100 * area)
    if top == 1:
        assert measures["seen"] == pytest.approx(100 * max(s for s, _ in points))
        assert measures["unseen"] == pytest.approx(100 * max(u for _, u in points))
        assert measures["hm"] == pytest.approx(100 * max(2 * s * u / (s + u) if s + u else 0 for s, u in points))
        best = accuracies(scores.numpy(), labels.numpy(), seen.numpy(), outcome.best_bias())
        assert 200 * best[0] * best[1] / sum(best) == pytest.approx(measures["hm"])


def test_a_perfect_scorer_has_all_of_the_area():
    _, labels, pairs, seen = example(1)
    right = torch.nn.functional.one_hot(labels, len(pairs)).float()
    found = outcome_of(right, labels, pairs, seen).measures()
    assert all(found[name] == 100 for name in ("auc", "hm", "seen", "unseen", "attribute", "object", "auc_top3"))
    assert found["auc_released"] == 50  # its biases skip the range in which all images are right
    spread = outcome_of(right * (1 + torch.rand(len(labels), 1)), labels, pairs, seen).measures()
    assert spread["auc"] == pytest.approx(100)
    assert 90 < spread["auc_released"] < 100


def test_a_constant_scorer_has_the_triangle_of_its_two_answers():
    """It says the first seen pair, or with a bias the first unseen one; between both lies a straight line."""
    _, labels, pairs, seen = example(2)
    found = outcome_of(torch.full((len(labels), len(pairs)), 3.7), labels, pairs, seen).measures()
    first = [int((seen == side).nonzero()[0]) for side in (True, False)]
    shares = [
        (labels == pair).sum() / (seen[labels] == side).sum() for pair, side in zip(first, (True, False), strict=True)
    ]
    assert found["auc"] == pytest.approx(100 * float(shares[0] * shares[1]) / 2)
    assert found["seen"] == pytest.approx(100 * float(shares[0]))
    assert found["unseen"] == pytest.approx(100 * float(shares[1]))


def test_pairs_that_are_no_candidates_are_never_predicted():
    scores, labels, pairs, seen = example(3)
    candidates = torch.ones_like(seen)
    candidates[int((~seen).nonzero()[1])] = False
    kept = candidates[labels]
    whole = outcome_of(scores, labels, pairs, seen, candidates)
    for bias in (-100.0, 0.0, 100.0):
        assert candidates.numpy()[whole.predicted(bias)].all()
    lowered = scores.masked_fill(~candidates, -1e6)
    without = outcome_of(lowered[kept], labels[kept], pairs, seen)
    assert whole.curve().seen.max() == pytest.approx(without.curve().seen.max())
    unseen_images = ((~seen)[labels]).sum(), ((~seen)[labels[kept]]).sum()
    assert whole.measures()["auc"] == pytest.approx(
        without.measures()["auc"] * float(unseen_images[1] / unseen_images[0])
    )


def test_accuracy_of_every_pair_is_nan_without_images():
    scores, labels, pairs, seen = example(4)
    outcome = outcome_of(scores, labels, pairs, seen)
    found, said = outcome.accuracy_of_pairs(0.5), outcome.predicted(0.5)
    for pair in range(len(pairs)):
        mine = (labels == pair).numpy()
        wanted = 100 * (said[mine] == pair).mean() if mine.any() else np.nan
        np.testing.assert_allclose(found[pair], wanted)


def test_one_side_alone_has_no_curve():
    scores, labels, pairs, seen = example(5)
    only = outcome_of(scores[seen[labels]], labels[seen[labels]], pairs, seen)
    assert all(np.isnan(value) for value in only.measures().values())
    with pytest.raises(UserError, match="needs images of both"):
        only.curve()


def test_between_its_points_the_curve_is_straight_and_beyond_the_last_nothing():
    curve = Curve(np.arange(4.0), np.array([0.8, 0.6, 0.6, 0.0]), np.array([0.0, 0.0, 0.4, 0.5]))
    np.testing.assert_allclose(curve.seen_at(np.array([0.0, 0.2, 0.45, 0.6])), [0.6, 0.6, 0.3, np.nan])
