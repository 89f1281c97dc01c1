"""Insert a batch-attention module into an existing model, and remove it again."""

from batchformer.attach.attachment import Attachment, attach, attachment_of, detach
from batchformer.attach.locate import find_classifiers
from batchformer.attach.plan import Point
from batchformer.attach.state_dicts import plain_state_dict

__all__ = ["Attachment", "Point", "attach", "attachment_of", "detach", "find_classifiers", "plain_state_dict"]
