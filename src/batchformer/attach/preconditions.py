"""Preconditions of attach: refuse non-models, unsupported models and wrong options first."""

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from batchformer.attach.dry_run import takes_padded_images
from batchformer.attach.locate import Channels
from batchformer.attach.per_stream import BatchNormMode
from batchformer.errors import UserError, check_choice, nearest
from batchformer.nn import BatchFormer

# By name: importing FSDP takes longer than attaching.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def refuse_what_is_no_model(model: Any, call: str) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{call} takes a model, an nn.Module, and got {type(model).__name__}: give it the model itself."
        )


def refuse_spread_over_processes(model: nn.Module) -> None:
    """A wrapper does not synchronise parameters that are added later: those of the processes would differ unnoticed."""
    for part in model.modules():
        found = next((kind.__name__ for kind in type(part).__mro__ if kind.__name__ in _WRAPPERS), None)
        if found is not None:
            how = "sharding it" if found == "FSDPModule" else f"wrapping the model in {found}"
            raise UserError(f"attach before {how}: parameters that are added later are not synchronised.")


def refuse_attached_parts(model: nn.Module, handle: str) -> None:
    """Two attachments in one forward would open four streams."""
    for name, part in model.named_modules():
        if name and handle in part.__dict__:
            raise UserError(
                f"a BatchFormer is already attached to {name!r}, a part of this {type(model).__name__}: detach that "
                f"one first, or leave it and do not attach to the whole."
            )


def refuse_unknown_options(keywords: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(BatchFormer.__init__).parameters if name not in ("self", "dim")]
    for name in keywords:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near[0]!r}" if near else f"there are {', '.join(known)}"
            raise UserError(f"attach has no option {name!r}: {hint}.")


def check_options(batch_norm: Any, channels: Any, **places: Any) -> None:
    """At most one of before=, after=, blocks= and encoder_layers= may be given."""
    check_choice("batch_norm", batch_norm, get_args(BatchNormMode))
    if channels is not None:
        check_choice("channels", channels, get_args(Channels))
    if sum(place is not None for place in places.values()) > 1:
        raise UserError("attach takes only one of before=, after=, blocks= and encoder_layers=.")


def check_before(model: nn.Module, **only_after: bool) -> None:
    """Refuse options that need after= or similar if the module is inserted before a layer; and refuse detectors."""
    for name, given in only_after.items():
        if given:
            raise UserError(f"{name}=True needs after=, blocks= or encoder_layers=: leave it out.")
    if takes_padded_images(model) or isinstance(model._modules.get("bbox_predictor"), nn.Module):
        where = "encoder_layers=[0], as the paper does," if takes_padded_images(model) else "blocks=[0]"  # YOLOS
        raise UserError(
            f"{type(model).__name__} is a detector, where the second stream must start inside the encoder: pass "
            f"{where} or after=[paths]."
        )
