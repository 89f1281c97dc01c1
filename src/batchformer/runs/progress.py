"""One line of progress, for one run or for all the runs of a comparison.

In a terminal and in a notebook the line is redrawn in place at most four times a second; in a file or a pipe a new line
is written for every tenth of the work, so logs stay short.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import lightning.pytorch as L
from lightning.pytorch.callbacks import ProgressBar

_SECONDS_BETWEEN_DRAWS = 0.25
_BAR = 12
_JUST_BEFORE_THE_END = 0.999


class ProgressLine:
    """Progress over several runs, each a number of equal steps."""

    def __init__(self, runs: int = 1, stream: TextIO | None = None, cell: Callable[[str], None] | None = None) -> None:
        self.runs = runs
        self._cell = notebook_cell() if stream is None and cell is None else cell
        self.stream = stream if stream is not None else sys.stderr
        self.in_place = self._cell is not None or self.stream.isatty()
        self._run = 0
        self._label = ""
        self._started = time.perf_counter()
        self._fraction_at_start = 0.0
        self._drawn = 0.0
        self._last_tenth = -1
        self._open = False

    def begin_run(self, index: int, label: str) -> None:
        self._run, self._label = index, label

    def skip_to(self, fraction_of_run: float) -> None:
        """Leave out work of an earlier process in the estimate of the time left."""
        self._fraction_at_start = self._overall(fraction_of_run)
        self._started = time.perf_counter()

    def update(self, fraction_of_run: float, text: str | Callable[[], str], force: bool = False) -> None:
        """Show how far the run is; `text` may be a function, which is called only when the line is drawn."""
        now = time.perf_counter()
        overall = self._overall(fraction_of_run)
        if self.in_place:
            if force or now - self._drawn >= _SECONDS_BETWEEN_DRAWS:
                self._drawn = now
                self._draw(overall, text, now)
        elif (tenth := int(overall * 10 + 1e-9)) > self._last_tenth:
            self._last_tenth = tenth
            self._draw(overall, text, now)

    @contextmanager
    def meanwhile(self, text: str) -> Iterator[None]:
        """Context manager: show `text` during work before the first step, in a terminal only."""
        if self.in_place:
            self._draw(self._overall(0.0), text, time.perf_counter())
        try:
            yield
        finally:
            self.clear()

    def say(self, line: str) -> None:
        """Print a line above the progress bar that stays."""
        self.clear()
        print(line, file=self.stream, flush=True)

    def clear(self) -> None:
        if self.in_place and self._open:
            self._replace("")
            self._open = False

    def _replace(self, line: str) -> None:
        if self._cell is not None:
            self._cell(line)
            return
        self.stream.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
        self.stream.flush()

    def _overall(self, fraction_of_run: float) -> float:
        return (self._run + min(1.0, max(0.0, fraction_of_run))) / self.runs

    def _draw(self, overall: float, text: str | Callable[[], str], now: float) -> None:
        text = text if isinstance(text, str) else text()
        filled = round(overall * _BAR)
        bar = "█" * filled + "░" * (_BAR - filled)
        run = f" run {self._run + 1}/{self.runs}" if self.runs > 1 else ""
        # what matters most comes first: a narrow terminal cuts the end off
        line = f"{bar} {overall:4.0%} {self._time_left(overall, now):>9}{run} {self._label}  {text}"
        if self.in_place:
            self._replace(line)
            self._open = True
        else:
            self.stream.write(line + "\n")
            self.stream.flush()

    def _time_left(self, overall: float, now: float) -> str:
        done = overall - self._fraction_at_start
        if done < 0.02 or overall >= 1:
            return ""
        seconds = int((now - self._started) / done * (1 - overall))
        hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def notebook_cell() -> Callable[[str], None] | None:
    """In a notebook, a function that shows a text in the output of the cell in place of the one before; else None."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        return None
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)


class RunProgress(ProgressBar):
    """Feeds a `ProgressLine` from Lightning's hooks: epoch, loss, learning rate, and measures once validated."""

    def __init__(self, line: ProgressLine) -> None:
        super().__init__()
        self.line = line
        self._on = True
        self._judged = ""
        self._validated_step = -1

    def disable(self) -> None:
        self._on = False

    def enable(self) -> None:
        self._on = True

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step:
            self.line.skip_to(self._fraction(trainer, 0))
        self._show(trainer, 0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._show(trainer, batch_idx + 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        seen = trainer.callback_metrics
        named = [measure for measure in pl_module.measures if measure.in_progress and f"val/{measure.key}" in seen]
        shown = [f"{measure.key} {float(seen[f'val/{measure.key}']):.1f}" for measure in named]
        self._judged = "  " + " ".join(shown) if shown else ""
        self._validated_step = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._validated_step != trainer.global_step:
            self._judged = ""  # of other weights than the last ones
        if self._on:
            self.line.update(1.0, self._text(trainer, max(1, trainer.current_epoch)))
        self.line.clear()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.line.clear()

    def _fraction(self, trainer: L.Trainer, batches: int) -> float:
        per_epoch = trainer.num_training_batches
        inside = batches / per_epoch if isinstance(per_epoch, int) and per_epoch else 0.0
        by_epochs = (trainer.current_epoch + inside) / _or_endless(trainer.max_epochs)
        return max(by_epochs, trainer.global_step / _or_endless(trainer.max_steps))

    def _show(self, trainer: L.Trainer, batches: int) -> None:
        if self._on:
            # the last tenth waits for the end of training, and with it for the validation of the last weights
            fraction = min(self._fraction(trainer, batches), _JUST_BEFORE_THE_END)
            self.line.update(fraction, lambda: self._text(trainer, trainer.current_epoch + 1))

    def _text(self, trainer: L.Trainer, epoch: int) -> str:
        """Reading the loss waits for the device, so this is called when the line is drawn and not at every step."""
        running: dict[str, float] = getattr(trainer.lightning_module, "running_values", dict)()
        numbers = "".join(f"  {name} {value:.3g}" for name, value in running.items())
        return self._where(trainer, epoch) + numbers + self._judged

    @staticmethod
    def _where(trainer: L.Trainer, epoch: int) -> str:
        if math.isfinite(last := _or_endless(trainer.max_epochs)):
            return f"epoch {min(epoch, int(last))}/{int(last)}"
        end = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        return f"step {trainer.global_step}{end}"


def _or_endless(limit: int | None) -> float:
    """Lightning writes -1 for no limit."""
    return math.inf if limit is None or limit < 0 else max(1, limit)
