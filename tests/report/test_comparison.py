"""Several runs on one page."""

import json
import re

import pytest

from advice import advises
from paragan.core.errors import UsageError
from paragan.report.comparison import MAX_RUNS, write_comparison
from paragan.report.page import MAX_PAGE_BYTES
from processes import run_cli, usage_error

from .test_page import Page, data_uri, score, tick, write_jsonl, write_noise

RUN_YAML = "recipe: digits\nkimg: {kimg}\nstrategy: {{name: {strategy}}}\ng: {{optimizer: {{lr: 0.001}}}}\n"


def make_run_dir(folder, strategy="sync", kimg=40, ticks=20, scores=(), side=16):
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(RUN_YAML.format(kimg=kimg, strategy=strategy))
    write_jsonl(folder / "stats.jsonl", [tick(i) for i in range(1, ticks + 1)])
    write_jsonl(folder / "metrics.jsonl", scores)
    write_noise(folder / f"fakes{2 * ticks:06d}.png", side, "RGB", seed=ticks)
    return folder


def compare(tmp_path, *folders):
    path = write_comparison(folders, tmp_path / "both.html")
    assert path.stat().st_size < MAX_PAGE_BYTES
    return Page(path.read_text("utf-8"))


@pytest.fixture
def a(tmp_path):
    return make_run_dir(tmp_path / "a", scores=[score(30, 20), score(8, 40), score(0.9, 40, name="recall")])


@pytest.fixture
def b(tmp_path):
    return make_run_dir(tmp_path / "b", "gossip", 80, 10, [score(9, 20), score(7.5, 20, name="recall")])


def test_two_runs_side_by_side(tmp_path, a, b):
    page = compare(tmp_path, a, b)
    for text in (
        "2 runs side by side",
        "a digits · strategy sync finished 40 40 2,000 25 s 60 MB 2.5",
        "b digits · strategy gossip unfinished 20 80 2,000 12.5 s 30 MB 2.5",
        "fid10k lower is better 8 40 kimg 9 20 kimg recall higher is better 0.9 40 kimg 7.5 20 kimg",
        "These scores were taken at 20 to 40 kimg.",
        "field of run.yaml a b kimg 40 80 strategy.name sync gossip Written",
    ):
        assert text in page.words
    assert "not comparable" not in page.words
    best = [attrs for tag, attrs in page.elements if tag == "td" and attrs.get("class") == "n best"]
    assert len(best) == 2
    assert page.attributes("src") == [data_uri(a / "fakes000040.png"), data_uri(b / "fakes000020.png")]
    text = (tmp_path / "both.html").read_text()
    assert not re.search(r"https?://|<link|<script", text)
    losses = re.search(r"aria-label=\"Loss of G: a, b over kimg\".*?</svg>", text)
    assert losses
    assert {"var(--r1)", "var(--r2)"} <= set(re.findall(r"var\(--\w+\)", losses[0]))


def test_different_protocols_give_a_warning_and_no_best(tmp_path, a):
    other = make_run_dir(tmp_path / "c", scores=[score(5, 40, protocol={"features": "inception", "generated": 50_000})])
    page = compare(tmp_path, a, other)
    warning = "fid10k of c (P2) is not comparable with that of a (P1): generated 50,000, not 10,000."
    assert warning in page.words
    assert "n best" not in page.attributes("class")


def test_the_common_protocol_is_compared(tmp_path, a):
    swept = make_run_dir(tmp_path / "c", scores=[score(5, 40), score(4, 40, protocol={"generated": 50_000})])
    for pair in ((a, swept), (swept, a)):
        page = compare(tmp_path, *pair)
        assert "not comparable" not in page.words
        best = [attrs for tag, attrs in page.elements if tag == "td" and attrs.get("class") == "n best"]
        assert len(best) == 1


def test_scores_that_look_equal_have_no_best(tmp_path):
    scores = {"c": 0.13321150, "d": 0.13321158}
    page = compare(tmp_path, *(make_run_dir(tmp_path / name, scores=[score(x, 40)]) for name, x in scores.items()))
    assert not any(attrs.get("class") == "n best" for _, attrs in page.elements)


def test_seeds_are_comparable_and_truncations_are_not(tmp_path):
    samples = {"features": "inception", "truncation": 1.0}
    a, b = (make_run_dir(tmp_path / f"{n}", scores=[score(n, 40, protocol=samples | {"seed": n})]) for n in (1, 2))
    page = compare(tmp_path, a, b)
    assert "not comparable" not in page.words
    assert page.attributes("class").count("n best") == 1
    c = make_run_dir(tmp_path / "c", scores=[score(5, 40, protocol=samples | {"seed": 1, "truncation": 0.5})])
    assert "truncation 0.5, not 1." in compare(tmp_path, a, c).words


def test_a_different_fingerprint_gives_a_warning(tmp_path, a):
    other = make_run_dir(tmp_path / "c", scores=[score(5, 40, fingerprint="other")])
    assert "is not comparable with that of a (P1): fingerprint." in compare(tmp_path, a, other).words


def test_runs_without_scores_ticks_or_grids(tmp_path, a):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.yaml").write_text("recipe: digits\n")
    words = compare(tmp_path, empty, a).words
    assert "empty digits no ticks yet 0" in words
    assert "No sample grids yet" in words
    assert "fid10k lower is better 8 40 kimg" in words
    words = compare(tmp_path, empty, make_run_dir(tmp_path / "bare")).words
    assert "No scores yet" in words


def test_equal_runs_differ_in_no_setting(tmp_path, a):
    other = make_run_dir(tmp_path / "c", scores=[score(30, 20)])
    assert "None: all settings are equal." in compare(tmp_path, a, other).words
    with pytest.raises(UsageError, match="named twice"):
        compare(tmp_path, a, tmp_path / "b" / ".." / "a")


def test_names_are_as_short_as_possible(tmp_path):
    folders = [make_run_dir(tmp_path / name / "merged") for name in ("x", "y")]
    assert "x/merged y/merged" in compare(tmp_path, *folders).words


def test_the_maximal_number_of_runs(tmp_path):
    folders = [make_run_dir(tmp_path / f"{n}", ticks=600, side=500, scores=[score(n, 9)]) for n in range(MAX_RUNS)]
    page = compare(tmp_path, *folders)
    assert len(page.attributes("src")) == MAX_RUNS
    assert sum("dashed" in name for name in page.attributes("class")) > 8
    with advises("17 RUN_DIRs: a page shows at most 16. Use fewer"):
        compare(tmp_path, *folders, make_run_dir(tmp_path / "more"))


def test_health_events_are_shown(tmp_path, a, b):
    event = {"kimg": 12, "kind": "collapse", "message": "m", "action": "warned"}
    write_jsonl(b / "health.jsonl", [event] * 7)
    assert "b : collapse at 12 kimg; " in compare(tmp_path, a, b).words
    assert "and 1 more" in compare(tmp_path, a, b).words


def test_the_command(tmp_path, monkeypatch, a, b):
    monkeypatch.chdir(tmp_path)
    ended = run_cli("report", a, b)
    assert (ended.status, ended.out) == (0, "comparison.html\n")
    assert (tmp_path / "comparison.html").exists()
    assert not (a / "report.html").exists()
    assert run_cli("report", a, b, "--out", "new.html").out == "new.html\n"
    assert run_cli("report", a).out == f"{a}/report.html\n"
    assert run_cli("report", a, "--out", "a.html").out == "a.html\n"


def test_invalid_input_is_rejected_before_anything_is_written(tmp_path, monkeypatch, a):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "metrics.jsonl").write_text(json.dumps({"name": "fid"}))
    assert "foreign: run.yaml is missing" in usage_error("report", a, tmp_path / "foreign")
    assert "--out page.pdf: not an HTML file" in usage_error("report", a, "--out", "page.pdf")
    assert "nowhere: does not exist" in usage_error("report", a, "nowhere")
    assert not list(tmp_path.rglob("*.html"))
