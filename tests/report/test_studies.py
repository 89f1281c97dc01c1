"""Variants of a recipe are held to one baseline, in docs/results.md and on the page."""

import json

import pytest
from made_up import classification, comparison, health, result, write

from batchformer.errors import UserError
from batchformer.report import load_runs, write_report
from batchformer.report.comparison import comparison_table, format_difference, metrics_of
from batchformer.report.paper import MAIN, STUDIES
from batchformer.report.provenance import command, facts
from batchformer.report.readme_table import readme_table
from batchformer.report.results_page import results_page
from batchformer.report.runs import by_recipe
from batchformer.report.statistics import paired_difference
from batchformer.report.studies import base_of, find_studies, with_references
from batchformer.report.verdict import verdict

BASE = "vit-cifar100-32"
EQUAL_COST = STUDIES[BASE].held_to_words


def study():
    """A baseline, a variant that dies, one that gains, and a longer baseline."""
    made = [classification(f"{BASE}-baseline", "baseline", s, 54) for s in range(3)]
    made += [classification(f"{BASE}-published", seed=s, top1=53.5, dead=True) for s in range(3)]
    made += [classification(f"{BASE}-stable-block8", seed=s, top1=56.5) for s in (0, 1, 7)]
    return made + [classification(f"{BASE}-long", "baseline", s, 57, epochs=100) for s in range(3)]


def top1(results, name):
    return {r["seed"]: r["metrics"]["top1"] for r in results if r["recipe"] == f"{BASE}-{name}"}


def test_classification_is_about_top_1_and_top_5():
    rows = comparison_table([classification(method=m, seed=s) for m in ("baseline", "batchformer") for s in (0, 1)])
    assert [(row.metric, row.label) for row in rows] == [("all", "Top-1"), ("top5", "Top-5")]
    assert "top-1 accuracy" in verdict(rows).sentence
    assert [row.label for row in comparison_table(comparison(seeds=2))] == ["All", "Many", "Medium", "Few"]


def test_averaged_weights_and_long_tails_add_their_rows():
    metrics = {"top1": 50.0, "top5": 70.0, "all": 50.0, "top1_ema": 51.0, "many": 60.0, "medium": 40.0, "few": 20.0}
    assert list(metrics_of([classification(metrics=metrics)]).values()) == [
        "Top-1", "Top-5", "Top-1, EMA", "Many", "Medium", "Few",
    ]  # fmt: skip
    assert "Few" not in metrics_of([classification(metrics={**metrics, "few": float("nan")})]).values()


@pytest.mark.parametrize(
    ("recipe", "base"),
    [
        (f"{BASE}-stable", BASE),
        (BASE, BASE),
        ("deit-ti-cifar100-100-stable", "deit-ti-cifar100-100"),
        ("deit-s-imagenet-lt-1-12", "deit-s-imagenet-lt-1-12"),
        ("digits-lt", None),
    ],
)
def test_a_row_of_a_paper_is_never_a_variant_of_another(recipe, base):
    assert base_of(recipe) == base


def test_every_recipe_named_in_a_table_is_shipped():
    from batchformer.recipes import recipe_names

    assert {*MAIN, *(study.recipe for study in STUDIES.values())} <= set(recipe_names())


def test_differences_are_to_the_baseline_over_matched_seeds(tmp_path):
    results = study()
    (found,) = find_studies(by_recipe(load_runs([write(tmp_path, results)])))
    assert [v.name for v in found.variants] == ["baseline", "long", "published", "stable-block8"]
    assert found.reference is found.variants[0]
    base, stable = top1(results, "baseline"), top1(results, "stable-block8")
    wanted = paired_difference([base[0], base[1]], [stable[0], stable[1]])
    assert found.difference(found.variants[3]) == pytest.approx(wanted)
    assert found.difference(found.reference) is None


def test_the_study_is_one_table_of_the_results_page(tmp_path):
    results = study()
    page = results_page(write(tmp_path, results))
    assert page.count(f"## Study: {BASE}") == 1
    assert "Not in the paper" in page
    table, _ = page.split(EQUAL_COST)
    lines = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    assert list(lines) == ["baseline", "long", "published", "stable-block8"]
    base, dead = top1(results, "baseline"), top1(results, "published")
    gain = format_difference(paired_difference(list(base.values()), list(dead.values())))
    assert gain in lines["published"]
    streams = [r["streams"] for r in results if r["recipe"] == f"{BASE}-published"]
    last = [sum(s[f"{stream}_loss"][-1] for s in streams) / 3 for stream in ("plain", "related")]
    assert f"| {last[0]:.2f} | {last[1]:.2f} | 50 |" in lines["published"]
    assert "| – | – | 100 |" in lines["long"]
    assert f"{BASE}-long`, baseline" in page
    assert "makes 2,100 updates" in page


def test_a_variant_is_held_to_the_baseline_of_equal_cost_where_that_was_run(tmp_path):
    results = study()
    folder = write(tmp_path, [*results, *comparison(seeds=2)])
    longer, published = (list(top1(results, name).values()) for name in ("long", "published"))
    wanted = format_difference(paired_difference(longer, published))
    lines = [line for line in results_page(folder).partition(EQUAL_COST)[2].splitlines() if line.startswith("| `")]
    (line,) = [line for line in lines if line.startswith("| `published` | `long` |")]
    assert f"| {wanted} |" in line
    assert not any(line.startswith("| `stable-block8`") for line in lines)  # its long baseline was not run
    table = readme_table(folder)
    assert EQUAL_COST in table
    (line,) = [line for line in table.splitlines() if line.startswith("| `published` |")]
    assert line.endswith(f"| `long` | {wanted} |")
    (line,) = [line for line in table.splitlines() if line.startswith("| `stable-block8` |")]
    assert line.endswith("|  |  |")
    without = write(tmp_path / "without", [each for each in results if each["recipe"] != f"{BASE}-long"])
    assert EQUAL_COST not in results_page(without)


def test_the_study_says_how_much_the_modules_relate(tmp_path):
    results = study()
    measured = health()
    measured["points"][3]["change_quiet"] = 0.071
    results[3]["stream_health"] = measured
    page = results_page(write(tmp_path, results))
    line = next(line for line in page.splitlines() if line.startswith("| `published`"))
    assert "| 7.1% | 31.0% |" in line
    assert "Measured after training" in page


def test_a_study_of_a_papers_row_stands_beside_its_number(tmp_path):
    results = [
        classification("deit-ti-cifar100-100-baseline", "baseline", 0, 50),
        classification("deit-ti-cifar100-100-single", "batchformer", 0, 51),
    ]
    page = results_page(write(tmp_path, [*results, *comparison(seeds=1), result(recipe="cifar100-lt-100-single")]))
    assert "paper (V2, Table 7): 49.2 without, 58.7 with." in page
    single = page.index("## Ablation: without the shared classifier")
    assert "deit-ti" not in page[single:]  # a V2 variant is no row of BatchFormer's Table 10


def test_a_row_of_v2_stands_beside_the_paper_with_top_5(tmp_path):
    results = [classification("deit-ti-imagenet", m, s) for m in ("baseline", "batchformer") for s in (0, 1)]
    page = results_page(write(tmp_path / "a", results))
    assert "| Top-1 | 72.2 | 72.7 | +0.5 |" in page
    assert "| Top-5 | 91.1 | 91.5 | +0.4 |" in page
    table = readme_table(tmp_path / "a")
    assert "| Top-5 | 91.1 | 91.5 |" in table
    results = [classification("deit-ti-cifar100-100", m, 0) for m in ("baseline", "batchformer")]
    assert "| Top-5 | – | – |" in readme_table(write(tmp_path / "b", results))


def test_the_readme_shows_the_variants_beside_the_rows_of_the_papers(tmp_path):
    results = study()
    table = readme_table(write(tmp_path, [*results, *comparison(seeds=2)]))
    before, after = (top1(results, name) for name in ("baseline", "published"))
    gain = paired_difference([before[s] for s in range(3)], [after[s] for s in range(3)])
    line = next(line for line in table.splitlines() if line.startswith("| `published`"))
    assert line.split(" | ")[3] == format_difference(gain)
    assert (
        next(line for line in table.splitlines() if line.startswith("| `baseline`")).split(" | ")[3] == "the baseline"
    )


def test_the_readme_names_the_variants_of_a_papers_row_and_whose_caveat_it_is(tmp_path):
    row = "deit-ti-cifar100-100"
    results = [classification(row, m, 0) for m in ("baseline", "batchformer")] + [classification(f"{row}-stable")]
    tripled = comparison(seeds=2)
    for each in tripled:
        each["config"]["model"]["stream_loss"] = "released"
    table = readme_table(write(tmp_path, [*results, *tripled]))
    part = table.partition(f"`{row}`: {MAIN[row].setting}.")[2]
    assert [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")] == [
        "baseline", "batchformer", "stable",
    ]  # fmt: skip
    (careful,) = [line for line in table.splitlines() if line.startswith("- Read with care")]
    assert careful.startswith("- Read with care `cifar100-lt-100`: ")


def test_a_mixing_method_is_held_to_cutmix(tmp_path):
    name = "mix-vit-cifar100-32"
    levels = {"baseline": 55, "cutmix": 57, "transmix": 58, "cutmix-batchformer": 60, "transmix-batchformer": 61}
    methods = {each: "batchformer" if "batchformer" in each else "baseline" for each in levels}
    results = [
        classification(f"{name}-{each}", methods[each], s, level) for each, level in levels.items() for s in range(3)
    ]
    told = results_page(write(tmp_path, results)).partition(STUDIES[name].held_to_words)[2]
    lines = [line for line in told.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1:4:2] for line in lines] == [
        ["transmix", "cutmix"], ["cutmix-batchformer", "cutmix"], ["transmix-batchformer", "cutmix-batchformer"],
    ]  # fmt: skip
    cutmix, transmix = (
        [each["metrics"]["all"] for each in results if each["recipe"] == f"{name}-{mix}"]
        for mix in ("cutmix", "transmix")
    )
    assert f"| {format_difference(paired_difference(cutmix, transmix))} |" in lines[0]


def test_a_study_says_what_it_lacks(tmp_path):
    name = "mix-resnet56-cifar100"
    methods = ["cutmix", "attentive-cutmix", "saliencymix", "puzzlemix"]
    made = [classification(f"{name}-{each}", "baseline", seed) for each in ("baseline", *methods) for seed in (0, 1, 2)]
    assert "not finished" not in results_page(write(tmp_path / "whole", made))
    left = [one for one in made if "puzzlemix" not in one["recipe"]]
    left.remove(next(one for one in left if one["recipe"] == f"{name}-saliencymix"))
    page = results_page(write(tmp_path / "part", left))
    assert "This study is not finished: not trained yet `puzzlemix`; 2 of 3 seeds of `saliencymix`." in page
    once = results_page(write(tmp_path / "once", [one for one in made if one["seed"] == 0]))
    assert "not finished: 1 of 3 seeds of `baseline`, `attentive-cutmix`, `cutmix`, `puzzlemix`, `saliencymix`." in once


def test_one_run_that_shared_the_card_does_not_slow_down_its_row(tmp_path):
    made = [{**one, "images_per_s": rate} for one, rate in zip(study()[:3], (15_000, 50_600, 50_500), strict=True)]
    page = results_page(write(tmp_path, [*made, *study()[3:]]))
    header, row = (next(line for line in page.splitlines() if line.startswith(start)) for start in ("| var", "| `bas"))
    column = header.split(" | ").index("images/s, median |")
    assert row.split(" | ")[column] == "50,500 |"


def test_a_variant_borrows_the_baseline_of_its_study_and_says_so(tmp_path):
    results = study()
    recipes = with_references(by_recipe(load_runs([write(tmp_path, results)])))
    runs = recipes[f"{BASE}-stable-block8"]
    assert sorted((run.method, run.seed) for run in runs) == [
        ("baseline", 0), ("baseline", 1), ("batchformer", 0), ("batchformer", 1), ("batchformer", 7),
    ]  # fmt: skip
    assert command(runs).splitlines() == [
        f"batchformer fit {BASE} --name {BASE}-stable-block8 --method batchformer --seed {s}" for s in (0, 1, 7)
    ]
    assert command(load_runs([write(tmp_path / "short", [result(recipe="cifar100-lt-100-short")])])) == (
        "batchformer fit cifar100-lt-100 --name cifar100-lt-100-short --method batchformer --seed 0"
    )
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert f"the runs of {BASE}-baseline" in text
    assert "Read with care" not in text
    assert text.count("A baseline</strong>of the study") == 2


def test_settings_of_the_module_do_not_make_a_baseline_another_training(tmp_path):
    results = study()
    for each in results:
        each["config"]["model"]["batchformer"] = {"norm": "pre" if "stable" in each["recipe"] else "post"}
    assert "differ in more" not in write_report([write(tmp_path / "a", results)], tmp_path / "a.html").read_text()
    results[-1]["config"]["model"]["lr"] = 0.5
    assert "differ in more" in write_report([write(tmp_path / "b", results)], tmp_path / "b.html").read_text()


@pytest.mark.parametrize(
    ("method", "told"),
    [("cutmix", ""), ("transmix", ", attention of block 7"), ("attentive-cutmix", ", extractor mobilenet_v2")],
)
def test_settings_tell_the_mixing_and_what_that_one_reads(tmp_path, method, told):
    made = classification(BASE, "baseline", 0)
    made["config"]["model"]["mix"] = {"method": method, "cutmix": 1.0, "block": 7, "extractor": "mobilenet_v2"}
    settings = dict(facts(load_runs([write(tmp_path, [made])])))["Settings"]
    assert f"mixing by {method}, CutMix 1.0{told}, " in f"{settings}, "
    assert ("block" in settings) == (method == "transmix")
    assert ("extractor" in settings) == (method == "attentive-cutmix")


@pytest.mark.parametrize(
    ("method", "told"),
    [("mixup", "mixup 0.5"), ("cutmix", "CutMix 1.0"), ("saliencymix", "mixup 0.5, CutMix 1.0")],
)
def test_settings_tell_the_alphas_that_the_mixing_draws_with(tmp_path, method, told):
    made = classification(BASE, "baseline", 0)
    made["config"]["model"]["mix"] = {"method": method, "mixup": 0.5, "cutmix": 1.0}
    settings = dict(facts(load_runs([write(tmp_path, [made])])))["Settings"]
    assert f"mixing by {method}, {told}" in settings
    assert ("CutMix" in settings, " mixup 0.5" in settings) == ("CutMix" in told, "mixup" in told)


def test_settings_of_a_training_without_mixing_name_none(tmp_path):
    made = classification(BASE, "baseline", 0)
    made["config"]["model"]["mix"] = {"method": "mixup-cutmix", "mixup": 0.0, "cutmix": 0.0}
    settings = dict(facts(load_runs([write(tmp_path, [made])])))["Settings"]
    assert "mixing by" not in settings
    assert "CutMix" not in settings


def test_balanced_classes_leave_out_what_is_about_frequency(tmp_path):
    results = [classification(BASE, m, s) for m in ("baseline", "batchformer") for s in (0, 1)]
    text = write_report([write(tmp_path, results)], tmp_path / "page.html").read_text()
    assert "training frequency" not in text
    assert "Fig. 6" not in text
    assert "Training loss of both streams" in text


def test_runs_without_streams_have_no_section_about_them(tmp_path):
    text = write_report([write(tmp_path, comparison(seeds=1))], tmp_path / "page.html").read_text()
    assert "The two streams" not in text


def with_health(folder, content):
    run = write(folder, [classification(BASE)]) / f"{BASE}-batchformer-seed0"
    (run / "stream_health.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "The modules relate samples: each changes the related tokens by 14.0%"),
        (
            {"gradient_on_others": {"quiet": {"norm_share": 0.25, "squared_share": 0.006}}},
            "25.0% of the gradient of a sample&#x27;s loss falls on other samples (by norms, 0.6% by squares)",
        ),
        ({"related_loss": 4.6}, "sits at chance (4.60): nothing is learnt"),
        ({"related_loss": 4.6, "plain_loss": 4.4}, "sits at chance (4.60) and the plain one is near it (4.40)"),
        ({"related_loss": 4.6, "plain_loss": None}, "sits at chance (4.60): nothing is learnt"),
        ({"gradient_on_others": {"quiet": {"norm_share": 0.002}}}, "hardly relate"),
        ({"points": [{"path": "blocks.0", "change_quiet": 0.03}]}, "hardly relate"),
        ({"gradient_on_others": {}}, "not complete"),
    ],
)
def test_the_page_says_whether_the_related_stream_lives(tmp_path, change, words):
    with_health(tmp_path, {**health(), **change})
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert words in text


def test_the_health_of_a_result_file_lies_beside_it(tmp_path):
    (tmp_path / "batchformer-seed0.json").write_text(json.dumps(classification(BASE)))
    (tmp_path / "batchformer-seed0.stream_health.json").write_text(json.dumps(health(depth=3)))
    (run,) = load_runs([tmp_path])
    assert [point["path"] for point in run.health["points"]] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("content", ["{", "[]", '{"points": 3}', '{"points": [1]}'])
def test_a_damaged_health_file_is_named(tmp_path, content):
    from batchformer.errors import UserError

    with_health(tmp_path, content)
    with pytest.raises(UserError, match=r"stream_health\.json"):
        load_runs([tmp_path])


def test_pictures_of_a_run_are_inside_the_page_and_nothing_else_is(tmp_path):
    from PIL import Image

    run = write(tmp_path, [classification(BASE)]) / f"{BASE}-batchformer-seed0"
    folder = run / "pictures"
    folder.mkdir()
    Image.new("RGB", (40, 10), (9, 9, 9)).save(folder / "seen.png")
    (folder / "script.svg").write_text("<svg onload='alert(1)'/>")
    (run / "secret.png").write_bytes((folder / "seen.png").read_bytes())
    index = [
        {"file": "seen.png", "title": "Who & whom", "caption": "<b>caption</b>"},
        {"file": "script.svg", "title": "no"},
        {"file": "../secret.png", "title": "outside"},
        {"file": "missing.png", "title": "gone"},
    ]
    (folder / "pictures.json").write_text(json.dumps(index))
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert text.count("data:image/") == text.count("data:image/png;base64,") == 1
    assert 'alt="Who &amp; whom"' in text
    assert "&lt;b&gt;caption" in text
    assert "onload" not in text


def test_pictures_that_are_gone_leave_no_empty_section_and_a_damaged_index_is_told_as_such(tmp_path):
    run = write(tmp_path, comparison(seeds=1)) / "cifar100-lt-100-batchformer-seed0"
    (run / "pictures").mkdir()
    (run / "pictures" / "pictures.json").write_text('[{"file": "gone.png"}]')
    assert "The two streams" not in write_report([tmp_path], tmp_path / "page.html").read_text()
    (run / "pictures" / "pictures.json").write_text("{")
    with pytest.raises(UserError, match="draw the pictures again"):
        write_report([tmp_path], tmp_path / "page.html")
