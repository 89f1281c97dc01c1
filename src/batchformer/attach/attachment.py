"""attach, detach, and the handle between them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from batchformer.attach.contexts import temporary_attributes
from batchformer.attach.dry_run import Example
from batchformer.attach.hooks import InputHook, RowCheck, TrainingCheck, remove_hooks
from batchformer.attach.insertion import InstanceForward, ModuleHolder, relates_in_eval
from batchformer.attach.locate import Channels, block_paths, encoder_layer_paths, find_classifiers
from batchformer.attach.per_stream import BatchNormMode, MeanOfStreams, SeparateNorm
from batchformer.attach.plan import Point
from batchformer.attach.planner import norms_behind_heads, plan_after, points_before
from batchformer.attach.preconditions import (
    check_before,
    check_options,
    refuse_attached_parts,
    refuse_spread_over_processes,
    refuse_unknown_options,
    refuse_what_is_no_model,
)
from batchformer.attach.state_dicts import PREFIX, WRAPPERS, explain_missing
from batchformer.errors import UserError
from batchformer.kernels.backend import Choice
from batchformer.nn.streams import count_rows, plain_count, plain_rows, related_rows

_HANDLE = "_batchformer_attachment"
T = TypeVar("T")


@torch.inference_mode(False)  # parameters created in inference mode could never be trained
def attach(
    model: nn.Module,
    before: str | Sequence[str] | None = None,
    *,
    after: str | Sequence[str] | None = None,
    blocks: Sequence[int] | Literal["all"] | None = None,
    encoder_layers: Sequence[int] | Literal["all"] | None = None,
    share: bool = False,
    batch_norm: BatchNormMode = "separate",
    mask_padding: bool = False,
    dim: int | None = None,
    channels: Channels | None = None,
    example_inputs: Any = None,
    **module_keywords: Any,
) -> Attachment:
    """Insert a BatchFormer before the classifier of `model` (in place) and return a handle that can remove it again.

    With `after=` or `blocks=` insert BatchFormerV2 instead, at every token or pixel of the named submodules' outputs.

    Args:
        model: any `nn.Module`.
        before: path of the submodule (or several) whose input goes through the module; None finds the classifier(s).
        after: path of the submodule (or several) whose output goes through the module at every position. The first one
            the model calls opens the second stream, later ones act on it.
        blocks: the same by number, counted from 0, or "all", for models with a standard name for their blocks. The
            papers count from 1 and insert after: their "first layer" is block 0.
        encoder_layers: the same for the layers of a detector's encoder (transformers' DETR family).
        share: one module for all insertion points instead of one each (as for the experts of RIDE).
        batch_norm: whether BatchNorm after the insertion normalises each stream separately, with only plain rows
            updating its running statistics ("separate"), or both together ("joint", as published).
        mask_padding: in batches of images or texts of different sizes, padded positions pass the module unchanged and
            nothing attends to them (transformers' detectors and text models, by their masks). As published they take
            part.
        dim, channels: width and layout of the feature, if neither the layer nor a dry run determines them.
        example_inputs: a batch for dry runs, if the model takes more than images (or images of an unusual size that is
            not in its `default_cfg`): a tensor, a tuple, or a dict with the argument names of `forward`.
        module_keywords: every keyword of `BatchFormer`: heads, hidden_dim, dropout, layers, norm, layer_scale, variant;
            group_size, scope ("local", or "global" for the batch of all processes) and process_group select which
            samples attend to each other; streams; backend and memory select the implementation
            (`Attachment.backend_used`).

    Heads that read the same feature share one module, computed once; heads that read different features get one each.
    In eval mode the outputs of the attached model are bit-identical to the plain one. In training it returns 2B rows
    (plain, then related): compute the loss with `TwoStreamLoss` or `repeat_targets`. `labels` that a model accepts in
    its `forward` (as in transformers) are repeated automatically. The parameters are registered on the model under
    `batchformer.`; an optimizer created before attach does not have them.
    """
    refuse_what_is_no_model(model, "attach")
    model = getattr(model, "_orig_mod", model)  # compiled
    refuse_spread_over_processes(model)
    if (existing := attachment_of(model)) is not None:
        raise UserError(
            f"a BatchFormer is already attached {existing.points[0].side} {', '.join(map(repr, existing.paths))}: "
            f"detach it first, or name all insertion points in one call, {existing.points[0].side}=[...]."
        )
    refuse_attached_parts(model, _HANDLE)
    refuse_unknown_options(module_keywords)
    check_options(batch_norm, channels, before=before, after=after, blocks=blocks, encoder_layers=encoder_layers)
    example = Example.of(example_inputs)
    if blocks is not None:
        after = block_paths(model, blocks)
    elif encoder_layers is not None:
        after = encoder_layer_paths(model, encoder_layers)
    if after is not None:
        plan = plan_after(
            model,
            [after] if isinstance(after, str) else list(after),
            share=share,
            batch_norm=batch_norm,
            mask_padding=mask_padding,
            dim=dim,
            channels=channels,
            keywords=module_keywords,
            example=example,
        )
        return Attachment(model, plan.points(), plan.input_hook, plan.supports)
    check_before(model, mask_padding=mask_padding)
    paths = [before] if isinstance(before, str) else find_classifiers(model) if before is None else list(before)
    points = points_before(model, paths, share, dim, channels, module_keywords, example)
    norms = norms_behind_heads(model, points, batch_norm, example)
    return Attachment(model, points, InputHook(model, points[0].module), norms)


def detach(model: nn.Module) -> nn.Module:
    """Remove everything that `attach` added; returns the same object, with its original keys.

    For a wrapped model (DDP, FSDP, `AveragedModel`, timm's `ModelEmaV3`, `torch.compile`) the wrapper is returned. To
    continue training, wrap the model again in DDP or FSDP, which still expect gradients of the module.
    """
    refuse_what_is_no_model(model, "detach")
    attachment = attachment_of(model)
    if attachment is None:
        raise UserError(
            f"nothing is attached to this {type(_unwrap(model)).__name__}: call detach on the model given to attach."
        )
    attachment.detach()
    return model


def attachment_of(model: nn.Module) -> Attachment | None:
    """The handle of an attached model, also if wrapped, else None. A copy of an attached model has its own handle."""
    model = _unwrap(model)
    held = model.__dict__.get(_HANDLE)
    return None if held is None else held.handle_of(model)


class _Attached:
    """The state of an attachment that is stored on the attached model: everything except the model.

    Storing the handle, which references the model, would create a reference cycle: an attached model that goes out of
    scope would keep its memory until Python's garbage collector runs.
    """

    def __init__(self, points: list[Point], pieces: list[InstanceForward], modules: ModuleHolder, prefix: str) -> None:
        self.points, self.pieces, self.modules, self.prefix = points, pieces, modules, prefix
        self.training_check = TrainingCheck(modules)
        self.handle: weakref.ref[Attachment] | None = None

    def handle_of(self, model: nn.Module) -> Attachment:
        """The existing handle if it is still referenced, otherwise a new one."""
        handle = None if self.handle is None else self.handle()
        if handle is None:
            handle = Attachment.__new__(Attachment)
            handle._hold(model, self)
        return handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}


class Attachment:
    """The handle of an attached model, returned by `attach`.

    The released code builds the module into each network and skips it at test time; here `detach` removes it and
    returns the same model. `plain`, `related` and `stream_losses` separate the streams, `disabled` runs the model
    without the module, and `infer_with_batch` uses the module at test time, which the papers do only as an ablation.
    """

    def __init__(
        self, model: nn.Module, points: list[Point], input_hook: InputHook, supports: Sequence[InstanceForward] = ()
    ) -> None:
        # In this order: an insertion before a BatchNorm must bypass the separation of streams there.
        pieces = [*supports, *(piece for point in points for piece in point.insertions)]
        modules = ModuleHolder(dict.fromkeys(point.module for point in points))  # a shared module is registered once
        modules.train(model.training)
        modules.register_load_state_dict_post_hook(explain_missing)
        owner = _owner(model, points)
        if hasattr(owner, PREFIX):
            raise UserError(
                f"{type(owner).__name__} already has an attribute {PREFIX!r}, which attach needs: rename it."
            )
        prefix = f"{PREFIX}." if owner is model else f"{points[0].paths[0]}.{PREFIX}."
        self._hold(model, _Attached(points, pieces, modules, prefix))
        owner.add_module(PREFIX, modules)
        for piece in pieces:
            piece.put()
        input_hook.training_check = self._held.training_check
        input_hook.norms = [piece for piece in pieces if isinstance(piece, SeparateNorm)]
        model.register_forward_pre_hook(input_hook, with_kwargs=True)
        check = RowCheck([point.site for point in points], input_hook)
        model.register_forward_hook(check, with_kwargs=True, always_call=True)
        model.__dict__[_HANDLE] = self._held

    def _hold(self, model: nn.Module, held: _Attached) -> None:
        self.model, self._held = model, held
        self.points, self.modules, self._pieces = held.points, held.modules, held.pieces
        #: prefix of the module's own parameters in the model's state dict
        self.prefix = held.prefix
        held.handle = weakref.ref(self)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for point in self.points for path in point.paths)

    @property
    def attached(self) -> bool:
        return self.model.__dict__.get(_HANDLE) is self._held

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's own parameters, e.g. for a separate learning rate."""
        return self.modules.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.modules.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the module only, which can be loaded into another attachment."""
        return self.modules.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.modules.load_state_dict(state_dict)

    @contextmanager
    def disabled(self) -> Iterator[nn.Module]:
        """Use the model without the module, also in training. (Under DDP the module's parameters are then unused.)"""
        with temporary_attributes({point.module: {"enabled": False} for point in self.points}):
            yield self.model

    @contextmanager
    def infer_with_batch(self) -> Iterator[nn.Module]:
        """Mini-batch inference (V2's Table 12, BatchFormer's ablation): use the modules in eval mode.

        There is one stream, which goes through the modules without dropout; the output for an image depends on the
        other images of the batch. Training mode is not affected.
        """
        with temporary_attributes({point.site: {"infers": True} for point in self.points}):
            yield self.model

    def backend_used(self) -> dict[str, Choice]:
        """The backend of the batch attention at each insertion point under the current autocast, and why.

        `attachment.backend_used()["blocks.8"].backend` is "triton", "sdpa" or "reference"; see docs/kernels.md.
        """
        return {path: point.module.backend_used() for point in self.points for path in point.paths}

    def plain(self, outputs: T) -> T:
        """The rows of the plain stream, for metrics in training; outputs with one stream are returned unchanged.

        These are all outputs in eval mode, with the module disabled and after detach, and in training the outputs with
        as many rows as the plain stream (from eval mode, already plain, or from a head that branches off before the
        module). Outputs whose rows match no training forward (gathered from several processes) are refused, since the
        plain rows can no longer be identified.
        """
        return plain_rows(outputs, self.points[0].module.streams) if self._has_both_streams(outputs) else outputs

    def related(self, outputs: T) -> T | None:
        """The rows of the related stream, as `plain` returns the others; None if there are none (eval, disabled).

        With `streams="single"`, and inside `infer_with_batch`, all rows are related.
        """
        streams = self.points[0].module.streams
        if self._has_both_streams(outputs):
            rows = count_rows(outputs)
            none_left = rows is not None and plain_count(rows, streams) == rows  # one image, split
            return None if none_left else related_rows(outputs, streams)
        return outputs if self.attached and relates_in_eval(self.points[0].site) else None

    def _has_both_streams(self, outputs: Any) -> bool:
        """Whether outputs contain related rows, judged by the number of rows if the module is active.

        Also counts forwards of compiled models for the check of whether the module trains.
        """
        if self.attached:
            self._held.training_check.count(self.model, self.points[0].module)
        module, rows, sites = self.points[0].module, count_rows(outputs), [point.site for point in self.points]
        if not (self.attached and module.active):
            return False
        made = {count for site in sites for count in site.made}
        if rows is None or rows in made or not made or module.streams == "single" or any(s.compiled for s in sites):
            return True
        if any(plain_count(count, module.streams) == rows for count in made):
            return False
        raise UserError(
            f"these outputs have {rows} rows, but forwards in training gave {' or '.join(map(str, sorted(made)))}, so "
            f"plain and related rows cannot be told apart: call plain() and related() right after the forward, before "
            f"outputs are gathered, joined or flattened, and for outputs of eval mode while the model is in eval mode."
        )

    def expect_no_training(self) -> None:
        """Turn off the warning that the module does not train, if this is on purpose (a learning rate of 0)."""
        self._held.training_check.stop()

    def stream_losses(self) -> tuple[Tensor, Tensor] | None:
        """The losses of the plain and the related rows in the last training forward of a detector with labels, which
        returns their mean; otherwise None.
        """
        found = (piece.losses for piece in self._pieces if isinstance(piece, MeanOfStreams))
        parts = [losses for losses in found if losses is not None]
        if not parts:
            return None
        return torch.stack([plain for plain, _ in parts]).sum(), torch.stack([related for _, related in parts]).sum()

    def plain_state_dict(self) -> dict[str, Any]:
        """The model's weights without the module's, with the names they have when nothing is attached."""
        return {key: value for key, value in self.model.state_dict().items() if not key.startswith(self.prefix)}

    def detach(self) -> nn.Module:
        """Remove the module and return the same model, with the keys, hooks and forwards it had before attach."""
        if not self.attached:
            raise UserError("this attachment was already detached: attach again to get a new one.")
        for piece in reversed(self._pieces):
            piece.remove()
        remove_hooks(self.model)
        if (owner := _owner(self.model, self.points)) is not None:
            del owner._modules[PREFIX]
        del self.model.__dict__[_HANDLE]
        return self.model

    def __repr__(self) -> str:
        state = "" if self.attached else ", detached"
        return f"Attachment({type(self.model).__name__}, {', '.join(map(repr, self.points))}{state})"


def _unwrap(model: nn.Module) -> nn.Module:
    """The attached model inside wrappers; if none is attached, the innermost model."""
    while (
        _HANDLE not in model.__dict__ and len(model._modules) == 1 and (name := next(iter(model._modules))) in WRAPPERS
    ):
        model = model.get_submodule(name)
    return model


def _owner(model: nn.Module, points: list[Point]) -> Any:
    """The object on which the module is registered; None if that layer has since been replaced."""
    # A container calls or counts its children, so the module is registered on the layer after it instead.
    contained = isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return points[0].insertions[0].layer if contained else model
