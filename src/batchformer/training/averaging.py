"""SWAD, stochastic weight averaging densely: the mean of the weights over a valley of the validation loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.training.sharding import divided_as, whole_tensors


@dataclass
class SwadOptions:
    """SWAD (Cha et al., NeurIPS 2021); the names are those of the released code.

    Args:
        n_converge: N_s of the paper: number of consecutive evaluations without a lower loss that define an optimum.
        n_tolerance: N_e: number of consecutive evaluations above the threshold that end the valley.
        tolerance_ratio: r - 1 of the paper: how far the loss may rise above the optimum (0.2 for VLCS).
        released: average the segments that the released code averages (see `LossValley`).
    """

    n_converge: int = 3
    n_tolerance: int = 6
    tolerance_ratio: float = 0.3
    released: bool = False

    def check(self) -> None:
        if not 1 <= self.n_converge <= self.n_tolerance:
            raise UserError(
                f"model.swad.n_converge={self.n_converge} must be 1 or more and at most n_tolerance={self.n_tolerance}."
            )
        if not 0 < self.tolerance_ratio < math.inf:
            raise UserError(f"model.swad.tolerance_ratio={self.tolerance_ratio} must be above 0.")


@dataclass(frozen=True)
class LossValley:
    """The segments of a training that SWAD averages, computed from the validation losses so far.

    A segment is the steps between two evaluations, E_k the loss measured at the end of segment k; N_s, N_e and r are
    `n_converge`, `n_tolerance` and 1 + `tolerance_ratio`.

        optimum    the first t with E_t = min(E_t, ..., E_{t+N_s-1})
        threshold  l = r / N_s * (E_t + ... + E_{t+N_s-1})
        start      t, and before it up to N_e - N_s segments as long as each has E <= l
        end        the last segment with E <= l before N_e in a row are above it (then the valley has ended)
        average    of the weights after every step from start to end; without an optimum: of the last segment

    Optimum, threshold and end are Algorithm 1 of the paper. There the average starts at t itself, and ends with the
    training where it has not ended. Walking back from t, and leaving out the last segments above l, are done by the
    released code. Its first segment is one step long; here all are as long as there are steps between evaluations.

    The released code (`released`) differs further: it loses the first segment of the valley and counts that of the
    optimum twice (a new average is overwritten by the first segment that is added); with an optimum among the first N_e
    evaluations, or among the last ones of the training, others are counted several times as well. There the average is
    over segments, whatever their number of steps.

    Args:
        weights: weight of each segment if the training ended now.
        settled: number of initial segments whose weights no longer depend on future losses.
        optimum: the segment t; None: not reached yet.
        threshold: l.
        dead: the evaluation at which the valley ended; None: it has not ended.
    """

    weights: list[int]
    settled: int
    optimum: int | None = None
    threshold: float | None = None
    dead: int | None = None

    @classmethod
    def of(cls, losses: Sequence[float], options: SwadOptions) -> LossValley:
        n_s, n_e, count = options.n_converge, options.n_tolerance, len(losses)
        oldest = max(0, count - n_e)  # only the last n_e segments matter for a later optimum
        optima = (t for t in range(count - n_s + 1) if losses[t] == min(losses[t : t + n_s]))
        if (optimum := next(optima, None)) is None:
            return cls([int(k == count - 1) for k in range(count)], oldest)
        threshold = (1 + options.tolerance_ratio) * sum(losses[optimum : optimum + n_s]) / n_s
        if options.released:
            weights, dead = _released_weights(losses, options, optimum, threshold)
            return cls(weights, oldest if dead is None else count, optimum, threshold, dead)
        start, end, dead = optimum, optimum, None
        while start > max(0, optimum - (n_e - n_s)) and losses[start - 1] <= threshold:
            start -= 1
        for k in range(optimum, count):
            if losses[k] <= threshold:
                end = k
            elif k == end + n_e:
                dead = k
                break
        weights = [int(start <= k <= end) for k in range(count)]
        return cls(weights, end + 1 if dead is None else count, optimum, threshold, dead)

    @property
    def start(self) -> int:
        """The first segment of the average."""
        return next(k for k, weight in enumerate(self.weights) if weight)

    @property
    def end(self) -> int:
        """The last segment of the average."""
        return max(k for k, weight in enumerate(self.weights) if weight)


def _released_weights(
    losses: Sequence[float], options: SwadOptions, optimum: int, threshold: float
) -> tuple[list[int], int | None]:
    """How often the released code adds each segment, and the evaluation at which the valley ended.

    Its queue holds the last n_e segments; `first` is the oldest of them.
    """
    n_s, n_e, count = options.n_converge, options.n_tolerance, len(losses)
    weights = [0] * count
    found = optimum + n_s - 1  # the evaluation that shows the optimum
    first = max(0, found - n_e + 1)
    walked = range(first, min(first + n_e - n_s, found) + 1)  # ends at the optimum only if the queue is full
    start = max((k + 1 for k in walked if losses[k] > threshold), default=first)
    if n_e > n_s:
        for k in range(start + 1, walked.stop):
            weights[k] += 1
    for now in range(found + 1, count):
        first = max(0, now - n_e + 1)
        if first < optimum:
            continue
        if min(losses[first : now + 1]) > threshold:
            dead: int | None = now
            break
        weights[first] += 1
    else:
        dead = None
        for k in range(max(0, count - n_e) + 1, count):
            if min(losses[k:]) > threshold:
                break
            weights[k] += 1
    if not any(weights):
        weights[optimum] = 1
    return weights, dead


class SWAD:
    """The averaged weights: call `update` after every step, `close_segment` at every evaluation, `put_into` at the end.

    Training continues after the end of the valley (the released code stops): the average is fixed then; the run also
    gives the result without it. Parameters are averaged, those of BatchFormer too; buffers stay those of the network,
    so BatchNorm's statistics must be frozen, as in the paper's protocol, or they do not fit the averaged weights.

    Memory on the device: sums in float32 of the current segment, of the closed average, and of up to n_tolerance
    segments that may still count; besides them two copies while the average is evaluated.

    `update` changes tensors in place, makes none and does not synchronise: it may be captured in a CUDA graph, once
    `begin` was called.
    """

    def __init__(self, options: SwadOptions) -> None:
        options.check()
        self.options = options
        self.losses: list[float] = []
        self.steps: list[int] = []  # steps done at the end of each segment
        self._parameters: list[Tensor] = []
        self._sums: list[Tensor] = []  # of the current segment
        self._updates = torch.zeros((), dtype=torch.int64)  # steps in it; a tensor, so that a CUDA graph can count
        self._queue: list[tuple[list[Tensor], int]] = []  # sums and counts of the segments that are not settled
        self._closed: tuple[list[Tensor], int] = ([], 0)  # of the settled segments

    @property
    def valley(self) -> LossValley:
        return LossValley.of(self.losses, self.options)

    def begin(self, network: nn.Module) -> None:
        """Allocate the sums for the parameters of a network, or put those of a checkpoint where they are."""
        own: list[Tensor] = list(network.parameters())
        self._parameters = own
        self._sums, self._updates = divided_as(own, self._sums or _zeros(own)), self._updates.to(own[0].device)
        self._queue = [(divided_as(own, sums), count) for sums, count in self._queue]
        self._closed = divided_as(own, self._closed[0] or _zeros(own)), self._closed[1]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step to the current segment."""
        torch._foreach_add_(self._sums, self._parameters)
        self._updates.add_(1)

    @torch.no_grad()
    def close_segment(self, loss: float) -> None:
        """Close the current segment with the loss of an evaluation; without a step since the last one, do nothing."""
        count = int(self._updates)
        if count == 0:
            return
        if not 0 <= loss < math.inf:
            raise UserError(f"SWAD needs losses that are 0 or more, and an evaluation gave {loss}: train without swad.")
        self.losses.append(loss)
        self.steps.append(count + (self.steps[-1] if self.steps else 0))
        sums = [tensor.clone() for tensor in self._sums]
        torch._foreach_zero_(self._sums)
        self._updates.zero_()
        if self.options.released:
            torch._foreach_div_(sums, count)
            count = 1
        self._queue.append((sums, count))
        valley = self.valley
        while len(self.losses) - len(self._queue) < valley.settled:
            weight = valley.weights[len(self.losses) - len(self._queue)]
            self._closed = _added(self._closed, self._queue.pop(0), weight)

    @torch.no_grad()
    def put_into(self, network: nn.Module) -> None:
        """Replace the parameters of the network by the average, as it is if the training ends now."""
        if not self.losses:
            raise UserError("there is no average of the weights yet: SWAD needs an evaluation after some training.")
        parameters = list(network.parameters())
        average = [tensor.clone() for tensor in self._closed[0]] or _zeros(parameters), self._closed[1]
        waiting = self.valley.weights[len(self.losses) - len(self._queue) :]
        for segment, weight in zip(self._queue, waiting, strict=True):
            average = _added(average, segment, weight)
        sums, count = average
        for parameter, total in zip(parameters, whole_tensors(sums), strict=True):
            parameter.copy_(total / count)

    @contextmanager
    def applied_to(self, network: nn.Module) -> Iterator[None]:
        """Context manager: the averaged parameters in the network; its own are restored afterwards, bit for bit."""
        with torch.no_grad():
            own = [parameter.detach().clone() for parameter in network.parameters()]
        self.put_into(network)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(network.parameters(), own, strict=True):
                    parameter.copy_(value)

    # ---- results

    def summary(self) -> dict[str, Any]:
        """For result.json. `start_step` and `end_step`: the first and the last step whose weights are averaged."""
        if not self.losses:
            return {}
        valley, ends = self.valley, [0, *self.steps]
        return {
            **asdict(self.options),
            "start_step": ends[valley.start] + 1,
            "end_step": ends[valley.end + 1],
            "optimum_step": None if valley.optimum is None else self.steps[valley.optimum],
            "dead_step": None if valley.dead is None else self.steps[valley.dead],
            "threshold": valley.threshold,
            "steps": list(self.steps),
            "losses": list(self.losses),
            "weights": valley.weights,
        }

    def section(self, name: str) -> dict[str, Any]:
        """The valley for the page; `name` is that of the evaluation set."""
        told, valley = self.summary(), self.valley
        text = f"Averaged: the weights after steps {told['start_step']} to {told['end_step']} of {self.steps[-1]}. "
        if valley.optimum is None:
            text += "The loss reached no optimum, so these are the steps since the second to last evaluation."
        elif valley.dead is None:
            text += f"Optimum at step {told['optimum_step']}; the valley lasted until the end of training."
        else:
            text += f"Optimum at step {told['optimum_step']}; its end was detected at step {told['dead_step']}."
        averaged = [loss if weight else None for loss, weight in zip(self.losses, valley.weights, strict=True)]
        lines: dict[str, list[float | None]] = {"loss": [*self.losses], "averaged": averaged}
        if valley.threshold is not None:
            lines["threshold"] = [valley.threshold] * len(self.losses)
        series = {"x": list(self.steps), "lines": lines, "xlabel": "step", "ylabel": f"loss on {name}"}
        return {"title": "SWAD: the valley of the loss", "text": text, "series": series}

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "steps": list(self.steps),
            "sums": whole_tensors(self._sums),
            "updates": self._updates,
            "queue": [(whole_tensors(sums), count) for sums, count in self._queue],
            "closed": (whole_tensors(self._closed[0]), self._closed[1]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; call `begin` before further steps."""
        self.losses, self.steps = list(state["losses"]), list(state["steps"])
        self._sums, self._updates = list(state["sums"]), state["updates"].clone()
        self._queue, self._closed = list(state["queue"]), state["closed"]


def _zeros(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)).detach() for p in parameters]


def _added(total: tuple[list[Tensor], int], segment: tuple[list[Tensor], int], weight: int) -> tuple[list[Tensor], int]:
    """Add a segment `weight` times to sums and count; changes `total` in place."""
    if weight:
        torch._foreach_add_(total[0], segment[0], alpha=weight)
    return total[0], total[1] + weight * segment[1]
