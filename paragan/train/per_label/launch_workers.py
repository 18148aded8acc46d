"""Start the workers of a per-label run: how the processes of a launcher find its folder, and part."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paragan.comm.launch_info import LaunchInfo
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.run import Run, to_saved_dict
from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
from paragan.core.schema import diff, from_dict, read_yaml
from paragan.data.dataset import Dataset
from paragan.models.model import init_per_label_model
from paragan.models.model_config import read_model_config
from paragan.models.sampler import LabelPrior
from paragan.train.callbacks.sample_images import draw_reals
from paragan.train.console import RunConsole
from paragan.train.per_label.jobs import describe_jobs, describe_rare_labels, make_jobs
from paragan.train.per_label.lease_queue import FINALIZE_JOB, LeaseQueue
from paragan.train.per_label.worker import LabelWorker, has_spent_budget
from paragan.train.prepare import prepare_on_all_ranks
from paragan.train.rank_agreement import check_shared_storage, on_all_ranks
from paragan.train.run_dir import RunDir
from paragan.train.run_dir_selection import INPUT_PATHS, RunDirRequest, select_shared_run_dir, unwritable_error
from paragan.train.session import check_init_from, set_process_options
from paragan.train.trainer import ExplainFn

BUDGET_FIELDS = ("kimg", "strategy.minutes")  # may change on resume, but must be equal for all workers


def train_per_label(
    run: Run,
    launch_info: LaunchInfo,
    device: torch.device,
    request: RunDirRequest,
    reasons: Sequence[str],
    explain: ExplainFn | None = None,
) -> Path:
    """Work on a per-label run until it is done, as one of any number of processes. Returns the run folder.

    The processes of a launcher meet to find the folder. Afterwards only the ranks of one label exchange anything.

    Args:
        reasons: lines that are printed first.
        explain: says which settings would fit, if the device runs out of memory.
    """
    console = RunConsole(launch_info.rank == 0)
    world = World.join(launch_info, device, run.timeout_s)
    with leave_on_error(world):
        set_process_options(run.device, world)
        prepared = prepare_on_all_ranks(run, world)
        run = prepared.run
        dataset = prepared.dataset
        paths = world.all_gather_str(on_all_ranks(world, lambda: _prepare_run_dir(run, dataset, request, world)))
        path = Path(paths[0])
        check_shared_storage(path, world)
        jobs = make_jobs(run, dataset, path)
        strategy = run.per_label
        assert strategy is not None
        ranks = strategy.ranks_of_label(world.rank, world.size, len(jobs))
    lines = [
        *reasons,
        *dataset.describe().splitlines(),
        f"run folder {path}",
        describe_jobs(jobs),
        describe_rare_labels(strategy, dataset),
    ]
    for line in lines:
        if line:
            console.print(line)
    with world.split_off(ranks) as label_world:
        LabelWorker(run, dataset, jobs, path, label_world, console, explain).work()
    return path


@contextlib.contextmanager
def leave_on_error(world: World) -> Iterator[None]:
    """Leave the world if anything inside raises; otherwise stay in it."""
    try:
        yield
    except BaseException as error:
        world.__exit__(type(error), error, None)
        raise


def _prepare_run_dir(run: Run, dataset: Dataset, request: RunDirRequest, world: World) -> str:
    """Find or create the folder, and what all workers need in it, on rank 0. Returns its path; "." on other ranks."""
    if not world.is_main:
        return "."
    jobs = make_jobs(run, dataset, Path())  # before a folder is created: it refuses what cannot be trained
    label_spec = replace(make_spec(run.data, dataset), classes=0)
    run_dir = select_shared_run_dir(
        request, run, lambda path: is_finished(path, dataset), lambda: check_init_from(run, label_spec)
    )
    path = run_dir.path
    try:
        _check_writable(path)
        _update_budget(run_dir, run)
        model = path / "model"
        prior = LabelPrior.from_labels(dataset.labels, len(dataset.classes))
        counts = [job.num_images for job in sorted(jobs, key=lambda job: job.label)]
        _check_same_dataset(model, dataset, run.data)
        init_per_label_model(
            model, make_spec(run.data, dataset), prior, dataset.classes, data=dataset.fingerprint, images=counts
        )
        draw_reals(dataset, path, nets=run.nets)
    except OSError as error:
        raise unwritable_error(path, error) from error
    return str(path)


def _check_same_dataset(model: Path, dataset: Dataset, options: DataOptions) -> None:
    """Raise UsageError if the generators of a folder were trained on other images: these may have other labels."""
    if not (model / "config.json").exists():
        return
    if read_model_config(model).get("data") != dataset.fingerprint:
        raise UsageError(
            f"--data {options.redacted_path}: not the images that {model.parent} is trained on. "
            "Use those, or another --run-dir"
        )


def _check_writable(path: Path) -> None:
    """Raise OSError if nothing can be written to a folder."""
    probe = path / f".probe-{secrets.token_hex(8)}"
    probe.write_bytes(bytes(4096))
    probe.unlink()


def is_finished(path: Path, dataset: Dataset) -> bool:
    """Return True if nothing is left to do in a folder."""
    try:
        run = from_dict(Run, read_yaml(path / "run.yaml"))
        entries = LeaseQueue(path / "queue", 1.0).entries()
        jobs = make_jobs(run, dataset, path)
    except UsageError:
        return True
    finished: dict[str, int] = {}  # job -> lease number
    for job in jobs:
        entry = entries.get(job.name)
        if entry and entry.state == "done" and has_spent_budget(job, entry):
            finished[job.name] = entry.lease_number
    last = entries.get(FINALIZE_JOB)
    if last is None or last.state != "done" or len(finished) < len(jobs):
        return False
    return last.metadata.get("of") == finished


def _update_budget(run_dir: RunDir, run: Run) -> None:
    """Write a changed budget, and paths of files that were moved, to run.yaml, unless a worker trains meanwhile.

    Raises:
        UsageError: a worker trains with another budget.
    """
    previous = run_dir.read_run_config() or {}
    changes = diff(previous, to_saved_dict(run))
    budget_changes = [change for change in changes if change[0] in BUDGET_FIELDS]
    if not budget_changes and not any(name in INPUT_PATHS for name, *_ in changes):
        return
    assert run.per_label is not None
    lease_queue = LeaseQueue(run_dir.path / "queue", run.per_label.lease_s)
    for entry in lease_queue.entries().values():
        if lease_queue.is_busy(entry):
            if not budget_changes:  # its host may see the same data under another path
                return
            name, before, now = budget_changes[0]
            raise UsageError(
                f"{name}={now}: {run_dir.path} is being trained by {entry.worker} with {name}={before}. Use that, or "
                "stop the others first"
            )
    run_dir.write_run_config(to_saved_dict(run))
