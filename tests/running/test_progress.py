"""Progress is one line: redrawn in a terminal, a few lines in a file."""

import io

from batchformer.running.progress import ProgressLine


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


def test_a_terminal_is_not_redrawn_at_every_step():
    stream = Terminal()
    line = ProgressLine(stream=stream)
    for step in range(1000):
        line.update(step / 1000, "")
    assert stream.getvalue().count("\r") < 100
