"""One LightningModule per task."""

from batchformer.tasks.long_tailed import LongTailed
from batchformer.tasks.options import BatchFormerOptions, LossOptions, OptimizerOptions, ScheduleOptions

__all__ = ["BatchFormerOptions", "LongTailed", "LossOptions", "OptimizerOptions", "ScheduleOptions"]
