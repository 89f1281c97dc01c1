"""compare: both methods on the same batches, one table, and a comparison that was stopped goes on."""

import json
import weakref

import pytest
import torch

from batchformer.runs import load
from batchformer.runs import train as running
from batchformer.tasks.long_tailed.task import LongTailed

from .conftest import TINY

COMMAND = ["compare", "digits-lt", "--seeds", "2", *TINY, "--no-analysis"]


@pytest.fixture
def seen(monkeypatch):
    """The batches every training run was given, in order."""
    runs = {}
    train = LongTailed.training_step

    def training_step(self, batch, batch_idx):
        runs.setdefault((self.method, self.seed), []).append([batch[part].clone() for part in ("images", "labels")])
        return train(self, batch, batch_idx)

    monkeypatch.setattr(LongTailed, "training_step", training_step)
    return runs


def test_compare_trains_both_on_the_same_batches_and_goes_on_after_a_stop(say, seen, tmp_path):
    out = tmp_path / "compare"
    code, text, err = say(*COMMAND, "--out", out)
    assert code == 0, err
    for seed in (0, 1):
        pairs = zip(seen["baseline", seed], seen["batchformer", seed], strict=True)
        assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    assert not torch.equal(seen["baseline", 0][0][0], seen["baseline", 1][0][0])
    for word in ("All", "Many", "Medium", "Few", "baseline", "batchformer", "report.html", "Next"):
        assert word in text
    assert (out / "report.html").stat().st_size > 1000
    table = json.loads((out / "compare.json").read_text())
    assert table["seeds"] == [0, 1]
    runs = {name: json.loads((out / name / "result.json").read_text()) for name in ("baseline-seed0", "baseline-seed1")}
    mean = sum(run["metrics"]["accuracy"] for run in runs.values()) / 2
    assert table["table"]["rows"][0]["mean"] == pytest.approx(mean)

    code, _, err = say(*COMMAND, "--out", out)
    assert code == 2
    assert "--resume" in err
    assert say(*COMMAND, "--out", out, "--print-config")[0] == 0  # which trains nothing

    (out / "batchformer-seed1/result.json").unlink()
    (out / "batchformer-seed1/checkpoints/last.ckpt").unlink()
    seen.clear()
    code, again, err = say(*COMMAND, "--out", out, "--resume")
    assert code == 0, err
    assert list(seen) == [("batchformer", 1)]
    assert again == text

    one = ["compare", "digits-lt", "--seeds", "1", *TINY, "--no-analysis", "--out", out]
    assert say(*one, "--resume")[0] == 0
    assert "seed 1" not in (out / "report.html").read_text()  # the page is of the runs in the table
    assert len(load(out)) == 2
    assert say(*COMMAND, "--out", out, "--resume")[0] == 0
    assert say(*one, "--overwrite")[0] == 0
    assert not (out / "baseline-seed1/result.json").exists()


def test_overwriting_removes_the_old_comparison_before_it_trains(say, monkeypatch, tmp_path):
    out = tmp_path / "compare"
    run = out / "baseline-seed0"
    run.mkdir(parents=True)
    old = [out / "compare.json", out / "report.html", run / "config.yaml", run / "result.json"]
    for file in old:
        file.write_text("{}")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LongTailed, "training_step", interrupted)
    command = ["compare", "digits-lt", "--seeds", "1", *TINY, "--no-analysis", "--out", out]
    assert say(*command, "--overwrite")[0] == 130
    assert not any(file.exists() and file.read_text() == "{}" for file in old)


def test_a_page_of_somebody_else_is_not_replaced(say, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<p>Years of work</p>")
    code, _, err = say("compare", "digits-lt", "--seeds", "1", *TINY, "--no-analysis", "--out", tmp_path, "--overwrite")
    assert (code, page.read_text()) == (2, "<p>Years of work</p>")
    assert f"{page} was not written by this command" in err
    assert not (tmp_path / "baseline-seed0").exists()


def test_ctrl_c_says_how_to_go_on(say, monkeypatch, tmp_path):
    train = LongTailed.training_step

    def interrupted(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            raise KeyboardInterrupt
        return train(self, batch, batch_idx)

    monkeypatch.setattr(LongTailed, "training_step", interrupted)
    arguments = ["fit", "digits-lt", *TINY, "--run.checkpoint_every_steps", "1", "--no-analysis"]
    arguments += ["--out", tmp_path / "my run"]
    code, _, err = say(*arguments, "--trainer.enable_progress_bar", "false")
    assert code == 130
    assert err.count("\n") == 1
    assert "--resume" in err
    assert f"'{tmp_path}/my run'" in err  # as a shell wants it
    monkeypatch.undo()
    assert say(*arguments, "--resume")[0] == 0


def test_a_run_has_left_memory_when_the_next_one_begins(say, monkeypatch, tmp_path):
    earlier, alive, train = [], [], running.train

    def watched(run, *args):
        alive.append([each() is not None for each in earlier])
        earlier.extend(weakref.ref(part) for part in (run.task, run.data, run.trainer))
        return train(run, *args)

    monkeypatch.setattr(running, "train", watched)
    code, _, err = say("compare", "digits-lt", "--seeds", "1", *TINY, "--no-analysis", "--out", tmp_path / "compare")
    assert code == 0, err
    assert alive == [[], [False] * 3]
