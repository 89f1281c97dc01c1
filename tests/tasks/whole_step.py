"""The step that a CUDA graph captures, run as it is on the CPU."""

from batchformer.tasks import LongTailed


class WholeStep(LongTailed):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._whole_step, self.automatic_optimization = True, False
