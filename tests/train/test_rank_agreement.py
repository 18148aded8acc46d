"""Ranks that were started with other data or versions are refused before a folder is made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tiny_run
from advice import advises
from paragan.config.run import to_saved_dict
from paragan.data.dataset import from_arrays
from paragan.models.model import load_model
from paragan.train import rank_agreement
from paragan.train.callbacks.scoring import load_same_model
from paragan.train.checkpoint import Checkpoints
from paragan.train.console import RunConsole
from paragan.train.session import find_checkpoint
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


@pytest.mark.slow(after=6)
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


def test_ranks_with_the_data_of_rank_0_agree_as_advised(pool):
    dataset = from_arrays(IMAGES, LABELS)

    def job(world):
        images, labels, _ = OTHER_DATA["fewer"]
        other = from_arrays(images, labels) if world.rank == 1 else dataset
        with advises("Use the same data on all ranks") as refusal:
            rank_agreement.check_same_data(other, f"data{world.rank}", world)
        rank_agreement.check_same_data(dataset, f"data{world.rank}", world)
        return str(refusal.value)

    messages = pool(2, job)
    assert len(set(messages)) == 1
    assert "data: rank 0 has 64 images of 3 classes in data0" in messages[0]
    assert "rank 1 has 48 images in data1" in messages[0]


def test_ranks_of_one_version_agree_as_advised(pool):
    def job(world):
        version = "0.0.9" if world.rank == 2 else rank_agreement.__version__
        with (
            mock.patch.object(rank_agreement, "__version__", version),
            advises("Use one version") as refusal,
        ):
            rank_agreement.check_same_versions(world)
        rank_agreement.check_same_versions(world)
        return str(refusal.value)

    messages = pool(3, job)
    assert len(set(messages)) == 1
    assert "WORLD_SIZE=3: rank 0 runs paragan " in messages[0]
    assert "rank 2 runs paragan 0.0.9" in messages[0]


def test_ranks_that_share_their_storage_see_one_checkpoint_as_advised(pool, tmp_path):
    run = tiny_run.make_run()

    def job(world):
        dataset = tiny_run.make_dataset()
        session = tiny_run.make_session(run, world)
        metadata = {"data": dataset.fingerprint, "run": to_saved_dict(session.run)}
        shared = Checkpoints(tmp_path / "shared", world)
        shared.save(session.game.players, {"step": 0, "images": 0, "seconds": 0.0}, metadata, session.role)
        own = Checkpoints(tmp_path / "shared" if world.is_main else tmp_path / "own", world)
        arguments = session.run, dataset, RunConsole(False)
        with advises("--run-dir: ranks see different checkpoints (00000000, None). Use storage that all ranks share"):
            find_checkpoint(own, *arguments)
        return find_checkpoint(shared, *arguments).path.name

    assert pool(2, job) == ["00000000"] * 2


def test_ranks_that_share_their_storage_score_one_model_as_advised(pool, finished, tmp_path):
    other = shutil.copytree(finished, tmp_path / "other")
    config = other / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"kimg": 1.0}))

    def job(world):
        own = finished if world.is_main else other
        with advises(f"{own / 'model'}: ranks read different models. Use storage that all ranks share"):
            load_same_model(world, lambda: load_model(own))
        return load_same_model(world, lambda: load_model(finished)).kimg

    assert pool(2, job) == [0.16, 0.16]
