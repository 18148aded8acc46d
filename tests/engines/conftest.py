from __future__ import annotations

from pathlib import Path

import pytest

import example_runs
from processes import LONG_RUN_ARG, TINY_RUN_ARGS


@pytest.fixture(scope="session")
def run_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run by `paragan train --ranks 2`, as a user starts it, that was not interrupted."""
    folder = tmp_path_factory.mktemp("ranks")
    example_runs.run_paragan(folder, "train", *TINY_RUN_ARGS, LONG_RUN_ARG, "--ranks=2", "--run-dir=run")
    return folder / "run"


@pytest.fixture(scope="session")
def model_of_the_queue(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the model that --strategy per-label makes of label runs with `example_runs.label_args`."""
    folder = tmp_path_factory.mktemp("queue")
    total = ("--kimg=1.92", "--output.tick_kimg=0.048", "--output.checkpoint_kimg=0.24", "--strategy=per-label")
    example_runs.run_paragan(folder, "train", *example_runs.label_args(folder), *total, "--run-dir=run")
    return example_runs.model_files(folder / "run")
