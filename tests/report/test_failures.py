"""Which classes fail: in a terminal, as CSV, on the page; files that were changed by hand."""

import copy
import csv
import io
import json
import re

import pytest
from made_up import comparison, result, with_failures, write

from batchformer.errors import UserError
from batchformer.report import write_report
from batchformer.report.failures import SHOWN, failures_csv, failures_text, worst_first
from batchformer.report.runs import load_runs


def test_the_terminal_shows_the_worst_classes_and_says_where_the_others_are():
    made = with_failures(result(classes=30), 30)
    told = failures_text(made, "run/classes.csv")
    lines = told.splitlines()
    assert [line.split()[1] for line in lines[2 : 2 + SHOWN]] == [str(k) for k in range(27, 27 - SHOWN, -1)]
    assert f"and {28 - SHOWN} more: run/classes.csv" in told
    assert "class 27 predicted as class 0 (7 of 20)" in told
    assert (
        "Balanced accuracy 80.5 %; Macro F1 79.5 %; ECE 12.3 % (3.2 % with temperature 1.70: predict --calibrated)"
        in told
    )
    assert len({len(line) for line in lines[1 : 2 + SHOWN]}) == 1  # columns are aligned
    rows = list(csv.reader(io.StringIO(failures_csv(made))))
    assert rows[0] == ["class", "images", "precision", "recall", "F1"]
    assert len(rows) == 29
    assert rows[1] == ["class 27", "20", "63.0", "63.0", "63.0"]


def test_files_of_earlier_versions_have_no_such_part(tmp_path):
    old = result()
    assert failures_text(old, "x") == failures_csv(old) == ""
    page = write_report([write(tmp_path / "runs", comparison(seeds=2))], tmp_path / "r.html").read_text()
    assert "Which classes fail" not in page


def test_worst_first_leaves_out_what_was_not_evaluated():
    columns = {"images": [5, 0, 9, 9], "F1": [50.0, 1.0, 50.0, None]}
    assert worst_first(columns, "F1") == [2, 0]


def test_the_page_shows_classes_pairs_matrix_and_calibration(tmp_path):
    runs = [with_failures(made, 12) for made in comparison(seeds=2, classes=12)]
    page = write_report([write(tmp_path / "runs", runs)], tmp_path / "r.html").read_text()
    section = page.split("<h3>Which classes fail</h3>")[1].split("<h3>")[0]
    assert section.count("<details open><summary>") == 1  # the better variant
    worst = re.findall(r'<tr><th scope="row">(class \d+)</th>', section)
    assert worst[:SHOWN] == [f"class {k}" for k in range(9, -1, -1)]
    for words in ("Mean of 2 runs", "7 of 20", "Confusion matrix", "Reliability diagram", "each half of the test",
                  "Balanced accuracy <b>80.5 ± 0.0 %</b>"):  # fmt: skip
        assert words in section
    many = with_failures(result(classes=120), 120, matrix=False)
    page = write_report([write(tmp_path / "many", [many])], tmp_path / "m.html").read_text()
    assert f"{118 - SHOWN} more classes" in page
    assert "Confusion matrix" not in page


def test_columns_have_a_number_for_each_named_class_and_names_may_be_missing(tmp_path):
    made = copy.deepcopy(with_failures(result(classes=12), 12))
    del made["class_names"]
    (tmp_path / "result.json").write_text(json.dumps(made))
    (run,) = load_runs([tmp_path])
    assert len(run.failures["columns"]["F1"]) == 12
    made["class_names"] = [f"class {k}" for k in range(13)]
    (tmp_path / "result.json").write_text(json.dumps(made))
    with pytest.raises(UserError, match="not one number for each of its classes"):
        load_runs([tmp_path])


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("columns", {"images": [1, 2]}),
        ("columns", {"images": ["<b>"] * 12, "F1": [1.0] * 12}),
        ("worst_by", "recall2"),
        ("confusions", [[0, 99, 3]]),
        ("confusions", [[0, "<b>", 3]]),
        ("matrix", [[1]]),
        ("calibration", {"ece": "bad"}),
        ("calibration", {"ece": 1.0, "bins": [[1, 2]]}),
        ("calibration", {"ece": 1.0, "temperature": 2.0}),
        ("pictures", "../elsewhere"),
    ],
)
def test_entries_that_cannot_be_read_are_refused(tmp_path, part, value):
    made = copy.deepcopy(with_failures(result(classes=12), 12))
    made["failures"][part] = value
    (tmp_path / "result.json").write_text(json.dumps(made))
    with pytest.raises(UserError, match=r"result\.json has"):
        load_runs([tmp_path])
