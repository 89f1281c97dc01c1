"""Learning from the relations between the samples of a mini-batch."""

from batchformer.attach import Attachment, attach, attachment_of, detach, find_classifiers
from batchformer.nn import BatchFormer, TwoStreamLoss, repeat_targets

__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "BatchFormer",
    "TwoStreamLoss",
    "attach",
    "attachment_of",
    "detach",
    "find_classifiers",
    "repeat_targets",
]
