"""Runs per label from the command line: any number of workers, one model, no messages."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch

import paragan
from advice import advises
from paragan.core.jsonl import read_jsonl
from paragan.core.rng import CPU
from paragan.models.sampler import module_bytes
from paragan.models.teacher import Teacher
from paragan.nets import Spec
from paragan.train import trainer
from paragan.train.per_label.lease_queue import LeaseQueue
from processes import TINY_RUN_ARGS, final_tensors, list_checkpoints, on_step, run_cli, usage_error, wait_until

PER_LABEL = ("--strategy=per-label", "--kimg=0.8", "--output.checkpoint_kimg=0.16", "--evaluation.count=40")
LABELS = range(10)


def command(folder, *more):
    return ["train", *TINY_RUN_ARGS, *PER_LABEL, f"--run-dir={folder}", *more]


def trained(folder, *more):
    ended = run_cli(*command(folder, *more))
    assert ended.status == 0, ended
    return folder


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    """Run in an empty directory and skip report pages, which are slow; `done` and subprocesses write them."""
    monkeypatch.chdir(tmp_path)
    for page in ("write_report", "make_final_figures"):
        monkeypatch.setattr(trainer, page, lambda *_: None)


@pytest.fixture(scope="session")
def done(tmp_path_factory):
    """A finished run of one worker. Tests must not change it."""
    return trained(tmp_path_factory.mktemp("labels") / "run")


def states(folder):
    return {job: entry.state for job, entry in LeaseQueue(folder / "queue", 60).entries().items()}


def label(folder, number):
    return folder / "labels" / f"{number:04d}"


def outcomes(folder):
    return [final_tensors(label(folder, number)) for number in LABELS]


def complete(folder):
    """Return whether every label is done exactly once and completely."""
    assert set(states(folder).values()) == {"done"}
    for number in LABELS:
        files = sorted((folder / "queue").glob(f"{number:04d}.*.json"))
        assert [json.loads(f.read_text())["state"] for f in files].count("done") == 1
        steps = [row["Progress/step"] for row in read_jsonl(label(folder, number) / "stats.jsonl")]
        assert steps == [1, 2, 3, 4, 5]
    return True


def test_every_label_is_trained_only_on_its_images(done):
    assert complete(done)
    for number in LABELS:
        config = json.loads((label(done, number) / "model" / "config.json").read_text())
        assert config["classes"] == []
        assert (label(done, number) / "reals.png").exists()
    assert len({files["model/model.safetensors"] for files in outcomes(done)}) == 10
    assert {"run.yaml", "metrics.jsonl", "stats.jsonl", "report.html", "reals.png", "fakes000001.png"} <= {
        path.name for path in done.iterdir()
    }
    assert read_jsonl(done / "metrics.jsonl")[-1]["protocol"]["labels"] == "as in the data"


@pytest.mark.slow
def test_training_sends_no_messages(tmp_path, processes):
    """No bytes are sent, and a worker has no open connections during training."""
    patch = (
        "import psutil, paragan.train.loop as loop\n"
        "original = loop.play_round\n"
        "def play_round(session):\n"
        "    original(session)\n"
        "    assert session.world.size == 1\n"
        "    there = [c for c in psutil.Process().net_connections() if c.status == 'ESTABLISHED']\n"
        "    assert not there, there\n"
        "loop.play_round = play_round\n"
    )
    ranks = processes.start_ranks(
        3, *command(tmp_path / "run"), start=lambda *a, **e: processes.start_forked(*a, patch=patch, **e)
    )
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0], [rank.err for rank in ranks]
    assert complete(tmp_path / "run")
    workers = set()
    for number in LABELS:
        rows = read_jsonl(label(tmp_path / "run", number) / "stats.jsonl")
        assert sum(row["Comm/G/sent_bytes"] + row["Comm/D/sent_bytes"] for row in rows) == 0
        entry = LeaseQueue(tmp_path / "run" / "queue", 60).entry(f"{number:04d}")
        workers.add(entry.worker)
    assert len(workers) == 3


@pytest.mark.slow
def test_any_number_of_workers_train_the_same(done, tmp_path, processes):
    """Workers are plain processes, started at any time, without a launcher and without --run-dir."""
    arguments = [a for a in command("x") if not a.startswith("--run-dir")]
    several = [processes.start_forked(*arguments, f"--outdir={tmp_path}/runs") for _ in range(3)]
    assert [one.wait(120) for one in several] == [0, 0, 0], [one.err for one in several]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "00000-digits-dcgan-per-label-b16"
    assert complete(folder)
    assert outcomes(folder) == outcomes(done)


@pytest.mark.slow
def test_ranks_of_one_label_agree_over_any_wire(tmp_path, processes):
    more = ("--strategy.ranks_per_label=2", "--strategy.per_label_strategy.wire=int8", "--kimg=0.32")
    ranks = processes.start_ranks(2, *command(tmp_path / "run", *more))
    assert [rank.wait(120) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert set(states(tmp_path / "run").values()) == {"done"}
    rows = read_jsonl(label(tmp_path / "run", 3) / "stats.jsonl")
    assert rows[-1]["Comm/G/sent_bytes"] > 0


@pytest.mark.slow
def test_three_ranks_on_two_labels_equal_one_rank(tmp_path, processes):
    data = tmp_path / "two.npz"
    rng = np.random.default_rng(0)
    np.savez(data, images=rng.integers(0, 255, (60, 8, 8), np.uint8), labels=np.arange(60) % 2)
    more = (f"--data={data}", "--kimg=0.16", "--evaluation.metrics=[fd]", "--device.precision=float32")
    ranks = processes.start_ranks(3, *command(tmp_path / "three", *more))
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0], [rank.err for rank in ranks]
    trained(tmp_path / "one", *more)
    for number in (0, 1):
        a, b = (paragan.load(label(tmp_path / name, number)).sampler.g.state_dict() for name in ("three", "one"))
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_dc_cgan_name_selects_teams_and_loss(tmp_path, processes):
    """D trains on one rank, G on another."""
    more = ("--strategy=DC-CGAN", "--policy=dcgan", "--kimg=0.32")
    arguments = [a for a in command(tmp_path / "run", *more) if a != "--strategy=per-label"]
    ranks = processes.start_ranks(2, *arguments)
    assert [rank.wait(120) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    record = paragan.core.schema.read_yaml(label(tmp_path / "run", 0) / "run.yaml")
    assert record["strategy"]["name"] == "async"
    assert record["objective"]["loss"] == "nonsaturating"
    assert (label(tmp_path / "run", 0) / "lags.jsonl").exists()  # written only by teams


# Workers that are stopped or killed -----------------------------------------------------------------------


def test_stopped_label_resumes_bit_for_bit(done, tmp_path):
    with on_step(3, lambda session: signal.raise_signal(signal.SIGTERM)):
        ended = run_cli(*command(tmp_path / "run"))
    assert ended.status == 3
    assert "the same command resumes the run" in ended.err
    assert states(tmp_path / "run") == {"0000": "free"}
    trained(tmp_path / "run")
    assert complete(tmp_path / "run")
    assert outcomes(tmp_path / "run") == outcomes(done)


def test_config_of_a_label_reproduces_it_as_a_run(done, tmp_path):
    record = label(done, 4) / "run.yaml"
    assert run_cli("train", record, f"--run-dir={tmp_path / 'alone'}").status == 0
    assert final_tensors(tmp_path / "alone") == final_tensors(label(done, 4))


def frozen(processes, folder):
    """Start a worker and freeze it in the middle of a label."""
    slow = "import time, paragan.train.loop as l; o = l.play_round\n"
    slow += "l.play_round = lambda s: (time.sleep(0.2), o(s))\n"
    worker = processes.start_forked(*command(folder, "--strategy.lease_s=1"), patch=slow)
    wait_until(lambda: len(list_checkpoints(folder / "labels" / "0000.1")) > 0, 60)
    worker.send_signal(signal.SIGSTOP)
    return worker


@pytest.mark.slow
def test_frozen_worker_is_replaced_and_exits_on_wakeup(done, tmp_path, processes):
    worker = frozen(processes, tmp_path / "run")
    trained(tmp_path / "run", "--strategy.lease_s=1")
    assert complete(tmp_path / "run")
    assert outcomes(tmp_path / "run") == outcomes(done)
    before = outcomes(tmp_path / "run")
    worker.send_signal(signal.SIGCONT)
    assert worker.wait(60) == 0  # its label is already done
    assert "another took over" in worker.out
    assert complete(tmp_path / "run")
    assert outcomes(tmp_path / "run") == before


@pytest.mark.slow
def test_label_that_kills_workers_is_marked_failed(tmp_path, processes):
    poison = (
        "import os, paragan.train.loop as l; o = l.play_round\n"
        "l.play_round = lambda s: os._exit(9) if s.run.data.only == 0 else o(s)\n"
    )
    for _ in range(5):
        assert processes.start_forked(*command(tmp_path / "run"), patch=poison).wait(60) == 9
    ended = processes.start_forked(*command(tmp_path / "run"), patch=poison)
    assert ended.wait(120) == 1
    assert "label 0 (0): 5 workers died in it, one after the other, without a checkpoint" in ended.err
    assert "the same command tries again" in ended.err
    states_by_label = states(tmp_path / "run")
    assert states_by_label.pop("0000") == "failed"
    assert set(states_by_label.values()) == {"done"}
    assert "failed" in run_cli("status", tmp_path / "run").out
    trained(tmp_path / "run")
    assert complete(tmp_path / "run")


@pytest.mark.slow
def test_diverging_label_does_not_stop_the_others(tmp_path):
    def spoil(session):
        if session.run.data.only == 2:
            session.game.g.flat.params.fill_(float("nan"))

    with on_step(2, spoil):
        ended = run_cli(*command(tmp_path / "run"))
    assert ended.status == 1
    assert "label 2 (2): step " in ended.err
    states_by_label = states(tmp_path / "run")
    assert [job for job, state in states_by_label.items() if state == "failed"] == ["0002"]
    assert len(states_by_label) == 10  # and no other job
    trained(tmp_path / "run")
    assert complete(tmp_path / "run")


@pytest.mark.slow
def test_time_budget_ends_a_label(tmp_path):
    folder = trained(tmp_path / "run", "--kimg=800", "--strategy.minutes=0.05", "--output.checkpoint_kimg=1000")
    for number in LABELS:
        entry = LeaseQueue(folder / "queue", 60).entry(f"{number:04d}")
        assert 0.3 <= entry.metadata["seconds"] < 1
        assert 0 < entry.metadata["images"] < 80_000
        assert json.loads((label(folder, number) / "model" / "config.json").read_text())["kimg"] > 0
    second = run_cli(*command(folder, "--kimg=800", "--strategy.minutes=0.05", "--output.checkpoint_kimg=1000"))
    assert second.status == 0
    assert "label 0" not in second.out


@pytest.mark.slow
def test_longer_budget_resumes_every_label(tmp_path):
    folder = trained(tmp_path / "run", "--kimg=0.48")
    trained(folder)
    steps = [row["Progress/step"] for row in read_jsonl(label(folder, 9) / "stats.jsonl")]
    assert steps == [1, 2, 3, 4, 5]
    assert len(read_jsonl(folder / "metrics.jsonl")) == 2


# The model of all labels ---------------------------------------------------------------------------------


def test_merged_model_samples_each_label_with_its_generator(done):
    model = paragan.load(done)
    assert model.classes == tuple("0123456789")
    labels = np.array([3, 7, 3, 0])
    images = model.sampler.images(range(4), labels, seed=5)
    for row, number in enumerate(labels):
        expected = paragan.load(label(done, number)).sampler.images([row], None, seed=5)
        assert torch.equal(images[row], expected[0])
    sampled_labels = model.sampler.labels(range(4000), 0)
    shares = np.bincount(sampled_labels, minlength=10) / 4000
    np.testing.assert_allclose(shares, model.config["prior"], atol=0.02)


def test_generators_are_loaded_on_demand_and_evicted(done):
    sampler = paragan.load(done).sampler
    assert not sampler._cached_samplers
    sampler.max_cached_bytes = 3 * module_bytes(sampler.for_label(0).g)
    images = sampler.images(range(20), np.arange(20) % 10, 0)
    assert list(sampler._cached_samplers) == [7, 8, 9]
    assert torch.equal(images[13], sampler.images([13], np.array([3]), 0)[0])


def test_scores_do_not_depend_on_the_number_of_loaded_generators(done, monkeypatch):
    from paragan.models import sampler

    first = run_cli("eval", done, "--metrics=fd", "--count=200")
    monkeypatch.setattr(sampler, "PREFETCH_BYTES", 64 * 64 * 2)
    second = run_cli("eval", done, "--metrics=fd", "--count=200")
    assert first.status == 0
    assert first.out.splitlines()[1] == second.out.splitlines()[1]


def test_exported_model_draws_the_same_images(done, tmp_path):
    assert run_cli("export", done, "--out", tmp_path / "model").status == 0
    exported = paragan.load(tmp_path / "model").sampler.images(range(5), np.arange(5), 1)
    assert torch.equal(exported, paragan.load(done).sampler.images(range(5), np.arange(5), 1))
    assert sum(1 for _ in (tmp_path / "model").rglob("*.safetensors")) == 10
    assert "with files in it" in usage_error("export", done, "--out", tmp_path / "model")


def test_status_lists_every_label(done):
    out = run_cli("status", done).out
    lines = out.splitlines()
    assert lines[0].split() == ["label", "class", "images", "state", "kimg", "minutes", "worker", "scores"]
    assert lines[4].split()[:5] == ["3", "3", "183", "done", "0.08"]
    assert "10 labels, 10 done; 0.8 of 0.8 kimg" in lines[11]
    assert "fd_pixels" in lines[12]
    assert "complete, 0.08 of 0.08 kimg" in run_cli("status", label(done, 3)).out


@pytest.mark.slow
def test_retraining_a_label_does_not_change_the_others(tmp_path):
    folder = trained(tmp_path / "run")
    before = outcomes(folder)
    assert run_cli("label", folder, "3", "--retrain").status == 0
    assert "9 done, 1 waiting" in run_cli("status", folder).out
    assert paragan.load(folder).sampler.for_label(3)  # the former, until there is another
    trained(folder)
    after = outcomes(folder)
    assert [a == b for a, b in zip(before, after, strict=True)] == [n != 3 for n in LABELS]
    assert run_cli("label", folder, "4", "--replace-with", label(folder, 2)).status == 0
    images = paragan.load(folder).sampler.images([0, 0], np.array([2, 4]), 0)
    assert torch.equal(images[0], images[1])
    trained(folder)
    assert outcomes(folder) == after
    assert "replaced" in run_cli("status", folder).out


@pytest.mark.slow
def test_stopped_label_can_be_retrained(tmp_path):
    with on_step(3, lambda session: signal.raise_signal(signal.SIGTERM)):
        assert run_cli(*command(tmp_path / "run")).status == 3
    assert run_cli("label", tmp_path / "run", "0", "--retrain", "--seed=77").status == 0
    trained(tmp_path / "run")
    assert complete(tmp_path / "run")
    assert paragan.core.schema.read_yaml(label(tmp_path / "run", 0) / "run.yaml")["seed"] == 77


@pytest.mark.slow
def test_same_command_resumes_after_a_label_is_replaced(tmp_path):
    arguments = [*command("x")[:-1], f"--outdir={tmp_path}/runs"]
    assert run_cli(*arguments).status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert run_cli("label", folder, "1", "--replace-with", label(folder, 0) / "model" / "model.safetensors").status == 0
    assert "before what was trained since" in run_cli("status", folder).out
    assert run_cli(*arguments).status == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
    assert "before what was trained since" not in run_cli("status", folder).out


def test_removed_model_files_are_restored(done, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    shutil.rmtree(folder / "model" / "0001")
    with advises(f"{folder}: no generator yet for label 1 (1). Resume that run first"):
        Teacher.load(folder, Spec(8, 1, 10), 8, [str(number) for number in LABELS], CPU)
    trained(folder)
    assert Teacher.load(folder, Spec(8, 1, 10), 8, [str(number) for number in LABELS], CPU)
    assert (folder / "model" / "0001" / "model.safetensors").exists()


@pytest.mark.slow
def test_run_resumes_after_its_queue_was_deleted(tmp_path):
    with on_step(3, lambda session: signal.raise_signal(signal.SIGTERM)):
        assert run_cli(*command(tmp_path / "run")).status == 3
    shutil.rmtree(tmp_path / "run" / "queue")
    trained(tmp_path / "run")
    assert complete(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "message", "state"),
    [(True, "before its scores were measured", "free"), (False, "stopped after label 0", "done")],
)
def test_signal_during_scoring_ends_the_worker(before, message, state, tmp_path, monkeypatch):
    from paragan.train.callbacks import scoring
    from paragan.train.per_label import finalize

    score = scoring.score
    assert finalize.score is score  # loaded before it is patched

    def signalled(*args, **kwargs):
        if before:
            signal.raise_signal(signal.SIGTERM)
        result = score(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "score", signalled)
        ended = run_cli(*command(tmp_path / "run"))
    assert ended.status == 3
    assert message in ended.err
    assert states(tmp_path / "run") == {"0000": state}
    trained(tmp_path / "run")
    assert complete(tmp_path / "run")


@pytest.mark.slow
def test_renamed_run_with_warm_starts_resumes(tmp_path):
    more = ("--strategy.rare_below=175", "--strategy.warm_start=nearest")
    folder = trained(tmp_path / "run", *more, "--kimg=0.48").rename(tmp_path / "moved")
    trained(folder, *more)
    assert set(states(folder).values()) == {"done"}


@pytest.mark.slow
def test_rare_label_starts_from_its_neighbor(tmp_path):
    folder = trained(tmp_path / "run", "--strategy.rare_below=175", "--strategy.warm_start=nearest", "--kimg=0.32")
    record = paragan.core.schema.read_yaml(label(folder, 8) / "run.yaml")  # 174 images
    assert record["init_from"].startswith(str(folder / "labels"))
    assert paragan.core.schema.read_yaml(label(folder, 7) / "run.yaml")["init_from"] == ""


# Bad input -----------------------------------------------------------------------------------------------


def test_two_runs_do_not_share_a_folder(done, finished):
    assert "batch was 16, is 32" in usage_error(*command(done, "--batch=32"))
    assert "strategy.name was 'sync'" in usage_error(*command(finished))
    assert "holds another run" in usage_error("train", *TINY_RUN_ARGS, f"--run-dir={done}")


def test_images_without_labels_are_rejected(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((40, 8, 8), np.uint8))
    assert "needs images with classes" in usage_error(*command(tmp_path / "run", f"--data={tmp_path / 'a.npz'}"))
    labels, classes = np.arange(40) % 2, np.array(["a", "b", "c"])
    np.savez(tmp_path / "b.npz", images=np.zeros((40, 8, 8), np.uint8), labels=labels, classes=classes)
    assert "label 2 (c): has no image" in usage_error(*command(tmp_path / "run", f"--data={tmp_path / 'b.npz'}"))
    assert not (tmp_path / "run").exists()


def test_budgets_below_a_step_are_rejected(tmp_path):
    assert "Use --kimg 0.16 or more" in usage_error(*command(tmp_path / "run", "--kimg=0.1"))
    assert not (tmp_path / "run").exists()
    assert "--strategy.minutes: leaves" in usage_error(*command(tmp_path / "run", "--strategy.minutes=1e-6"))
    assert states(tmp_path / "run") == {"0000": "free"}


@pytest.mark.slow
def test_budget_change_during_training_is_rejected(tmp_path, processes):
    worker = frozen(processes, tmp_path / "run")
    assert "is being trained by" in usage_error(*command(tmp_path / "run", "--kimg=1.6", "--strategy.lease_s=1"))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    trained(tmp_path / "run", "--kimg=1.6", "--strategy.lease_s=1")
    assert states(tmp_path / "run")["0000"] == "done"


@pytest.fixture
def small(tmp_path):
    """A file system of 100 kB that can be enlarged or made read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options):
        return (
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], capture_output=True).returncode == 0
        )

    if not mount("size=100k"):
        pytest.skip("only root may mount")
    yield disk, mount
    subprocess.run(["umount", "-l", disk])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_full_disk_ends_a_worker_without_losing_data(done, small):
    disk, mount = small
    ended = run_cli(*command(disk / "run"))
    assert ended.status == 1
    assert "No space left on device" in ended.err
    assert ended.err.count("\n") == 1
    assert mount("remount,size=100M")
    trained(disk / "run")
    assert complete(disk / "run")
    assert outcomes(disk / "run") == outcomes(done)


def test_readonly_folder_is_rejected(small):
    disk, mount = small
    assert mount("remount,size=100M")
    trained(disk / "run", "--kimg=0.16")
    assert mount("remount,ro")
    assert "cannot be written (Read-only file system)" in usage_error(*command(disk / "run"))
    assert "cannot be written (Read-only file system)" in usage_error(*command(disk / "other"))
    assert "10 labels, 10 done" in run_cli("status", disk / "run").out


def test_other_images_are_rejected(done, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((40, 8, 8), np.uint8), labels=np.arange(40) % 10)
    assert "data.path was" in usage_error(*command(done, f"--data={tmp_path / 'a.npz'}"))


@pytest.mark.parametrize(
    ("file", "text", "arguments"),
    [
        ("model/0001/config.json", "{", ("eval",)),
        ("model/0001/config.json", '{"format": 1}', ("sample", "--labels=1", "--out=x.png")),
        ("model/config.json", "{", ("status",)),
        ("model/config.json", "{", ("sample", "--out=x.png")),
        ("labels/seeds.json", "x", ("label", "1", "--retrain")),
        ("run.yaml", "strategy: per-label", ("sample", "--labels=²", "--out=x.png")),
    ],
)
def test_damaged_files_are_named(done, tmp_path, file, text, arguments):
    folder = shutil.copytree(done, tmp_path / "run")
    (folder / file).write_text(text)
    command, *rest = arguments
    usage_error(command, folder, *rest)


@pytest.mark.parametrize(
    "text", ["", '{"state": "odd", "worker": "x"}', '{"state": "done", "worker": "x", "images": "y"}']
)
def test_damaged_queue_files_are_ignored(done, tmp_path, text):
    folder = shutil.copytree(done, tmp_path / "run")
    (folder / "queue" / "0001.1.json").write_text(text)
    assert run_cli("status", folder).status == 0
    trained(folder, "--strategy.lease_s=1")
    assert set(states(folder).values()) == {"done"}


def test_label_and_export_reject_invalid_requests(done, finished, tmp_path):
    assert "there is no class 'x'" in usage_error("label", done, "x", "--retrain")
    assert "no run of --strategy per-label" in usage_error("label", finished, "3", "--retrain")
    assert "images of 8 px" in usage_error("label", done, "3", "--replace-with", finished)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((done / "model" / "config.json").read_text())
    assert "no generator for label 0" in usage_error("export", tmp_path, "--out", tmp_path / "out")
