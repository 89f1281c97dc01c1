"""Compositional zero-shot recognition: accuracy on seen against unseen pairs, over a bias on the scores of unseen ones.

A network that was trained on some (attribute, object) pairs scores these higher than pairs it has never seen. So a bias
b is added to the scores of all unseen pairs and varied: the accuracy on images of unseen pairs rises with b, that on
images of seen pairs falls (Chao et al., 2016; Purushwalkam et al., 2019). The area under this curve does not depend on
how the scores of seen and unseen pairs compare.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric

from batchformer.errors import UserError

TOP = 3  # areas are given for the true pair among the best 1, 2 and 3
MEASURES = ("auc", "hm", "seen", "unseen", "attribute", "object", "auc_released", "hm_released", "attribute_released",
            "object_released", *(f"auc_top{k}" for k in range(2, TOP + 1)))  # fmt: skip
RELEASED_BIAS, RELEASED_OFFSET, RELEASED_STEPS = 1e3, 1e-4, 20


class Curve(NamedTuple):
    """Accuracies in [0, 1] for rising biases."""

    bias: Float[np.ndarray, " points"]
    seen: Float[np.ndarray, " points"]
    unseen: Float[np.ndarray, " points"]

    @property
    def area(self) -> float:
        """By the trapezoid rule, seen over unseen accuracy."""
        return float(((self.seen[1:] + self.seen[:-1]) / 2 * np.diff(self.unseen)).sum())

    @property
    def harmonic_means(self) -> Float[np.ndarray, " points"]:
        total = self.seen + self.unseen
        return np.divide(2 * self.seen * self.unseen, total, out=np.zeros_like(total), where=total > 0)

    def seen_at(self, unseen: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Seen accuracy at these unseen accuracies, between the points on a straight line; nan beyond the last."""
        last = np.r_[self.unseen[1:] > self.unseen[:-1], True]  # of points above one another the lowest
        return np.interp(unseen, self.unseen[last], self.seen[last], right=np.nan)


class Outcome(NamedTuple):
    """What was kept of every image, and the measures that follow from it.

    Of an image these decide at which bias it becomes right or wrong: the score of its true pair, how many pairs of the
    same side (seen or unseen) are ranked above that, and the best scores of the other side.

    Args:
        pairs: attribute and object of each pair.
        seen: whether a pair was trained on.
        labels: the true pair of each image.
        rank: pairs of its own side above the true one.
        true: the score of the true pair.
        others: the highest scores of the other side, falling.
        best: the highest score of seen pairs, and that of unseen ones.
        best_pair: the pairs that have these.
    """

    pairs: Int[np.ndarray, "pairs 2"]
    seen: Bool[np.ndarray, " pairs"]
    labels: Int[np.ndarray, " images"]
    rank: Int[np.ndarray, " images"]
    true: Float[np.ndarray, " images"]
    others: Float[np.ndarray, "images top"]
    best: Float[np.ndarray, "images 2"]
    best_pair: Int[np.ndarray, "images 2"]

    def measures(self) -> dict[str, float]:
        """In percent.

        - `auc`: the area under the curve of *all* biases, so a perfect scorer has 100; `hm`, `seen`, `unseen`: the best
          harmonic mean, seen and unseen accuracy on this curve; `auc_top2`, `auc_top3`: the area where a true pair
          among the best 2 or 3 counts.
        - `attribute`, `object`: images whose best pair, without a bias, has the right attribute, the right object.
        - `auc_released`, `hm_released`: over some 20 biases and a last one of 1000, as the released code of CGE and
          CompCos has it: a perfect scorer has 97.5 there, or 50 if it tells right from wrong and no more;
          `attribute_released`, `object_released`: with a bias of 1000, which that code prints, too.

        All are shares of images, not means over pairs; nan where images of seen or of unseen pairs are missing.
        """
        if not self.is_complete:
            return dict.fromkeys(MEASURES, float("nan"))
        whole, released = self.curve(), self.released_curve()
        values = {
            "auc": whole.area,
            "hm": whole.harmonic_means.max(),
            "seen": whole.seen.max(),
            "unseen": whole.unseen.max(),
            **self._right_parts(0.0, ""),
            "auc_released": released.area,
            "hm_released": released.harmonic_means.max(),
            **self._right_parts(RELEASED_BIAS, "_released"),
            **{f"auc_top{k}": self.curve(k).area for k in range(2, TOP + 1)},
        }
        return {name: 100.0 * float(values[name]) for name in MEASURES}

    @property
    def is_complete(self) -> bool:
        """Whether there are images of seen and of unseen pairs."""
        of_seen = self.seen[self.labels]
        return bool(of_seen.any() and not of_seen.all())

    def curve(self, top: int = 1) -> Curve:
        """Both accuracies between all the biases at which an image becomes right or wrong."""
        lost, won = self._changes(top)
        changes = np.concatenate([lost, won])
        at = np.unique(changes[np.isfinite(changes)])
        between = np.concatenate([at[:1] - 1, (at[:-1] + at[1:]) / 2, at[-1:] + 1]) if len(at) else np.zeros(1)
        limits = np.concatenate([[-np.inf], at])
        seen = (len(lost) - np.searchsorted(np.sort(lost), limits, side="right")) / len(lost)
        unseen = np.searchsorted(np.sort(won), limits, side="right") / len(won)
        return Curve(between, seen, unseen)

    def released_curve(self) -> Curve:
        """At the biases of the released code: just below those at which unseen images become right, every n / 20th."""
        lost, won = self._changes(1)
        right_at_last = won[won < RELEASED_BIAS]
        chosen = np.sort(right_at_last - RELEASED_OFFSET)[:: max(len(right_at_last) // RELEASED_STEPS, 1)]
        biases = np.append(chosen, RELEASED_BIAS)
        seen = (len(lost) - np.searchsorted(np.sort(lost), biases, side="left")) / len(lost)
        unseen = np.searchsorted(np.sort(won), biases, side="left") / len(won)
        return Curve(biases, seen, unseen)

    def best_bias(self) -> float:
        """The bias of the best harmonic mean."""
        curve = self.curve()
        return float(curve.bias[curve.harmonic_means.argmax()])

    def predicted(self, bias: float) -> Int[np.ndarray, " images"]:
        """The best pair of every image, with this bias on unseen ones."""
        return np.where(self.best[:, 1] + bias > self.best[:, 0], self.best_pair[:, 1], self.best_pair[:, 0])

    def accuracy_of_pairs(self, bias: float) -> Float[np.ndarray, " pairs"]:
        """In percent, nan for a pair without images."""
        counts = np.bincount(self.labels, minlength=len(self.pairs))
        right = np.bincount(self.labels[self.predicted(bias) == self.labels], minlength=len(self.pairs))
        return np.divide(100.0 * right, counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def _right_parts(self, bias: float, suffix: str) -> dict[str, float]:
        right = (self.pairs[self.labels] == self.pairs[self.predicted(bias)]).mean(0)
        return {f"attribute{suffix}": right[0], f"object{suffix}": right[1]}

    def _changes(self, top: int) -> tuple[Float[np.ndarray, " seen"], Float[np.ndarray, " unseen"]]:
        """For images of seen pairs the bias from which on they are wrong, for others that above which they are right.

        A true pair with `rank` pairs of its own side above it is among the best k as long as fewer than k - rank pairs
        of the other side are above it, too: the (k - rank)-th best of these decides.
        """
        if not self.is_complete:
            raise UserError("seen against unseen accuracy needs images of both: add images of the others.")
        of_seen = self.seen[self.labels]
        place, possible = top - 1 - self.rank, self.rank < top
        known = np.clip(place, 0, self.others.shape[1] - 1)
        decides = np.take_along_axis(self.others, known[:, None], 1)[:, 0]
        decides = np.where(place < self.others.shape[1], decides, -np.inf)  # the other side has no more pairs
        with np.errstate(invalid="ignore"):  # a true pair that is no candidate is not possible either
            distance = self.true - decides
        return np.where(possible, distance, -np.inf)[of_seen], np.where(possible, -distance, np.inf)[~of_seen]


class CompositionalScores(Metric):
    """Collects the `Outcome` of images from their scores for all pairs.

    The scores themselves are not kept: C-GQA has 278,000 pairs in the open world. A score that two pairs share counts
    for the one with the lower number, and at a bias that makes a seen and an unseen pair equal the seen one wins.

    Args:
        pairs: attribute and object of each pair.
        seen: whether a pair was trained on.
        candidates: pairs that may be predicted; by default all.
    """

    full_state_update = False
    pairs: Int[Tensor, "pairs 2"]
    seen: Bool[Tensor, " pairs"]
    candidates: Bool[Tensor, " pairs"]

    def __init__(
        self,
        pairs: Int[Tensor, "pairs 2"],
        seen: Bool[Tensor, " pairs"],
        candidates: Bool[Tensor, " pairs"] | None = None,
    ) -> None:
        super().__init__()
        candidates = torch.ones_like(seen) if candidates is None else candidates
        for name, values in (("pairs", pairs), ("seen", seen), ("candidates", candidates)):
            self.register_buffer(name, values.clone(), persistent=False)
        for name in Outcome._fields[2:]:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, scores: Float[Tensor, "batch pairs"], labels: Int[Tensor, " batch"]) -> None:
        scores = scores.detach().float().masked_fill(~self.candidates, -torch.inf)
        true = scores.gather(1, labels[:, None])
        own_side = self.seen[labels][:, None] == self.seen
        before = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
        above = (scores > true) | ((scores == true) & before)
        rank = (above & own_side).sum(1).masked_fill(true[:, 0] == -torch.inf, scores.shape[1])
        others = scores.masked_fill(own_side, -torch.inf).topk(min(TOP, scores.shape[1]), dim=1).values
        sides = [scores.masked_fill(other, -torch.inf).max(1) for other in (~self.seen, self.seen)]
        best, best_pair = (torch.stack(columns, 1) for columns in zip(*sides, strict=True))
        rows = (labels, rank, true[:, 0], others, best, best_pair)
        for name, values in zip(Outcome._fields[2:], rows, strict=True):
            getattr(self, name).append(values)

    def compute(self) -> Outcome:
        kept = (_joined(getattr(self, name)) for name in Outcome._fields[2:])
        return Outcome(self.pairs.cpu().numpy(), self.seen.cpu().numpy(), *kept)


def _joined(parts: Sequence[Tensor] | Tensor) -> np.ndarray:
    values = parts if isinstance(parts, Tensor) else torch.cat(list(parts))
    return values.cpu().double().numpy() if values.is_floating_point() else values.cpu().numpy()
