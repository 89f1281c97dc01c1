"""A context that restores a model after a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

from batchformer.errors import UserError
from batchformer.nn import BatchFormer

Mode = Literal["train", "quiet"]


@contextmanager
def untouched(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Random state, buffers and modes of the model are restored afterwards; gradients are enabled inside.

    `seed` is that of all random numbers inside. A compiled model runs eagerly meanwhile: hooks on its submodules would
    not be called otherwise.
    """
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    compiled = any(
        getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in model.modules()
    )
    forked = torch.random.fork_rng(sorted(d for d in devices if d is not None))
    with forked, torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def set_mode(model: nn.Module, mode: Mode) -> None:
    """`"train"`: as in training. `"quiet"`: eval mode, with the insertions still relating rows.

    Quiet, there is no dropout, no drop-path, and BatchNorm uses its running statistics: rows then meet in the
    insertions and nowhere else.
    """
    if mode not in ("train", "quiet"):
        raise UserError(f"mode={mode!r} is not known: say 'train' or 'quiet'.")
    if mode == "train":
        if not model.training:
            model.train()
        return
    model.eval()
    for module in model.modules():
        if isinstance(module, BatchFormer):
            module.training = True  # the flag alone: its layers stay in eval mode
