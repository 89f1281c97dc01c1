"""The page in a real browser: laptop and phone, light and dark, offline."""

import json

import pytest
from made_up import classification, comparison, health, pose, result, with_failures, write
from PIL import Image

from batchformer.report import write_report
from tests.browser import MISSING, PROGRAM, QUIET, SIZES
from tests.selection import others_slow

LEAVES = [f"kind of leaf {k}" for k in range(10)]
COMMAND = "batchformer fit own --seed 3 --trainer.max_epochs 90 --model.optimizer.lr 0.05 --data.augment autoaugment"

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (dev extra)")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=PROGRAM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    long_name = "averylongrecipenamewithoutanyplacetobreak" * 3
    contents = {
        "full": comparison(seeds=3) + comparison(seeds=3, recipe="digits-lt", classes=10, gain=0.0),
        "bare": [{key: result(recipe=long_name)[key] for key in ("recipe", "method", "seed", "metrics")}],
        "long": comparison(seeds=2, recipe=long_name, device="x" * 200) + comparison(seeds=2),
        "wide": far_apart(comparison(seeds=2)),
        "single": [
            result(recipe="own", classes=10, class_names=[f"kind of leaf {k}" for k in range(10)], command=COMMAND)
        ],
        "stuck": [
            result(recipe="own", epochs=3, history=[{"epoch": e, "train_loss": 18.966 - e / 1000} for e in range(3)])
        ],
        "failing": [
            *(with_failures(made, 10) for made in comparison(seeds=2, classes=10, class_names=LEAVES)),
            with_failures(result(recipe="many", classes=120), 120, matrix=False),
        ],
        "index": [made for k in range(6) for made in comparison(seeds=2, recipe=f"study-{k}", classes=10, epochs=5)],
        "crowded": crowded(),
        "pose": pose(seeds=3) + comparison(seeds=2, recipe="digits-lt", classes=10),
    }
    for name, results in contents.items():
        write(folder / name, results)
        write_report([folder / name], folder / f"{name}.html")
    put_streams(folder / "streams")
    write_report([folder / "streams"], folder / "streams.html")
    return folder


def crowded():
    """Eight variants and eight measures."""
    keys = [f"measure {k}" for k in range(8)]
    measures = [
        {"key": key, "label": key, "unit": "%", "better": "higher", "primary": k == 0, "name": "", "note": ""}
        for k, key in enumerate(keys)
    ]
    return [
        result(
            method=f"variant-{v}", variant=f"variant-{v}", reference="variant-0", seed=seed, measures=measures,
            metrics={key: 50 + 3.0 * v + k + seed for k, key in enumerate(keys)}, main_picture={"bars": keys},
        )
        for v in range(8) for seed in range(2)
    ]  # fmt: skip


def far_apart(results):
    """Two seeds that disagree as much as they can: intervals of hundreds of points."""
    for made in results:
        share = 1.0 if (made["method"] == "batchformer") == (made["seed"] == 0) else 99.0
        made["metrics"] = dict.fromkeys(made["metrics"], share)
    return results


def put_streams(folder):
    """A comparison in which the related stream is dead, with its measurement and two pictures."""
    recipe = "vit-cifar100-32"
    runs = [classification(recipe, "baseline", s, 54) for s in range(2)]
    runs += [classification(recipe, seed=s, dead=True) for s in range(2)]
    write(folder, runs)
    run = folder / f"{recipe}-batchformer-seed0"
    (run / "stream_health.json").write_text(json.dumps(health(dead=True)))
    (run / "pictures").mkdir()
    index = []
    for name, size in (("wide", (1400, 500)), ("tall", (1000, 1100))):
        Image.new("RGB", size, (20, 26, 33)).save(run / "pictures" / f"{name}.png")
        index.append({"file": f"{name}.png", "title": f"A {name} picture", "caption": "What it shows."})
    (run / "pictures" / "pictures.json").write_text(json.dumps(index))


@pytest.fixture
def visit(browser, pages):
    """Open a page and watch it: complaints of the console and addresses asked for are kept."""
    contexts = []

    def opened(name, size="laptop", scheme="light"):
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.asked = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto((pages / f"{name}.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["full", "bare", "long", "wide", "streams", "pose", "single", "failing", "index"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", others_slow(["light", "dark"], ["light"]))
def test_page_is_quiet_offline_and_no_wider_than_the_screen(visit, name, size, scheme):
    page = visit(name, size, scheme)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    cut = page.evaluate(
        """() => [...document.querySelectorAll('.card, figure, table, p, h1, h2, h3, dd, pre')]
             .filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 0.5)
             .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    squeezed = page.evaluate(
        """() => [...document.querySelectorAll('.card > table')].filter(t => {
             const card = t.parentElement, room = parseFloat(getComputedStyle(card).paddingRight);
             return t.getBoundingClientRect().right > card.getBoundingClientRect().right - room + 1;
           }).map(t => t.caption.textContent)"""
    )
    assert squeezed == []


def test_content_is_visible(visit):
    page = visit("full")
    for words in ("difference", "Learning curves", "Fig. 6", "How it was made", "batchformer compare digits-lt"):
        assert page.get_by_text(words).first.is_visible()
    boxes = [picture.bounding_box() for picture in page.locator("figure > svg").all()]
    assert len(boxes) == 16
    assert all(box["width"] > 300 and box["height"] > 100 for box in boxes)
    page.get_by_text("Every run").first.click()
    assert page.get_by_text("baseline, seed 2").first.is_visible()


def test_a_tall_picture_stands_beside_two_others_and_stretches_none(visit):
    page = visit("crowded")
    blank = page.evaluate(
        """() => [...document.querySelectorAll('.first > figure')].map(f => f.querySelector('figcaption')
             .getBoundingClientRect().top - f.querySelector(':scope > svg').getBoundingClientRect().bottom)"""
    )
    assert len(blank) == 3
    assert max(blank) < 150


def test_a_link_of_the_navigation_leads_to_its_recipe(visit):
    page = visit("full", "phone")
    page.locator("nav a", has_text="digits-lt").click()
    page.wait_for_function("Math.abs(document.querySelector('#recipe-2').getBoundingClientRect().top) < 3")


def test_a_link_of_the_index_opens_its_study(visit):
    page = visit("index", "phone")
    assert not page.get_by_text("Difference, BatchFormer minus baseline").nth(3).is_visible()
    page.locator(".index a", has_text="study-3").click()
    page.wait_for_function("Math.abs(document.querySelector('#recipe-4').getBoundingClientRect().top) < 60")
    assert page.get_by_text("Difference, BatchFormer minus baseline").nth(3).is_visible()
    assert page.locator("details.recipe[open]").count() == 1


@pytest.mark.parametrize("name", ["single", "wide", "streams", "pose", "failing"])
def test_verdict_table_and_picture_are_on_the_first_screen_of_a_laptop(visit, name):
    page = visit(name)
    tops = [page.locator(part).first.bounding_box()["y"] for part in (".verdict", ".comparison", ".first > figure")]
    assert tops == sorted(tops) or tops[1] - 80 < tops[2] < tops[1]  # the picture stands beside the table, or below it
    assert tops[-1] < 760


def test_dark_is_dark_and_light_is_light(visit):
    grounds = []
    for scheme in ("light", "dark"):
        colour = visit("full", "phone", scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")))
    assert grounds[0] > 600
    assert grounds[1] < 150


@pytest.mark.parametrize("name", ["full", "pose", "single", "stuck", "failing"])
@pytest.mark.parametrize("size", SIZES)
def test_words_in_pictures_stay_inside_and_legible(visit, size, name):
    """No label leaves its picture or touches numbers or another label; letters are at least 9 px on a phone."""
    page = visit(name, size)
    problems = page.evaluate(
        """() => {
            const found = [];
            for (const svg of document.querySelectorAll('figure > svg')) {
                const frame = svg.getBoundingClientRect(), name = svg.querySelector('title').textContent;
                for (const text of svg.querySelectorAll('text')) {
                    const box = text.getBoundingClientRect();
                    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
                        found.push(`${name}: "${text.textContent}" leaves the picture`);
                }
                const scale = frame.width / svg.viewBox.baseVal.width;
                if (parseFloat(getComputedStyle(svg.querySelector('text')).fontSize) * scale < 9)
                    found.push(`${name}: letters too small`);
                const ticks = [...svg.querySelectorAll('.tick.x')].map(t => t.getBoundingClientRect())
                    .sort((a, b) => a.left - b.left);
                for (let k = 1; k < ticks.length; k++)
                    if (ticks[k].left < ticks[k - 1].right) found.push(`${name}: labels of the axis overlap`);
                const label = svg.querySelector('.label[transform]')?.getBoundingClientRect();
                for (const tick of svg.querySelectorAll('.tick.y'))
                    if (label && tick.getBoundingClientRect().left < label.right)
                        found.push(`${name}: "${tick.textContent}" touches the label of its axis`);
            }
            return found;
        }"""
    )
    assert problems == []


def test_the_command_breaks_between_options_and_is_copied_whole(visit):
    code = visit("single", "phone").locator("pre code").first
    assert code.inner_text() == COMMAND
    rows = code.evaluate("e => [...e.children].map(o => [o.getClientRects().length, o.getBoundingClientRect().height])")
    assert len({height for _, height in rows}) == 1  # none of them takes two lines
    assert all(part.startswith("--") for part in code.locator("> *").all_inner_texts()[1:])  # each has its value
    assert code.evaluate("e => e.getBoundingClientRect().height") > 2 * rows[0][1]  # and all of them take several


def test_every_class_is_read_without_a_mouse(visit):
    page = visit("single", "phone")
    for name in LEAVES:
        assert page.locator("th", has_text=name).first.is_visible()


def test_lines_of_a_legend_look_like_those_of_the_picture(visit):
    page = visit("full")
    figure = page.locator("figure", has_text="Accuracy over all classes").filter(has=page.locator("svg .line.v0")).first
    for style in ("v0", "v1"):
        sample, line = (figure.locator(f"{part} .line.{style}").first for part in (".legend", "svg[role=img]"))
        for what in ("stroke", "strokeDasharray", "strokeWidth"):
            looks = [each.evaluate(f"e => getComputedStyle(e).{what}") for each in (sample, line)]
            assert looks[0] == looks[1]


@pytest.mark.parametrize("size", SIZES)
def test_the_two_streams_are_seen(visit, size):
    page = visit("streams", size)
    section = page.locator("#recipe-1")
    for words in ("The two streams", "stays at chance (4.60)", "Signal in the related tokens", "A tall picture"):
        assert section.get_by_text(words).first.is_visible()
    assert section.locator("figure > svg").count() == 11
    pictures = section.locator("figure.seen img")
    assert pictures.count() == 2
    for k in range(2):
        assert pictures.nth(k).evaluate("image => image.complete && image.naturalWidth > 0")
    wide, tall = (pictures.nth(k).bounding_box()["width"] for k in range(2))
    assert wide > 600  # on a phone one scrolls to read it
    assert tall < SIZES[size][0]


def test_lines_of_both_streams_can_be_told_from_the_ground_and_from_each_other(visit):
    for scheme in ("light", "dark"):
        page = visit("streams", scheme=scheme)
        colours = [
            page.locator(f"svg .line.{stream}").first.evaluate("line => getComputedStyle(line).stroke")
            for stream in ("plain", "related")
        ]
        ground = page.locator("figure").first.evaluate("figure => getComputedStyle(figure).backgroundColor")
        assert len({*colours, ground}) == 3
        for colour in colours:
            assert contrast(colour, ground) > 3


def contrast(one, other):
    """As WCAG defines it; 3 is what it asks of lines."""

    def light(colour):
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((light(one), light(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
