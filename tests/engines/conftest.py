from __future__ import annotations

import pytest

import example_runs


@pytest.fixture(scope="session")
def model_of_the_queue(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the model that --strategy per-label makes of label runs with `example_runs.label_args`."""
    folder = tmp_path_factory.mktemp("queue")
    total = ("--kimg=1.92", "--output.tick_kimg=0.048", "--output.checkpoint_kimg=0.24", "--strategy=per-label")
    example_runs.run_paragan(folder, "train", *example_runs.label_args(folder), *total, "--run-dir=run")
    return example_runs.model_files(folder / "run")
