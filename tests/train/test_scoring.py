"""What could not be scored or shown is refused, or shown as it is, before anything is trained."""

from __future__ import annotations

import numpy as np
import pytest

from paragan.report.records import read
from processes import TINY, call, refused


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("extra", [["--evaluation.count=3", "--evaluation.metrics=[prdc]"], ["--evaluation.count=6"]])
def test_too_few_fakes_are_refused_at_once(tmp_path, extra):
    line = refused("train", *TINY, "--evaluation.metrics=[fd,prdc]", *extra, "--run-dir", tmp_path / "run")
    assert "at least 7 images" in line
    assert not (tmp_path / "run").exists()


def test_too_few_reals_are_refused_at_once(tmp_path):
    data = npz(tmp_path / "one.npz", images=np.zeros((1, 8, 8, 1), np.uint8))
    line = refused("train", *TINY, "--data", data, "--run-dir", tmp_path / "run")
    assert "1 reals" in line


def test_a_class_without_images_is_not_drawn(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 1), np.uint8)
    data = npz(tmp_path / "e.npz", images=images, labels=np.arange(40) % 2, classes=np.array(["a", "b", "c"]))
    ended = call("train", *TINY, "--data", data, "--kimg=0.032", "--run-dir", tmp_path / "run")
    assert ended.status == 0, ended.err
    assert (tmp_path / "run" / "reals.png").exists()


def test_a_finished_run_is_scored_by_what_is_asked_for_later(tmp_path):
    arguments = ["train", *TINY, "--kimg=0.032", "--run-dir", tmp_path / "run"]
    assert call(*arguments).status == 0
    assert call(*arguments, "--evaluation.metrics=[fd,kid]").status == 0
    names = [row["name"] for row in read(tmp_path / "run" / "metrics.jsonl")]
    assert names == ["fd_pixels", "kid_pixels"]
