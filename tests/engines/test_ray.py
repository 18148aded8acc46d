"""Runs and label runs by the workers of a real Ray cluster on this machine."""

from __future__ import annotations

import importlib.util
import os

import pytest

import example_runs
from processes import LONG_RUN_ARG, TINY_RUN_ARGS, list_checkpoints, wait_for_step

REQUIRED = os.environ.get("PARAGAN_ENGINES") == "required"
RUN_ARGS = (*TINY_RUN_ARGS, LONG_RUN_ARG, "--output.checkpoint_kimg=0.16")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("ray") and not REQUIRED, reason="there is no Ray: pip install -e '.[ray]'"
    ),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("engine", [("--storage=storage",), ("--actors",)], ids=["torch trainer", "actors"])
def test_a_killed_rank_is_started_again_and_the_model_is_that_of_paragan_ranks(engine, run_by_two, tmp_path):
    engine = [option.replace("=storage", f"={tmp_path}/storage") for option in engine]
    arguments = ("--ranks=2", *engine, *RUN_ARGS, "--run-dir=run")  # a relative path is of this folder
    with example_runs.started(tmp_path, "examples.ray.train", *arguments) as run:
        run.kill_owner(tmp_path / "run")
        assert run.wait() == 0
        assert "resumed from run/checkpoints/" in run.output
        assert run.output.count("done: ") == 1
    assert example_runs.model_files(tmp_path / "run") == example_runs.model_files(run_by_two)
    assert len(list_checkpoints(tmp_path / "run")) > 1


def test_gossip_continues_without_a_killed_actor(tmp_path):
    arguments = ("--ranks=3", "--cpus=0", "--actors", "--max-failures=0", *TINY_RUN_ARGS, LONG_RUN_ARG, "--lanes=4")
    with example_runs.started(
        tmp_path, "examples.ray.train", *arguments, "--strategy=gossip", f"--run-dir={tmp_path}/run"
    ) as run:
        wait_for_step(tmp_path / "run", 5)
        run.kill_owner(tmp_path / "run")
        assert run.wait() == 1  # what was lost is reported, though the run is complete
        assert "lost; going on with rank" in run.output
        assert run.output.count("done: ") == 1


def test_wrong_fields_are_refused_once(tmp_path):
    arguments = ("--ranks=2", f"--storage={tmp_path}/storage", *TINY_RUN_ARGS, "--nets.widht=4", "--run-dir=run")
    with example_runs.started(tmp_path, "examples.ray.train", *arguments) as run:
        assert run.wait() == 2
        assert run.output.count("did you mean nets.width?") == 1
    assert not (tmp_path / "run").exists()


def test_a_label_whose_task_is_killed_is_trained_again_and_all_are_pooled(model_of_the_queue, tmp_path):
    example_runs.assert_killed_label_is_repeated(tmp_path, model_of_the_queue, "examples.ray.labels")


def test_the_first_classes_of_the_data_are_trained_and_pooled(tmp_path):
    arguments = (f"--labels={example_runs.NUM_LABELS - 1}", "--dir=labels", *example_runs.label_args(tmp_path))
    with example_runs.started(tmp_path, "examples.ray.labels", *arguments, "--kimg=0.016") as run:
        assert run.wait() == 0
        assert "model with 2 generators" in run.output
    assert len(list((tmp_path / "labels").glob("*/run.yaml"))) == 2
