"""What attach really puts into a model: one object as the instance `forward` of the layer it stands before.

Why an instance `forward` and neither a hook nor a wrapper: keys stay, `deepcopy` and pickling give a copy that drives
itself, and `torch.compile` guards on it, whereas it skips guards on hooks (an attached model compiled after a plain
twin would silently run plain).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from batchformer.attach.probe import Channels
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.streams import count_rows


class Once:
    """One feature, computed once per forward, for the several heads that read it.

    The first head of the model's order computes both streams and leaves them here; the last one takes them away. Which
    is which was seen in a dry run, so nothing depends on what earlier forwards left behind.
    """

    def __init__(self, module: BatchFormer, channels: Channels) -> None:
        self.module, self.channels = module, channels
        self.read: Tensor | None = None
        self.streams: Tensor | None = None

    def __call__(self, x: Tensor, first: bool, last: bool) -> Tensor:
        if first or self.streams is None or self.read is not x:
            self.read, self.streams = x, self._relate(x)
        out = self.streams
        if last:
            self.read = self.streams = None
        return out

    def _relate(self, x: Tensor) -> Tensor:
        if self.channels == "last" or x.ndim == 2:
            return self.module(x)
        return self.module(x.movedim(1, -1)).movedim(-1, 1)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made between two heads must not carry half a forward.
        return {**self.__dict__, "read": None, "streams": None}


class Before:
    """The instance `forward` of a layer: relate its input, then do what the layer does."""

    def __init__(self, layer: nn.Module, feature: Once, first: bool = True, last: bool = True) -> None:
        self.layer, self.feature, self.first, self.last = layer, feature, first, last
        self.previous: Callable[..., Any] | None = layer.__dict__.get("forward")

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.feature.module.active:
            x = self.feature(x, self.first, self.last)
        if self.previous is not None:
            return self.previous(x, *args, **kwargs)
        return type(self.layer).forward(self.layer, x, *args, **kwargs)

    def put(self) -> None:
        self.layer.__dict__["forward"] = self

    def remove(self) -> None:
        if self.layer.__dict__.get("forward") is self:
            del self.layer.__dict__["forward"]
            if self.previous is not None:
                self.layer.__dict__["forward"] = self.previous


class RowCheck:
    """A forward hook of the whole model: in training with doubled streams, twice the rows must leave it."""

    def __init__(self, modules: list[BatchFormer]) -> None:
        self.modules = modules

    def __call__(self, model: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if not any(module.active and module.streams == "duplicate" for module in self.modules):
            return
        entered, left = count_rows(args), count_rows(outputs)
        if entered is not None and left is not None and left != 2 * entered:
            raise UserError(
                f"{entered} rows entered {type(model).__name__} in training and {left} left it, where two streams must "
                f"give {2 * entered}: the model does not pass the second stream on from where it was attached; attach "
                f"before another layer."
            )
