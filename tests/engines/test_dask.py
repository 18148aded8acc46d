"""Label runs by the workers of a real Dask cluster on this machine."""

from __future__ import annotations

import importlib.util
import os

import pytest

import example_runs

REQUIRED = os.environ.get("PARAGAN_ENGINES") == "required"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("distributed") and not REQUIRED,
        reason="there is no Dask: pip install -e '.[dask]'",
    ),
    pytest.mark.timeout(600),
]


def test_a_label_whose_worker_is_killed_is_trained_again_and_all_are_pooled(model_of_the_queue, tmp_path):
    example_runs.assert_killed_label_is_repeated(tmp_path, model_of_the_queue, "examples.dask.labels", "--workers=2")


def test_the_first_classes_of_the_data_are_trained_and_pooled(tmp_path):
    arguments = (f"--labels={example_runs.NUM_LABELS - 1}", "--dir=labels", *example_runs.label_args(tmp_path))
    with example_runs.started(tmp_path, "examples.dask.labels", *arguments, "--kimg=0.016") as run:
        assert run.wait() == 0
        assert "model with 2 generators" in run.output
    assert len(list((tmp_path / "labels").glob("*/run.yaml"))) == 2
