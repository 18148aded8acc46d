"""Workers of a run per label: how the processes of a launcher find its folder, and part."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paragan.comm.world import LaunchInfo, World
from paragan.config.resolve import make_spec
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import diff, from_dict, read_yaml, to_dict
from paragan.data.dataset import Dataset
from paragan.models.model import init_per_label_model
from paragan.models.model_files import read_model_config
from paragan.models.sampler import LabelPrior
from paragan.strategies.per_label_wcgan import PerLabel
from paragan.train.callbacks.sample_images import draw_reals
from paragan.train.console import RunConsole
from paragan.train.per_label.jobs import describe_jobs, describe_rare_labels, make_jobs
from paragan.train.per_label.lease_queue import LeaseQueue
from paragan.train.per_label.worker import FINALIZE_JOB, LabelWorker, has_spent_budget
from paragan.train.prepare import prepare_on_all_ranks
from paragan.train.rank_agreement import check_same_config, check_shared_storage, on_all_ranks
from paragan.train.run_dir import RunDir, RunDirRequest, select_shared_run_dir
from paragan.train.session import check_init_from, set_threads

BUDGET_FIELDS = ("kimg", "strategy.minutes")  # how long each game is, so that all workers have to know it alike


def train_per_label(
    run: Run, launch_info: LaunchInfo, device: torch.device, request: RunDirRequest, reasons: Sequence[str]
) -> Path:
    """Work on a run per label until it is done, as one of any number of processes: where it is. They meet to find the
    folder, and exchange nothing afterwards, but for the ranks of one label. reasons: said first, a line each."""
    screen = RunConsole(launch_info.rank == 0)
    world = World.join(launch_info, device, run.timeout_s)
    with leave_on_error(world):
        set_threads(run, world)
        prepared = prepare_on_all_ranks(run, world)
        run = prepared.run
        images = prepared.dataset
        check_same_config(run, world)
        path = Path(world.all_gather_str(on_all_ranks(world, lambda: _prepare_run_dir(run, images, request, world)))[0])
        check_shared_storage(path, world)
        found, strategy = make_jobs(run, images, path), run.per_label
        assert strategy is not None
        team = strategy.ranks_of_label(world.rank, world.size, len(found))
        on_all_ranks(world, lambda: _check_ranks_per_label(run, strategy, len(team)))
    for line in (
        *reasons,
        *images.describe().splitlines(),
        f"run folder {path}",
        describe_jobs(found),
        describe_rare_labels(strategy, images),
    ):
        if line:
            screen.print(line)
    with world.split_off(team) as mine:
        LabelWorker(run, images, found, path, mine, screen).work()
    return path


@contextlib.contextmanager
def leave_on_error(world: World) -> Iterator[None]:
    """Inside, whatever goes wrong ends this rank's part in the world; else it stays."""
    try:
        yield
    except BaseException as error:
        world.__exit__(type(error), error, None)
        raise


def _check_ranks_per_label(run: Run, strategy: PerLabel, ranks: int) -> bool:
    """Unusable where so many ranks cannot play a label together."""
    if ranks > run.lanes:
        raise UsageError(
            f"{ranks} ranks of a label cannot share --lanes {run.lanes}: use --strategy.ranks_per_label={run.lanes}"
        )
    strategy.per_label_strategy.check(ranks)
    return True


def _prepare_run_dir(run: Run, dataset: Dataset, request: RunDirRequest, world: World) -> str:
    """Rank 0 finds or makes the folder, and what all workers need in it."""
    if not world.is_main:
        return "."
    found = make_jobs(run, dataset, Path())  # nothing is made for what could not begin
    spec = replace(make_spec(run, dataset), classes=0)  # of a label's networks
    folder = select_shared_run_dir(
        request, run, lambda path: is_finished(path, dataset), lambda: check_init_from(run, spec)
    )
    path = folder.path
    try:
        _check_writable(path)
        _update_budget(folder, run)
        model = path / "model"
        prior, classes = LabelPrior.from_labels(dataset.labels, len(dataset.classes)), dataset.classes
        counts = [job.num_images for job in sorted(found, key=lambda job: job.label)]
        _check_same_dataset(model, dataset, run)
        init_per_label_model(model, make_spec(run, dataset), prior, classes, data=dataset.fingerprint, images=counts)
        draw_reals(dataset, path, nets=run.nets)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; give another --run-dir or --outdir") from error
    return str(path)


def _check_same_dataset(model: Path, dataset: Dataset, run: Run) -> None:
    """Generators belong to the images they were trained on: other ones may have other labels."""
    if not (model / "config.json").exists():
        return
    former = read_model_config(model)
    if former.get("data") != dataset.fingerprint:
        raise UsageError(
            f"--data {run.data.redacted_path} holds other images than those that {model.parent} is trained on"
        )


def _check_writable(path: Path) -> None:
    """OSError where nothing can be written."""
    mark = path / f".probe-{secrets.token_hex(8)}"
    mark.write_bytes(bytes(4096))
    mark.unlink()


def is_finished(path: Path, dataset: Dataset) -> bool:
    """Whether nothing is left to do in a folder."""
    try:
        run = from_dict(Run, read_yaml(path / "run.yaml"))
        entries, found = LeaseQueue(path / "queue", 1.0).entries(), make_jobs(run, dataset, path)
    except UsageError:
        return True
    of = {
        job.name: e.lease_number
        for job in found
        if (e := entries.get(job.name)) and e.state == "done" and has_spent_budget(job, e)
    }
    last = entries.get(FINALIZE_JOB)
    return last is not None and last.state == "done" and len(of) == len(found) and last.metadata.get("of") == of


def _update_budget(run_dir: RunDir, run: Run) -> None:
    """Another budget than before is everybody's: refused while somebody works with the former."""
    former = run_dir.read_run_config() or {}
    other = [d for d in diff(former, to_dict(run)) if d[0] in BUDGET_FIELDS]
    if not other:
        return
    assert run.per_label is not None
    leases = LeaseQueue(run_dir.path / "queue", run.per_label.lease_s)
    for entry in leases.entries().values():
        if leases.is_busy(entry):
            name, before, now = other[0]
            raise UsageError(
                f"{run_dir.path} is being trained by {entry.worker} with {name}={before}, not {now}: give the same, or "
                "stop the others first"
            )
    run_dir.write_run_config(run)
