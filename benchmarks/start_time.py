"""How long commands take to their first training step, and to refuse a wrong option.

    python -m benchmarks.start_time benchmarks/results/start_time.json

The first step has ended when the progress line first shows a loss. Besides the time on the clock the processor time of
the command until then is measured, which other programs on the machine change less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from batchformer.runs.result import versions

TRIALS = 3
_SHORT = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "10", "--no-analysis", "--overwrite"]
FIRST_STEP = {
    "fit digits-lt": ["fit", "digits-lt", *_SHORT],
    "fit vit-digits": ["fit", "vit-digits", *_SHORT],
    "compare digits-lt": ["compare", "digits-lt", "--seeds", "1", *_SHORT],
}
REFUSED = {
    "fit digits-lt --trainer.max_epoch 3": ["fit", "digits-lt", "--trainer.max_epoch", "3"],
    "fit digits-lt --nonsense 3": ["fit", "digits-lt", "--nonsense", "3"],
    "fit digits-lt --trainer.max_epochs three": ["fit", "digits-lt", "--trainer.max_epochs", "three"],
}


def to_first_step(words: list[str], folder: str) -> tuple[float, float]:
    """Seconds on the clock and of the processor until the first line of progress that has a loss."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "batchformer.cli", *words, "--out", f"{folder}/run"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "  loss " in line:
                wall = time.perf_counter() - begin
                used = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
                ticks = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
                break
        else:
            raise SystemExit(f"{' '.join(words)} showed no step")
        child.stderr.read()
    return wall, ticks


def to_refusal(words: list[str]) -> tuple[float, float]:
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "batchformer.cli", *words], capture_output=True)
    after = os.times()
    assert done.returncode == 2, done.stderr
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, used


def measured(trials: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "wall_s": round(statistics.median(wall for wall, _ in trials), 2),
        "cpu_s": round(statistics.median(cpu for _, cpu in trials), 2),
    }


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: measured([to_first_step(words, f"{folder}/{name.split()[0]}") for _ in range(TRIALS)])
                 for name, words in FIRST_STEP.items()}  # fmt: skip
    refused = {name: measured([to_refusal(words) for _ in range(TRIALS)]) for name, words in REFUSED.items()}
    result = {
        "first_step": steps,
        "refused": refused,
        "trials": TRIALS,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": versions(),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
