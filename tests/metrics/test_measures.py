"""What tables, verdicts and the progress line read of measures."""

import dataclasses

import pytest

from batchformer.errors import UserError
from batchformer.metrics import measures as room
from batchformer.metrics.measures import Measure, measures_of, primary_of

TASKS = {
    name: value
    for name, value in vars(room).items()
    if isinstance(value, tuple) and all(isinstance(each, Measure) for each in value) and name != "CLASS_SCORES"
}


@pytest.mark.parametrize("name", TASKS)
def test_one_measure_decides_and_the_progress_line_shows_it(name):
    measures = TASKS[name]
    (deciding,) = (measure for measure in measures if measure.primary)
    assert deciding is primary_of(measures)
    assert deciding.in_progress
    assert not deciding.detail
    keys = [measure.key for measure in measures]
    assert len(set(keys)) == len(keys)
    assert {measure.reading_of for measure in measures} <= {"", *keys}


def test_the_progress_line_shows_what_moves_first_beside_the_measure_that_decides():
    shown = {name: [each.key for each in measures if each.in_progress] for name, measures in TASKS.items()}
    assert shown["LONG_TAILED"] == ["accuracy", "few"]
    assert shown["CLASSIFICATION"] == ["top1", "top1_ema", "few"]
    assert shown["DETECTION"] == ["ap", "ap50"]
    assert shown["VOC"] == ["voc_ap", "voc_ap50"]
    assert shown["PANOPTIC"] == ["pq", "pq_things"]


@pytest.mark.parametrize("name", TASKS)
def test_of_errors_and_distances_less_is_better_and_of_scores_more(name):
    for measure in TASKS[name]:
        is_error = "error" in measure.words or measure.unit == "mm"
        assert measure.better == ("lower" if is_error else "higher")
        assert measure.gain(2.0) == (-2.0 if is_error else 2.0)
        assert measure.bounds == ((0.0, 100.0) if measure.unit == "%" else (0.0, None))


def test_a_measure_says_its_unit_where_it_has_one():
    error, score, plain = Measure("e", "Error", "mm"), Measure("s", "Score"), Measure("p", "Pairs", "")
    assert [each.title for each in (error, score, plain)] == ["Error, mm", "Score, %", "Pairs"]
    assert [each.points for each in (error, score, plain)] == ["mm", "points", ""]
    assert error.words == "error"
    assert dataclasses.replace(error, name="error of joints").words == "error of joints"
    with pytest.raises(UserError, match="measure e: better='more'"):
        dataclasses.replace(error, better="more")


def test_on_another_evaluation_set_it_decides_nothing():
    of_run, averaged = Measure("top1", "Top-1", primary=True), Measure("top1_ema", "Averaged", reading_of="top1")
    there = of_run.of("real")
    assert (there.key, there.label, there.words) == ("real/top1", "Top-1 (real)", "top-1 on real")
    assert not there.primary
    assert there.reading_of == ""
    assert averaged.of("real").reading_of == there.key


def test_measures_come_back_from_a_result_file():
    assert measures_of({"measures": [measure.as_dict() for measure in room.HANDS]}) == list(room.HANDS)
