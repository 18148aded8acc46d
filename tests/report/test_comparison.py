"""Several runs on one page."""

import json
import re

import pytest

from paragan.core.errors import UsageError
from paragan.report.comparison import MAX_RUNS, write_comparison
from paragan.report.page import MAX_PAGE_BYTES
from processes import run_cli, usage_error

from .test_page import Page, lines, noise, picture_of, score, tick

RECORD = "recipe: digits\nkimg: {kimg}\nstrategy: {{name: {strategy}}}\ng: {{optimizer: {{lr: 0.001}}}}\n"


def run_of(folder, strategy="sync", kimg=40, ticks=20, scores=(), side=16):
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(RECORD.format(kimg=kimg, strategy=strategy))
    lines(folder / "stats.jsonl", [tick(place) for place in range(1, ticks + 1)])
    lines(folder / "metrics.jsonl", scores)
    noise(folder / f"fakes{2 * ticks:06d}.png", side, "RGB", seed=ticks)
    return folder


def compared(tmp_path, *folders):
    path = write_comparison(folders, tmp_path / "both.html")
    assert path.stat().st_size < MAX_PAGE_BYTES
    return Page(path.read_text("utf-8"))


@pytest.fixture
def a(tmp_path):
    return run_of(tmp_path / "a", scores=[score(30, 20), score(8, 40), score(0.9, 40, name="recall")])


@pytest.fixture
def b(tmp_path):
    return run_of(tmp_path / "b", "gossip", 80, 10, [score(9, 20), score(7.5, 20, name="recall")])


def test_two_runs_side_by_side(tmp_path, a, b):
    page = compared(tmp_path, a, b)
    for text in (
        "2 runs side by side",
        "a digits · strategy sync finished 40 40 2,000 25 s 60 MB 2.5",
        "b digits · strategy gossip unfinished 20 80 2,000 12.5 s 30 MB 2.5",
        "fid10k lower is better 8 40 kimg 9 20 kimg recall higher is better 0.9 40 kimg 7.5 20 kimg",
        "They were taken after 20 to 40 kimg.",
        "field of run.yaml a b kimg 40 80 strategy.name sync gossip Written",
    ):
        assert text in page.words
    assert "not comparable" not in page.words
    best = [attrs for tag, attrs in page.elements if tag == "td" and attrs.get("class") == "n best"]
    assert len(best) == 2
    assert page.attributes("src") == [picture_of(a / "fakes000040.png"), picture_of(b / "fakes000020.png")]
    text = (tmp_path / "both.html").read_text()
    assert not re.search(r"https?://|<link|<script", text)
    losses = re.search(r"aria-label=\"Loss of G: a, b over kimg\".*?</svg>", text)
    assert losses
    assert {"var(--r1)", "var(--r2)"} <= set(re.findall(r"var\(--\w+\)", losses[0]))


def test_protocols_that_differ_are_warned_of_and_nothing_is_best(tmp_path, a):
    other = run_of(tmp_path / "c", scores=[score(5, 40, protocol={"features": "inception", "generated": 50_000})])
    page = compared(tmp_path, a, other)
    told = "fid10k of c (P2) is not comparable with that of a (P1): generated 50,000, not 10,000."
    assert told in page.words
    assert "n best" not in page.attributes("class")


def test_of_several_protocols_the_one_that_both_runs_have_is_compared(tmp_path, a):
    swept = run_of(tmp_path / "c", scores=[score(5, 40), score(4, 40, protocol={"generated": 50_000})])
    for pair in ((a, swept), (swept, a)):
        page = compared(tmp_path, *pair)
        assert "not comparable" not in page.words
        best = [attrs for tag, attrs in page.elements if tag == "td" and attrs.get("class") == "n best"]
        assert len(best) == 1


def test_scores_that_are_written_alike_are_equally_good(tmp_path):
    scores = {"c": 0.13321150, "d": 0.13321158}
    page = compared(tmp_path, *(run_of(tmp_path / name, scores=[score(x, 40)]) for name, x in scores.items()))
    assert not any(attrs.get("class") == "n best" for _, attrs in page.elements)


def test_runs_of_other_seeds_are_compared_and_of_other_truncations_warned_of(tmp_path):
    drawn = {"features": "inception", "truncation": 1.0}
    a, b = (run_of(tmp_path / f"{n}", scores=[score(n, 40, protocol=drawn | {"seed": n})]) for n in (1, 2))
    page = compared(tmp_path, a, b)
    assert "not comparable" not in page.words
    assert page.attributes("class").count("n best") == 1
    c = run_of(tmp_path / "c", scores=[score(5, 40, protocol=drawn | {"seed": 1, "truncation": 0.5})])
    assert "truncation 0.5, not 1." in compared(tmp_path, a, c).words


def test_a_fingerprint_that_differs_is_warned_of(tmp_path, a):
    other = run_of(tmp_path / "c", scores=[score(5, 40, fingerprint="other")])
    assert "is not comparable with that of a (P1): fingerprint." in compared(tmp_path, a, other).words


def test_runs_without_scores_ticks_or_grids(tmp_path, a):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.yaml").write_text("recipe: digits\n")
    words = compared(tmp_path, empty, a).words
    assert "empty digits no ticks yet 0" in words
    assert "No sample grids yet" in words
    assert "fid10k lower is better 8 40 kimg" in words
    words = compared(tmp_path, empty, run_of(tmp_path / "bare")).words
    assert "No scores yet" in words


def test_the_same_run_twice_differs_in_nothing(tmp_path, a):
    other = run_of(tmp_path / "c", scores=[score(30, 20)])
    assert "None: they are the same run." in compared(tmp_path, a, other).words
    with pytest.raises(UsageError, match="given twice"):
        compared(tmp_path, a, tmp_path / "b" / ".." / "a")


def test_names_are_as_long_as_they_have_to_be(tmp_path):
    folders = [run_of(tmp_path / name / "merged") for name in ("x", "y")]
    assert "x/merged y/merged" in compared(tmp_path, *folders).words


def test_as_many_as_there_are_colours(tmp_path):
    folders = [run_of(tmp_path / f"{n}", ticks=600, side=500, scores=[score(n, 9)]) for n in range(MAX_RUNS)]
    page = compared(tmp_path, *folders)
    assert len(page.attributes("src")) == MAX_RUNS
    assert sum("dashed" in name for name in page.attributes("class")) > 8
    with pytest.raises(UsageError, match=r"17 RUN_DIRs .* at most 16"):
        compared(tmp_path, *folders, run_of(tmp_path / "more"))


def test_what_the_watchers_told_is_said(tmp_path, a, b):
    event = {"kimg": 12, "kind": "collapse", "message": "m", "action": "warned"}
    lines(b / "health.jsonl", [event] * 7)
    assert "b : collapse at 12 kimg; " in compared(tmp_path, a, b).words
    assert "and 1 more" in compared(tmp_path, a, b).words


def test_the_command(tmp_path, monkeypatch, a, b):
    monkeypatch.chdir(tmp_path)
    ended = run_cli("report", a, b)
    assert (ended.status, ended.out) == (0, "comparison.html\n")
    assert (tmp_path / "comparison.html").exists()
    assert not (a / "report.html").exists()
    assert run_cli("report", a, b, "--out", "new.html").out == "new.html\n"
    assert run_cli("report", a).out == f"{a}/report.html\n"
    assert run_cli("report", a, "--out", "a.html").out == "a.html\n"


def test_what_is_no_run_is_refused_before_anything_is_written(tmp_path, monkeypatch, a):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "metrics.jsonl").write_text(json.dumps({"name": "fid"}))
    assert "foreign: run.yaml is missing" in usage_error("report", a, tmp_path / "foreign")
    assert "--out page.pdf must end in .html" in usage_error("report", a, "--out", "page.pdf")
    assert "nowhere: does not exist" in usage_error("report", a, "nowhere")
    assert not list(tmp_path.rglob("*.html"))
