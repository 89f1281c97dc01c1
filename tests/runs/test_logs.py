"""metrics.csv of a resumed run: no gap, no double."""

from batchformer.runs.loggers import RunCSVLogger, rows_before


def test_rows_after_the_checkpoint_are_dropped_and_the_others_kept(tmp_path):
    first = RunCSVLogger(tmp_path, resume_step=0)
    for step in range(10):
        first.log_metrics({"train/loss": 10.0 - step}, step)
    first.finalize("failed")

    second = RunCSVLogger(tmp_path, resume_step=6)
    for step in range(6, 12):
        second.log_metrics({"train/loss": 100.0 + step, "val/all": 1.0}, step)
    second.finalize("success")

    rows = rows_before(tmp_path / "metrics.csv", 10**9)
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert float(rows[5]["train/loss"]) == 5.0
    assert float(rows[6]["train/loss"]) == 106.0


def test_a_new_run_keeps_nothing(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    logger = RunCSVLogger(tmp_path, resume_step=0)
    logger.log_metrics({"train/loss": 1.0}, 0)
    logger.finalize("success")
    assert [row["step"] for row in rows_before(tmp_path / "metrics.csv", 10)] == ["0"]
