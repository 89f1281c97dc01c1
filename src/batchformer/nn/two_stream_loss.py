"""The loss over both streams, and a guard that warns once if nothing is learnt through the module."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError, check_choice
from batchformer.nn.inputs import as_number, is_whole
from batchformer.nn.streams import count_rows, plain_rows, related_rows, repeat_targets

WARNING = (
    "the related stream stays at chance (training loss {related:.2f}; a constant prediction has {chance:.2f}) while "
    'the plain one has learnt ({plain:.2f}), so nothing is learnt through BatchFormer: use variant="stable", a lower '
    "dropout, or fewer places (blocks=[8])."
)


class TwoStreamLoss(nn.Module):
    """Applies any criterion to the outputs of an attached model, with targets repeated to match the rows.

    `scale="mean"` is Algorithm 1: the criterion over all 2B rows, which is the mean of both streams.
    `scale="released"` is what the released BalancedSoftmax code computes, L_related + L_plain + L_stacked. For a
    criterion that averages this is 1.5 (L_plain + L_related), three times the mean, which in effect multiplies the
    learning rate by three. With a single stream (eval, baseline, `streams="single"`) both are the criterion itself. A
    criterion with `reduction="none"` returns one value per image, the mean of its two rows. A criterion that compares
    rows or depends on their order (contrastive, JSD over augmentation splits) is not a mean over rows: compute it for
    each stream separately (docs/attach.md). The criterion's attributes can be read and set through this object, as some
    frameworks do (fastai: `reduction`, `activation`, `decodes`).
    """

    def __init__(self, criterion: Callable[[Any, Any], Tensor], scale: Literal["mean", "released"] = "mean") -> None:
        super().__init__()
        check_choice("scale", scale, ("mean", "released"))
        if isinstance(criterion, type) or not callable(criterion):
            raise UserError(
                f"TwoStreamLoss needs something it can call with outputs and targets, got {criterion!r}: create the "
                "criterion first, TwoStreamLoss(nn.CrossEntropyLoss())."
            )
        if any(kind.__name__ == "JsdCrossEntropy" for kind in type(criterion).__mro__):
            raise UserError(
                "TwoStreamLoss cannot take JsdCrossEntropy, which cuts the rows into augmentation splits by their "
                "place: compute it for each stream separately, (loss(attachment.plain(logits), labels) + "
                "loss(attachment.related(logits), labels)) / 2."
            )
        self.scale = scale  # before the criterion, which may have a scale of its own
        self.criterion = criterion

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        repeated = repeat_targets(targets, outputs)
        if self.scale == "mean" or repeated is targets:
            loss = self.criterion(outputs, repeated)
            by_row = (
                repeated is not targets and isinstance(loss, Tensor) and loss.ndim and len(loss) == count_rows(outputs)
            )
            return (plain_rows(loss) + related_rows(loss)) / 2 if by_row else loss
        return 1.5 * (self.criterion(plain_rows(outputs), targets) + self.criterion(related_rows(outputs), targets))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            criterion = _criterion_of(self)
            if name.startswith("__") or not hasattr(criterion, name):
                raise
            return getattr(criterion, name)

    def __setattr__(self, name: str, value: Any) -> None:
        criterion = _criterion_of(self)
        own = name in self.__dict__ or hasattr(type(self), name) or name == "criterion"
        if criterion is None or own or not hasattr(criterion, name):
            super().__setattr__(name, value)
        else:
            setattr(criterion, name, value)

    def extra_repr(self) -> str:
        return f"scale={self.scale!r}"


def _criterion_of(loss: TwoStreamLoss) -> Any:
    """The criterion; None while the loss is being constructed or unpickled."""
    held = loss.__dict__
    return held.get("criterion", held.get("_modules", {}).get("criterion"))


class StreamGuard:
    """Compares the training losses of plain and related rows, and warns once if the related stream learns nothing.

    After many stacked modules as published (post-LN, dropout 0.5), little information about an image is left in its
    related row, so the loss of these rows stays at that of a constant prediction for a long time or permanently: some
    runs recover and end with equal losses of both streams, others do not (docs/stability.md). Until then the shared
    blocks learn nothing from them. The papers do not mention this and their code does not check it. The sum of both
    losses decreases as usual, and a run that does not recover is only a more expensive baseline.

        guard = bf.StreamGuard(num_classes)
        for images, labels in loader:
            rows = F.cross_entropy(logits, bf.repeat_targets(labels, logits), reduction="none")
            guard.update_rows(rows, attachment)

    Losses are summed on their device, without host synchronisation except once every `every` steps. With a captured
    CUDA graph call `add` inside and `tick` outside.

    Args:
        classes: the number of classes, or the number of training images of each class. It determines the loss of the
            best constant prediction, the entropy of the labels: log(classes) if all are equally frequent, even if
            labels are mixed or smoothed.
        every: steps between two checks; a check reads the mean losses of those steps.
        warmup: number of steps at the start that are not checked.
        looks: number of consecutive checks that must agree.
        at_chance: the related stream is at chance if its loss is at least this fraction of the constant prediction's.
        has_learnt: the plain stream has learnt if its loss is at most this fraction of it. Once is enough while the
            related stream is at chance, since the related rows may make the plain ones worse again.
    """

    def __init__(
        self,
        classes: int | Sequence[float],
        *,
        every: int = 100,
        warmup: int = 0,
        looks: int = 3,
        at_chance: float = 0.97,
        has_learnt: float = 0.85,
    ) -> None:
        self.chance = chance_loss(classes)
        if not is_whole(every) or not is_whole(looks):
            raise UserError(f"StreamGuard needs every and looks of 1 or more, got every={every} and looks={looks}.")
        if not as_number(warmup) >= 0:
            raise UserError(f"StreamGuard: warmup={warmup!r} must be a number of steps, 0 or more.")
        for name, part in (("at_chance", at_chance), ("has_learnt", has_learnt)):
            if not as_number(part) > 0:
                raise UserError(f"StreamGuard: {name}={part!r} must be a part of the loss at chance, above 0.")
        self.every, self.warmup, self.looks = every, warmup, looks
        self.at_chance, self.has_learnt = at_chance, has_learnt
        self.warned = False
        self._steps = self._steps_in_sums = self._dead_checks = 0
        self._plain_best = math.inf  # of the checks since the related stream has been at chance
        self._sums: Tensor | None = None  # plain, related

    def update(self, plain_loss: Float[Tensor, ""] | float, related_loss: Float[Tensor, ""] | float) -> None:
        """One step: the mean loss of the plain rows and of the related ones."""
        self.add(plain_loss, related_loss)
        self.tick()

    def update_rows(self, losses: Float[Tensor, " rows"], attachment: Any) -> None:
        """One step, from the loss of every row and the handle that tells the streams apart.

        Where there are no two streams (eval, disabled, `streams="single"`) it is no step, so a loss function that also
        serves evaluation may call it.
        """
        related = attachment.related(losses)
        if related is not None and len(related) < len(losses):
            self.update(attachment.plain(losses).mean(), related.mean())

    @torch.no_grad()
    def add(self, plain_loss: Float[Tensor, ""] | float, related_loss: Float[Tensor, ""] | float) -> None:
        """The part of `update` on the device: adds to one tensor, in place."""
        losses = torch.stack([torch.as_tensor(loss).detach() for loss in (plain_loss, related_loss)]).double()
        if losses.ndim > 1:
            raise UserError("StreamGuard: give the mean loss of each stream, or the loss of every row to update_rows.")
        if self._sums is None:
            self._sums = torch.zeros_like(losses)
        self._sums.add_(losses)

    def tick(self) -> None:
        """The part of `update` on the host: count the step, and check the losses every `every` steps."""
        self._steps += 1
        self._steps_in_sums += 1
        if self._steps == self.warmup:
            self._reset_sums()
        elif self._steps_in_sums >= self.every and self._steps > self.warmup:
            self._check()

    def _check(self) -> None:
        assert self._sums is not None
        plain, related = (self._sums / self._steps_in_sums).tolist()
        self._reset_sums()
        at_chance = related >= self.at_chance * self.chance
        self._plain_best = best = min(plain, self._plain_best) if at_chance else math.inf
        self._dead_checks = self._dead_checks + 1 if best <= self.has_learnt * self.chance else 0
        if self._dead_checks >= self.looks and not self.warned:
            self.warned = True
            warnings.warn(WARNING.format(plain=best, related=related, chance=self.chance), UserWarning, stacklevel=1)

    def _reset_sums(self) -> None:
        if self._sums is not None:
            self._sums.zero_()
        self._steps_in_sums = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, so that a resumed run warns like an uninterrupted one."""
        sums = [0.0, 0.0] if self._sums is None else self._sums.tolist()
        return {
            "sums": sums,
            "steps": self._steps,
            "steps_in_sums": self._steps_in_sums,
            "dead_looks": self._dead_checks,
            "plain_best": self._plain_best,
            "warned": self.warned,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        self._sums = torch.tensor(state["sums"], dtype=torch.float64, device=device)
        self._steps, self._steps_in_sums = state["steps"], state["steps_in_sums"]
        self._dead_checks, self.warned = state["dead_looks"], state["warned"]
        self._plain_best = state.get("plain_best", math.inf)  # states of earlier versions have none


def chance_loss(classes: int | Sequence[float]) -> float:
    """Cross entropy of the best prediction that ignores its input: the entropy of the labels."""
    if isinstance(classes, int | Integral):
        counts = [1.0] * int(classes)
    else:
        counts = [as_number(count) for count in classes] if isinstance(classes, Iterable) else []
    total = sum(counts)
    if sum(count > 0 for count in counts) < 2 or not all(0 <= count < math.inf for count in counts):
        raise UserError(
            "StreamGuard needs two or more classes: pass their number, or the number of training images of each."
        )
    return -sum(count / total * math.log(count / total) for count in counts if count > 0)
