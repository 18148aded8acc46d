import base64
import io
import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from advice import advises
from paragan.core.errors import UsageError
from paragan.report.embedded_images import MAX_GRIDS, evenly_spaced, find_sample_grids, make_gallery
from paragan.report.page import MAX_PAGE_BYTES, write_report
from paragan.report.run_data import StatsColumns
from paragan.report.usage import time_breakdown

VOID = {"meta", "img", "input", "br", "link", "hr"}


class Page(HTMLParser):
    """A parsed page: its elements, its text outside scripts and styles. Fails where elements do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def attributes(self, *names):
        return [attrs[name] for _, attrs in self.elements for name in names if name in attrs]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def parse_page(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob(".report*"))
    assert path.stat().st_size < MAX_PAGE_BYTES
    return Page(path.read_text("utf-8"))


def write_noise(path, side=16, mode="L", seed=0):
    shape = (side, side) if mode == "L" else (side, side, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path, compress_level=1)


def tick(number, **more):
    return {
        "Progress/kimg": number * 2,
        "Progress/step": number * 20,
        "Loss/G/loss": 1.0 + number % 3,
        "Loss/D/loss": 1.5,
        "Loss/scores/real": 0.5,
        "Loss/scores/fake": -0.5,
        "Timing/sec_per_kimg": 0.5,
        "Timing/img_per_sec": 2000,
        "Timing/data_wait_s": 0.1,
        "Timing/exchange_wait_s": 0.2,
        "Timing/total_s": number * 1.25,
        "Comm/G/sent_bytes": 3_000_000,
        "Comm/D/sent_bytes": 0,
        "Resources/peak_mem_gb": 2.5,
        "Async/staleness_mean": number % 5,
        **more,
    }


def score(value, kimg, **more):
    return {
        "name": "fid10k",
        "value": value,
        "kimg": kimg,
        "protocol": {"features": "inception", "generated": 10_000},
        "fingerprint": "abc",
        "seconds": 12.5,
        **more,
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def fresh(tmp_path):
    run_dir = tmp_path / "00000-digits"
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text("recipe: digits\nkimg: 40\nstrategy: {name: gossip, wire: int8}\nbatch: 64\n")
    return run_dir


def make_run_dir(folder):
    folder.mkdir()
    (folder / "run.yaml").write_text("recipe: digits\n")
    return folder


@pytest.fixture
def run_dir(fresh):
    write_jsonl(fresh / "stats.jsonl", [tick(i) for i in range(1, 21)])
    write_jsonl(fresh / "metrics.jsonl", [score(30, 0), score(7.4182, 20), score(8, 40)])
    for kimg in range(0, 41, 10):
        write_noise(fresh / f"fakes{kimg:06d}.png", seed=kimg)
    write_noise(fresh / "reals.png", seed=99)
    return fresh


def test_a_finished_run(run_dir):
    words = parse_page(run_dir).words
    for text in (
        "digits finished",
        "strategy gossip · batch 64",
        "images seen 40 of 40 kimg",
        "2,000 images/s",
        "time 25 s",
        "fid10k, lower is better 8 at 40 kimg best 7.418 at 20 kimg",
        "Protocol: features inception, generated 10,000.",
        "Bytes sent MB per tick",
        "Async/staleness_mean",
        "computing and other 14 s 56.0 %",
        "waiting for data 2 s 8.0 %",
        "waiting for other ranks 4 s 16.0 %",
        "between ticks (scores, samples, checkpoints) 5 s 20.0 %",
        "strategy: {name: gossip, wire: int8}",
    ):
        assert text in words
    assert "Not comparable" not in words


def test_the_page_is_self_contained(run_dir):
    text = write_report(run_dir).read_text("utf-8")
    parsed = Page(text)
    references = parsed.attributes("src", "href", "xlink:href", "srcset", "data", "poster", "action")
    assert references
    assert all(reference.startswith(("data:", "#")) for reference in references)
    assert not re.search(r"@import|url\((?!#)|https?://|<link|<iframe", text)
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in references if link.startswith("#")} <= set(ids)
    assert "default-src 'none'" in text


def test_grids_are_the_original_files_newest_first(run_dir):
    images = parse_page(run_dir).attributes("src")
    names = [*(f"fakes{kimg:06d}.png" for kimg in (40, 30, 20, 10, 0)), "reals.png"]
    decoded = [base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in images]
    assert decoded == [(run_dir / name).read_bytes() for name in names]


def test_a_run_without_ticks(fresh):
    words = parse_page(fresh).words
    for text in (
        "digits no ticks yet",
        "No sample grids yet",
        "No ticks yet",
        "No scores yet",
        "No time recorded yet",
    ):
        assert text in words


def test_an_unfinished_run(run_dir):
    write_jsonl(run_dir / "stats.jsonl", [tick(i) for i in range(1, 11)])
    (run_dir / "metrics.jsonl").unlink()
    words = parse_page(run_dir).words
    assert "digits unfinished" in words
    assert "20 of 40 kimg" in words
    assert "No scores yet" in words


def test_a_run_that_stopped_between_two_ticks_is_at_its_newest_checkpoint(run_dir):
    write_jsonl(run_dir / "stats.jsonl", [tick(i) for i in range(1, 11)])
    for step, text in ((11, '{"clock": {"images": 21000}}'), (12, '{"clock": {"images": 22500}}'), (13, '{"clo')):
        folder = run_dir / "checkpoints" / f"{step:08d}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(text)
    assert "22.5 of 40 kimg" in parse_page(run_dir).words


def test_files_of_a_crashed_run(run_dir):
    with (run_dir / "stats.jsonl").open("a") as file:
        file.write('{"Progress/kimg": 41, "Loss/G')
    (run_dir / "fakes000050.png").write_bytes((run_dir / "fakes000040.png").read_bytes()[:-20])
    (run_dir / "fakes000060.png").write_bytes(b"")
    (run_dir / "fakes000070.png").symlink_to(run_dir / "of an archive that is not here")
    os.mkfifo(run_dir / "fakes000080.png")
    words = parse_page(run_dir).words
    assert "40 of 40 kimg" in words
    assert "fakes000050.png is not a complete image" in words
    for kimg in (60, 70, 80):
        assert f"fakes{kimg:06d}.png is not a complete image" in words
    assert "at 40 kimg, the latest" in words


def test_nonfinite_values_are_reported(run_dir):
    rows = [tick(i) for i in range(1, 21)]
    rows[4] |= {"Loss/G/loss": None, "nonfinite": ["Loss/G/loss"]}
    rows[5] |= {"Loss/G/loss": float("nan")}  # as another writer would have it
    write_jsonl(run_dir / "stats.jsonl", rows)
    write_jsonl(run_dir / "metrics.jsonl", [score(None, 40, nonfinite=["value"])])
    words = parse_page(run_dir).words
    assert "Loss/G/loss was not finite at 2 of 20 ticks, first at 10 kimg." in words
    assert "fid10k, lower is better not finite at 40 kimg" in words


def test_only_nonfinite_values(fresh):
    rows = [dict.fromkeys(tick(1), None) | {"Progress/kimg": 1, "nonfinite": list(tick(1))}]
    write_jsonl(fresh / "stats.jsonl", rows)
    assert "Loss/D/loss was not finite at 1 of 1 ticks" in parse_page(fresh).words


def test_scores_under_different_protocols_are_marked(run_dir):
    other = {"features": "inception", "generated": 50_000}
    write_jsonl(
        run_dir / "metrics.jsonl",
        [score(8, 40), score(6, 40, protocol=other, fingerprint="d", notes="by hand")],
    )
    words = parse_page(run_dir).words
    assert words.count("Not comparable with the first fid10k: generated 50,000, not 10,000.") == 2
    assert "by hand" in words
    assert "generated 10,000 50,000 fingerprint abc d" in words


def test_health_events_are_listed_and_marked(run_dir):
    events = [
        {"kimg": 12, "kind": "collapse", "message": "diversity fell below 0.2", "action": "rolled back"},
        {"kimg": 18, "kind": "collapse", "message": "again", "action": None},
        {"kimg": None, "kind": "lost"},
        {"kimg": 30, "kind": "divergence", "message": "G's loss is 1e9", "action": "warned"},
    ]
    without = write_report(run_dir).read_text().count("var(--alarm)")
    write_jsonl(run_dir / "health.jsonl", events)
    words = parse_page(run_dir).words
    assert "collapse at 12 kimg and 1 more time: diversity fell below 0.2" in words
    assert "divergence at 30 kimg: G's loss is 1e9" in words
    assert "12 collapse diversity fell below 0.2 rolled back 18 collapse again" in words
    text = (run_dir / "report.html").read_text()
    charts = text.count('<figure class="chart">') - 1  # the last is one of those that are folded away
    assert text.count("var(--alarm)") - without == 3 * charts


def test_class_scores_are_bars(run_dir):
    of_classes = {"cat": 4.0, "dog": 16.0, "eel": None}
    rows = [score(30, 20, per_class={"cat": 1.0}), score(8, 40, per_class=of_classes)]
    write_jsonl(run_dir / "metrics.jsonl", [*rows, score(0.5, 40, name="accuracy", per_class={"dog": 0.25, "fox": 1})])
    parsed = parse_page(run_dir)
    assert "Class by class fid10k, lower is better, at 40 kimg: 8 for all classes." in parsed.words
    assert "cat 4 dog 16 0.25 eel fox 1" in parsed.words
    bars = [a["style"] for tag, a in parsed.elements if tag == "span" and a.get("style", "").startswith("width")]
    assert bars[:4] == ["width: 25.0%", "width: 100.0%", "width: 25.0%", "width: 100.0%"]


def test_traffic_staleness_and_consensus(run_dir):
    ages = [{"Async/fakes_age/0": 6, "Async/fakes_age/2": 2}, {"Async/fakes_age/2": 4, "Async/critic_age/40": 1}]
    consensus = {"Consensus/G": 0.25, "Consensus/D": 0.5}
    rows = [tick(i, **ages[i % 2], **consensus) for i in range(1, 5)]
    write_jsonl(run_dir / "stats.jsonl", rows)
    words = parse_page(run_dir).words
    assert "for G 12 MB 1,500" in words  # 4 times 3 MB, 8 kimg
    assert "for D" not in words
    assert "Staleness of fakes: 1 rounds on average this round 50.0 % 2 rounds 50.0 %" in words
    assert "Staleness of critic: 40 rounds on average more than 16 rounds 100.0 %" in words
    assert "Staleness: mean age rounds" in words
    assert "Consensus: distance of ranks from their mean" in words
    assert "Async/fakes_age" not in words.split("Every recorded number")[0]


def test_evaluation_time_is_separate(run_dir):
    write_jsonl(run_dir / "stats.jsonl", [tick(i, **{"Timing/eval_s": 0.2}) for i in range(1, 21)])
    words = parse_page(run_dir).words
    assert "evaluation 4 s 16.0 %" in words
    assert "between ticks (samples, checkpoints) 1 s 4.0 %" in words


def write_figures(run_dir, *files):
    (run_dir / "figures").mkdir()
    write_noise(run_dir / "figures" / "one.png", seed=77)
    strips = [{"file": file, "caption": f"of {file}", "alt": "<b>"} for file in files]
    figures = [
        {"title": "Nearest", "description": "what it is", "strips": strips},
        {"title": "Empty", "strips": [7, {}]},
        None,
    ]
    (run_dir / "figures" / "figures.json").write_text(json.dumps({"figures": figures, "missing_reasons": ["no data"]}))


def test_figures_are_on_the_page(run_dir):
    write_figures(run_dir, "one.png", "../reals.png", "/etc/passwd", "nowhere.png", "figures.json")
    parsed = parse_page(run_dir)
    assert "Nearest what it is of one.png no data" in parsed.words
    assert "Empty" not in parsed.words
    assert parsed.attributes("src").count(data_uri(run_dir / "figures" / "one.png")) == 1
    assert "of ../reals.png" not in parsed.words


def data_uri(path):
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"figures": 3}', '{"figures": [{"strips": "x"}], "missing_reasons": {}}']
)
def test_unreadable_figures_are_left_out(run_dir, text):
    (run_dir / "figures").mkdir()
    (run_dir / "figures" / "figures.json").write_text(text)
    assert "Samples Curves" in parse_page(run_dir).words


def test_many_large_figures_stay_under_the_limit(fresh):
    (fresh / "figures").mkdir()
    for number in range(60):
        write_noise(fresh / "figures" / f"{number}.png", 500, "RGB", number)
    strips = [{"file": f"{number}.png"} for number in range(60)]
    (fresh / "figures" / "figures.json").write_text(json.dumps({"figures": [{"title": "Many", "strips": strips}]}))
    for kimg in range(20):
        write_noise(fresh / f"fakes{kimg:06d}.png", 500, "RGB", kimg)
    images = parse_page(fresh).attributes("src")
    assert len(images) == 48 + MAX_GRIDS


@pytest.mark.slow
def test_long_lists_stay_under_the_limit(fresh):
    long = "<&>" * 100
    many = {f"{number}{long}": number / 3 for number in range(1100)}
    write_jsonl(fresh / "stats.jsonl", [tick(i, **{f"{long}{n}": n * i for n in range(500)}) for i in range(1, 9)])
    scored = [score(n, n % 7, name=f"fid{n % 13}{long}", per_class=many, notes=long, protocol=many) for n in range(30)]
    write_jsonl(fresh / "metrics.jsonl", scored)
    write_jsonl(
        fresh / "health.jsonl", [{"kimg": n, "kind": f"{n}{long}", "message": long, "action": long} for n in range(900)]
    )
    rows = [{"label": n, "name": long, "kimg": 1, "seconds": 2, "worker": long, "scores": many} for n in range(1100)]
    write_jsonl(fresh / "labels.jsonl", [{**row, "scores": dict(list(many.items())[:40])} for row in rows])
    assert "Long lists are shortened" in parse_page(fresh).words
    assert "Long lists are shortened" not in parse_page(make_run_dir(fresh.parent / "small")).words


def test_unfinished_labels(fresh):
    (fresh / "model").mkdir()
    config = {"classes": ["ape", "bee", "cat", "dog"], "images": [5, 6, 7, 8]}
    (fresh / "model" / "config.json").write_text(json.dumps(config))
    for name, kimg in (("0000", 8), ("0002.1", 1), ("0002.3", 4), ("seeds", 9)):
        (fresh / "labels" / name).mkdir(parents=True)
        (fresh / "labels" / name / "run.yaml").write_text("recipe: digits\n")
        write_jsonl(fresh / "labels" / name / "stats.jsonl", [tick(kimg // 2)])
        write_noise(fresh / "labels" / name / "fakes000001.png", seed=kimg)
    write_jsonl(fresh / "labels" / "0000" / "metrics.jsonl", [score(3, 8), score(None, 8, name="kid")])
    parsed = parse_page(fresh)
    assert "digits unfinished" in parsed.words
    assert "images seen 12 of 40 kimg" in parsed.words
    assert "1 of 4 are done" in parsed.words
    assert "0 ape done 5 8 5 s 3 1 bee not begun 6 0 0 s 2 cat begun 7 4 2.5 s 3 dog not begun" in parsed.words
    assert len(parsed.attributes("src")) == 2
    assert [link for link in parsed.attributes("href") if "/" in link] == [
        "labels/0000/report.html",
        "labels/0002.3/report.html",
    ]
    elsewhere = write_report(fresh, fresh.parent / "elsewhere.html").read_text()
    assert "labels/0000/report.html" not in elsewhere


def test_a_retrained_label_is_unfinished(run_dir):
    rows = [{"label": n, "name": str(n), "kimg": 20, "seconds": 1.0, "scores": {}, "worker": "me"} for n in (0, 1)]
    write_jsonl(run_dir / "labels.jsonl", [*rows, {"label": "x"}, {}])
    assert "2 of 2 are done" in parse_page(run_dir).words
    (run_dir / "labels" / "0001.4").mkdir(parents=True)
    (run_dir / "labels" / "0001.4" / "run.yaml").write_text("recipe: digits\n")
    assert "1 of 2 are done" in parse_page(run_dir).words


def test_a_run_of_another_program_is_rejected(fresh):
    (fresh / "run.yaml").write_text("name: other\nsteps: 7\n")
    with pytest.raises(UsageError, match=r"00000-digits/run\.yaml: the field recipe is missing"):
        write_report(fresh)


def test_hostile_text_stays_text(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)> \"'&{{ 7*7 }}"
    run_dir = tmp_path / re.sub("/", "", evil)
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text(json.dumps({"recipe": evil, "strategy": {"name": evil}, "kimg": evil}))
    write_jsonl(run_dir / "stats.jsonl", [tick(i, **{evil: i, "none": None}) for i in (1, 2)])
    protocol = {evil: {evil: [evil, {evil: evil}]}}
    rows = [score(i, i, name=evil, protocol=protocol, fingerprint=evil, notes=evil) for i in (1, 2)]
    write_jsonl(run_dir / "metrics.jsonl", [*rows, score(3, 3, name=evil), {"name": None}, {"value": [], "kimg": {}}])
    plain = parse_page(run_dir)
    assert sum(tag == "script" for tag, _ in plain.elements) == 1
    assert not plain.attributes("onerror", "src")
    assert evil in plain.text  # one piece: nothing in it was an element
    assert "{{ 7*7 }}" in plain.words


@pytest.mark.parametrize("side", [200, 400])
def test_many_large_grids_stay_under_the_limit(fresh, side):
    for kimg in range(20):
        write_noise(fresh / f"fakes{kimg:06d}.png", side, "RGB", kimg)
    write_noise(fresh / "reals.png", side, "RGB", 99)
    images = parse_page(fresh).attributes("src")
    displayed = [Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) for image in images]
    assert len(displayed) == MAX_GRIDS + 1
    assert displayed[0].width == side
    assert displayed[-1].width == side


def test_very_large_grids_are_fewer_and_smaller(fresh, monkeypatch):
    monkeypatch.setattr("paragan.report.embedded_images.MAX_DECODED_PIXELS", 3 * 200 * 200)
    for kimg in range(5):
        write_noise(fresh / f"fakes{kimg:06d}.png", 200, "RGB", kimg)
    fakes, reals, notes = vars(make_gallery(fresh, max_chars=40_000)).values()
    assert [kimg for kimg, _ in fakes] == [0, 2, 4]
    assert sum(len(image.uri) for _, image in fakes) < 40_000
    assert reals is None
    assert notes == (
        "3 of the run's 5 grids.",
        "Some are shrunk or compressed here; the run folder has the originals.",
    )


def test_grids_are_sorted_by_number(fresh):
    for name in ("fakes1000000.png", "fakes999999.png", "fakes000001.png", "fakes1.png", "fakesinit.png"):
        (fresh / name).touch()
    assert [kimg for kimg, _ in find_sample_grids(fresh)] == [1, 999_999, 1_000_000]


@pytest.mark.parametrize(
    ("count", "max_count", "indices"),
    [(0, 4, []), (1, 4, [0]), (4, 4, [0, 1, 2, 3]), (9, 3, [0, 4, 8]), (9, 2, [0, 8]), (9, 1, [8])],
)
def test_evenly_spaced(count, max_count, indices):
    assert evenly_spaced(count, max_count) == indices


def test_total_time_of_a_restarted_clock():
    rows = [{"Progress/kimg": kimg, "Timing/total_s": total} for kimg, total in ((1, 5), (2, 9), (3, 2), (4, 6))]
    assert [item.amount for item in time_breakdown(StatsColumns(rows))] == [15]
    assert time_breakdown(StatsColumns([{"Progress/kimg": 1}])) == []


def test_a_folder_without_a_run_names_runs_nearby(run_dir):
    with pytest.raises(UsageError, match=r"run\.yaml is missing; it contains the run folders .*00000-digits$"):
        write_report(run_dir.parent)
    (run_dir / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"it is inside the run folder .*00000-digits$"):
        write_report(run_dir / "checkpoints")
    assert not (run_dir.parent / "report.html").exists()


def test_a_folder_with_no_run_nearby(tmp_path):
    with pytest.raises(UsageError, match=r"run\.yaml is missing; `paragan train` makes run folders"):
        write_report(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        write_report(tmp_path / "file")


YAML_BOMB = "recipe: x\na0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        *("a: [1", "- 1", "", "a: \x00", "!!python/object:os.system x", "recipe: 2024-13-45", "recipe: " + "[" * 9999),
        *(YAML_BOMB + "reasons: *a8\n", "recipe: x\nreasons: &a [*a]\n", "recipe: x\na: &a {b: *a}\n"),
    ],
    ids=lambda text: text[:20],
)
def test_a_run_that_is_not_yaml_is_rejected(fresh, text):
    (fresh / "run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"run\.yaml: ") as error:
        write_report(fresh)
    assert "\n" not in str(error.value)
    assert not (fresh / "report.html").exists()


@pytest.mark.parametrize(
    "line",
    [
        f'{{"Progress/kimg": 1, "Loss/G/loss": {10**400}}}',
        f'{{"Progress/kimg": {10**400}, "Loss/G/loss": 1}}',
        '{"Progress/kimg": 1, "Loss/G/loss": null, "nonfinite": 5}',
        '{"Progress/kimg": 1, "Loss/G/loss": null, "nonfinite": null}',
    ],
)
def test_invalid_numbers_are_left_out(fresh, line):
    (fresh / "run.yaml").write_text(f"recipe: digits\nkimg: {10**400}\n")
    (fresh / "stats.jsonl").write_text(f"{line}\n")
    (fresh / "labels" / "0000").mkdir(parents=True)
    (fresh / "labels" / "0000" / "run.yaml").write_text("recipe: digits\n")
    (fresh / "labels" / "0000" / "metrics.jsonl").write_text('{"value": 1, "kimg": 1}\n')
    assert "unfinished" in parse_page(fresh).words or "no ticks yet" in parse_page(fresh).words


def test_the_record_of_a_run_is_used_as_advised(fresh, finished):
    file = fresh / "run.yaml"
    file.write_text("- 1")
    with advises(f"{file}: not a run. Use the run.yaml that `paragan train` wrote"):
        write_report(fresh)
    file.write_text((finished / "run.yaml").read_text())
    assert write_report(fresh).exists()


def test_a_long_run_yaml_is_shortened(fresh):
    (fresh / "run.yaml").write_text("recipe: digits\nlong: " + "x" * 300_000)
    assert "more characters in run.yaml" in parse_page(fresh).words


def test_data_pipeline_changes_are_shown(fresh):
    fixed = {"Data/concurrent_requests": 16, "Data/workers": 1}
    rows = [tick(i, **{"Data/fetch_ms": 5 + i, "Data/batches_ahead": 4 * i}, **fixed) for i in range(1, 4)]
    rows[1]["Data/decisions"] = ["3.5 s, congestion: fetches 16 -> 48 <b>"]
    rows[2]["Data/decisions"] = "not a list"
    write_jsonl(fresh / "stats.jsonl", rows)
    text = write_report(fresh).read_text()
    assert "Data: latency per image" in text
    assert "Data: batches ahead" in text
    assert "Changes by the data pipeline, on rank 0: 1" in text
    assert "3.5 s, congestion: fetches 16 -&gt; 48 &lt;b&gt;" in text
