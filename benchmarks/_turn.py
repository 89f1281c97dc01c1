"""A Lightning callback: several runs start up side by side, and train one at a time."""

from __future__ import annotations

import fcntl
from typing import IO, Any

from lightning.pytorch.callbacks import Callback


class InTurn(Callback):
    """Waits for `lock` after the first `free` steps, in which the network is compiled and captured, and lets it go when
    the training ends.

    Reading the data, tracing and the last measurements use the host; training uses the card, and two trainings on one
    card take longer than one after the other.
    """

    def __init__(self, lock: str, free: int = 6) -> None:
        self.lock, self.free = lock, free
        self._held: IO[str] | None = None
        self._steps = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._steps == self.free:
            self._held = open(self.lock, "w")  # noqa: SIM115 (kept open as long as it is held)
            fcntl.flock(self._held, fcntl.LOCK_EX)
        self._steps += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
