"""Model-level hooks: repeat inputs, check rows, forbid partial forwards, warn when the module does not train."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
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
_FORWARDS = 32  # between two comparisons of `TrainingCheck`: more than an optimizer lets pass between two steps
_NOT_TRAINED = "the attached BatchFormer does not train, although the model's other parameters change: "
_FROZEN = (
    "its parameters are frozen (requires_grad=False). Attach after freezing, or unfreeze attachment.parameters(), and "
    "create the optimizer after that."
)
_NOT_IN_OPTIMIZER = (
    "no optimizer changes its parameters. Create the optimizer after attach, or add them to it, "
    'optimizer.add_param_group({"params": list(attachment.parameters())}).'
)
_IN_EVAL_MODE = "it is in eval mode, where it does nothing. Call model.train() before the training steps."


class _Hook:
    """Explains why torch.jit.script, which reads the name of every hook, cannot work."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "an attached model cannot go through torch.jit.script: detach it first, bf.detach(model), or use "
            "torch.export (or torch.jit.trace) in eval mode, which see the plain model.",
            name="torch.jit.script",  # else Python ends the message with "Did you mean: '__ne__'?"
            obj=None,
        )


class TrainingCheck:
    """Warns once if training changes the model's parameters but not the module's.

    Every `_FORWARDS` forwards with gradients the norms of all parameters are compared with the previous ones; two
    consecutive equal findings decide. The interval doubles while the module may be training, so that gradient
    accumulation, skipped steps, learning rate 0 and gradients without training cost nothing. Once the module is known
    to train, only forwards in eval mode count (`model.train()` may be forgotten after a validation).

    A parameter's `_version` would need no synchronisation with the device, but fused optimizers do not change it.
    """

    def __init__(self, modules: nn.Module) -> None:
        self.modules = modules
        self._done = self._trains = False
        self._training, self._eval = _Interval(1), _Interval(_FORWARDS)

    def count(self, model: nn.Module, module: BatchFormer) -> None:
        """One forward. `Attachment.plain` and `related` count as well: compiled models run no hook on the host."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._done or not module.enabled:
            return
        if module.training:
            self._eval = _Interval(_FORWARDS)  # steps count for eval mode where no forward was in training mode
            if self._trains:
                return
        interval = self._training if module.training else self._eval
        interval.forwards -= 1
        if interval.forwards > 0 or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        self._compare(model, interval, module.training)

    def stop(self) -> None:
        """Check no further: the module is left as it is on purpose."""
        self._done = True

    def _compare(self, model: nn.Module, interval: _Interval, training: bool) -> None:
        own = set(self.modules.parameters())
        if training:
            _refuse_unsynchronised(own)
        try:
            # Not those without gradients: averages (momentum encoders) change where nothing trains.
            others = (p for p in model.parameters() if p.requires_grad and p not in own)
            norms = _norms(self.modules.parameters()), _norms(others)
        except (RuntimeError, TypeError):  # a kind of parameter without norms: training goes on unchecked
            norms = [], []
        if not norms[0]:  # or all of them are held by other processes
            self._done = True
            return
        trained = interval.finding(*norms)
        self._trains |= training and trained is True
        if trained is False:
            self._done = True
            frozen = not any(p.requires_grad for p in own)
            why = _IN_EVAL_MODE if not training else _FROZEN if frozen else _NOT_IN_OPTIMIZER
            warnings.warn(_NOT_TRAINED + why, UserWarning, stacklevel=1)

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingCheck, (self.modules,)  # a copy of the model begins a check of its own


class _Interval:
    """The forwards from one comparison of norms to the next."""

    def __init__(self, forwards: int) -> None:
        self.forwards, self.length = forwards, _FORWARDS
        self.norms: tuple[list[float], list[float]] | None = None
        self.last: bool | None = None

    def finding(self, own: list[float], others: list[float]) -> bool | None:
        """Whether the module was trained; None where nothing was, or the comparison before did not find the same (a
        file that is loaded changes parameters once)."""
        before, self.norms = self.norms, (own, others)
        trained = before is None or own != before[0] or others == before[1]
        self.length *= 2 if trained and before is not None else 1
        self.forwards = self.length
        if before is None or before == self.norms:
            return None
        last, self.last = self.last, trained
        return trained if last is trained else None


def _norms(parameters: Iterable[Tensor]) -> list[float]:
    """Of what this process holds of each parameter; tensors in the place of parameters (`torch.func`) are left out."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in parameters if isinstance(p, nn.Parameter)]
    kept = [p.detach() for p in parts if p.is_floating_point() and p.numel() and not p.is_meta]
    return [float(torch.linalg.vector_norm(p, dtype=torch.float32 if p.is_mps else torch.float64)) for p in kept]


def _refuse_unsynchronised(own: set[nn.Parameter]) -> None:
    """DistributedDataParallel exchanges the gradients of the parameters it found when it was made."""
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    if wrapper is None:
        return
    late = own - set(wrapper._module_parameters)
    for name, parameter in wrapper.module.named_parameters():
        if parameter in late and parameter.requires_grad and name not in wrapper.parameters_to_ignore:
            raise UserError(
                "the module was attached after the model was wrapped in DistributedDataParallel, which does not "
                "exchange its gradients between processes: attach first, then wrap."
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
        self.training_check: TrainingCheck | None = None
        self.canvas: tuple[int, int] | None = None  # height and width of the images, where processes compare them
        self.inside = False  # while the forward of the whole model runs
        arguments = argument_names(type(model).forward)
        self.labels_at = arguments.index(_LABELS) if _LABELS in arguments else None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(model, "_is_replica", False):
            raise UserError(
                "an attached model cannot run in nn.DataParallel, whose replicas would call the first GPU's layers: "
                "start one process per GPU (torchrun, DistributedDataParallel), or use one GPU only."
            )
        if self.training_check is not None:
            self.training_check.count(model, self.module)
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
        at = self.labels_at
        if at is not None and at < len(args):
            return (*args[:at], twice(labels), *args[at + 1 :]), kwargs
        return args, {**kwargs, _LABELS: twice(labels)}

    def _labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self.labels_at
        if at is None:
            return None
        given = args[at] if at < len(args) else kwargs.get(_LABELS)
        return given if isinstance(given, list) or (isinstance(given, Tensor) and given.ndim) else None


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
                f"{type(self.layer).__name__}.{self.name} cannot be called on its own in training while a "
                f"BatchFormerV2 is attached inside: call the whole model, or use eval mode or "
                f"`with attachment.disabled():`."
            )
        return self.original(*args, **kwargs)


class RowCheck(_Hook):
    """A forward hook of the whole model: the rows that left the module must be the rows that leave the model.

    After a forward that failed it is called without outputs, and only clears what the sites have recorded.
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
                f"attached at, so nothing was related: attach at a layer that is called in every forward (not one "
                f"whose weights are read directly, nor one that is skipped at random, layerdrop), attach again if the "
                f"layer was replaced (reset_classifier), or use `with attachment.disabled():` for this forward."
            )
        if left is not None and left != expected[0]:
            if left == 2 * expected[0] or len(set(expected)) > 1:
                cure = "the streams were opened twice in one forward: name one of the places"
            else:
                cure = "the model does not pass the second stream on from there: attach at another layer"
            raise UserError(
                f"{expected[0]} rows left the module in training and {left} left {type(model).__name__}; {cure}."
            )


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
