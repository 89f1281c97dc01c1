"""Imported where it is needed only: `torch.compiler.disable` brings all of torch's compiler with it."""

from __future__ import annotations

import torch

from batchformer.attach.separate_norm import SeparateNorm


@torch.compiler.disable
def follow_replaced(norms: list[SeparateNorm]) -> None:
    """Back onto the model's BatchNorms. Not traced: compiled code breaks here, the first time after it happened."""
    for norm in norms:
        if norm.replaced:
            norm.follow()
