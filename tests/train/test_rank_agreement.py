"""Ranks that were started with other data or versions are refused before a folder is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paragan.core.errors import UsageError
from paragan.train import rank_agreement
from processes import TINY_RUN_ARGS, CliProcess, CliProcesses, free_port

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), np.uint8)
LABELS = np.arange(64) % 3
OTHER_DATA = {  # name -> images, labels, what the line says of rank 1
    "black": (IMAGES * 0, LABELS, "rank 1 has as many, but other images or labels in"),
    "permuted": (IMAGES, (LABELS + 1) % 3, "rank 1 has as many, but other images or labels in"),
    "fewer": (IMAGES[:48], LABELS[:48], "rank 1 has 48 images in"),
    "two": (IMAGES, np.minimum(LABELS, 1), "rank 1 has 2 classes in"),
}


@pytest.fixture
def data_files(tmp_path: Path) -> Path:
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    for name, (images, labels, _) in OTHER_DATA.items():
        np.savez(tmp_path / f"{name}.npz", images=images, labels=labels)
    return tmp_path


def start_ranks(processes: CliProcesses, command: list[str], paths: list[Path]) -> list[CliProcess]:
    """Start a rank for each path of data."""
    env = {"WORLD_SIZE": str(len(paths)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        processes.start_forked(*command, f"--data={path}", RANK=str(rank), LOCAL_RANK=str(rank), **env)
        for rank, path in enumerate(paths)
    ]


def assert_refused(ranks: list[CliProcess], data_files: Path, name: str) -> None:
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert ranks[1].err == ""
    assert ranks[0].err.count("\n") == 1
    assert f"rank 0 has 64 images of 3 classes in {data_files}/a.npz" in ranks[0].err
    assert f"{OTHER_DATA[name][2]} {data_files}/{name}.npz" in ranks[0].err


@pytest.mark.parametrize("strategy", ["sync", "gossip", "per-label"])
@pytest.mark.parametrize("name", OTHER_DATA)
def test_ranks_with_other_data_do_not_train(name, strategy, data_files, processes):
    run = data_files / "run"
    command = ["train", "folder", *TINY_RUN_ARGS[1:], f"--strategy={strategy}", f"--run-dir={run}"]
    assert_refused(
        start_ranks(processes, command, [data_files / "a.npz", data_files / f"{name}.npz"]), data_files, name
    )
    assert not run.exists()


@pytest.mark.parametrize("name", OTHER_DATA)
def test_ranks_with_other_data_do_not_score(name, finished, data_files, processes):
    command = ["eval", str(finished)]
    assert_refused(
        start_ranks(processes, command, [data_files / "a.npz", data_files / f"{name}.npz"]), data_files, name
    )


def test_the_same_data_at_other_paths_are_the_same(data_files, processes):
    np.savez_compressed(data_files / "copy.npz", images=IMAGES, labels=LABELS)
    command = ["train", "folder", *TINY_RUN_ARGS[1:], f"--run-dir={data_files}/run", "--kimg=0.032"]
    ranks = start_ranks(processes, command, [data_files / "a.npz", data_files / "copy.npz"])
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_versions_are_compared(pool):
    def job(world):
        if world.rank == 2:
            rank_agreement.__version__ = "0.0.9"
        try:
            rank_agreement.check_same_versions(world)
        except UsageError as error:
            return str(error)

    messages = pool(3, job)
    assert len(set(messages)) == 1
    assert "rank 2 runs paragan 0.0.9" in messages[0]
