"""The pages in a real browser, at a phone's and a desktop's width."""

import json

import numpy as np
import pytest
from PIL import Image

from browser import Browser
from fake_records import write_wave_samples
from paragan.report.comparison import write_comparison
from paragan.report.page import MAX_PAGE_BYTES, write_report
from processes import train_tiny

pytestmark = pytest.mark.browser

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
EVIL = "<img src=https://example.com/a.png><script>console.error(1)</script>" + "x" * 300


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A tiny run, with all that a page can show: long names, classes, an alarm, large grids."""
    folder = train_tiny(tmp_path_factory.mktemp("browser") / "run", "--kimg=0.16")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["per_class"] = {f"class {number} {EVIL}": number / 7 for number in range(12)}
    rows += [rows[-1] | {"protocol": {"space": EVIL}, "name": EVIL, "fingerprint": "f" * 200}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"kimg": 0.1, "step": 6, "kind": "collapse", "message": EVIL, "key": EVIL, "value": 1, "action": "warned"}
    (folder / "health.jsonl").write_text(json.dumps(event) + "\n")
    noise = np.random.default_rng(0)
    write_wave_samples(folder, 0, noise.uniform(-1, 1, (2, 2, 1, 4000)))
    for kimg in range(1, 14):
        pixels = noise.integers(0, 256, (300, 300, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"fakes{kimg:06d}.png", compress_level=1)
    return folder


@pytest.fixture(scope="module", params=SIZES)
def tab(request, browser, run_dir):
    page = write_report(run_dir)
    assert page.stat().st_size < MAX_PAGE_BYTES
    return browser.open(page, *SIZES[request.param])


def has_no_horizontal_scroll(tab):
    return tab.evaluate("Math.max(document.documentElement.scrollWidth, window.innerWidth)") == tab.width


def test_the_page_loads_nothing_and_fits(tab):
    assert tab.console_messages == []
    assert tab.requests == []
    assert has_no_horizontal_scroll(tab)
    assert tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert tab.evaluate("[...document.images].every(image => image.alt)")
    tab.wait_until("[...document.querySelectorAll('audio')].filter(audio => audio.duration == 0.5).length == 4")
    assert tab.evaluate("document.body.innerText.includes('<script>console.error(1)')")


def test_the_page_fits_with_everything_unfolded(tab):
    tab.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert has_no_horizontal_scroll(tab)
    assert tab.evaluate("document.querySelector('#run ~ details pre').innerText.includes('recipe: digits')")


def visible_captions(tab):
    return tab.evaluate(
        "[...document.querySelectorAll('#fakes figure')].filter(f => f.offsetHeight).map(f => f.innerText)"
    )


def test_the_slider_works_by_keyboard(tab):
    tab.evaluate("document.getElementById('when').focus()")
    tab.press_key("End")
    assert [text.split("\n")[0] for text in visible_captions(tab)] == ["Generated at 13 kimg, the latest"]
    tab.press_key("ArrowLeft")
    assert visible_captions(tab) == ["Generated at 12 kimg"]
    assert tab.evaluate("document.getElementById('when').getAttribute('aria-valuetext')") == "Generated at 12 kimg"
    tab.press_key("Home")
    assert visible_captions(tab) == ["Generated at 0 kimg"]


def test_the_slider_works_by_touch(browser, run_dir):
    tab = browser.open(write_report(run_dir), *SIZES["phone"])
    tab.evaluate("document.getElementById('when').scrollIntoView({block: 'center'})")
    left, top, width, height = tab.evaluate(
        "(r => [r.left, r.top, r.width, r.height])(document.getElementById('when').getBoundingClientRect())"
    )
    assert height >= 28
    tab.tap(left + width / 2, top + height / 2)
    tab.wait_until("document.getElementById('when').value != 13")
    assert len(visible_captions(tab)) == 1
    assert "the latest" not in visible_captions(tab)[0]


def test_without_javascript_all_grids_are_shown_newest_first(browser, run_dir):
    tab = browser.open(write_report(run_dir), *SIZES["phone"], script=False)
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    figures = tab.call("DOM.querySelectorAll", nodeId=root, selector="#fakes figure")["nodeIds"]
    tops = [tab.call("DOM.getBoxModel", nodeId=figure)["model"]["border"][1] for figure in figures]
    assert len(tops) == 14
    assert tops == sorted(tops)


def test_a_printed_page_has_the_latest_grid_and_no_slider(browser, run_dir):
    tab = browser.open(write_report(run_dir), *SIZES["desktop"])
    tab.call("Emulation.setEmulatedMedia", media="print")
    texts = visible_captions(tab)
    assert len(texts) == 5
    assert "13 kimg, the latest" in texts[0]
    assert texts[-1] == "Generated at 0 kimg"
    assert tab.evaluate("document.getElementById('when').offsetHeight") == 0
    assert tab.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("size", SIZES)
def test_several_runs(browser, run_dir, finished, size, tmp_path):
    page = write_comparison([run_dir, finished], tmp_path / "both.html")
    assert page.stat().st_size < MAX_PAGE_BYTES
    tab = browser.open(page, *SIZES[size], dark=True)
    assert (tab.console_messages, tab.requests) == ([], [])
    assert has_no_horizontal_scroll(tab)
    assert tab.evaluate("document.querySelectorAll('#scores ~ .wide th').length") > 2
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"


def test_a_request_is_detected(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<img src='https://example.com/a.png'><p style='width: 2000px'>wide<script>nothing()</script>")
    tab = browser.open(page, *SIZES["phone"], wait_for_load=False)
    tab.wait_until("document.images.length")
    assert tab.requests == ["https://example.com/a.png"]
    assert tab.console_messages
    assert tab.evaluate("document.documentElement.scrollWidth") > 390
