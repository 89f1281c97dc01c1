"""The page in a real browser: laptop and phone, light and dark, offline."""

import shutil

import pytest
from made_up import comparison, result, write

from batchformer.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (dev extra)")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=QUIET)
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
    }
    for name, results in contents.items():
        write(folder / name, results)
        write_report([folder / name], folder / f"{name}.html")
    return folder


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


@pytest.mark.parametrize("name", ["full", "bare", "long"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
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
    assert len(boxes) == 12
    assert all(box["width"] > 300 and box["height"] > 100 for box in boxes)
    page.get_by_text("Every seed").first.click()
    assert page.get_by_text("baseline, seed 2").first.is_visible()


def test_a_link_of_the_navigation_leads_to_its_recipe(visit):
    page = visit("full", "phone")
    page.locator("nav a", has_text="digits-lt").click()
    page.wait_for_function("Math.abs(document.querySelector('#recipe-2').getBoundingClientRect().top) < 3")


def test_dark_is_dark_and_light_is_light(visit):
    grounds = []
    for scheme in ("light", "dark"):
        colour = visit("full", "phone", scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")))
    assert grounds[0] > 600
    assert grounds[1] < 150


@pytest.mark.parametrize("size", SIZES)
def test_words_in_pictures_stay_inside_and_legible(visit, size):
    """No label leaves its picture, neighbours on an axis do not touch, and letters are at least 9 px on a phone."""
    page = visit("full", size)
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
            }
            return found;
        }"""
    )
    assert problems == []
