"""Compiling a network for its training."""

from typing import Any

import torch
from torch import nn

_ROOM = 64


def compile_in_place(net: nn.Module, **options: Any) -> None:
    """`net.compile` for batches of one shape; no key changes.

    torch compiles a network anew for the objects that attach or TransMix put into it, keeps the code of networks that
    are long gone, and after eight of them runs a class uncompiled. A comparison over many seeds needs more room.
    """
    torch._dynamo.config.recompile_limit = max(_ROOM, torch._dynamo.config.recompile_limit)
    net.compile(dynamic=False, **options)
