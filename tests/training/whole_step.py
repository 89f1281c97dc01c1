"""The step that a CUDA graph captures, run as it is on the CPU."""

from batchformer.tasks import ImageTask, LongTailed


def whole_step(kind: type[ImageTask]) -> type[ImageTask]:
    class Whole(kind):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            if stage == "fit":
                self._whole_step, self.automatic_optimization = True, False

    return Whole


WholeStep = whole_step(LongTailed)
