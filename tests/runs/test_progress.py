"""Progress is one line: redrawn in a terminal, a few lines in a file."""

import io
from contextlib import suppress

import lightning.pytorch as L
import pytest
import torch

from batchformer.metrics.measures import Measure
from batchformer.runs.progress import ProgressLine, RunProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_one_line_for_every_tenth_of_all_runs():
    stream = io.StringIO()
    line = ProgressLine(runs=4, stream=stream)
    for run in range(4):
        line.begin_run(run, f"run{run}")
        for step in range(1001):
            line.update(step / 1000, f"step {step}")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert "0%" in lines[0]
    assert "run 3/4 run2" in lines[6]
    assert "100%" in lines[-1]


def test_a_terminal_line_is_redrawn_in_place_and_cleared():
    stream = Terminal()
    line = ProgressLine(stream=stream)
    line.update(0.5, "half", force=True)
    line.say("a sentence that stays")
    text = stream.getvalue()
    assert "\n" not in text[: text.index("a sentence")]
    assert text.index("50%") < text.index("a sentence that stays\n")


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_before_the_first_step_is_told_in_a_terminal_and_gone_after_it(fails):
    for stream in (Terminal(), io.StringIO()):
        line = ProgressLine(stream=stream)
        with suppress(OSError), line.meanwhile("reading the data"):
            assert ("reading the data" in stream.getvalue()) == stream.isatty()
            if fails:
                raise OSError
        assert stream.getvalue().endswith("\r\x1b[2K") == stream.isatty()
        line.update(0.0, "epoch 1/2", force=True)
        assert stream.getvalue().count("0%") == 1 + stream.isatty()  # a log begins with the training


def test_a_terminal_is_not_redrawn_at_every_step():
    stream = Terminal()
    line = ProgressLine(stream=stream)
    for step in range(1000):
        line.update(step / 1000, "")
    assert stream.getvalue().count("\r") < 100


class Counting(L.LightningModule):
    """Its accuracy is the number of steps made, so a number on the line says when it was measured."""

    measures = (Measure("all", "All", primary=True),)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.weight * batch.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/all", float(self.trainer.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _last_line(**keywords):
    stream = io.StringIO()
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[RunProgress(ProgressLine(stream=stream))], **keywords,
    )  # fmt: skip
    trainer.fit(Counting(), torch.ones(5, 1), torch.ones(2, 1))
    lines = stream.getvalue().splitlines()
    assert sum("100%" in line for line in lines) == 1
    return lines[-1]


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"max_epochs": 3}, "epoch 3/3  all 15.0"),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, "epoch 3/3"),  # what epoch 2 had is not shown for epoch 3
        ({"max_epochs": -1, "max_steps": 10}, "step 10/10  all 10.0"),
        ({"max_epochs": -1, "max_steps": 12}, "step 12/12"),
        ({"max_epochs": 9, "max_steps": 10}, "epoch 2/9  all 10.0"),
    ],
)
def test_the_last_line_is_of_the_last_weights(keywords, expected):
    assert _last_line(**keywords).endswith(f"  {expected}")


def test_a_cell_of_a_notebook_shows_one_line_that_is_replaced():
    shown = []
    line = ProgressLine(stream=io.StringIO(), cell=shown.append)
    line.update(0.5, lambda: "half", force=True)
    line.update(0.6, lambda: 1 / 0)  # too early to be drawn, so its numbers are not asked for
    line.clear()
    assert "50%" in shown[0]
    assert shown[0].endswith("half")
    assert shown[1:] == [""]
