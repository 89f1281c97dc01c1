"""The keys of an attached model in state dicts: files written while attached, and files without the module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from batchformer.errors import UserError

PREFIX = "batchformer"
_OWN_KEY = re.compile(rf"(^|\.){PREFIX}\.\d+\.layers\.\d+\.")
# Attribute of the wrapped model in torch.compile; FSDP; DDP, AveragedModel and timm's ModelEmaV3.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "module")


def plain_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the module from a state dict saved while attached, so that it loads strictly into the plain model.

    Prefixes of wrappers are removed too: `_orig_mod.` and `_fsdp_wrapped_module.` anywhere, `module.` if all keys start
    with it (DDP and copies with averaged weights, whose counter `n_averaged` is also removed). In a checkpoint with
    several state dicts each one is converted, and everything else is unchanged. That includes the optimizer state,
    which still contains the module's parameters: create a new optimizer.
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
    """The name of a missing key; when formatted in the message of a strict load, it includes how to fix it."""

    def __format__(self, _: str) -> str:
        return (
            f"{self!s} (the file was written without the module: load it before attach, or with strict=False, which "
            f"leaves the module unchanged)"
        )


def explain_missing(modules: nn.Module, incompatible: Any) -> None:
    """Hook after loading: if a file has none of the module's weights, the error says what to do."""
    missing = incompatible.missing_keys
    own = [number for number, key in enumerate(missing) if _OWN_KEY.search(key)]
    if own and len(own) == len(modules.state_dict()):
        missing[own[-1]] = _MissingKey(missing[own[-1]])
