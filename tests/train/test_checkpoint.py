"""Checkpoints: complete or absent, and every kind of damage is noticed."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import tiny_run
from advice import Case
from paragan.comm import checkpoint_files, checkpoint_metadata
from paragan.comm.checkpoint_files import merge_ranks
from paragan.comm.checkpoint_metadata import FORMAT_VERSION
from paragan.core.errors import RunError
from paragan.train.checkpoint import Checkpoints, read_checkpoint
from paragan.train.session import Session
from processes import (
    final_tensors,
    list_checkpoints,
    logged_steps,
    on_step,
    run_cli,
    train_args,
    train_interrupted,
    train_tiny,
    usage_error,
)

SHORT = ("--kimg=0.16", "--output.checkpoint_kimg=0.064")  # as `finished`, with checkpoints after 4, 8 and 10 rounds


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run with checkpoints after 4 and 7 of its 10 rounds. Copy it."""
    return train_interrupted(tmp_path_factory.mktemp("stopped") / "run", 6, *SHORT)


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


# A changed world ------------------------------------------------------------------------------------------


def test_tensors_of_several_ranks_become_their_mean():
    a, b, c = ({"x": torch.tensor(v), "n": torch.tensor(3)} for v in ([1.0, 2.0], [2.0, 4.0], [6.0, 0.0]))
    merged = merge_ranks([a, b, c])
    assert merged["x"].tolist() == [3.0, 2.0]
    assert merged["n"].item() == 3
    assert merged["n"].dtype == torch.int64


def test_a_tensor_of_one_rank_is_unchanged():
    x = torch.tensor([0.1, 1e-30, 3e38])
    assert torch.equal(merge_ranks([{"x": x}, {"y": torch.zeros(2)}])["x"], x)


def test_the_mean_is_computed_in_double_precision():
    x = torch.full((2,), 3e38)
    assert torch.equal(merge_ranks([{"x": x}] * 4)["x"], x)


# Damage ---------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    tensors = path / "rank0000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])


def flip_bit(path: Path, name: str = "rank0000.safetensors") -> None:
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)


def remove_tensors(path: Path) -> None:
    (path / "rank0000.safetensors").unlink()


def remove_metadata(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def empty_metadata(path: Path) -> None:
    (path / "checkpoint.json").write_text("")


def change_digit(path: Path) -> None:
    about = (path / "checkpoint.json").read_text()
    assert '"step": 7' in about
    (path / "checkpoint.json").write_text(about.replace('"step": 7', '"step": 6'))


def flip_metadata_bit(path: Path) -> None:
    flip_bit(path, "checkpoint.json")


DAMAGES = [
    *(cut, flip_bit, remove_tensors),
    *(remove_metadata, empty_metadata, change_digit, flip_metadata_bit),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_used(damage, run, finished):
    before, last = list_checkpoints(run)
    damage(last)
    ended = run_cli(*train_args(run, *SHORT))
    assert ended.status == 0
    assert f"checkpoint {last} is damaged (" in ended.out
    assert f"resumed from {before}" in ended.out
    assert final_tensors(run) == final_tensors(finished)
    assert logged_steps(run) == list(range(1, 11))


def test_a_new_checkpoint_outlives_a_damaged_one(run):
    """The run falls back to round 4 and is stopped before it is again where the damaged one was."""
    flip_bit(list_checkpoints(run)[-1])
    train_interrupted(run, 4, *SHORT, "--output.max_checkpoints=1")
    assert [path.name for path in list_checkpoints(run)] == ["00000005"]
    assert "resumed from" in run_cli(*train_args(run, *SHORT)).out


def test_a_run_with_only_damaged_checkpoints_starts_again_as_advised(run, check_advice):
    for path in list_checkpoints(run):
        cut(path)
    lines = (run / "stats.jsonl").read_bytes()
    command = " ".join(train_args(run, "--kimg=0.016"))
    check_advice(
        Case(
            command,
            f"{run / 'checkpoints'}: every checkpoint is damaged. Use another --run-dir to start again",
            ("~run-dir --run-dir=NEW/new",),
        )
    )
    assert (run / "stats.jsonl").read_bytes() == lines
    assert len(list_checkpoints(run)) == 2


def test_a_checkpoint_of_another_version_is_read_by_that_version(tmp_path, check_advice):
    run = tmp_path / "run"
    command = train_args(run, "--kimg=0.032")
    with mock.patch.object(checkpoint_files, "FORMAT_VERSION", 1):
        train_tiny(run, "--kimg=0.016")
    (path,) = list_checkpoints(run)
    check_advice(
        Case(
            " ".join(command),
            f"{path}: checkpoint format 1, and this version of paragan reads format {FORMAT_VERSION}. "
            "Use the version that wrote it, or another run folder",
            ("~run-dir --run-dir=NEW/new",),
        )
    )
    assert list_checkpoints(run) == [path]
    with (
        mock.patch.object(checkpoint_files, "FORMAT_VERSION", 1),
        mock.patch.object(checkpoint_metadata, "FORMAT_VERSION", 1),
    ):
        assert "resumed from" in run_cli(*command).out


def test_a_record_of_another_version_raises_by_its_checkpoint_format(run):
    record = run / "run.yaml"
    record.write_text(record.read_text().replace("max_bad_fraction", "bad_share"))
    for path in list_checkpoints(run):
        metadata = path / "checkpoint.json"
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"format": 1}))
    for command in (train_args(run, *SHORT), ["eval", str(run)], ["report", str(run)], ["status", str(run)]):
        assert "checkpoint format 1" in usage_error(*command)
    assert not (run / "report.html").exists()


def test_changed_data_raise(tmp_path):
    data, run = tmp_path / "data.npz", tmp_path / "run"
    np.savez(data, images=np.zeros((64, 8, 8, 1), np.uint8))
    train_interrupted(run, 1, *SHORT, f"--data={data}")
    np.savez(data, images=np.ones((64, 8, 8, 1), np.uint8))
    assert "not the images that" in usage_error(*train_args(run, *SHORT, f"--data={data}"))


def test_remains_of_an_interrupted_save_are_removed(run):
    temporary = run / "checkpoints/.writing-00000009"
    temporary.mkdir()
    (temporary / "rank0000.safetensors").write_bytes(b"half")
    assert run_cli(*train_args(run, *SHORT)).status == 0
    assert not temporary.exists()


# A full disk ----------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit_leaves_the_previous(tmp_path, finished):
    run, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    with on_step(5, lambda session: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))):
        ended = run_cli(*train_args(run, *SHORT))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.status == 1
    (good,) = list_checkpoints(run)
    assert ended.err.count("\n") == 1
    assert "00000008 was not written: [Errno 27] File too large" in ended.err
    assert f"the last good checkpoint is {good}" in ended.err
    assert not list(run.glob("**/.writing*"))
    assert run_cli(*train_args(run, *SHORT)).status == 0
    assert final_tensors(run) == final_tensors(finished)
    assert not list(run.glob("**/.*writing*"))


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
@pytest.mark.parametrize("tick_kimg", [0.016, 4], ids=["at a line of stats", "at a checkpoint"])
def test_a_full_disk_stops_the_run_which_resumes_with_space(tick_kimg, small_disk, finished):
    run, filler = small_disk / "run", small_disk / "filler"
    command = train_args(run, *SHORT, f"--output.tick_kimg={tick_kimg}")

    def fill(session: Session) -> None:
        for size in (4096, 1):
            with filler.open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    with on_step(5, fill):
        ended = run_cli(*command)
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert "No space left on device" in ended.err
    assert str(run) in ended.err
    filler.unlink()
    assert run_cli(*command).status == 0
    assert final_tensors(run) == final_tensors(finished)


def test_if_one_rank_cannot_write_no_checkpoint_appears(pool, tmp_path):
    full = OSError(28, "No space left on device")

    def job(world):
        s = tiny_run.make_session(tiny_run.make_run("lanes=2"), world)

        def save(step: int) -> None:
            clock = {"step": step, "images": 16 * step, "seconds": 0.0}
            role = dataclasses.replace(s.role, replicated=False)
            Checkpoints(tmp_path, world).save(s.game.players, clock, {}, role)

        save(1)
        for step, failing in ((2, 1), (3, 0)):  # its own part
            broken = mock.patch("paragan.comm.checkpoint_files._write_synced", side_effect=full)
            with (
                broken if world.rank == failing else nullcontext(),
                pytest.raises(RunError, match=f"0000000{step} was"),
            ):
                save(step)
        with (
            mock.patch.object(Checkpoints, "_commit", return_value=full),
            pytest.raises(RunError, match="00000004 was"),
        ):
            save(4)  # the last step, which rank 0 takes for all

    pool(2, job)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert read_checkpoint(tmp_path / "00000001", 1, 2).step == 1


# A game that diverges -------------------------------------------------------------------------------------

DIVERGING = (
    *("--objective.loss=wasserstein", "--nets.spectral=false"),
    *("--g.optimizer=sgd", "--g.optimizer.lr=1", "--d.optimizer=sgd", "--d.optimizer.lr=1"),
    *("--kimg=0.32", "--output.checkpoint_kimg=0.032"),
)


@pytest.mark.parametrize("tick_kimg", [0.016, 4], ids=["at a line of stats", "at a checkpoint"])
def test_divergence_ends_the_run_and_retains_good_checkpoints(tick_kimg, tmp_path):
    ended = run_cli(*train_args(tmp_path / "run", *DIVERGING, f"--output.tick_kimg={tick_kimg}"))
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    last = list_checkpoints(tmp_path / "run")[-1]
    assert "Loss/G/loss is nan" in ended.err
    assert f"the last good checkpoint is {last}" in ended.err
    good = train_tiny(tmp_path / "good", *DIVERGING, f"--kimg={0.016 * int(last.name)}")
    assert final_tensors(tmp_path / "run") == final_tensors(good)


def test_a_diverged_state_is_not_saved_at_a_stop(tmp_path):
    def poison(session: Session) -> None:
        session.game.d.flat.params[0] = float("nan")
        signal.raise_signal(signal.SIGTERM)

    with on_step(4, poison):
        ended = run_cli(*train_args(tmp_path / "run", *SHORT, "--output.tick_kimg=4"))
    assert ended.status == 1
    assert "Loss/D/loss is nan" in ended.err
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["00000004"]
