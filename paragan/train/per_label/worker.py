"""A worker of a per-label run: it leases one label after the other, and trains it as any run.

RUN/run.yaml          the run
RUN/queue/            who works on which label, and how it ended (lease_queue.py)
RUN/labels/0003/      an ordinary run of label 3, with its own checkpoints and report
RUN/labels/0003.2/    the same, while it is trained under its second lease
RUN/model/            the model of all labels

Workers communicate only by these files, so any number of them can start and die at any time, on any host that sees the
folder. A label's folder is renamed by the worker that takes it over: an earlier owner that is still alive then writes
into nothing. Where a label has several ranks they are one worker, with a world of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paragan.comm.world import World
from paragan.config.run import Run, to_saved_dict
from paragan.core.errors import Diverged, Interrupted, RunError, UsageError
from paragan.core.jsonl import newest_values, read_jsonl
from paragan.data.dataset import Dataset
from paragan.models.model import install_label_model
from paragan.models.per_label_layout import label_dir
from paragan.train.console import RunConsole
from paragan.train.per_label import finalize
from paragan.train.per_label.jobs import Job
from paragan.train.per_label.label_dirs import find_label_dir, label_seed, leased_label_dir
from paragan.train.per_label.lease_queue import FINALIZE_JOB, Lease, LeaseEntry, LeaseQueue
from paragan.train.run_dir import RunDir
from paragan.train.session import Callback, Session, callbacks_due
from paragan.train.trainer import ExplainFn, train_in_dir

POLL_S = 1.0
MAX_ATTEMPTS = 5  # workers that may die in a label, one after the other, without a new checkpoint
NO_MORE_JOBS = "end"
LEASE_LOST_MESSAGE = "this worker was silent for too long and another took over, or its file in the queue is gone"


class TimeBudgetTooShort(UsageError):
    """Raised if a time budget is less than a step."""


@dataclass(frozen=True)
class LeaseFence:
    """Callback: stop before anything is written for a label that another worker has taken over."""

    lease: Lease

    def __call__(self, session: Session) -> None:
        if not self.lease.is_owned():
            raise RunError(LEASE_LOST_MESSAGE)


@dataclass(frozen=True)
class TimeBudget:
    """Callback: end the run when its time is used up. Ranks that train together go by the clock of the first."""

    limit_s: float
    console: RunConsole

    def __call__(self, session: Session) -> None:
        clock = session.clock
        world = session.world
        if not self.limit_s or clock.is_done:
            return
        seconds = clock.seconds
        if world.size > 1:
            if clock.step and not callbacks_due(session):
                return
            seconds = float(world.all_gather_str(str(clock.seconds))[0])
        self.console.max_remaining_s = self.limit_s - seconds
        if seconds < self.limit_s:
            return
        if clock.step == 1:
            raise TimeBudgetTooShort(
                f"--strategy.minutes: leaves {self.limit_s:.2g} s for this label, and its first step took "
                f"{seconds:.2g} s. Use {math.ceil(2 * seconds / self.limit_s)} times as much, or more"
            )
        clock.finish_now()


@dataclass
class LabelWorker:
    """One of the ranks that train one label together.

    jobs              : the labels of the run, the longest first
    world             : the ranks of this worker only
    explain           : says which settings would fit, if the device runs out of memory
    previously_failed : lease numbers of labels that had failed when it started: it tries them again
    lease             : what this worker works on; None on other ranks than the first
    """

    run: Run
    dataset: Dataset
    jobs: Sequence[Job]
    folder: Path
    world: World
    console: RunConsole
    explain: ExplainFn | None = None
    previously_failed: Mapping[str, int] = field(default_factory=dict[str, int])
    lease: Lease | None = None

    def __post_init__(self) -> None:
        strategy = self.run.per_label
        assert strategy is not None
        self.wait_for_all = strategy.wait_for_all
        self.lease_queue = LeaseQueue(self.folder / "queue", strategy.lease_s)
        self.previously_failed = {
            job: entry.lease_number for job, entry in self.lease_queue.entries().items() if entry.state == "failed"
        }
        self.jobs_by_name = {job.name: job for job in self.jobs}

    def work(self) -> None:
        """Train labels until all are done, or none is left for this worker.

        Raises:
            RunError: lists the labels that could not be trained.
        """
        while True:
            name = self.world.all_gather_str(self.next_job() if self.world.is_main else "")[0]
            if name == NO_MORE_JOBS:
                break
            if name == FINALIZE_JOB:
                self.finalize()
            elif name:
                self.train_label(self.jobs_by_name[name])
            else:
                time.sleep(POLL_S)
        self.check_failed()

    # Choose the next job -------------------------------------------------------------------------------------

    def next_job(self) -> str:
        """Lease a job and return its name; "" to wait, NO_MORE_JOBS if all is done."""
        entries = self.lease_queue.entries()
        open_jobs = [job for job in self.jobs if not self.is_finished(job, entries.get(job.name))]
        self.console.suffix = f"{len(self.jobs) - len(open_jobs)} of {len(self.jobs)} labels done"
        for job in open_jobs:
            entry = entries.get(job.name)
            if self.has_source(job, entries) and self.can_acquire(entry) and self.try_acquire(job, entry):
                return job.name
        if open_jobs:
            return "" if self.wait_for_all else NO_MORE_JOBS
        return self.next_finalize_job(entries)

    def has_source(self, job: Job, entries: Mapping[str, LeaseEntry]) -> bool:
        """Return True if the label that a job starts from is finished, or if there is none."""
        if job.source_label is None:
            return True
        name = f"{job.source_label:04d}"
        return self.is_finished(self.jobs_by_name[name], entries.get(name))

    def is_finished(self, job: Job, entry: LeaseEntry | None) -> bool:
        """Return True if there is nothing more to do for a label."""
        if entry is None:
            return False
        if entry.state == "done":
            return has_spent_budget(job, entry)
        return entry.state == "failed" and not self.may_retry(entry)

    def may_retry(self, entry: LeaseEntry) -> bool:
        """Return True if a job had failed before this worker started."""
        return self.previously_failed.get(entry.job) == entry.lease_number

    def can_acquire(self, entry: LeaseEntry | None) -> bool:
        """Return True if no living worker holds a job."""
        return entry is None or entry.state != "held" or self.lease_queue.is_dead(entry)

    def try_acquire(self, job: Job, entry: LeaseEntry | None) -> bool:
        """Try to lease a label. One in which workers die again and again is marked as failed instead."""
        last_number = 0
        images = 0
        attempts = 1
        if entry:
            last_number = entry.lease_number
            label_folder = find_label_dir(self.folder, job.label)
            images = RunDir(label_folder).trained_images if label_folder else 0
            if entry.state == "held" and entry.metadata.get("from") == images:  # its worker died without a checkpoint
                attempts += int(entry.metadata.get("attempts", 1))
        metadata = {"label": job.label, "from": images, "attempts": attempts}
        self.lease = self.lease_queue.acquire(job.name, last_number, metadata)
        if self.lease and attempts > MAX_ATTEMPTS:
            reason = f"{MAX_ATTEMPTS} workers died in it, one after the other, without a checkpoint"
            self.lease.release("failed", images=images, seconds=0.0, reason=reason)
            return False
        return self.lease is not None

    def next_finalize_job(self, entries: Mapping[str, LeaseEntry]) -> str:
        """Lease the last job once all labels are done: one worker does it, once. Returns as `next_job` does."""
        self.restore_label_models()
        if any(entries[job.name].state == "failed" for job in self.jobs):
            return NO_MORE_JOBS
        entry = entries.get(FINALIZE_JOB)
        lease_numbers = {job.name: entries[job.name].lease_number for job in self.jobs}
        if entry:
            is_current = entry.metadata.get("of") == lease_numbers
            has_ended = entry.state == "done" or (entry.state == "failed" and not self.may_retry(entry))
            if is_current and has_ended:
                return NO_MORE_JOBS
            if not self.can_acquire(entry):
                return "" if self.wait_for_all else NO_MORE_JOBS
        last_number = entry.lease_number if entry else 0
        self.lease = self.lease_queue.acquire(FINALIZE_JOB, last_number, {"of": lease_numbers})
        return FINALIZE_JOB if self.lease else ""

    def restore_label_models(self) -> None:
        """Put generators that were removed from the model back, from the folders of their labels."""
        for job in self.jobs:
            trained = label_dir(self.folder / "labels", job.label) / "model"
            installed = label_dir(self.folder / "model", job.label)
            if (trained / "model.safetensors").exists() and not (installed / "model.safetensors").exists():
                install_label_model(self.folder / "model", job.label, trained)

    # Do it ----------------------------------------------------------------------------------------

    def train_label(self, job: Job) -> None:
        """Train a label to its end, or leave it to another worker.

        Raises:
            Interrupted: a signal came while it was trained, or too late for it.
            RunError, UsageError, OSError: failures that are not the label's own; this worker ends.
        """
        self.console.print(job.describe())
        run_dir = self.open_label_dir(job)
        try:
            with self.lease or contextlib.nullcontext():
                late_signal = self.train_to_end(job, run_dir)
        except TimeBudgetTooShort:
            self.release_lease("free", run_dir)
            raise
        except (RunError, UsageError, OSError) as error:
            if self.lease and not self.lease.is_owned():
                self.console.print(f"label {job.label} ({job.class_name}): {LEASE_LOST_MESSAGE}")
            elif isinstance(error, Diverged | UsageError):
                self.release_lease("failed", run_dir, reason=str(error))
                self.console.print(f"label {job.label} ({job.class_name}) failed: {error}")
            else:
                self.try_release_lease(run_dir)
                raise
            if self.world.size > 1:  # the world of ranks that train together is broken after a failure
                raise
        except (Interrupted, KeyboardInterrupt):
            self.try_release_lease(run_dir)
            raise
        else:
            signals = [name for name in self.world.all_gather_str(late_signal) if name]
            if signals:
                message = f"{signals[0]}: stopped after label {job.label}"
                raise Interrupted(message, same_on_all_ranks=not self.world.is_main)

    def open_label_dir(self, job: Job) -> RunDir:
        """Rename or create the folder of a label that was just leased, under a name that only this worker uses."""
        path = ""
        if self.lease:
            current = find_label_dir(self.folder, job.label)
            leased = leased_label_dir(self.folder, job.label, self.lease.lease_number)
            with contextlib.suppress(FileNotFoundError):  # another worker took over; LeaseFence will notice
                if leased.exists() and leased != current:
                    leased.rename(leased.with_name(f"{leased.name}.stray-{secrets.token_hex(4)}"))
                if current:
                    current.rename(leased)
                else:
                    leased.mkdir(parents=True)
            images = RunDir(leased).trained_images if current else 0
            if images:
                self.console.print(f"it continues at {images / 1000:g} kimg")
            path = str(leased)
        return RunDir(Path(self.world.all_gather_str(path)[0]))

    def train_to_end(self, job: Job, run_dir: RunDir) -> str:
        """Train a label and install its model. Returns a signal that came too late for it, or ""."""
        run = self.with_original_start(job, run_dir)
        dataset = self.dataset.only_class(job.label)
        if self.world.is_main:
            run_dir.write_run_config(to_saved_dict(run))
        callbacks: list[Callback] = [LeaseFence(self.lease)] if self.lease else []
        callbacks.append(TimeBudget(job.max_seconds, self.console))
        session, late_signal = train_in_dir(run_dir, run, self.world, dataset, self.console, callbacks, self.explain)
        if self.lease and self.lease.is_owned():
            final = label_dir(self.folder / "labels", job.label)
            run_dir.path.rename(final)
            install_label_model(self.folder / "model", job.label, final / "model")
            self.lease.release(
                "done",
                images=session.clock.images,
                seconds=round(session.clock.seconds, 3),
                scores=newest_values(read_jsonl(final / "metrics.jsonl")),
            )
        return late_signal

    def with_original_start(self, job: Job, run_dir: RunDir) -> Run:
        """Return the run of a label with its seed and `init_from` as they were when it started.

        The folder may have been moved since, and with it the model that the label started from. The first rank reads
        them for all.
        """
        seed = job.run.seed
        init_from = job.run.init_from
        if self.world.is_main:
            seed = label_seed(self.folder, job.label, seed)
            previous = run_dir.read_run_config() if run_dir.trained_images else None
            if previous:
                init_from = previous["init_from"]
        text = json.dumps({"seed": seed, "init_from": init_from})
        start = json.loads(self.world.all_gather_str(text)[0])
        return replace(job.run, seed=int(start["seed"]), init_from=str(start["init_from"]))

    def try_release_lease(self, run_dir: RunDir) -> None:
        """Give the lease back, unless the folder cannot be written, which may be why."""
        with contextlib.suppress(OSError):
            self.release_lease("free", run_dir)

    def release_lease(self, state: str, run_dir: RunDir, **metadata: str) -> None:
        """Write how training ended, if this worker still owns the lease."""
        if self.lease and self.lease.is_owned():
            images, seconds = run_dir.progress
            self.lease.release(state, images=images, seconds=seconds, **metadata)

    def finalize(self) -> None:
        """Score and draw the model of all labels, on the rank that holds the lease."""
        if not self.lease:
            return
        with self.lease as lease:
            finalize.finalize(self.run, self.dataset, self.jobs, self.lease_queue.entries(), self.folder, self.console)
            lease.release("done")

    def check_failed(self) -> None:
        """Raise RunError if labels have failed, and say why."""
        entries = self.lease_queue.entries()
        failures: list[str] = []
        for job in self.jobs:
            entry = entries.get(job.name)
            if entry and entry.state == "failed":
                failures.append(f"label {job.label} ({job.class_name}): {entry.metadata.get('reason')}")
        if failures:
            more = f" and {len(failures) - 4} more labels" if len(failures) > 4 else ""
            raise RunError(f"{'; '.join(failures[:4])}{more}; the same command tries again", same_on_all_ranks=True)


def has_spent_budget(job: Job, entry: LeaseEntry) -> bool:
    """Return True if a label that is done has used the budget that it has now."""
    images = float(entry.metadata.get("images", 0))
    seconds = float(entry.metadata.get("seconds", 0))
    return "replaced" in entry.metadata or job.is_complete(images, seconds)
