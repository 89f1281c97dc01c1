"""Context managers that change a model for a while and restore it: modes, buffers, random state, attributes.

Only the `training` flag of each module is set, never `train()` or `eval()` of other people's modules to restore a mode:
those may do more (merge weights, say).
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.errors import check_choice
from batchformer.nn import BatchFormer
from batchformer.nn.attention import BatchAttention

if TYPE_CHECKING:
    from batchformer.attach.insertion import InstanceForward

Mode = Literal["train", "quiet"]


@contextmanager
def temporary_attributes(values: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """For each object: attributes and the values they have inside the context, then the ones they had before."""
    before = {one: {name: getattr(one, name) for name in given} for one, given in values.items()}
    try:
        _set_attributes(values)
        yield
    finally:
        _set_attributes(before)


def _set_attributes(values: Mapping[Any, Mapping[str, Any]]) -> None:
    for one, given in values.items():
        for name, value in given.items():
            setattr(one, name, value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model and all its parts in eval mode, each back in its own mode afterwards."""
    with keep_modes(model):
        for module in model.modules():
            module.training = False
        yield


@contextmanager
def untouched(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Random state, buffers (BatchNorm's statistics) and modes are afterwards what they were; `seed` holds inside.

    Gradients are on, for measurements that need them. A compiled model runs eagerly meanwhile: hooks on its submodules
    would not be seen otherwise.
    """
    with (
        torch.random.fork_rng(_cuda_devices(model)),
        torch.inference_mode(False),
        torch.enable_grad(),
        keep_modes(model),
        keep_buffers(model),
        run_eagerly(model),
    ):
        torch.manual_seed(seed)
        yield


@contextmanager
def dry_run_state(model: nn.Module, training: bool = False) -> Iterator[None]:
    """The state of a dry run: eval mode (or training mode, but for BatchNorm), no gradients, the random state kept.

    In training mode also what a forward may count or collect is kept: buffers, and plain numbers of the modules.
    """
    with keep_modes(model), _keep_hooks(model):
        model.eval()
        for module in model.modules() if training else ():  # not by train(), of which a model may make its own
            module.training = True
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(model)), run_eagerly(model):
            if not training:
                yield
                return
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
            # warnings of checkpoints without gradients are ignored
            with keep_buffers(model), _keep_numbers(model), warnings.catch_warnings(action="ignore"):
                yield


@contextmanager
def pieces_in_place(
    pieces: Sequence["InstanceForward"], modules: Sequence[nn.Module], **settings: Any
) -> Iterator[None]:
    """The pieces are on the model meanwhile, and the modules are set for a dry run: any backend, because a model that
    is yet to move to the GPU runs on the CPU here; and scope="local", because other processes take no part.
    `settings` are further attributes of the modules for the time being.
    """
    parts = [part for module in modules for part in module.modules()]
    wanted: dict[nn.Module, dict[str, Any]]
    wanted = {part: {"backend": "auto"} for part in parts if isinstance(part, BatchAttention)}
    wanted |= {part: {"scope": "local", **settings} for part in parts if isinstance(part, BatchFormer)}
    for piece in pieces:
        piece.put()
    try:
        with temporary_attributes(wanted):
            yield
    finally:
        for piece in reversed(pieces):
            piece.take_away()


@contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """Every module is afterwards in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Every buffer is afterwards the same tensor with the same values, also where a forward has replaced it."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _keep_numbers(model: nn.Module) -> Iterator[None]:
    numbers = {
        module: {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
        for module in model.modules()
    }
    try:
        yield
    finally:
        for module, values in numbers.items():
            vars(module).update(values)


@contextmanager
def _keep_hooks(model: nn.Module) -> Iterator[None]:
    """Hooks that a first forward installs are gone afterwards, with transformers' mark that its recorders are there.

    A model that has them can no longer be pickled.
    """
    installed = "_output_capturing_hooks_installed"
    before = [(module, set(module._forward_hooks), installed in vars(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, hooks, marked in before:
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]
            if not marked:
                vars(module).pop(installed, None)


def run_eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Compiled parts run as they are written: a compiler would not see hooks, or follow those of a dry run."""
    compiled = (
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if any(compiled) else nullcontext()


def _cuda_devices(model: nn.Module) -> list[int]:
    """Whose random state a forward of the model may move."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})


def set_mode(model: nn.Module, mode: Mode) -> None:
    """`"train"`: as in training. `"quiet"`: eval mode all over, with the insertions still relating rows.

    Quiet, there is no dropout, no drop-path, and BatchNorm uses its running statistics: rows then meet in the
    insertions and nowhere else. To be called inside `untouched`, which restores the modes.
    """
    check_choice("mode", mode, ("train", "quiet"))
    if mode == "train":
        if not model.training:
            model.train()
        return
    model.eval()
    for module in model.modules():
        if isinstance(module, BatchFormer):
            module.training = True  # the flag alone: its layers stay in eval mode
