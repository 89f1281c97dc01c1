"""What attach really puts into a model: one object as the instance `forward` of the layer it stands before.

Why an instance `forward` and neither a hook nor a wrapper: keys stay, `deepcopy` and pickling give a copy that drives
itself, and `torch.compile` guards on it, whereas it skips guards on hooks (an attached model compiled after a plain
twin would silently run plain).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from batchformer.attach.after import InstanceForward
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
        self.rows: int | None = None  # that left the module in the forward under way, for `RowCheck`
        self.read: Tensor | None = None
        self.streams: Tensor | None = None

    def __call__(self, x: Tensor, first: bool, last: bool) -> Tensor:
        if first or self.streams is None or self.read is not x:
            self.read, self.streams = x, self._relate(x)
        out = self.streams
        self.rows = out.shape[0]
        if last:
            self.read = self.streams = None
        return out

    def _relate(self, x: Tensor) -> Tensor:
        if self.channels == "last" or x.ndim == 2:
            return self.module(x)
        return self.module(x.movedim(1, -1)).movedim(-1, 1)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made between two heads must not carry half a forward.
        return {**self.__dict__, "rows": None, "read": None, "streams": None}


class Before(InstanceForward):
    """The instance `forward` of a layer: relate its input, then do what the layer does."""

    def __init__(self, layer: nn.Module, feature: Once, first: bool = True, last: bool = True) -> None:
        super().__init__(layer)
        self.feature, self.first, self.last = feature, first, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.removed and self.feature.module.active:
            if args:
                args = (self.feature(args[0], self.first, self.last), *args[1:])
            else:  # the layer's input by name, whatever that is
                name = next(iter(kwargs))
                kwargs = {**kwargs, name: self.feature(kwargs[name], self.first, self.last)}
        return self.original(*args, **kwargs)


class Held(nn.ModuleList):
    """Holds the modules on the model. A container that calls all its children finds one that changes nothing."""

    def forward(self, x: Any) -> Any:
        return x


class RowCheck:
    """A forward hook of the whole model: the rows that left the module must be the rows that leave the model."""

    def __init__(self, features: list[Any]) -> None:  # each with a module and the rows that left it
        self.features = features

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if not any(feature.module.active for feature in self.features):
            return
        expected = [feature.rows for feature in self.features if feature.rows is not None]
        for feature in self.features:
            feature.rows = None
        left = count_rows(outputs)
        if not expected:
            raise UserError(
                f"{type(model).__name__} went through a forward in training without calling the layer the module was "
                f"attached at, so nothing was related: attach at a layer that is called (not one whose weights are "
                f"read directly), or use `with attachment.disabled():` for this forward."
            )
        if left is not None and left != expected[0]:
            if left == 2 * expected[0] or len(set(expected)) > 1:
                cure = "the streams were opened twice on one way: name one place of it"
            else:
                cure = "the model does not pass the second stream on from there: attach at another layer"
            raise UserError(
                f"{expected[0]} rows left the module in training and {left} left {type(model).__name__}; {cure}."
            )
