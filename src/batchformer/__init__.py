"""Learning from the relations between the samples of a mini-batch."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchformer import mix, parallel
    from batchformer.attach import Attachment, attach, attachment_of, detach, find_classifiers, plain_state_dict
    from batchformer.nn import BatchFormer, BatchFormerV2, StreamGuard, TwoStreamLoss, repeat_targets

__version__ = "0.2.0"

__all__ = ["Attachment", "BatchFormer", "BatchFormerV2", "StreamGuard", "TwoStreamLoss", "attach", "attachment_of",
           "detach", "find_classifiers", "mix", "parallel", "plain_state_dict", "repeat_targets"]  # fmt: skip
_HOME = dict.fromkeys(__all__, "batchformer.attach") | dict.fromkeys(
    ("BatchFormer", "BatchFormerV2", "StreamGuard", "TwoStreamLoss", "repeat_targets"), "batchformer.nn"
)


class _Names(ModuleType):
    """Public names are fetched when first used: the command line lists recipes and writes reports without torch."""

    def __getattr__(self, name: str) -> Any:
        if name in ("mix", "parallel"):  # rooms that are used by their own name: bf.mix.CutMix
            return import_module(f"batchformer.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    @property
    def attach(self) -> Any:
        """The function; the room of the same name would otherwise take its place as soon as it is imported."""
        return import_module("batchformer.attach").attach

    @attach.setter
    def attach(self, room: ModuleType) -> None:
        """What the import system stores here is found in sys.modules all the same."""


sys.modules[__name__].__class__ = _Names
