"""The objects with which attach replaces the `forward` of single layers, to relate their input or output.

Why an instance `forward` and neither a hook nor a wrapper: keys stay, `deepcopy` and pickling give a copy that uses
its own modules, and `torch.compile` guards on it, whereas it skips guards on hooks (an attached model compiled after a
plain twin would silently run plain).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from batchformer.attach.dry_run import argument_names
from batchformer.attach.locate import Channels
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.batchformer_v2 import BatchFormerV2, with_channels_last
from batchformer.nn.streams import alike, count_rows, twice

if TYPE_CHECKING:
    from batchformer.attach.doubled_input import PlainHalfOnly
    from batchformer.attach.hooks import InputHook

_MASK = "attention_mask"  # the argument of transformers' encoder layers that marks image positions


def weak_reference(module: nn.Module | None) -> weakref.ref[nn.Module] | None:
    return None if module is None else weakref.ref(module)


class InstanceForward:
    """An object that stands in for the `forward` (or another method) of one module, and can be taken away again.

    The module holds this object, which holds the module by a weak reference: with a reference cycle a model that goes
    out of scope would keep its memory until Python's garbage collector runs.
    """

    def __init__(self, layer: nn.Module, name: str = "forward") -> None:
        self._layer, self.name = weak_reference(layer), name
        self.previous: Callable[..., Any] | None = None  # what stood there when it was put
        self.removed = False

    @property
    def layer(self) -> Any:
        """The module; None once nobody holds it any more: the model is gone, or has another one in its place."""
        return None if self._layer is None else self._layer()

    @layer.setter
    def layer(self, layer: nn.Module | None) -> None:
        self._layer = weak_reference(layer)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return getattr(type(self.layer), self.name)(self.layer, *args, **kwargs)

    def put(self) -> None:
        """Stack on top of the current forward: several on one layer must be removed in reverse order."""
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
        """For copies and pickles, with the module itself: a weak reference cannot be copied or pickled."""
        return {name: value() if isinstance(value, weakref.ref) else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layer = state["_layer"]


class ModuleHolder(nn.ModuleList):
    """Registers the modules on the model. Calling it, as a container does with all its children, changes nothing."""

    def forward(self, x: Any) -> Any:
        return x


def relates_in_eval(site: SharedFeature | After) -> bool:
    """Whether the module is used there although the model is in eval mode (V2, Table 12)."""
    return site.infers and site.module.enabled and not site.module.training


def in_layout(relate: Callable[[Tensor], Tensor], x: Tensor, channels: str) -> Tensor:
    """Wrap `relate`, which expects channels last, for features of this layout."""
    return relate(x) if channels == "last" or x.ndim == 2 else with_channels_last(relate, x)


class Site:
    """A place where the module is applied, and the number of rows that left it there in training."""

    def __init__(self) -> None:
        self.rows: int | None = None  # in the forward under way, for `hooks.RowCheck`
        self.made: set[int] = set()  # in every forward so far, for `Attachment.plain`
        self.compiled = False  # then `made` is not complete: adding to it would fix the shapes of the compiled code
        self.infers = False  # see `Attachment.infer_with_batch`

    def note(self, rows: int) -> None:
        self.rows = rows
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self.made.add(rows)

    def forget(self) -> None:
        self.rows, self.made = None, set()


class SharedFeature(Site):
    """One feature, related once per forward, for the several heads that read it.

    The first head of the model's order computes both streams and leaves them here; the last one takes them away. Which
    is which was seen in a dry run, so nothing depends on what earlier forwards left behind.
    """

    def __init__(self, module: BatchFormer, channels: Channels) -> None:
        super().__init__()
        self.module, self.channels = module, channels
        self.read: Tensor | None = None
        self.streams: Tensor | None = None

    def __call__(self, x: Tensor, first: bool, last: bool) -> Tensor:
        if first or self.streams is None or self.read is not x:
            relate = self.module if self.module.active else self.module.relate  # both streams, or all rows in one
            self.read, self.streams = x, in_layout(relate, x, self.channels)
        out = self.streams
        if self.module.active:
            self.note(out.shape[0])
        if last:
            self.read = self.streams = None
        return out

    def forget(self) -> None:
        """Clean up after a forward that failed between two heads, which would keep its whole graph in memory."""
        super().forget()
        self.read = self.streams = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy made between two heads must not contain half a forward.
        return {**self.__dict__, "rows": None, "made": set(), "read": None, "streams": None}


class Before(InstanceForward):
    """The instance `forward` of a layer: relate its input, then call the layer."""

    def __init__(self, layer: nn.Module, feature: SharedFeature, first: bool = True, last: bool = True) -> None:
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


class After(InstanceForward, Site):
    """Call the layer, then relate its output (of nested tuples, the first tensor) over the batch.

    Mostly it simply returns twice the rows and everything behind it follows; else see `doubled_input.py`. Whether it
    opens the streams is decided once, at attach: a flag that is set while running would be read again, and wrongly,
    when gradient checkpointing computes the forward anew.
    """

    def __init__(
        self,
        layer: nn.Module,
        module: BatchFormerV2,
        opens: bool,
        padding: LayerPadding | None = None,
        is_signal: bool = False,  # (B, C, length), which no shape tells from tokens (B, N, C)
    ) -> None:
        InstanceForward.__init__(self, layer)
        Site.__init__(self)
        self.module, self.opens, self.padding, self.is_signal = module, opens, padding, is_signal
        self.plain_half: PlainHalfOnly | None = None  # of a model with doubled input: the layer itself sees B rows
        self.input_hook: InputHook | None = None  # of a detector, whose images differ in size from batch to batch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not (self.module.active or relates_in_eval(self)):
            return self.original(*args, **kwargs)
        if self.plain_half is not None and self.module.active:
            args, kwargs = self.plain_half.halved(args, kwargs)
        valid = None if self.padding is None else self.padding(args, kwargs)
        return self.related(self.original(*args, **kwargs), valid)

    def related(self, out: Any, valid: Tensor | None = None) -> Any:
        """Relate the first tensor; if that doubles its rows, other tensors with as many rows are doubled too."""
        if isinstance(out, Tensor):
            relate = partial(self._relate, valid=valid)
            return with_channels_last(relate, out) if self.is_signal else relate(out)
        rows, first, items = count_rows(out), True, []
        doubles = self.module.active and self.opens
        for item in out:
            if first and count_rows(item) is not None:
                item, first = self.related(item, valid), False
            elif isinstance(item, Tensor) and item.ndim and item.shape[0] == rows and doubles and self.rows != rows:
                item = twice(item)
            items.append(item)
        return alike(out, items)

    def _relate(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if valid is None and self.padding is not None and self.module.scope == "global":
            # nothing is padded here, but it may be on other processes, and all must come with a mask
            valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if not self.module.active:
            channels = self.module.channels if x.ndim == 4 else "last"
            return in_layout(partial(self.module.relate, valid=valid), x, channels)
        x = self.module(x, valid, opens=self.opens, grid=None if self.input_hook is None else self.input_hook.canvas)
        self.note(x.shape[0])
        return x

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rows": None, "made": set()}


class LayerPadding:
    """Finds the valid positions, for `mask_padding=True`, in what an encoder layer of a detector is called with.

    A batch of images that differ in size shares one canvas: every image stands at its top left corner, the rest is
    padding. A position of BatchFormerV2 is a cell of that canvas (of several feature maps: a cell of one of them): the
    same distance from the corner in every image, not the same part of it. So the grids of all images are aligned
    whatever their sizes; beyond the edge of a smaller image a larger one finds padding to attend to, as in the released
    code. `mask_padding=True` leaves it out.

    The mask is read from the arguments, and not noted while running: when gradient checkpointing calls the layer again,
    the model may have been given other batches since.
    """

    def __init__(self, layer: nn.Module, path: str) -> None:
        names = argument_names(type(layer).forward)
        if _MASK not in names:
            raise UserError(
                f"mask_padding=True needs a layer with an argument {_MASK!r}, as the encoder layers of transformers "
                f"have; {path!r} ({type(layer).__name__}) has none: leave it out."
            )
        self.at = names.index(_MASK)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bool[Tensor, "batch position"] | None:
        """None if nothing is padded."""
        mask = args[self.at] if self.at < len(args) else kwargs.get(_MASK)
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
            raise UserError(
                f"mask_padding=True cannot read padding from a {type(mask).__name__}: build the model with "
                f'attn_implementation="sdpa" or "eager".'
            )
        if mask.ndim == 4:  # (batch, 1, query, key), the same keys for every query
            mask = mask[:, 0, 0]
        # Masks that are added to the scores have zero where one may look, and minus a lot elsewhere.
        return mask == 0 if mask.is_floating_point() else mask != 0
