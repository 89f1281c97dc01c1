"""Classes are sorted by how often they were seen, whatever their labels, and averaged over runs and groups."""

import pytest
from made_up import result, write

from batchformer.report import load_runs, paired_difference
from batchformer.report.classes import (
    class_ranks,
    difference_per_group,
    influence_chart,
    mean_per_group,
    sorted_groups,
    split_borders,
)


@pytest.fixture
def runs(tmp_path):
    counts = [5, 500, 50, 20]
    accuracies = {
        ("baseline", 0): [10.0, 80.0, 60.0, 40.0],
        ("batchformer", 0): [20.0, 81.0, 60.0, 42.0],
        ("baseline", 1): [12.0, 82.0, 60.0, None],
        ("batchformer", 1): [26.0, 84.0, 60.0, 50.0],
    }
    return load_runs(
        [
            write(
                tmp_path,
                [
                    result(method=m, seed=s, classes=4, class_counts=counts, per_class=values)
                    for (m, s), values in accuracies.items()
                ],
            )
        ]
    )


def test_frequent_classes_come_first(runs):
    assert [group.members for group in sorted_groups(runs)] == [(1,), (2,), (3,), (0,)]
    assert [group.name for group in sorted_groups(runs)] == ["class 1", "class 2", "class 3", "class 0"]


def test_splits_follow_the_papers_borders(runs):
    assert split_borders(sorted_groups(runs)) == (1, 3)  # 500 | 50 20 | 5


def test_means_leave_out_what_is_not_known(runs):
    baseline = [run for run in runs if run.variant == "baseline"]
    means = mean_per_group(baseline, sorted_groups(runs), lambda run: run.per_class)
    assert means == [81.0, 60.0, 40.0, 11.0]


def test_differences_match_seeds(runs):
    differences = difference_per_group(runs, "baseline", "batchformer", sorted_groups(runs))
    assert [d.mean for d in differences] == [1.5, 0.0, 2.0, 12.0]
    assert differences[2].low is None  # seed 1 of the baseline is not known there: one pair is left


def test_too_many_classes_are_drawn_as_groups_that_hold_each_class_once(runs):
    groups = sorted_groups(runs, most=2)
    assert [group.members for group in groups] == [(1, 2), (3, 0)]
    assert groups[1].count == pytest.approx(10.0)  # geometric mean of 20 and 5


def test_groups_stand_where_their_classes_do(runs):
    assert class_ranks(sorted_groups(runs)) == [1, 2, 3, 4]
    assert class_ranks(sorted_groups(runs, most=2)) == [1.5, 3.5]


def test_the_axis_of_classes_counts_all_of_them(tmp_path):
    norms = {"wrt": "features", "per_class": [0.5] * 1500}
    many = write(tmp_path, [result(classes=1500, gradient_influence=norms)])
    assert ">1500<" in influence_chart("a", load_runs([many]))


def test_a_seed_with_several_targets_is_one_pair(tmp_path):
    made = []
    for variant, gain in (("baseline", 0.0), ("batchformer", 3.0)):
        for target, level in (("sun", 50.0), ("night", 20.0)):
            for seed in (0, 1):
                value = level + gain + (seed if variant == "batchformer" else 0)
                made.append(result(method=variant, seed=seed, classes=1, target=target, per_class=[value]))
    runs = load_runs([write(tmp_path, made)])
    (difference,) = difference_per_group(runs, "baseline", "batchformer", sorted_groups(runs))
    assert difference == pytest.approx(paired_difference([35.0, 35.0], [38.0, 39.0]))
