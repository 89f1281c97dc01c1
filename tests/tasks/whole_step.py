"""The step that a CUDA graph captures, run as it is on the CPU."""

from batchformer.tasks import LongTailed, Task


def whole_step(kind: type[Task]) -> type[Task]:
    class Whole(kind):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            if stage == "fit":
                self._whole_step, self.automatic_optimization = True, False

    return Whole


WholeStep = whole_step(LongTailed)
