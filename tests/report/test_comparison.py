"""The table of `compare` matches seeds, and its sentence says what the interval says."""

import math

import pytest

from batchformer.errors import UserError
from batchformer.report import comparison_table, format_table, paired_difference, verdict


def run(method, seed, all_, **more):
    return {"recipe": "digits-lt", "method": method, "seed": seed, "metrics": {"all": all_, **more}}


def both(baseline, batchformer):
    return [run("baseline", s, v) for s, v in enumerate(baseline)] + [
        run("batchformer", s, v) for s, v in enumerate(batchformer)
    ]


def test_difference_uses_only_seeds_that_both_methods_have():
    results = [run("baseline", s, v) for s, v in [(0, 10.0), (1, 20.0), (2, 90.0)]]
    results += [run("batchformer", s, v) for s, v in [(1, 22.0), (0, 11.0), (7, 5.0)]]
    row = comparison_table(results)[0]
    assert row.paired_seeds == (0, 1)
    assert row.difference == paired_difference([10.0, 20.0], [11.0, 22.0])
    assert row.baseline.mean == pytest.approx(40.0)


def test_rows_are_all_many_medium_few_and_absent_splits_are_dashes():
    rows = comparison_table([run("baseline", 0, 50.0, many=60.0, medium=math.nan, few=None)])
    assert [row.label for row in rows] == ["All", "Many", "Medium", "Few"]
    lines = format_table(rows).splitlines()
    assert lines[4].split() == ["Medium", "–", "–", "–"]
    assert len({len(line) for line in lines}) == 1


def test_the_same_seed_twice_is_refused():
    with pytest.raises(UserError, match="method baseline and seed 3"):
        comparison_table([run("baseline", 3, 50.0), run("baseline", 3, 51.0)])


def test_runs_of_two_recipes_do_not_share_a_table():
    with pytest.raises(UserError, match="cifar100-lt-100, digits-lt"):
        comparison_table([run("baseline", 0, 1.0), run("baseline", 0, 1.0) | {"recipe": "cifar100-lt-100"}])


@pytest.mark.parametrize(
    ("baseline", "batchformer", "kind", "words"),
    [
        ([50, 51, 52], [52, 53.1, 53.9], "helped", "BatchFormer helped: +2.00"),
        ([50, 51, 52], [48, 49.1, 49.9], "hurt", "BatchFormer hurt: −2.00"),
        ([50, 51, 52], [53, 49, 52.5], "unclear", "No clear difference"),
        ([50], [51], "unclear", "1.00 points higher, but this is one seed: no interval"),
        ([50, 51], [], "incomplete", "add runs with BatchFormer"),
        ([], [50, 51], "incomplete", "add runs of the baseline"),
    ],
)
def test_verdict_says_what_the_interval_says(baseline, batchformer, kind, words):
    judged = verdict(comparison_table(both(baseline, batchformer)))
    assert judged.kind == kind
    assert words in judged.sentence


def test_verdict_without_a_common_seed_says_so():
    judged = verdict(comparison_table([run("baseline", 0, 1.0), run("batchformer", 1, 1.0)]))
    assert judged.kind == "incomplete"
    assert "never with the same seed" in judged.sentence


def test_verdict_counts_the_seeds():
    judged = verdict(comparison_table(both([50, 51, 52, 53], [52, 53.1, 53.9, 55])))
    assert "4 matched seeds" in judged.sentence
