"""The keys of an attached model in state dicts: files written while attached, and files without the module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from batchformer.errors import UserError

PREFIX = "batchformer"
_OWN_KEY = re.compile(rf"(^|\.){PREFIX}\.\d+\.layers\.\d+\.")
# What holds a model as its only child calls it so: torch.compile; FSDP; DDP, AveragedModel and timm's ModelEmaV3.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "module")


def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that was written while attached, without the module: it loads strictly into the stock model.

    What wrappers add to the keys is taken away as well: `_orig_mod.` and `_fsdp_wrapped_module.` anywhere, `module.`
    where all keys begin so (DDP and copies with averaged weights, whose counter `n_averaged` goes too). In a checkpoint
    that holds state dicts among other things each of them is converted and the rest stays. That includes the state of
    an optimizer, which still counts the module's parameters: make a new optimizer.
    """
    if not isinstance(state_dict, Mapping):
        raise UserError(
            f"plain_state_dict takes a state dict and got {type(state_dict).__name__}: give it model.state_dict(), or "
            f"what torch.load returns for a file."
        )
    if any(map(_holds_weights, state_dict.values())):
        return {key: plain_state_dict(part) if _holds_weights(part) else part for key, part in state_dict.items()}
    if not _is_state_dict(state_dict):
        raise UserError("plain_state_dict found no weights: give it a state dict, or a checkpoint that holds one.")
    plain = {key: value for key, value in state_dict.items() if not _OWN_KEY.search(key)}
    for inner in WRAPPERS[:2]:
        plain = {key.replace(f"{inner}.", ""): value for key, value in plain.items()}
    while plain and all(key.startswith("module.") for key in plain if key != "n_averaged"):
        plain = {key.removeprefix("module."): value for key, value in plain.items() if key != "n_averaged"}
    return plain


def _is_state_dict(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and all(isinstance(key, str) for key in part)
        and any(isinstance(value, Tensor) for value in part.values())
    )


def _holds_weights(part: Any) -> bool:
    return _is_state_dict(part) or (isinstance(part, Mapping) and any(map(_is_state_dict, part.values())))


class _MissingKey(str):
    """The name of a missing key; in the message of a strict load, which formats it, with what to do about it."""

    def __format__(self, _: str) -> str:
        return (
            f"{self!s} (the file was written without the module: load it before attach, or with strict=False, which "
            f"leaves the module as it is)"
        )


def explain_missing(modules: nn.Module, incompatible: Any) -> None:
    """A hook after loading: where a file has none of the module's weights, the error says what to do."""
    missing = incompatible.missing_keys
    own = [number for number, key in enumerate(missing) if _OWN_KEY.search(key)]
    if own and len(own) == len(modules.state_dict()):
        missing[own[-1]] = _MissingKey(missing[own[-1]])
