"""BatchFormerV2 after named submodules: what is put on them, and on what runs before and behind.

Mostly the insertion simply returns twice the rows and everything behind it follows. Where a parent has noted the batch
size before the insertion (XCiT's class token), the whole model runs *wide*: `entry.Entry` hands it every image twice,
the submodules before the insertion run *thin* on the first half and repeat what they give: nothing is computed twice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from batchformer.attach.arguments import Arguments, Place, change_tensors, given_tensors
from batchformer.attach.insertion import InstanceForward, relate_alone, relates_in_eval
from batchformer.attach.padding import LayerPadding
from batchformer.nn.batchformer_v2 import BatchFormerV2, with_channels_last
from batchformer.nn.streams import alike, count_rows, repeat_rows, twice

if TYPE_CHECKING:
    from batchformer.attach.entry import Entry


class After(InstanceForward):
    """Do what the layer does, then relate its output (of nested tuples, the first tensor) over the batch.

    Whether it opens the streams is decided once, at attach: a flag that is set while running would be read again, and
    wrongly, when gradient checkpointing computes the forward anew.
    """

    def __init__(
        self,
        layer: nn.Module,
        module: BatchFormerV2,
        opens: bool,
        padding: LayerPadding | None = None,
        is_signal: bool = False,  # (B, C, length), which no shape tells from tokens (B, N, C)
    ) -> None:
        super().__init__(layer)
        self.module, self.opens, self.padding, self.is_signal = module, opens, padding, is_signal
        self.thin: Thin | None = None
        self.entry: Entry | None = None  # of a detector, whose images differ in size from batch to batch
        self.rows: int | None = None
        self.infers = False  # see `Attachment.infer_with_batch`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not (self.module.active or relates_in_eval(self)):
            return self.original(*args, **kwargs)
        if self.thin is not None and self.module.active:
            args, kwargs = self.thin.halved(args, kwargs)
        valid = None if self.padding is None else self.padding(args, kwargs)
        return self.related(self.original(*args, **kwargs), valid)

    def related(self, out: Any, valid: Tensor | None = None) -> Any:
        """The first tensor related; where that has doubled its rows, tensors beside it that had as many are doubled."""
        if isinstance(out, Tensor):
            relate = partial(self._relate, valid=valid)
            return with_channels_last(relate, out) if self.is_signal else relate(out)
        rows, first, items = count_rows(out), True, []
        for item in out:
            if first and count_rows(item) is not None:
                item, first = self.related(item, valid), False
            elif isinstance(item, Tensor) and item.ndim and item.shape[0] == rows and self._doubled(rows):
                item = twice(item)
            items.append(item)
        return alike(out, items)

    def _relate(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if valid is None and self.padding is not None and self.module.scope == "global":
            # nothing is padded here, but it may be on other processes, and all must come with a mask
            valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if not self.module.active:
            return relate_alone(self.module, x, self.module.channels if x.ndim == 4 else "last", valid)
        x = self.module(x, valid, opens=self.opens, grid=None if self.entry is None else self.entry.canvas)
        self.rows = x.shape[0]
        return x

    def forget(self) -> None:
        self.rows = None

    def _doubled(self, rows: int | None) -> bool:
        return self.module.active and self.opens and self.rows != rows

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rows": None}


class Thin(InstanceForward):
    """A submodule before the insertion of a wide model: it sees each image once and gives its output twice.

    `in_eval` and `in_training` say which of its arguments have the batch on their first axis in these modes: seen in
    dry runs with different numbers of images, because a shape alone does not tell (four levels are not two images
    doubled). Positions that are the same for all images may be each image's own where training leaves patches out.
    """

    def __init__(
        self,
        layer: nn.Module,
        module: BatchFormerV2,
        in_eval: frozenset[Place],
        in_training: frozenset[Place],
    ) -> None:
        super().__init__(layer)
        self.module, self.in_eval, self.in_training = module, in_eval, in_training

    @property
    def places(self) -> frozenset[Place]:
        return self.in_training if self.layer.training else self.in_eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not self.module.active or not self.places:
            return self.original(*args, **kwargs)
        args, kwargs = self.halved(args, kwargs)
        rows = next(x.shape[0] for place, x in given_tensors(args, kwargs) if place in self.places)
        return repeat_rows(self.original(*args, **kwargs), rows)

    def halved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return change_tensors(args, kwargs, self.places, lambda x: x[: x.shape[0] // 2])
