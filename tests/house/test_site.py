"""The documentation site: it builds without a warning, every link in it leads somewhere, and browsers show it well.

Addresses of other sites are not tried: the tests need no network.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import runpy
import subprocess
import sys
import threading
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import MISSING, PROGRAM, QUIET, SIZES

from .pages import REPOSITORY

SHOWN = ["index", "attach", "command-line", "recipes", "results", "reference", "generated/reference/batchformer",
         "generated/reference/tasks", "generated/examples/plain_loop", "generated/changelog"]  # fmt: skip


@pytest.fixture(scope="module")
def settings():
    before = list(sys.path)
    yield runpy.run_path(str(REPOSITORY / "docs" / "conf.py"))
    sys.path[:] = before


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the site was built, every warning an error."""
    pytest.importorskip("sphinx", reason="sphinx is not installed (docs extra)")
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "trees")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [*build, str(REPOSITORY / "docs"), str(out / "html")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_the_list_of_examples_and_that_of_the_reference_are_whole(settings):
    examples, reference = (
        (REPOSITORY / "docs" / f"{name}.md").read_text("utf-8") for name in ("examples", "reference")
    )
    scripts = [script.name for script in (REPOSITORY / "examples").glob("*.*")]
    assert [name for name in scripts if f"(../examples/{name})" not in examples] == []
    assert [name for name in settings["REFERENCE"] if f"| [`{name}`](../src/batchformer/" not in reference] == []


def test_docstrings_keep_their_characters_and_their_formulas(settings):
    lines = ["Cost of x_i * |y|, see `a_b*`:", "", "    f(x) = x_ * y", "", "where x_ is `code`.", "", "Args:",
             "    x: a number", "", "    more of it"]  # fmt: skip
    settings["as_restructured_text"](None, "", "", None, None, lines)
    assert lines[0] == r"Cost of x_i \* \|y\|, see ``a_b*``:"
    assert lines[2:5] == ["::", "", "    f(x) = x_ * y"]
    assert r"where x\_ is ``code``." in lines
    assert lines.count("::") == 1


def test_docstrings_have_no_markup_but_code():
    files = (REPOSITORY / "src").rglob("*.py")
    marked = re.compile(r":(?:class|func|meth|mod):`|\*\*[A-Z][\w ]*\.?\*\*")
    assert [str(file) for file in files if marked.search(file.read_text(encoding="utf-8"))] == []


class _Page(HTMLParser):
    """The names of places in a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places, self.references = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.places |= {found[key] for key in ("id", "name") if found.get(key)}
        self.references += [found[key] for key in ("href", "src") if found.get(key)]


@pytest.mark.slow
def test_every_link_inside_the_site_leads_somewhere(site):
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    lost = []
    for file, page in pages.items():
        for reference in page.references:
            parts = urlsplit(reference)
            if parts.scheme or (reference.startswith(("#", "//")) and "_downloads" in str(file)):
                continue  # another site, or the inside of the report page, which has tests of its own
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.exists() or (parts.fragment and target in pages
                                       and unquote(parts.fragment) not in pages[target].places):  # fmt: skip
                lost.append(f"{file.relative_to(site)}: {reference}")
    assert lost == []


@pytest.mark.slow
def test_every_public_name_has_an_entry(site, settings):
    inventory = import_module("sphinx.util.inventory").InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    known = {name for entries in inventory.data.values() for name in entries}
    missing = []
    for _, entries in settings["REFERENCE"].values():
        for module, *left_out in (entry.split() for entry in entries):
            names = getattr(import_module(module), "__all__", [])
            missing += [f"{module}.{name}" for name in names
                        if f"-{name}" not in left_out and f"{module}.{name}" not in known]  # fmt: skip
    assert missing == []


@pytest.fixture(scope="module")
def address(site):
    """The site behind an http server: a browser's search does not read files."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    if PROGRAM is None:
        pytest.skip(MISSING)
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (dev extra)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=PROGRAM, args=QUIET)
        yield opened
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_are_quiet_offline_and_no_wider_than_the_screen(browser, address, size, scheme, tmp_path):
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    backgrounds = set()
    for name in SHOWN:
        page = context.new_page()
        complaints, asked = [], []
        page.on("console", lambda message, to=complaints: to.append(message.text))
        page.on("pageerror", lambda error, to=complaints: to.append(str(error)))
        page.on("request", lambda request, to=asked: to.append(request.url))
        page.goto(f"{address}/{name}.html")
        assert complaints == [], name
        assert [url for url in asked if not url.startswith((address, "data:"))] == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.locator("article h1").first.is_visible()
        if size == "laptop":
            cut = "[...document.querySelectorAll('article pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
            assert page.evaluate(cut) == 0, name
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    (background,) = backgrounds
    brightness = sum(int(number) for number in re.findall(r"\d+", background)[:3]) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "found"), [("TransMix", "mix.html"), ("BalancedSoftmaxLoss", "losses.html")])
def test_the_search_finds_a_page_and_a_name(browser, address, words, found):
    page = browser.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(f"{address}/index.html")
    page.get_by_placeholder("Search").fill(words)
    page.keyboard.press("Enter")
    page.locator(f"#search-results li a[href*='{found}']").first.wait_for(timeout=20_000)
    assert complaints == []
    page.close()


@pytest.mark.slow
def test_on_a_phone_the_navigation_opens_and_leads_on(browser, address):
    width, height = SIZES["phone"]
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(f"{address}/index.html")
    link = page.locator(".sidebar-tree a", has_text="Unseen domains")
    assert page.evaluate("e => e.getBoundingClientRect().right", link.element_handle()) <= 0
    page.locator("label.nav-overlay-icon").first.click()
    link.click()
    assert Path(urlsplit(page.url).path).name == "domains.html"
    page.close()
