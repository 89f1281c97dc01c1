"""What attach really puts into a model: objects in the place of the `forward` of single layers.

Why an instance `forward` and neither a hook nor a wrapper: keys stay, `deepcopy` and pickling give a copy that drives
itself, and `torch.compile` guards on it, whereas it skips guards on hooks (an attached model compiled after a plain
twin would silently run plain).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from batchformer.attach.feature import Channels
from batchformer.nn import BatchFormer
from batchformer.nn.batchformer_v2 import with_channels_last


def weakly(module: nn.Module | None) -> weakref.ref[nn.Module] | None:
    return None if module is None else weakref.ref(module)


class InstanceForward:
    """An object that stands in for the `forward` (or another method) of one module, and can be taken away again.

    The module holds this object, which in turn holds the module weakly: else a forgotten model would stay in memory,
    with all its weights, until Python's garbage collector happens to look for cycles.
    """

    def __init__(self, layer: nn.Module, name: str = "forward") -> None:
        self._layer, self.name = weakly(layer), name
        self.previous: Callable[..., Any] | None = None  # what stood there when it was put
        self.removed = False

    @property
    def layer(self) -> Any:
        """The module; None once nobody holds it any more: the model is gone, or has another one in its place."""
        return None if self._layer is None else self._layer()

    @layer.setter
    def layer(self, layer: nn.Module | None) -> None:
        self._layer = weakly(layer)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return getattr(type(self.layer), self.name)(self.layer, *args, **kwargs)

    def put(self) -> None:
        """On top of what stands there: several on one layer must be taken away in reverse order."""
        layer = self.layer
        self.previous = layer.__dict__.get(self.name)
        layer.__dict__[self.name] = self

    def remove(self) -> None:
        self.removed = True  # somebody may have wrapped this `forward` in another since: then it only passes through
        self.take_away()

    def take_away(self) -> None:
        layer = self.layer
        if layer is not None and layer.__dict__.get(self.name) is self:
            del layer.__dict__[self.name]
            if self.previous is not None:
                layer.__dict__[self.name] = self.previous

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, with the module itself: a weak reference cannot travel."""
        return {name: value() if isinstance(value, weakref.ref) else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layer = state["_layer"]


def relates_in_eval(feature: Any) -> bool:
    """Whether a place relates the rows of the batch although the model is in eval mode (V2, Table 12)."""
    return feature.infers and feature.module.enabled and not feature.module.training


def relate_alone(module: BatchFormer, x: Tensor, channels: Channels, valid: Tensor | None = None) -> Tensor:
    """All rows related, in one stream, whatever the layout."""
    if channels == "last" or x.ndim == 2:
        return module.relate(x, valid)
    return with_channels_last(partial(module.relate, valid=valid), x)


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
        self.infers = False  # see `Attachment.infer_with_batch`

    def __call__(self, x: Tensor, first: bool, last: bool) -> Tensor:
        if first or self.streams is None or self.read is not x:
            self.read, self.streams = x, self._relate(x)
        out = self.streams
        if self.module.active:
            self.rows = out.shape[0]
        if last:
            self.read = self.streams = None
        return out

    def forget(self) -> None:
        """After a forward that failed between two heads: what it left would keep its whole graph in memory."""
        self.rows = self.read = self.streams = None

    def _relate(self, x: Tensor) -> Tensor:
        if not self.module.active:
            return relate_alone(self.module, x, self.channels)
        if self.channels == "last" or x.ndim == 2:
            return self.module(x)
        return with_channels_last(self.module, x)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made between two heads must not carry half a forward.
        return {**self.__dict__, "rows": None, "read": None, "streams": None}


class Before(InstanceForward):
    """The instance `forward` of a layer: relate its input, then do what the layer does."""

    def __init__(self, layer: nn.Module, feature: Once, first: bool = True, last: bool = True) -> None:
        super().__init__(layer)
        self.feature, self.first, self.last = feature, first, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.removed and (self.feature.module.active or relates_in_eval(self.feature)):
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
