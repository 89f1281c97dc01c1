"""The comparison matches targets and seeds, and its sentences say what the intervals say."""

import json
import math

import pytest
from made_up import classification, comparison, pose

from batchformer.errors import UserError
from batchformer.metrics.measures import with_current_names
from batchformer.report import compare_runs, format_table, paired_difference, summarise, verdict, verdicts


def run(method, seed, all_, **more):
    return {"recipe": "digits-lt", "method": method, "seed": seed, "metrics": {"all": all_, **more}}


def both(baseline, batchformer):
    return [run("baseline", s, v) for s, v in enumerate(baseline)] + [
        run("batchformer", s, v) for s, v in enumerate(batchformer)
    ]


def test_difference_uses_only_seeds_that_both_variants_have():
    results = [run("baseline", s, v) for s, v in [(0, 10.0), (1, 20.0), (2, 90.0)]]
    results += [run("batchformer", s, v) for s, v in [(1, 22.0), (0, 11.0), (7, 5.0)]]
    table = compare_runs(results)
    assert table.paired_seeds(table.primary, "batchformer") == (0, 1)
    assert table.difference(table.primary, "batchformer") == paired_difference([10.0, 20.0], [11.0, 22.0])
    assert table.cell(table.primary, "baseline").mean == pytest.approx(40.0)
    assert table.difference(table.primary, "baseline") is None


def test_rows_are_the_measures_that_a_run_has():
    table = compare_runs([run("baseline", 0, 50.0, many=60.0, medium=math.nan, few=None)])
    assert [measure.label for measure in table.measures] == ["All", "Many"]
    lines = format_table(table).splitlines()
    assert lines[3].split() == ["Many", "60.00"]
    assert len({len(line) for line in lines}) == 1


def test_the_table_of_the_default_pair_is_the_one_people_know():
    results = [run(m, s, v + s) for m, v in (("baseline", 50.0), ("batchformer", 51.5)) for s in range(3)]
    assert format_table(compare_runs(results)).splitlines() == [
        "accuracy, %      baseline   batchformer  difference [95 % interval]",
        "───────────  ────────────  ────────────  ──────────────────────────",
        "All          51.00 ± 1.00  52.50 ± 1.00        +1.50 [+1.50, +1.50]",
    ]


def test_classification_is_about_top_1_and_top_5():
    table = compare_runs([classification(method=m, seed=s) for m in ("baseline", "batchformer") for s in (0, 1)])
    assert [(each.key, each.label) for each in table.measures] == [("top1", "Top-1"), ("top5", "Top-5")]
    assert "top-1 accuracy" in verdict(table).sentence
    assert [each.label for each in compare_runs(comparison(seeds=2)).measures] == ["All", "Many", "Medium", "Few"]


def test_averaged_weights_and_long_tails_add_their_rows():
    metrics = {"top1": 50.0, "top5": 70.0, "all": 50.0, "top1_ema": 51.0, "many": 60.0, "medium": 40.0, "few": 20.0}
    labels = [each.label for each in compare_runs([classification(metrics=metrics)]).measures]
    assert labels == ["Top-1", "Top-5", "Top-1, EMA", "Many", "Medium", "Few"]


def test_files_of_version_0_1_and_of_this_one_are_compared_alike():
    old = comparison(seeds=3)
    assert compare_runs([with_current_names(result) for result in old]) == compare_runs(old)


def test_the_same_run_twice_is_refused():
    with pytest.raises(UserError, match="variant baseline and seed 3"):
        compare_runs([run("baseline", 3, 50.0), run("baseline", 3, 51.0)])
    results = pose(seeds=1)
    with pytest.raises(UserError, match="variant scratch, target sun and seed 0"):
        compare_runs([*results, next(each for each in results if each["target"] == "sun")])


def test_runs_of_two_recipes_do_not_share_a_table():
    with pytest.raises(UserError, match="cifar100-lt-100, digits-lt"):
        compare_runs([run("baseline", 0, 1.0), run("baseline", 0, 1.0) | {"recipe": "cifar100-lt-100"}])


@pytest.mark.parametrize(
    ("named", "variants", "order"),
    [
        ("erm", ("coral", "erm", "erm+bf"), ("erm", "coral", "erm+bf")),
        (None, ("mixup", "baseline", "a"), ("baseline", "mixup", "a")),
        (None, ("mixup", "coral"), ("coral", "mixup")),
        ("erm", ("coral",), ("erm", "coral")),
        ("baseline", ("batchformer",), ("baseline", "batchformer")),
    ],
)
def test_the_reference_comes_first(named, variants, order):
    results = [{**each, "reference": named} for each in pose(1, 2, variants)]
    assert compare_runs(results).variants == order


def values(results, variant, target):
    return [r["metrics"]["mpjpe"] for r in results if (r["variant"], r["target"]) == (variant, target)]


def test_targets_are_averaged_seed_by_seed_and_the_interval_is_over_seeds():
    results = pose(seeds=3)
    table = compare_runs(results)
    assert table.targets == ("indoor", "sun", "night", "glove")
    assert table.seeds == (0, 1, 2)
    columns = {v: [values(results, v, t) for t in table.targets] for v in table.variants}
    means = {v: [sum(c[s] for c in columns[v]) / 4 for s in range(3)] for v in table.variants}
    measure, last = table.primary, "mixstyle+batchformer"
    assert table.cell(measure, last) == pytest.approx(summarise(means[last]))
    assert table.difference(measure, last) == pytest.approx(paired_difference(means["scratch"], means[last]))
    of_one = paired_difference(values(results, "scratch", "sun"), values(results, last, "sun"))
    assert table.difference(measure, last, "sun") == pytest.approx(of_one)


def test_a_seed_without_all_targets_does_not_count_in_the_mean_over_them():
    results = [r for r in pose(seeds=3) if (r["seed"], r["target"], r["variant"]) != (1, "sun", "mixstyle")]
    table = compare_runs(results)
    assert table.paired_seeds(table.primary, "mixstyle") == (0, 2)
    assert table.paired_seeds(table.primary, "mixstyle", "night") == (0, 1, 2)
    assert table.paired_seeds(table.primary, "mixstyle+batchformer") == (0, 1, 2)
    half = [r for r in results if r["variant"] != "mixstyle" or r["target"] == "sun"]
    assert "for every target" in verdicts(compare_runs(half))["mixstyle"].sentence


def test_variants_and_targets_are_one_table_in_the_unit_of_the_measure():
    lines = format_table(compare_runs(pose(seeds=3))).splitlines()
    assert lines[0].split("  ")[0] == "MPJPE, mm (lower is better)"
    assert lines[0].split()[5:] == [
        "indoor", "sun", "night", "glove", "mean", "difference", "[95", "%", "interval]",
    ]  # fmt: skip
    assert lines[2].startswith("scratch ")
    assert lines[2].endswith("the reference")
    assert "−2." in lines[4]
    assert len({len(line) for line in lines}) == 1


def with_a_reading(seeds=3):
    """Runs that also measure the averaged weights: better by one millimetre, and by two with mixstyle."""
    results = pose(seeds=seeds)
    for each in results:
        better = 2.0 if each["variant"] == "mixstyle" else 1.0 + 0.1 * each["seed"]
        each["metrics"] |= {"mpjpe_swad": each["metrics"]["mpjpe"] - better}
        each["measures"] = [*each["measures"], {"key": "mpjpe_swad", "label": "MPJPE, SWAD", "unit": "mm",
                            "better": "lower", "bounds": [0.0, None], "reading_of": "mpjpe"}]  # fmt: skip
    return results


def test_other_weights_of_the_same_runs_are_a_table_of_their_own_with_the_difference_to_the_last():
    table = compare_runs(with_a_reading())
    assert [each.key for each in table.readings] == ["mpjpe_swad"]
    assert table.reading_difference(table.readings[0], "scratch") == pytest.approx(
        paired_difference([0, 0, 0], [-1, -1.1, -1.2])
    )
    _, second = format_table(table).split("\n\n")
    lines = second.splitlines()
    assert lines[0].split("  ")[0] == "mean over the targets"
    assert "−2.00 [−2.00, −2.00]" in next(line for line in lines if line.startswith("mixstyle "))
    assert "\n\n" not in format_table(compare_runs(pose(seeds=3)))


def test_judged_by_a_reading_the_last_weights_are_the_other_reading():
    results = with_a_reading()
    for each in results:
        each["measures"] = [{**m, "primary": m["key"] == "mpjpe_swad"} for m in each["measures"]]
    table = compare_runs(results)
    assert [each.key for each in table.readings] == ["mpjpe"]
    assert table.reading_difference(table.readings[0], "mixstyle").mean == pytest.approx(2.0)


def test_without_targets_each_variant_has_a_column_of_differences():
    results = [{**each, "target": None} for each in pose(seeds=3) if each["target"] == "sun"]
    lines = format_table(compare_runs(results)).splitlines()
    assert "mixstyle − scratch [95 %]" in lines[0]
    assert "mixstyle+batchformer − scratch [95 %]" in lines[0]
    assert lines[2].startswith("MPJPE, mm (lower is better)")
    assert lines[3].startswith("AUC  ")  # another unit, so that both rows say theirs
    assert "0.5" in lines[3]


def test_an_error_that_falls_has_helped_and_one_that_rises_has_hurt():
    table = compare_runs(pose(seeds=4))
    found = verdicts(table)
    assert list(found) == ["mixstyle", "mixstyle+batchformer"]
    judged = found["mixstyle+batchformer"]
    assert judged.kind == "helped"
    assert judged.sentence.startswith("mixstyle+batchformer helped against scratch: −2.")
    assert " mm of mean joint error (95 % interval −" in judged.sentence
    assert "4 matched seeds, mean of 4 targets" in judged.sentence
    assert verdict(table).sentence == "\n".join(each.sentence for each in found.values())
    turned = [{**each, "reference": "mixstyle+batchformer"} for each in pose(seeds=4)]
    assert verdicts(compare_runs(turned))["scratch"].kind == "hurt"
    one = verdicts(compare_runs(pose(seeds=1)))["mixstyle+batchformer"].sentence
    assert " mm lower than with scratch, but this is one seed" in one


def test_the_plain_form_is_json_and_holds_every_cell():
    table = compare_runs(pose(seeds=2))
    plain = json.loads(json.dumps(table.as_plain()))
    assert len(plain["rows"]) == 2 * 3 * 5
    row = next(r for r in plain["rows"] if (r["variant"], r["target"]) == ("mixstyle", None))
    assert row["mean"] == pytest.approx(table.cell(table.primary, "mixstyle").mean)
    assert row["difference"]["low"] == pytest.approx(table.difference(table.primary, "mixstyle").low)


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
    judged = verdict(compare_runs(both(baseline, batchformer)))
    assert judged.kind == kind
    assert words in judged.sentence


def test_verdict_without_a_common_seed_says_so():
    judged = verdict(compare_runs([run("baseline", 0, 1.0), run("batchformer", 1, 1.0)]))
    assert judged.kind == "incomplete"
    assert "never with the same seed" in judged.sentence


def test_verdict_counts_the_seeds():
    judged = verdict(compare_runs(both([50, 51, 52, 53], [52, 53.1, 53.9, 55])))
    assert "4 matched seeds" in judged.sentence


def test_details_stay_in_the_result_file():
    results = pose(seeds=1)
    for each in results:
        each["measures"] = [*each["measures"], {"key": "pck", "label": "PCK", "detail": True}]
        each["metrics"]["pck"] = 50.0
    assert [measure.key for measure in compare_runs(results).measures] == ["mpjpe", "auc"]
