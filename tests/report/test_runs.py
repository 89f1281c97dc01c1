"""Result files are found wherever runs put them; bad ones are named in one sentence."""

import json

import pytest
from made_up import comparison, pose, result, write

from batchformer.errors import UserError
from batchformer.report import load_runs


def test_finds_runs_in_run_folders_compare_folders_and_result_files(tmp_path):
    compare = write(tmp_path / "compare", comparison(seeds=2))
    (compare / "compare.json").write_text('{"recipe": "x", "method": "y", "seed": 1, "metrics": {}}')
    results = tmp_path / "results" / "digits-lt"
    results.mkdir(parents=True)
    (results / "h200-seed3.json").write_text(json.dumps(result(recipe="digits-lt", seed=3)))
    (results / "notes.json").write_text('{"unrelated": true}')
    one = write(tmp_path / "one", [result(recipe="other", seed=9)])
    runs = load_runs([compare, tmp_path / "results", one])
    assert [(run.recipe, run.variant, run.seed) for run in runs] == [
        ("cifar100-lt-100", "baseline", 0),
        ("cifar100-lt-100", "baseline", 1),
        ("cifar100-lt-100", "batchformer", 0),
        ("cifar100-lt-100", "batchformer", 1),
        ("digits-lt", "batchformer", 3),
        ("other", "batchformer", 9),
    ]


def test_a_run_given_twice_counts_once(tmp_path):
    folder = write(tmp_path / "runs", [result()])
    (tmp_path / "copy.json").write_text(json.dumps(result()))
    assert len(load_runs([folder, folder, tmp_path / "copy.json"])) == 1


def test_two_different_runs_of_one_seed_are_refused_with_both_names(tmp_path):
    write(tmp_path / "a", [result()])
    write(tmp_path / "b", [result(metrics={"all": 1.0})])
    with pytest.raises(UserError, match=r"a/.*b/.*pass only one of them$"):
        load_runs([tmp_path])
    for name, algorithm in (("c", "plain"), ("d", "ride")):
        write(tmp_path / name, [result(config={"model": {"algorithm": algorithm}, "run": {"threads": name}})])
    words = r"\(they differ in model\.algorithm, run\.threads; .* --variant NAME:model\.algorithm=VALUE\)$"
    with pytest.raises(UserError, match=words):
        load_runs([tmp_path / "c", tmp_path / "d"])


def test_numbers_that_are_not_finite_become_unknown(tmp_path):
    folder = write(tmp_path, [result(metrics={"all": 50.0, "few": float("nan")})])
    assert load_runs([folder])[0].metrics == {"accuracy": 50.0, "few": None}


def broken(**changes):
    return json.dumps({**result(classes=4, epochs=2), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"recipe": "digits-lt", "met', "is damaged"),
        ("\x00\x01", "is damaged"),
        ("[1, 2]", "not a JSON object"),
        ('{"recipe": "x", "seed": 1}', "has no 'variant', 'metrics'"),
        (broken(variant=3), "variant 3, expected a name"),
        (broken(target=["a"]), "target ['a'], expected a name"),
        (broken(metrics=[1.0]), "'metrics' that is not an object"),
        (broken(measures=[{"name": "x"}]), "'measures' that cannot be read"),
        (broken(measures=[3]), "'measures' that cannot be read"),
        (broken(measures=[]), "no 'measures'"),
        (broken(sections=[{"text": "x"}]), "without 'title' in its 'sections'"),
        (broken(sections=[{"title": "x", "table": {"header": ["a"], "rows": [[1, 2]]}}]), "not as long as its header"),
        (broken(sections=[{"title": "x", "series": {"x": [1], "lines": {"a": [1, 2]}}}]), "not as long as its 'x'"),
        (broken(sections=[{"title": "x", "points": {"groups": {"a": [[1, 2, 3]]}}}]), "that is not two numbers"),
        (broken(sections=[{"title": "x", "points": {"groups": {"a": [["b", 2]]}}}]), "'b' in \"section 'x': a\""),
        (
            broken(sections=[{"title": "x", "grid": {"rows": ["a"], "columns": ["b"], "values": [[1, 2]]}}]),
            "rows times",
        ),
        (broken(sections=[{"title": "x", "grid": {"rows": [], "columns": [], "marked": [1]}}]), "no row and column"),
        (broken(sections=[{"title": "x", "pictures": "../other"}]), "'pictures' are no folder of the run"),
        (broken(sections=[{"title": "x", "series": {"x": ["a"], "lines": {"a": [1]}}}]), "'a' in \"section 'x': x\""),
        (broken(seed="zero"), "seed 'zero'"),
        (broken(metrics={"few": 1.0}), "no 'accuracy'"),
        (broken(metrics={"all": "high"}), "'high' in 'metrics.accuracy'"),
        (broken(per_class=[1.0, 2.0]), "2 entries in 'per_class' but 4"),
        (broken(history=[{"all": 3.0}]), "without 'epoch'"),
        (broken(history="long"), "'history' that is not a list"),
        (broken(class_counts=[1, 2, 3, -4]), "-4 in 'class_counts'"),
        (broken(gradient_influence=[1.0]), "'gradient_influence' that is not an object"),
    ],
)
def test_a_bad_result_file_is_named_with_what_is_wrong(tmp_path, text, words):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_runs([tmp_path])
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_found_says_where_it_looked(tmp_path):
    with pytest.raises(UserError, match=f"no result.json found in {tmp_path}"):
        load_runs([tmp_path])
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_runs([tmp_path / "nowhere"])


def test_a_file_that_was_named_must_be_a_result_and_others_of_a_folder_are_passed_over(tmp_path):
    for name in ("settings.json", "result.json"):
        (tmp_path / name).write_text('{"seed": 1}')
        with pytest.raises(UserError, match=f"{name} has no .*: it is not a complete result file"):
            load_runs([tmp_path / name])
    with pytest.raises(UserError, match=r"result\.json has no"):
        load_runs([tmp_path])
    (tmp_path / "result.json").unlink()
    with pytest.raises(UserError, match=r"no result\.json found"):
        load_runs([tmp_path])


def test_a_run_that_is_not_finished_is_told_apart_from_a_wrong_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match=r"is a run that is not finished, it has no result.json: .* --resume"):
        load_runs([tmp_path])


def test_nobody_is_told_to_delete_a_file_that_is_no_result(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "settings.json").write_text("// a file of another program")
    for place in (tmp_path / "photo.jpg", tmp_path):
        with pytest.raises(UserError, match="is damaged or no result file") as caught:
            load_runs([place])
        assert "delete it" not in str(caught.value)


def test_runs_of_several_targets_are_runs_of_their_own(tmp_path):
    runs = load_runs([write(tmp_path, pose(seeds=1))])
    assert len(runs) == 12
    assert runs[0].name == "mixstyle, glove, seed 0"
    assert (runs[0].primary.key, runs[0].primary.better) == ("mpjpe", "lower")


def test_a_comparison_folder_says_in_which_order_its_variants_and_targets_stand(tmp_path):
    folder = write(tmp_path, pose(seeds=1))
    order = {
        "variants": ["scratch", "mixstyle+batchformer", "mixstyle"],
        "targets": ["sun", "night", "indoor", "glove"],
    }
    (folder / "compare.json").write_text(json.dumps(order))
    runs = load_runs([folder])
    assert list(dict.fromkeys(run.variant for run in runs)) == order["variants"]
    assert list(dict.fromkeys(run.target for run in runs)) == order["targets"]
    (folder / "compare.json").write_text("{")
    assert load_runs([folder])[0].variant == "mixstyle"
