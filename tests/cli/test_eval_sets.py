"""`paragan eval --reals A --fakes B` prints and writes scores, and refuses in one line what it cannot score."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paragan
from paragan.cli import eval_sets
from paragan.train import local_launcher
from processes import run_cli, usage_error

IMAGES = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), np.uint8)


@pytest.fixture(autouse=True)
def _sets(tmp_path, monkeypatch):
    """In the current folder: reals.npz, fakes/, an empty folder, a folder of one image."""
    monkeypatch.chdir(tmp_path)
    np.savez("reals.npz", images=IMAGES)
    for folder, count in (("fakes", 20), ("one", 1), ("empty", 0)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            Image.fromarray(255 - IMAGES[number, :, :, 0]).save(f"{folder}/{number:02d}.png")


def test_scores_are_printed_and_written(tmp_path):
    ended = run_cli("eval", "--reals", "reals.npz", "--fakes", "fakes", "--metrics=fd,kid,prdc", "--json=scores.json")
    assert ended.status == 0, ended.err
    first, second, third, *lines = ended.out.splitlines()
    assert first == "reals: 30 images, 8 x 8, grey, as they are (reals.npz)"
    assert second == "fakes: 20 images, 8 x 8, grey, as they are (fakes)"
    assert third == "features: pixels, 64 a record"
    written = json.loads((tmp_path / "scores.json").read_text())
    scores = paragan.compare("reals.npz", "fakes")
    assert [row["value"] for row in written["scores"]] == [score.value for score in scores]
    assert [line.split()[0] for line in lines] == [score.name for score in scores]
    assert lines[0].startswith(f"fd_pixels {scores[0].value:.4g}  (30 reals for 64 features: biased upwards)")
    assert written["reals"]["path"] == "reals.npz"
    assert written["scores"][0]["protocol"]["fakes"] == 20


def test_long_computations_name_their_metric_on_stderr(monkeypatch):
    command = ["eval", "--reals=reals.npz", "--fakes=fakes", "--metrics=fd,prdc"]
    assert run_cli(*command).err == ""
    monkeypatch.setattr(eval_sets, "QUIET_S", -1.0)
    ended = run_cli(*command)
    assert ended.err == "computing fd\ncomputing prdc\n"
    assert "computing" not in ended.out


@pytest.mark.slow
def test_started_ranks_print_what_one_prints(processes, tmp_path):
    command = ["eval", "--reals=reals.npz", "--fakes=fakes", "--metrics=fd,prdc"]
    two = processes.start_fresh(*command, "--json=two.json", "--ranks=2")
    assert run_cli(*command, "--json=one.json").status == 0
    assert two.wait(timeout_s=300) == 0, two.err
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for a, b in zip(one["scores"], other["scores"], strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=1e-9)
        assert a["protocol"] == b["protocol"]
    assert two.out.count("fd_pixels") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN_DIR: is missing. Use a run folder, or --reals A --fakes B"),
        (["--reals=reals.npz"], "--reals reals.npz: there is no --fakes. Use --reals A --fakes B"),
        (["--fakes=fakes"], "--fakes: there is no --reals. Use --reals A --fakes B"),
        (["run", "--reals=reals.npz", "--fakes=fakes"], "run: is scored without --reals"),
        (["run", "--resolution=8"], "--resolution: is for two sets of images"),
        (["--reals=reals.npz", "--fakes=fake"], "fakes: fake does not exist: did you mean fakes?"),
        (["--reals=empty", "--fakes=fakes"], "reals: "),
        (["--reals=reals.npz", "--fakes=one"], "metrics=fd: needs at least 2 fakes, and one has 1"),
        (["--reals=reals.npz", "--fakes=fakes", "--metrics=fd,kids"], "metrics=kids: is none of"),
        (["--reals=reals.npz", "--fakes=fakes", "--metrics="], "metrics=: is none of"),
        (
            ["--reals=reals.npz", "--fakes=fakes", "--metrics=is1", "--features=pixels"],
            "needs the logits of a classifier",
        ),
        (["--reals=reals.npz", "--fakes=fakes", "--metrics=fid"], "--inception: missing"),
        (["--reals=reals.npz", "--fakes=fakes", "--metrics=intra_fd"], "needs classes, and reals reals.npz have none"),
        (["--reals=reals.npz", "--fakes=fakes", "--features=pixel"], "did you mean pixels?"),
        (["--reals=reals.npz", "--fakes=fakes", "--follow"], "--follow: is for the model of a run"),
        (["--reals=reals.npz", "--fakes=fakes", "--truncation=0.5"], "--truncation: is for the model of a run"),
        (["--reals=reals.npz", "--fakes=fakes", "--reference=s.npz"], "--reference: is for the model of a run"),
        (["--reals=reals.npz", "--fakes=fakes", "--count=0"], "--count 0: must be positive"),
        (["--reals=reals.npz", "--fakes=fakes", "--ranks=0"], "--ranks 0: must be positive"),
        (["--reals=reals.npz", "--fakes=fakes", "--json=no/where.json"], "--json no/where.json: the folder does not"),
        (["--reals=reals.npz", "--fakes=fakes", "--metric=fd"], "--metric=fd: this command has no such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_scored_is_refused_in_one_line(arguments, message):
    before = sorted(Path().iterdir())
    assert message in usage_error("eval", *arguments)
    assert sorted(Path().iterdir()) == before


def test_samples_of_a_model_are_compared_with_its_data(finished):
    assert run_cli("sample", finished, "--count=64", "--out=samples.npz").status == 0
    ended = run_cli("eval", "--reals=digits", "--fakes=samples.npz", "--metrics=fd,intra_fd")
    assert ended.status == 0, ended.err
    assert "fakes: 64 images, 8 x 8, grey, as they are (samples.npz)" in ended.out
    assert "intra_fd_pixels" in ended.out


def test_a_run_is_scored_on_started_ranks(finished, monkeypatch):
    started = []
    monkeypatch.setattr(local_launcher, "launch", lambda ranks, arguments: started.append((ranks, arguments)) or 0)
    assert run_cli("eval", finished, "--metrics=fd", "--ranks=2").status == 0
    assert started == [(2, ["eval", str(finished), "--metrics=fd"])]
    assert "without --ranks" in usage_error("eval", finished, "--follow", "--ranks=2")
