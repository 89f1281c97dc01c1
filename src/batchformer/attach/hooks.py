"""Model-level hooks: repeat inputs, check rows, forbid partial forwards."""

from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach.dry_run import argument_names
from batchformer.attach.insertion import After, InstanceForward, SharedFeature
from batchformer.attach.per_stream import SeparateNorm, follow_replaced
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.streams import count_rows, repeat_rows, twice

_LABELS = "labels"  # the argument by which transformers' models (and many written like them) compute their loss inside
_COUNT = "num_items_in_batch"  # by which transformers' Trainer has a sum of losses divided


class _Hook:
    """torch.jit.script asks every hook for its name: the chance to tell the user why it cannot work."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "an attached model cannot go through torch.jit.script: detach it first, bf.detach(model), or use "
            "torch.export (or torch.jit.trace) in eval mode, which see the plain model."
        )


class InputHook(_Hook):
    """A forward pre-hook of the whole model: in training, labels for both streams; where needed, every input twice.

    A model that computes its loss inside `forward` sees each label twice, so its mean over rows is the mean over both
    streams. transformers' `Trainer` hands over the number of labels to divide a sum by: that is doubled as well.
    """

    def __init__(self, model: nn.Module, module: BatchFormer) -> None:
        self.module = module
        self.doubles_input = False  # see `doubled_input.double_input`
        self.norms: list[SeparateNorm] = []
        self.canvas: tuple[int, int] | None = None  # height and width of the images, where processes compare them
        self.inside = False  # while the forward of the whole model runs
        arguments = argument_names(type(model).forward)
        self.labels_at = arguments.index(_LABELS) if _LABELS in arguments else None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(model, "_is_replica", False):
            raise UserError(
                "an attached model cannot run in nn.DataParallel, whose replicas would call the first GPU's layers: "
                "start one process per GPU (torchrun, DistributedDataParallel), or show the program one GPU only."
            )
        if not self.module.active:
            return None
        for norm in self.norms:  # a plain loop, which is easy to compile
            if norm.replaced:
                # Not traced: compiled code breaks here, the first time after a BatchNorm was replaced. And not as a
                # decorator, because `torch.compiler.disable` imports all of torch's compiler.
                torch.compiler.disable(follow_replaced)(self.norms)
                break
        if self.module.scope == "global":
            given = [*args, *kwargs.values()]
            self.canvas = next(
                ((a.shape[-2], a.shape[-1]) for a in given if isinstance(a, Tensor) and a.ndim == 4), None
            )
        if self.module.streams != "duplicate":
            return None
        self.inside = True
        # The labels of a detector are a list whose first tensor has as many rows as there are objects.
        rows = count_rows([*args, *(value for name, value in kwargs.items() if name != _LABELS)])
        if rows is None:
            return None
        labels = self._labels(args, kwargs)
        if self.doubles_input:
            # Never inside a list of labels: the boxes of an image may be as many as the images.
            args = tuple(a if a is labels else repeat_rows(a, rows) for a in args)
            kwargs = {name: a if a is labels else repeat_rows(a, rows) for name, a in kwargs.items()}
        if labels is None or len(labels) != rows:
            return args, kwargs
        if kwargs.get(_COUNT) is not None:
            kwargs = {**kwargs, _COUNT: 2 * kwargs[_COUNT]}
        return self._with_labels(twice(labels), args, kwargs)

    def _labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self.labels_at
        if at is None:
            return None
        given = args[at] if at < len(args) else kwargs.get(_LABELS)
        return given if isinstance(given, list) or (isinstance(given, Tensor) and given.ndim) else None

    def _with_labels(self, labels: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self.labels_at
        if at is not None and at < len(args):
            return (*args[:at], labels, *args[at + 1 :]), kwargs
        return args, {**kwargs, _LABELS: labels}


class ForbidPartialForward(InstanceForward):
    """In the place of a method of the model that gives wrong rows when it is called by itself in training.

    timm's `forward_intermediates` notes the batch size and would fold both streams into the channels; of a model
    whose input is doubled, `forward_features` called from outside would take half of the images for the second stream.
    """

    def __init__(self, model: nn.Module, name: str, input_hook: InputHook) -> None:
        super().__init__(model, name)
        self.input_hook = input_hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.removed and self.input_hook.module.active and not self.input_hook.inside:
            raise UserError(
                f"{type(self.layer).__name__}.{self.name} cannot be called by itself in training while a BatchFormerV2 "
                f"is attached inside: call the whole model, or do it in eval mode or in `with attachment.disabled():`."
            )
        return self.original(*args, **kwargs)


class RowCheck(_Hook):
    """A forward hook of the whole model: the rows that left the module must be the rows that leave the model.

    After a forward that failed it is called without outputs, and only forgets what was noted so far.
    """

    def __init__(self, sites: list[SharedFeature | After], input_hook: InputHook) -> None:
        self.sites, self.input_hook = sites, input_hook

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        self.input_hook.inside = False
        if outputs is None:
            for site in self.sites:
                site.forget()
            return
        if not any(site.module.active for site in self.sites):
            return
        expected = [site.rows for site in self.sites if site.rows is not None]
        for site in self.sites:
            site.rows = None
        left = count_rows(outputs)
        if not expected:
            raise UserError(
                f"{type(model).__name__} went through a forward in training without calling the layer the module was "
                f"attached at, so nothing was related: attach at a layer that is called (not one whose weights are "
                f"read directly), again if it was replaced since (reset_classifier), or use `with "
                f"attachment.disabled():` for this forward."
            )
        if left is not None and left != expected[0]:
            if left == 2 * expected[0] or len(set(expected)) > 1:
                cure = "the streams were opened twice on one way: name one place of it"
            else:
                cure = "the model does not pass the second stream on from there: attach at another layer"
            raise UserError(
                f"{expected[0]} rows left the module in training and {left} left {type(model).__name__}; {cure}."
            )


def register_hooks(model: nn.Module, input_hook: InputHook, sites: list[SharedFeature | After]) -> None:
    model.register_forward_pre_hook(input_hook, with_kwargs=True)
    model.register_forward_hook(RowCheck(sites, input_hook), with_kwargs=True, always_call=True)


def remove_hooks(model: nn.Module) -> None:
    """By kind, not by handle: the handle of a copied model's hook points to the original."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, RowCheck):
            del model._forward_hooks[key]
            model._forward_hooks_with_kwargs.pop(key, None)
            model._forward_hooks_always_called.pop(key, None)
    for key, pre_hook in list(model._forward_pre_hooks.items()):
        if isinstance(pre_hook, InputHook):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
