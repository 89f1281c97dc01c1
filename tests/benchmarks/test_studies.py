"""Variants of a recipe are held to one baseline in docs/results.md, some of them in README.md."""

import xml.etree.ElementTree as xml

import pytest
from made_up import classification, comparison, health, result, write

from batchformer.report import load_runs
from batchformer.report.comparison import format_difference
from batchformer.report.runs import by_recipe
from batchformer.report.statistics import paired_difference
from benchmarks.paper import MAIN
from benchmarks.results_page import results_page
from benchmarks.studies import STUDIES
from benchmarks.study_section import base_of, find_studies, study_chart, study_picture
from benchmarks.when_it_helps import readme_table

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
    (line,) = [line for line in readme_table(folder).splitlines() if "equal GPU time" in line]
    assert f"| {wanted} | 3 |" in line
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
    results = [classification("deit-ti-cifar100-100", m, 0) for m in ("baseline", "batchformer")]
    assert "| Top-5 | – | – |" in results_page(write(tmp_path / "b", results))


def test_the_readme_holds_a_variant_to_its_baseline_at_equal_epochs(tmp_path):
    results = study()
    table = readme_table(write(tmp_path, [*results, *comparison(seeds=2)]))
    before, after = (top1(results, name) for name in ("baseline", "published"))
    gain = paired_difference([before[s] for s in range(3)], [after[s] for s in range(3)])
    (line,) = [line for line in table.splitlines() if "equal epochs" in line]
    assert f"| {format_difference(gain)} | 3 |" in line


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


@pytest.fixture
def mixing():
    """Results of a study, and the names of its variants."""
    variants = ("baseline", "cutmix", "saliencymix")
    base = "mix-resnet56-cifar100"
    return variants, [classification(f"{base}-{name}", "baseline", s, 60 + s) for name in variants for s in (0, 1, 2)]


def test_every_seed_is_a_ring_where_its_accuracy_is(tmp_path, mixing):
    variants, results = mixing
    (study,) = find_studies(by_recipe(load_runs([write(tmp_path, results)])))
    chart, words = study_chart(study)
    drawn = chart.svg("title", words)
    for row, name in enumerate(variants):
        values = [one["metrics"]["all"] for one in results if one["recipe"].endswith(f"-{name}")]
        for seed, value in enumerate(values):
            across, down = chart.at(value, len(variants) - row - 0.5)
            assert f'cx="{across:.1f}" cy="{down:.1f}" r="4"><title>{name}, seed {seed}: {value:.2f} %</title>' in drawn
        assert f"{name} {sum(values) / 3:.2f} %" in words
        if name == "baseline":
            middle, _ = chart.at(sum(values) / 3, 0)
            assert f'class="divider" x1="{middle:.1f}"' in drawn


def test_the_picture_is_a_file_that_opens_alone(tmp_path, mixing):
    (study,) = find_studies(by_recipe(load_runs([write(tmp_path, mixing[1])])))
    root = xml.fromstring(study_picture(study))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 9
