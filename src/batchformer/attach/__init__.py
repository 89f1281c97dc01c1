"""Put a module into somebody's model with one line, take it out with one line, leave no trace."""

from batchformer.attach.attachment import Attachment, Point, attach, attachment_of, detach
from batchformer.attach.classifiers import find_classifiers

__all__ = ["Attachment", "Point", "attach", "attachment_of", "detach", "find_classifiers"]
