"""How many attention heads a backbone has where the module goes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from batchformer.attach.locate import block_paths
from batchformer.errors import UserError
from batchformer.tasks.classification_options import InsertionOptions

DEFAULT = 4


def heads_at(net: nn.Module, options: InsertionOptions) -> int:
    """The number the options give, else the backbone's own at the places, else 4.

    V2: "the same number of heads with the corresponding baseline model" for classification; the released code and the
    papers' other tasks have 4 (F13). A CNN, and the feature in front of the classifier, have no heads of their own.
    """
    if options.heads is not None:
        return options.heads
    if not options.inside:
        return DEFAULT
    places: Sequence[str] = block_paths(net, options.blocks) if options.blocks is not None else options.after or ()
    inner = (part for place in places for part in net.get_submodule(place).modules())
    numbers_found = (getattr(part, "num_heads", None) for part in inner)
    found = {number for number in numbers_found if isinstance(number, int)}
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)))
        raise UserError(f"the backbone has {numbers} heads at the places: say model.batchformer.heads.")
    return found.pop() if found else DEFAULT
