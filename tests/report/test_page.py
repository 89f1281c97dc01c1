"""The page says what the numbers say, says what is missing, and trusts no text from a file."""

import ast
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up import comparison, pose, result, write

import batchformer.report
from batchformer.errors import UserError
from batchformer.metrics.measures import with_current_names
from batchformer.report import compare_runs, format_table, load_runs, verdict, write_report
from batchformer.report.charts import STYLES, Chart, linear_axis
from batchformer.report.classes import influence_correlation

SOURCES = Path(batchformer.report.__file__).parent
VARIANTS = [f"v{k}" for k in range(STYLES)]


def page_of(tmp_path, results, **keywords):
    write(tmp_path / "runs", results)
    return write_report([tmp_path / "runs"], tmp_path / "report.html", **keywords).read_text(encoding="utf-8")


def words(page):
    return re.sub(r"<[^>]+>", "", page)


def test_page_shows_the_table_that_the_terminal_shows(tmp_path):
    results = comparison(seeds=3)
    page = page_of(tmp_path, results)
    table = compare_runs(results)
    assert verdict(table).sentence in page
    plain = re.sub(r"<[^>]+>", " ", page)
    for number in re.findall(r"[+−]?\d+\.\d+", format_table(table)):
        assert number in plain


def test_a_picture_names_the_variant_where_there_are_several(tmp_path):
    page = words(page_of(tmp_path / "two", comparison(seeds=2)))
    assert "Difference by frequency" in page
    assert "Difference by frequency, " not in page


def test_values_of_classes_that_are_not_of_the_primary_measure_have_a_name_of_their_own(tmp_path):
    (made,) = pose(seeds=1, variants=("scratch",))[:1]
    made |= {"per_class": [20.0, 30.0], "class_counts": [9, 4], "class_names": ["a", "b"]}
    made["measures"][0]["of_class"] = "error"
    assert "Error per class" in words(page_of(tmp_path, [made]))


def test_a_page_on_which_nothing_is_compared_does_not_say_so(tmp_path):
    one, other = (result(recipe=recipe, method="batchformer") for recipe in ("a", "b"))
    assert "<h1>2 recipes</h1>" in page_of(tmp_path / "alone", [one, other])
    pair = [one, other, result(recipe="b", method="baseline")]
    assert "<h1>BatchFormer, with and without</h1>" in page_of(tmp_path / "pair", pair)


def test_the_first_column_and_the_axis_have_not_the_name_of_one_of_the_rows(tmp_path):
    (made,) = pose(seeds=1, variants=("scratch",))[:1]
    made["target"], made["measures"][1]["unit"] = None, "mm"
    for measure in made["measures"]:
        measure["better"] = "higher"
    other = {**made, "variant": "mixstyle"}
    assert format_table(compare_runs([made, other])).startswith("measure, mm")
    assert ">difference, mm<" in page_of(tmp_path, [made, other])
    made["measures"][0]["label"] = "All"
    assert format_table(compare_runs([made])).startswith("mpjpe, mm")


def test_labels_of_axes_stand_in_their_middle():
    chart = Chart("c", linear_axis([0.0, 1.0], "across"), linear_axis([0.0, 1.0], "up"))
    drawn = chart.svg("t", "d")
    (left, bottom), (right, top) = chart.at(chart.x.low, chart.y.low), chart.at(chart.x.high, chart.y.high)
    across = re.search(r'<text class="label" x="([\d.]+)"[^>]*>across', drawn)
    up = re.search(r'<text class="label" transform="translate\(12 ([\d.]+)\) rotate\(-90\)">up', drawn)
    assert float(across[1]) == pytest.approx((left + right) / 2, abs=0.1)
    assert float(up[1]) == pytest.approx((top + bottom) / 2, abs=0.1)


def test_report_needs_no_package_beyond_python():
    allowed = set(sys.stdlib_module_names) | {"batchformer"}
    for source in (*SOURCES.glob("*.py"), SOURCES.parent / "files.py"):  # which writes the page
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, f"{source.name} imports {name}"
                own = ("batchformer.report", "batchformer.errors", "batchformer.files", "batchformer.metrics")
                assert not name.startswith("batchformer.") or name.startswith(own)


def test_page_refers_to_nothing_outside_itself(tmp_path):
    page = page_of(tmp_path, comparison(seeds=2))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<img|<iframe", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {"data:,"}


def test_text_from_files_is_escaped(tmp_path):
    evil = "<script>alert('1')</script>&\"x"
    results = [
        result(method=m, classes=3, epochs=2, recipe="r", device=evil, class_names=[evil] * 3, versions={evil: evil})
        for m in ("baseline", "batchformer")
    ]
    for each in results:
        each["config"]["model"]["backbone"] = evil
        each["data"]["fingerprint"] = evil
        each["protocol"] = evil
        each["gradient_influence"] = {"wrt": evil, "per_class": [1.0, 2.0, 3.0]}
    write(tmp_path / "runs", results)
    for file in (tmp_path / "runs").rglob("result.json"):
        file.write_text(file.read_text().replace('"recipe": "r"', '"recipe": "<script>r"'))
    page = write_report([tmp_path / "runs"], tmp_path / "report.html", title=evil).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


def test_several_recipes_get_a_section_each_and_links_that_lead_there(tmp_path):
    page = page_of(tmp_path, comparison(seeds=2) + comparison(seeds=2, recipe="digits-lt", classes=10))
    anchors = set(re.findall(r'href="#([^"]+)"', page))
    assert len(anchors) == 2
    assert anchors <= set(re.findall(r'id="([^"]+)"', page))
    assert page.count('<section class="recipe"') == 2
    assert '<a href="#recipe-2">digits-lt</a>' in page


def test_ids_are_unique_and_tags_balance(tmp_path):
    page = page_of(tmp_path, comparison(seeds=2) + comparison(seeds=2, recipe="digits-lt", classes=10))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    Balance().feed(page)


class Balance(HTMLParser):
    """Fails on a tag that closes another one than the last opened."""

    void = ("meta", "link", "line", "polyline", "polygon", "br")

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_picture_has_a_title_and_a_description(tmp_path):
    page = page_of(tmp_path, comparison(seeds=2))
    pictures = re.findall(r'<svg[^>]*role="img".*?</svg>', page)
    assert len(pictures) == 8
    for picture in pictures:
        title, description = re.search(r'aria-labelledby="(\S+) (\S+)"', picture).groups()
        assert f'<title id="{title}">' in picture
        assert f'<desc id="{description}">' in picture


def test_missing_pieces_are_named_with_the_way_to_get_them(tmp_path):
    bare = {key: result()[key] for key in ("recipe", "method", "seed", "metrics")}
    page = page_of(tmp_path, [bare])
    assert "no history of their epochs" in page
    assert "no numbers per class" in page
    assert "batchformer fit cifar100-lt-100 --method batchformer --seed 0" in words(page)


def test_a_steep_start_is_told_of_where_the_axis_leaves_one_out(tmp_path):
    steep, level = result(), result()
    steep["history"] = [{"epoch": epoch, "all": all_} for epoch, all_ in enumerate([1, *[50 + k for k in range(9)]])]
    level["history"] = [{"epoch": 0, "all": 25.0}, {"epoch": 1, "all": 58.0}]
    assert "steep start is cut off" in page_of(tmp_path / "steep", [steep])
    assert "steep start is cut off" not in page_of(tmp_path / "level", [level])


def test_one_seed_gives_no_interval(tmp_path):
    page = page_of(tmp_path, comparison(seeds=1))
    assert "this is one seed: no interval can be given" in page
    assert "(one seed)" in page


@pytest.mark.parametrize(
    ("slope", "words"),
    [(1.0, "The same here"), (-1.0, "The opposite here"), (0.0, "No rank correlation|No clear correlation")],
)
def test_fig_6_is_read_as_it_is_not_as_the_paper_says(tmp_path, slope, words):
    influence = {"wrt": "features", "per_class": [5 + slope * k / 10 for k in range(40)]}
    page = page_of(tmp_path, [result(classes=40, gradient_influence=influence)])
    assert re.search(words, page)


def test_fig_6_correlates_with_rarity_in_label_order_of_the_file(tmp_path):
    """Labels are not sorted by frequency in general; the correlation must not depend on their order."""
    shuffled = result(classes=4, class_counts=[5, 500, 50, 20], gradient_influence={"per_class": [4.0, 1.0, 2.0, 3.0]})
    runs = load_runs([write(tmp_path, [shuffled])])
    assert influence_correlation(runs).rho == pytest.approx(1.0)


def test_runs_that_differ_in_more_than_method_and_seed_are_pointed_out(tmp_path):
    results = comparison(seeds=2)
    results[0]["config"]["trainer"]["precision"] = "32-true"
    results[1]["data"] = {"fingerprint": "other"}
    results[2]["protocol"] = "best"
    page = page_of(tmp_path, results)
    assert "more than method and seed: trainer.precision." in page
    assert "training data are not the same" in page
    assert "protocol: best" in page


def test_clean_comparison_has_no_caveat(tmp_path):
    assert "Read with care" not in page_of(tmp_path, comparison(seeds=2))


@pytest.mark.parametrize("classes", [1, 2, 10, 1000])
def test_any_number_of_classes_makes_a_page(tmp_path, classes):
    page = page_of(tmp_path, comparison(seeds=2, classes=classes, epochs=1))
    assert len(page) < 400_000
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)


def test_seeds_that_are_not_counted_from_zero_are_named_in_the_command(tmp_path):
    results = [result(method=m, seed=s) for m in ("baseline", "batchformer") for s in (5, 7)]
    assert "batchformer compare cifar100-lt-100 --seeds 5 7" in words(page_of(tmp_path, results))


def test_runs_that_know_their_command_tell_it(tmp_path):
    once = "batchformer compare digits-lt --seeds 2 --model.optimizer.lr 0.2"
    results = [{**result(method=m, seed=s), "command": once} for m in ("baseline", "batchformer") for s in (0, 1)]
    page = page_of(tmp_path / "known", results)
    assert words(page).count(once) == 1
    assert '<span class="option">--model.optimizer.lr 0.2</span>' in page  # lines break before it, not in it
    assert "in the configuration):" not in page
    each = [f"batchformer fit digits-lt --seed {s} --model.optimizer.lr 0.2" for s in (0, 1)]
    results = [{**result(seed=s), "command": words} for s, words in enumerate(each)]
    assert "\n".join(each) in words(page_of(tmp_path / "each", results))
    del results[0]["command"]  # of an earlier version
    page = page_of(tmp_path / "old", results)
    assert each[1] not in words(page)
    assert "changed on the command line are in the configuration):" in page


def test_a_folder_as_target_gets_report_html_and_a_bad_target_is_refused(tmp_path):
    write(tmp_path / "runs", comparison(seeds=1))
    assert write_report([tmp_path / "runs"], tmp_path) == tmp_path / "report.html"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        write_report([tmp_path / "runs"], tmp_path / "file" / "report.html")


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_enough_contrast_in_light_and_dark():
    style = (SOURCES / "page.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", style, flags=re.S)[:2]
    for scheme in schemes:
        colours = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", scheme))
        for ground in ("paper", "card"):
            for text in ("ink", "muted", "accent", "helped", "hurt", "unclear", "incomplete", *VARIANTS):
                bright, dim = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, ground)


def test_one_epoch_and_one_step_are_said_as_one(tmp_path):
    once = result(epochs=1, steps=1)
    write(tmp_path / "runs", [once])
    page = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 epoch, 1 step<" in page


def test_measures_of_another_unit_and_direction_read_right_everywhere(tmp_path):
    page = page_of(tmp_path, pose(seeds=3))
    seen = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.S)))
    for sentence in verdict(compare_runs(pose(seeds=3))).sentence.splitlines():
        assert sentence in seen
    assert "Mean joint error, mm: mean ± standard deviation over seeds" in seen
    assert "MPJPE, mm (lower is better)" in seen
    assert "difference in MPJPE, mm" in seen
    assert "← better" in seen
    assert "Left of zero: a variant is better than scratch." in seen
    assert "Lower is better." in seen
    own = re.sub(r"<pre>.*?</pre>", "", seen)
    for wrong in ("percent", "points", "accuracy", "Right of zero", "Many"):
        assert wrong not in own, wrong


def test_variants_and_targets_are_one_table_with_every_run_below(tmp_path):
    page = page_of(tmp_path, pose(seeds=2))
    header = re.search(r'<table class="comparison">.*?<thead>(.*?)</thead>', page).group(1)
    assert re.findall(r">([^<]+)</th>", header)[1:] == ["glove", "indoor", "night", "sun", "mean", "difference"]
    assert page.count("mixstyle+batchformer, night, seed 1</th>") == 1
    assert page.count('class="card verdict') == 2
    for style in ("v0", "v1", "v2"):
        assert f'<polyline class="line {style}"' in page


def test_sections_of_a_family_are_shown_for_each_run_and_escaped(tmp_path):
    results = pose(seeds=1)
    evil = {"title": "<i>Own</i>", "text": "<script>x</script>", "table": {"header": ["<u>"], "rows": [["<s>"]]},
            "series": {"x": [0, 1], "lines": {"<em>": [1.0, None]}, "xlabel": "<a>", "ylabel": "<b2>"}}  # fmt: skip
    results[0]["sections"].append(evil)
    page = page_of(tmp_path, results)
    assert page.count("<h3>Joints within a threshold</h3>") == 1
    assert page.count("<h4>scratch, sun, seed 0</h4>") == 1
    assert "<summary>8 more runs</summary>" in page
    assert "Left out: sun. See <code>pck</code>." in page
    assert ">threshold, mm</text>" in page
    assert "<h3>&lt;i&gt;Own&lt;/i&gt;</h3>" in page
    assert not re.search("<script|<i>|<u>|<s>|<em>1|<a>|<b2>", page)
    Balance().feed(page)


def test_of_a_section_one_run_of_every_variant_comes_first(tmp_path):
    page = page_of(tmp_path, pose(seeds=1))
    shown = page.partition("<h3>Joints within a threshold</h3>")[2].partition("<summary>")[0]
    found = re.findall(r"<h4>([^<]+), seed 0</h4>", shown)
    assert found == ["mixstyle, glove", "mixstyle+batchformer, glove", "scratch, glove", "mixstyle, indoor"]


def test_the_picture_of_every_seed_names_variants_as_the_others_do(tmp_path):
    drawn = page_of(tmp_path, comparison(seeds=2)).partition("<h4>Every seed</h4>")[2].partition("</figure>")[0]
    assert re.findall(r'class="tick y"[^>]*>([^<]+)<', drawn) == ["baseline", "BatchFormer"]
    assert 'class="divider"' in drawn


def test_a_section_of_an_older_file_has_the_current_title(tmp_path):
    old, new = pose(seeds=1)[:2]
    old["sections"] = [{"title": "What is taken for what", "text": "old"}]
    new["sections"] = [{"title": "Most frequent confusions", "text": "new"}]
    page = page_of(tmp_path, [old, new])
    assert page.count("<h3>Most frequent confusions</h3>") == 1
    assert "taken for what" not in page


def test_a_grid_is_coloured_by_its_values_and_framed_where_it_is_marked(tmp_path):
    results = pose(seeds=1)
    grid = {"rows": ["<wet>", "old", "empty"], "columns": ["dog", "cat", "none"], "marked": [[1, 0]],
            "values": [[25.0, None, None], [100.0, 0.0, None], [None, None, None]]}  # fmt: skip
    results[0]["sections"] = [{"title": "Pairs", "grid": grid, "pictures": "mistakes"}]
    page = page_of(tmp_path, results)
    shown = page.partition("<h3>Pairs</h3>")[2].partition("<h3>")[0]
    assert re.findall(r'<td class="value( marked)?" style="--share: (\d+)%">(\d+)</td>', shown) == [
        ("", "25", "25"), (" marked", "100", "100"), ("", "0", "0"),
    ]  # fmt: skip
    assert "&lt;wet&gt;" in shown
    assert "empty" not in shown
    assert "none" not in shown
    Balance().feed(page)


def test_lines_together_are_one_chart_with_the_mean_of_each_variant(tmp_path):
    results = pose(seeds=2)
    for k, each in enumerate(results):
        series = {"x": [0, 1, 2], "lines": {"AUC": [float(k), 2.0 * k, None if k else 3.0]}, "together": True}
        each["sections"] = [{"title": "Curve", "text": "What it is.", "series": series}]
    page = page_of(tmp_path, results)
    assert page.count("<h3>Curve</h3>") == 1
    shown = page.partition("<h3>Curve</h3>")[2].partition("<h3>")[0]
    variants = {each["variant"] for each in results}
    assert shown.count("<polyline") - shown.count('points="0,6 26,6"') == len(variants)
    for variant in variants:
        mine = [k for k, each in enumerate(results) if each["variant"] == variant]
        assert f"mean of {len(mine)} runs: {sum(mine) / len(mine):.4g} at 0" in shown
    assert " at 2<" not in shown  # one of the runs has no value there
    assert "What it is." in shown


def test_points_of_a_section_are_drawn_where_they_are(tmp_path):
    results = pose(seeds=1)
    groups = {"near": [[0.0, 1.0], [2.0, 3.0]], "<far>": [[4.0, None], [5.0, 5.0]]}
    results[0]["sections"] = [{"title": "Plane", "points": {"groups": groups, "xlabel": "first", "ylabel": "second"}}]
    page = page_of(tmp_path, results)
    shown = page.partition("<h3>Plane</h3>")[2].partition("<h3>")[0]
    places = [tuple(map(float, re.findall(r'c[xy]="([0-9.]+)"', dot)))
              for dot in re.findall(r'<circle class="dot v[01]"[^>]*r="3">', shown)]  # fmt: skip
    assert len(places) == 3  # a point without a number is none
    (x0, y0), (x1, y1), (x2, y2) = places
    assert (x1 - x0) / (x2 - x0) == pytest.approx(2 / 5, abs=0.01)
    assert (y1 - y0) / (y2 - y0) == pytest.approx(2 / 4, abs=0.01)
    assert "<title>&lt;far&gt;</title>" in shown
    assert shown.count("<li>") == 2


def test_every_target_has_its_own_curves_and_other_weights_their_own_table(tmp_path):
    results = pose(seeds=2)
    for each in results:
        each["metrics"]["mpjpe_swad"] = each["metrics"]["mpjpe"] - 1
        each["measures"] = [*each["measures"], {"key": "mpjpe_swad", "label": "MPJPE, SWAD", "unit": "mm",
                            "better": "lower", "bounds": [0.0, None], "reading_of": "mpjpe"}]  # fmt: skip
    page = page_of(tmp_path, results)
    curves = page.partition("<h3>MPJPE on each target</h3>")[2].partition("<h3>")[0]
    assert re.findall(r"<h4>([^<]+)</h4>", curves) == ["glove", "indoor", "night", "sun"]
    ends = re.findall(r"mixstyle\+batchformer ends at ([0-9.]+)", curves)
    wanted = [
        sum(each["metrics"]["mpjpe"] for each in results
            if (each["variant"], each["target"]) == ("mixstyle+batchformer", target)) / 2
        for target in ("glove", "indoor", "night", "sun")
    ]  # fmt: skip
    assert [float(end) for end in ends] == pytest.approx(wanted, rel=1e-3)
    tables = re.findall(r'<table class="comparison">.*?</table>', page, flags=re.S)
    assert len(tables) == 2
    assert tables[1].count("−1.00") == 3 + 2 * 3  # mean, and both ends of its interval


def test_what_is_held_out_by_the_seed_is_no_difference_between_variants(tmp_path):
    results = pose(seeds=2)
    for each in results:
        each["data"] = {"fingerprint": f"{each['target']}{each['seed']}"}
    page = page_of(tmp_path / "same", results)
    assert "training data are not the same" not in page
    assert "8, of the targets and seeds" in page
    results[0]["data"] = {"fingerprint": "other"}
    assert "training data are not the same" in page_of(tmp_path / "other", results)


@pytest.mark.parametrize("upright", [False, True])
def test_arrows_of_intervals_that_leave_the_chart_point_out_of_it_along_the_line(upright):
    chart = Chart("c", linear_axis([0.0, 1.0], "across"), linear_axis([0.0, 1.0], "up"))
    ends = [(chart.x.low - 9, chart.y.low - 9), (chart.x.high + 9, chart.y.high + 9)]
    chart.interval(*((0.5, y) if upright else (x, 0.5) for x, y in ends), "v0")
    found = re.findall(r'<polygon class="arrow v0" points="([^"]+)"', chart.svg("t", "d"))
    middle = chart.at(0.5, 0.5)
    for corners in found:
        tip, one, other = (
            [float(number) for number in point.split(",")][:: -1 if upright else 1] for point in corners.split()
        )
        centre = middle[::-1] if upright else middle
        assert one[0] == other[0]
        assert tip[1] == pytest.approx((one[1] + other[1]) / 2, abs=0.1) == pytest.approx(centre[1], abs=0.1)
        assert abs(tip[0] - centre[0]) == pytest.approx(abs(one[0] - centre[0]) + 7, abs=0.2)
    assert len(found) == 2


def test_an_interval_wider_than_is_possible_is_cut_in_the_chart(tmp_path):
    results = comparison(seeds=2)
    for made in results:
        share = 1.0 if (made["method"] == "batchformer") == (made["seed"] == 0) else 99.0
        made["metrics"] = {"all": share}
    page = page_of(tmp_path, results)
    chart = re.search(r"<title[^>]*>Difference BatchFormer minus baseline.*?</svg>", page).group(0)
    ticks = [float(text.replace("−", "-")) for text in re.findall(r'class="tick x"[^>]*>([^<]+)<', chart)]
    assert (min(ticks), max(ticks)) == (-100, 100)
    assert "beyond the possible range" in page
    assert chart.count('class="arrow') == 2  # at both ends of one interval
    assert "beyond the possible range" not in page_of(tmp_path / "narrow", comparison(seeds=3))


def test_the_axis_of_differences_ends_where_they_can(tmp_path):
    results = pose(seeds=2)
    for made in results:  # of an error between 0 and 25 mm; a round axis would go to 30
        made["measures"][0]["bounds"] = [0.0, 25.0]
        made["metrics"]["mpjpe"] = 24.0 if made["variant"] == "scratch" else 1.0 + made["seed"]
    chart = re.search(r"<title[^>]*>Difference.*?</svg>", page_of(tmp_path, results)).group(0)
    ticks = [float(text.replace("−", "-")) for text in re.findall(r'class="tick x"[^>]*>([^<]+)<', chart)]
    assert -25 <= min(ticks) < max(ticks) <= 25


def test_recipes_with_different_measures_share_an_overview(tmp_path):
    page = page_of(tmp_path, pose(seeds=2) + comparison(seeds=2))
    overview = re.search(r'<div class="card overview">.*?</div>', page, flags=re.S).group(0)
    assert "Accuracy over all classes, %; mean joint error, mm" in overview
    assert overview.count('<span class="interval">MPJPE, mm</span>') == 2
    assert '<span class="interval">mixstyle+batchformer</span>' in overview


def test_the_page_of_one_run_compares_with_nothing_and_has_no_gaps(tmp_path):
    page = page_of(tmp_path, [result(classes=10, recipe="digits-lt")])
    said = words(page.partition("<body>")[2])
    assert 'class="card muted missing"' not in page
    assert "<td>–</td>" not in page
    for absent in ("baseline", "difference", "matched seeds", "Every run", "mean of the seeds", "Incomplete"):
        assert absent not in said.split("How it was made")[0], absent
    for present in ("Learning curves", "Accuracy per class", "Fig. 6", "Seeds", "batchformer compare digits-lt"):
        assert present in said
    assert 'class="legend"' not in page


def test_a_line_is_explained_where_there_is_one(tmp_path):
    for classes in (3, 10):
        page = page_of(tmp_path / str(classes), [result(classes=classes, recipe="digits-lt")])
        drawn = "related trend" in page.partition("<body>")[2]
        assert drawn == ("Line: running mean over the classes" in page) == (classes > 4)


def test_the_overview_of_single_runs_has_their_numbers_alone(tmp_path):
    page = page_of(tmp_path, [result(), result(recipe="digits-lt", classes=10, method="baseline")])
    overview = re.search(r'<div class="card overview">.*?</div>', page, flags=re.S).group(0)
    assert "difference" not in overview
    assert "–" not in overview
    assert len(re.findall("<td", overview)) == 2


def test_every_class_is_named_in_the_page_itself(tmp_path):
    """Not in a tip alone, which needs a mouse; also where classes are balanced and no chart is drawn of them."""
    names = [f"kind {chr(97 + k)} of leaf" for k in range(26)]
    long_tailed = comparison(seeds=2, classes=26, class_names=names)
    balanced = [{**one, "recipe": "even", "metrics": {"top1": 50.0, "all": 50.0}} for one in long_tailed]
    for made in (long_tailed, balanced):
        page = page_of(tmp_path / made[0]["recipe"], made)
        table = re.search(r'<details class="card classes.*?</details>', page, flags=re.S).group(0)
        assert [name for name in names if f". {name}</th>" not in table] == []
        assert table.count("<tr>") == 26 + 2  # in two pieces, each with its header


def test_few_classes_are_named_at_the_axes(tmp_path):
    names = ["sea", "a very long name of a class", *(f"class {k}" for k in range(8))]
    page = page_of(tmp_path, comparison(seeds=2, classes=10, class_names=names))
    for title in ("Difference in accuracy by class frequency", "Gradient norm of each class"):
        chart = re.search(rf"<title[^>]*>{title}.*?</svg>", page).group(0)
        labels = re.findall(r'class="tick slanted"[^>]*>([^<]+)<', chart)
        assert labels == ["sea", "a very long n…", *names[2:]]


def test_legends_show_the_marks_that_the_picture_has(tmp_path):
    page = page_of(tmp_path, comparison(seeds=2, classes=10))
    found = {}
    for figure in re.findall(r"<figure>.*?</figure>", page):
        if 'class="legend"' in figure:
            title = re.search("<h4>(.*?)</h4>", figure)[1]
            legend, picture = figure.split("</ul>")
            kinds = ("line", "dot", "band", "whisker")
            found[title], drawn = ({k for k in kinds if f'class="{k} v1' in part} for part in (legend, picture))
            assert found[title] == drawn
    assert found["Accuracy over all classes"] == {"line", "band"}
    assert found["Against training frequency"] == {"dot"}


def test_the_command_says_where_the_data_go(tmp_path):
    made = result(command="batchformer fit cifar100-lt-100")
    made["config"]["data"]["init_args"]["root"] = "/somewhere/private"
    page = page_of(tmp_path, [made])
    assert "batchformer fit cifar100-lt-100 --data-root DIR" in words(page)
    assert "with your data folder for DIR" in page
    named = {**made, "command": "batchformer fit cifar100-lt-100 --data.root there"}
    assert "DIR" not in page_of(tmp_path / "named", [named])


def test_no_axis_of_a_measure_goes_beyond_its_bounds(tmp_path):
    made = comparison(seeds=2, classes=10)
    for one in made:  # constant at the upper bound: an axis around it would reach 110
        one["metrics"] = dict.fromkeys(one["metrics"], 100.0)
        one["history"] = [{"epoch": e, "all": 100.0, "train_loss": 0.5} for e in range(5)]
    chart = re.search(r"<title[^>]*>accuracy, % over the epochs.*?</svg>", page_of(tmp_path, made)).group(0)
    assert max(float(text) for text in re.findall(r'class="tick y"[^>]*>([^<]+)<', chart)) == 100


def first_screen_of(page):
    return page.split('<div class="grid first">')[1].split("<h3>")[0]


@pytest.mark.parametrize(
    ("declared", "there", "heading"),
    [
        ({"bars": ["few", "many"]}, 'class="bar v1"', "Few, Many"),
        ({"curve": "accuracy"}, 'class="line v1"', "Accuracy over all classes"),
        ({"section": "A curve of its own"}, 'class="line v1"', "A curve of its own"),
        ({"section": "that no run has"}, 'class="bar v1"', "All, Many, Medium, Few"),
        ({}, 'class="bar v1"', "All, Many, Medium, Few"),
    ],
)
def test_the_first_screen_has_the_picture_that_the_task_declares(tmp_path, declared, there, heading):
    series = {"x": [0, 1, 2], "lines": {"a": [1.0, 2.0, 3.0]}, "xlabel": "x", "ylabel": "y", "together": True}
    own = {"title": "A curve of its own", "series": series}
    made = [{**each, "main_picture": declared, "sections": [own]} for each in comparison(seeds=2)]
    page = page_of(tmp_path, made)
    assert page.index('class="card verdict') < page.index('<table class="comparison">') < page.index(there)
    first = first_screen_of(page)
    pictures = re.findall(r"<figure.*?</figure>", first)
    assert f"<h4>{heading}</h4>" in pictures[0]
    assert there in pictures[0]
    assert page.count(f"<h4>{heading}</h4>") == 1  # what is shown above is not shown again
    assert ("<h3>A curve of its own</h3>" in page) == (declared.get("section") != own["title"])


def test_targets_are_bars_and_many_variants_have_one_verdict_line(tmp_path):
    page = page_of(tmp_path, pose(seeds=2))
    assert "on each target</h4>" in first_screen_of(page)
    names = ["a", "b", "c", "d", "e"]
    made = [{**each, "variant": name} for name in names for each in [result(seed=0), result(seed=1)]]
    for k, each in enumerate(made):
        each |= {"reference": "a", "metrics": {**each["metrics"], "all": 50.0 + k}}
    page = page_of(tmp_path / "more", [with_current_names(each) for each in made])
    assert page.count('class="card verdict') == 1
    assert "Against a, better: b, c, d, e." in page
    rows = re.findall(r'<tr><th scope="row">(\w)</th>', first_screen_of(page))
    assert rows[: len(names)] == names  # variants are rows: five columns and four differences would not fit


def test_a_page_of_many_recipes_is_an_index_and_collapsed_sections(tmp_path):
    recipes = [f"recipe{k}" for k in range(6)]
    page = page_of(tmp_path, [each for recipe in recipes for each in comparison(seeds=2, recipe=recipe, epochs=5)])
    index = page.split('<div class="card index">')[1].split("</div>")[0]
    assert re.findall(r'<a href="#(recipe-\d)">(\w+)</a> <span class="line \w+">[^<]+</span>', index) == [
        (f"recipe-{k}", name) for k, name in enumerate(recipes, 1)
    ]
    assert page.count('<details class="recipe">') == 6
    for k in range(1, 7):  # inside what is collapsed, so that a link opens it
        assert page.count(f'id="recipe-{k}"') == 1
        assert page.index(f'<div id="recipe-{k}">') > page.index(f"<h2>recipe{k - 1}</h2>")
    assert "The whole configuration" not in page
