"""The documentation site: built strictly, complete, and readable from a disk in a browser, on a phone and a desktop."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paragan
from benchmarks.lib.document import ROOT
from browser import Browser, Tab
from paragan.config.run import Run
from paragan.core.schema import config_class, list_fields

sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import field_docstrings
import reference_pages
import repository_pages

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
PAGES = ("index.html", "start.html", "gossip.html", "measurements/clock.html", "reference/fields.html")
PAGES_WITH_CODE = ("reference/own_loop.html", "source/paragan/comm/gossip.py.html")


def build(config: Path, site: Path) -> tuple[int, str]:
    """Build a site strictly. Returns the exit status and what was printed."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--config-file={config}", f"--site-dir={site}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    status, output = build(ROOT / "mkdocs.yml", folder)
    assert status == 0, output
    return folder


# Pages --------------------------------------------------------------------------------------------------


def test_the_reference_is_complete(site: Path):
    api = "".join(path.read_text("utf-8") for path in (site / "reference").glob("*.html"))
    assert not [name for name in paragan.__all__ if f'id="paragan.{name}"' not in api]
    fields = (site / "reference" / "fields.html").read_text("utf-8")
    assert not [
        field.name for field in list_fields(Run, skip_repeats=True) if f"<code>{field.name}</code>" not in fields
    ]
    commands = (site / "reference" / "commands.html").read_text("utf-8")
    assert {"paragan-train", "paragan-data-inspect", "paragan-bench-links"} <= set(
        re.findall(r'h2 id="([^"]+)', commands)
    )


def test_pages_load_nothing_from_elsewhere(site: Path):
    loads = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//')
    assert not [path.name for path in site.rglob("*.html") if loads.search(path.read_text("utf-8"))]


def test_links_between_pages_hold(site: Path):
    """Also those of pages that mkdocs does not check: of the reference, and of source files."""
    missing = []
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text("utf-8"), flags=re.DOTALL)
        for link in set(re.findall(r'\s(?:href|src)="([^"#?]+)', text)):
            if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists() and page.name != "404.html":
                missing.append((page.relative_to(site).as_posix(), link))
    assert not missing


# What fails the build -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](b.md#gone)", "gone"),
        ("[gone](#gone)", "gone"),
        ("![gone](gone.png)", "gone.png"),
    ],
)
def test_a_broken_link_fails(tmp_path: Path, text: str, warning: str):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# A\n\n[b](b.md) {text}\n")
    (docs / "b.md").write_text("# B\n")
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(docs), "hooks": [], "plugins": [], "nav": None}
    settings |= {"theme": {"name": "mkdocs"}, "extra_css": []}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
    status, output = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert status == 1
    assert warning in output


def test_missing_docstrings_are_found():
    @config_class
    class Options:
        """Options.

        rate : documented
        """

        rate: float = 1.0
        batch: int = 1

        def build(self) -> None: ...

        @property
        def size(self) -> int:
            return 1

        def _private(self) -> None: ...

    found = set(reference_pages.find_undocumented(Options, "Options"))
    assert found == {"Options.batch", "Options.build", "Options.size"}
    assert list(reference_pages.find_undocumented(lambda: None, "f")) == ["f"]
    assert list(reference_pages.find_api_problems()) == []


def test_a_name_on_no_page_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(reference_pages.API_PAGES, "errors", ("Errors", "", ("UsageError", "RunError")))
    assert any(problem.startswith("paragan.Interrupted:") for problem in reference_pages.find_api_problems())


# Text ---------------------------------------------------------------------------------------------------


def test_field_lines_leave_the_docstring():
    text = "What it is.\n\nrate, size : of it,\n    and more\nother : no field\n\nAt the end."
    assert (
        field_docstrings.without_field_lines(text, ["rate", "size"]) == "What it is.\n\nother : no field\n\nAt the end."
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](sync.md#lanes)", "[a](../sync.md#lanes)"),
        ("[a](../README.md#start)", "[a](../project/readme.md#start)"),
        ("[a](../examples/cyclegan.py)", "[a](../source/examples/cyclegan.py.md)"),
        ("[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("`comm/gossip.py`", "[`comm/gossip.py`](../source/paragan/comm/gossip.py.md)"),
        ("`comm/none.py`", "`comm/none.py`"),
        ("    `comm/gossip.py`", "    `comm/gossip.py`"),
        ("```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_that_leave_the_documents(monkeypatch: pytest.MonkeyPatch, text: str, expected: str):
    monkeypatch.setattr(repository_pages, "_repository_path", lambda uri: ROOT / "docs" / "sync.md")
    assert repository_pages.convert(text, "folder/page.md") == expected


def test_embedded_code():
    text = repository_pages.convert("<!-- code: comm/gossip.py Gossip.traffic -->", "gossip.md")
    assert text.startswith('```python title="comm/gossip.py" linenums="')
    assert "\ndef traffic(self, n: int, itemsize: int) -> Traffic:" in text


@pytest.mark.parametrize("place", ["comm/none.py Gossip", "comm/gossip.py Gossip.none"])
def test_code_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture, place: str):
    with caplog.at_level(logging.WARNING):
        repository_pages.convert(f"<!-- code: {place} -->", "gossip.md")
    assert place in caplog.text


# In a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.mark.browser
@pytest.mark.parametrize("size", ["phone", pytest.param("desktop", marks=pytest.mark.slow)])
def test_pages_fit_and_report_nothing(browser: Browser, site: Path, size: str):
    width, height = SIZES[size]
    for page in (*PAGES, *PAGES_WITH_CODE):
        tab = browser.open(site / page, width, height, site=site)
        assert tab.console_messages == [], page
        assert tab.requests == [], page
        assert tab.evaluate("Math.max(document.documentElement.scrollWidth, window.innerWidth)") == width, page
        assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), page
        assert tab.evaluate("[...document.images].every(image => image.alt)"), page


@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
def test_search_works_from_a_disk(browser: Browser, site: Path, size: str):
    tab = browser.open(site / "index.html", *SIZES[size], site=site)
    search(tab, "doubly stochastic")
    links = tab.evaluate("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any("/gossip.html" in link for link in links)
    assert tab.console_messages == []
    assert tab.requests == []


def search(tab: Tab, words: str) -> None:
    """Type words into the search of a page, and wait for results."""
    tab.evaluate("document.querySelector('[data-md-toggle=search]').click()")
    tab.evaluate("document.querySelector('.md-search__input').focus()")
    tab.type_text(words)
    tab.wait_until("document.querySelectorAll('.md-search-result__link').length > 0")
