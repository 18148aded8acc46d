"""A worker of a run per label: it takes one game after another from the run's folder, and trains it as any run.

RUN/run.yaml          the run;  RUN/queue/ who works on which label, and what became of it (leases.py)
RUN/labels/0003/      an ordinary run of label 3, which resumes by itself; while it is trained for the second time it is
RUN/labels/0003.2/    and whoever takes it over renames it: the former owner, should it live, writes into nothing
RUN/model/            the model of all labels

Workers tell each other nothing but what they write there, so any number of them can be started and can die at any time,
on any host that sees the folder. Where a label has several ranks they are one worker, with a world of their own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.errors import Diverged, Interrupted, RunError, UsageError
from paragan.core.jsonl import newest_values, read_jsonl
from paragan.data.dataset import Dataset
from paragan.models.model import install_label_model, label_dir
from paragan.train.console import RunConsole
from paragan.train.per_label import finalize
from paragan.train.per_label.jobs import Job
from paragan.train.per_label.label_dirs import find_label_dir, label_seed, leased_label_dir
from paragan.train.per_label.lease_queue import Lease, LeaseEntry, LeaseQueue
from paragan.train.run_dir import RunDir
from paragan.train.session import Session, callbacks_due
from paragan.train.trainer import train_in_dir

POLL_S = 1.0
MAX_ATTEMPTS = 5  # workers that may end in a label, one after the other, without coming further
FINALIZE_JOB = "all"  # the last job: what is made of all labels together
NO_MORE_JOBS = "end"
LEASE_LOST_MESSAGE = "this worker was silent for too long and another took it over, or its file in the queue is gone"


class TimeBudgetTooShort(UsageError):
    """A budget of time that is less than a step."""


@dataclass(frozen=True)
class LeaseFence:
    """An observer: nothing is written for a label that is another's by now."""

    lease: Lease

    def __call__(self, session: Session) -> None:
        if not self.lease.is_owned():
            raise RunError(LEASE_LOST_MESSAGE)


@dataclass(frozen=True)
class TimeBudget:
    """An observer: the game ends where its time does. Ranks that play it together go by the first one's clock."""

    limit_s: float
    console: RunConsole

    def __call__(self, session: Session) -> None:
        clock, world = session.clock, session.world
        if not self.limit_s or clock.is_done or (world.size > 1 and clock.step and not callbacks_due(session)):
            return
        spent = clock.seconds if world.size == 1 else float(world.all_gather_str(str(clock.seconds))[0])
        self.console.max_remaining_s = self.limit_s - spent
        if spent < self.limit_s:
            return
        if clock.step == 1:
            raise TimeBudgetTooShort(
                f"--strategy.minutes leaves {self.limit_s:.2g} s for this label, and its first step took {spent:.2g} "
                f"s: use {2 * spent / self.limit_s:.1g} times as much, or more"
            )
        clock.finish_now()


@dataclass
class LabelWorker:
    """The ranks that train one label together, as one of them sees it.

    jobs   : the games of the run, the longest first
    world  : the ranks of this worker, and nobody else
    before : labels that had failed when it was started: it tries them again
    """

    run: Run
    dataset: Dataset
    jobs: Sequence[Job]
    folder: Path
    world: World
    console: RunConsole
    previously_failed: Mapping[str, int] = field(default_factory=dict[str, int])
    lease: Lease | None = None

    def __post_init__(self) -> None:
        strategy = self.run.per_label
        assert strategy is not None
        self.wait_for_all, self.lease_queue = strategy.wait_for_all, LeaseQueue(self.folder / "queue", strategy.lease_s)
        self.previously_failed = {
            job: e.lease_number for job, e in self.lease_queue.entries().items() if e.state == "failed"
        }
        self.jobs_by_name = {job.name: job for job in self.jobs}

    def work(self) -> None:
        """Take games until all are done, or none is left for us. Failed lists those that could not be trained."""
        while (name := self.world.all_gather_str(self.next_job() if self.world.is_main else "")[0]) != NO_MORE_JOBS:
            if name == FINALIZE_JOB:
                self.finalize()
            elif name:
                self.train_label(self.jobs_by_name[name])
            else:
                time.sleep(POLL_S)
        self.check_failed()

    # What comes next -------------------------------------------------------------------------------------

    def next_job(self) -> str:
        """The name of a job that was taken for this worker; "" where it has to wait, END where all is done."""
        entries = self.lease_queue.entries()
        left = [job for job in self.jobs if not self.is_finished(job, entries.get(job.name))]
        self.console.suffix = f"{len(self.jobs) - len(left)} of {len(self.jobs)} labels done"
        for job in left:
            entry, source = entries.get(job.name), job.source_label
            begins = source is None or self.is_finished(
                self.jobs_by_name[f"{source:04d}"], entries.get(f"{source:04d}")
            )
            if begins and self.can_acquire(entry) and self.try_acquire(job, entry):
                return job.name
        if left:
            return "" if self.wait_for_all else NO_MORE_JOBS
        return self.next_finalize_job(entries)

    def is_finished(self, job: Job, entry: LeaseEntry | None) -> bool:
        """Whether there is nothing more to do for a label."""
        if entry is None:
            return False
        if entry.state == "done":
            return has_spent_budget(job, entry)
        return entry.state == "failed" and not self.may_retry(entry)

    def may_retry(self, entry: LeaseEntry) -> bool:
        return self.previously_failed.get(entry.job) == entry.lease_number

    def can_acquire(self, entry: LeaseEntry | None) -> bool:
        return entry is None or entry.state != "held" or self.lease_queue.is_dead(entry)

    def try_acquire(self, job: Job, entry: LeaseEntry | None) -> bool:
        """Try to have a label; one in which workers end again and again is given up instead."""
        number, former = (entry.lease_number, find_label_dir(self.folder, job.label)) if entry else (0, None)
        reached = RunDir(former).trained_images if former else 0
        ended = entry is not None and entry.state == "held" and entry.metadata.get("from") == reached
        attempts = 1 + (int(entry.metadata.get("attempts", 1)) if entry and ended else 0)
        about = {"label": job.label, "from": reached, "attempts": attempts}
        self.lease = self.lease_queue.acquire(job.name, number, about)
        if self.lease and attempts > MAX_ATTEMPTS:
            reason = f"{MAX_ATTEMPTS} workers ended in it, one after the other, without a checkpoint"
            self.lease.release("failed", images=reached, seconds=0.0, reason=reason)
            return False
        return self.lease is not None

    def next_finalize_job(self, entries: Mapping[str, LeaseEntry]) -> str:
        """All labels being settled: what is made of them together, once, by one worker."""
        self.restore_label_models()
        if any(entries[job.name].state == "failed" for job in self.jobs):
            return NO_MORE_JOBS
        entry, of = entries.get(FINALIZE_JOB), {job.name: entries[job.name].lease_number for job in self.jobs}
        if entry and entry.metadata.get("of") == of:
            if entry.state == "done" or (entry.state == "failed" and not self.may_retry(entry)):
                return NO_MORE_JOBS
            if entry.state == "held" and not self.lease_queue.is_dead(entry):
                return "" if self.wait_for_all else NO_MORE_JOBS
        elif entry and not self.can_acquire(entry):
            return "" if self.wait_for_all else NO_MORE_JOBS
        self.lease = self.lease_queue.acquire(FINALIZE_JOB, entry.lease_number if entry else 0, {"of": of})
        return FINALIZE_JOB if self.lease else ""

    def restore_label_models(self) -> None:
        """Generators that somebody has removed from the model are put back from their labels."""
        for job in self.jobs:
            model, here = (
                label_dir(self.folder / "labels", job.label) / "model",
                label_dir(self.folder / "model", job.label),
            )
            if not (here / "model.safetensors").exists() and (model / "model.safetensors").exists():
                install_label_model(self.folder / "model", job.label, model)

    # What is done ----------------------------------------------------------------------------------------

    def train_label(self, job: Job) -> None:
        """Play a label's game to its end, or leave it as it is for another worker."""
        self.console.print(job.describe())
        folder = self.open_label_dir(job)
        try:
            with self.lease or contextlib.nullcontext():
                late = self.train_to_end(job, folder)
        except TimeBudgetTooShort:
            self.release_lease("free", folder)
            raise
        except (RunError, UsageError, OSError) as error:
            if self.lease and not self.lease.is_owned():
                self.console.print(f"label {job.label} ({job.class_name}): {LEASE_LOST_MESSAGE}")
            elif isinstance(error, Diverged | UsageError):
                self.release_lease("failed", folder, reason=str(error))
                self.console.print(f"label {job.label} ({job.class_name}) failed: {error}")
            else:
                self.try_release_lease(folder)
                raise
            if self.world.size > 1:  # ranks that play together do not go on after a failure: their world is broken
                raise
        except (Interrupted, KeyboardInterrupt):
            self.try_release_lease(folder)
            raise
        else:
            if asked := next(filter(None, self.world.all_gather_str(late)), ""):
                raise Interrupted(f"{asked}: stopped after label {job.label}", same_on_all_ranks=not self.world.is_main)

    def open_label_dir(self, job: Job) -> RunDir:
        """The folder of a label that was just taken, under a name that is ours alone."""
        path = ""
        if self.lease:
            former, mine = (
                find_label_dir(self.folder, job.label),
                leased_label_dir(self.folder, job.label, self.lease.lease_number),
            )
            with contextlib.suppress(FileNotFoundError):  # whoever took it over was faster, which the fence will see
                if mine.exists() and mine != former:
                    mine.rename(mine.with_name(f"{mine.name}.stray-{secrets.token_hex(4)}"))
                former.rename(mine) if former else mine.mkdir(parents=True)
            if former and (reached := RunDir(mine).trained_images):
                self.console.print(f"it goes on from {reached / 1000:g} kimg")
            path = str(mine)
        return RunDir(Path(self.world.all_gather_str(path)[0]))

    def train_to_end(self, job: Job, run_dir: RunDir) -> str:
        """Returns which signal asked for the end when it was too late for this label."""
        run, images = self.with_original_start(job, run_dir), self.dataset.only_class(job.label)
        if self.world.is_main:
            run_dir.write_run_config(run)
        fence = [LeaseFence(self.lease)] if self.lease else []
        watchers = [*fence, TimeBudget(job.max_seconds, self.console)]
        session, late = train_in_dir(run_dir, run, self.world, images, self.console, watchers)
        if self.lease and self.lease.is_owned():
            run_dir.path.rename(final := label_dir(self.folder / "labels", job.label))
            install_label_model(self.folder / "model", job.label, final / "model")
            images_seen, seconds = session.clock.images, round(session.clock.seconds, 3)
            self.lease.release(
                "done", images=images_seen, seconds=seconds, scores=newest_values(read_jsonl(final / "metrics.jsonl"))
            )
        return late

    def with_original_start(self, job: Job, run_dir: RunDir) -> Run:
        """A label's run with its seed, and, where it has come further than its beginning, from what it was begun with
        (the folder may have been moved since): read by the first rank for all."""
        about = {"seed": job.run.seed, "init_from": job.run.init_from}
        if self.world.is_main:
            about["seed"] = label_seed(self.folder, job.label, job.run.seed)
            about["init_from"] = (
                (run_dir.read_run_config() or about)["init_from"] if run_dir.trained_images else job.run.init_from
            )
        about = json.loads(self.world.all_gather_str(json.dumps(about))[0])
        return replace(job.run, seed=int(about["seed"]), init_from=str(about["init_from"]))

    def try_release_lease(self, run_dir: RunDir) -> None:
        with contextlib.suppress(OSError):  # which may be what is wrong
            self.release_lease("free", run_dir)

    def release_lease(self, state: str, run_dir: RunDir, **metadata: str) -> None:
        """Let others have it, or know that it cannot be trained."""
        if self.lease and self.lease.is_owned():
            images, seconds = run_dir.progress
            self.lease.release(state, images=images, seconds=seconds, **metadata)

    def finalize(self) -> None:
        """Score and draw the model of all labels."""
        if not self.lease:
            return
        with self.lease as lease:
            finalize.finalize(self.run, self.dataset, self.jobs, self.lease_queue.entries(), self.folder, self.console)
            lease.release("done")

    def check_failed(self) -> None:
        entries = self.lease_queue.entries()
        failed = [(job, e) for job in self.jobs if (e := entries.get(job.name)) and e.state == "failed"]
        if failed:
            listed = "; ".join(
                f"label {job.label} ({job.class_name}): {e.metadata.get('reason')}" for job, e in failed[:4]
            )
            more = f" and {len(failed) - 4} more labels" if len(failed) > 4 else ""
            raise RunError(f"{listed}{more}; the same command tries again", same_on_all_ranks=True)


def has_spent_budget(job: Job, entry: LeaseEntry) -> bool:
    """Whether a label that is done has had the budget that it now has."""
    images, seconds = float(entry.metadata.get("images", 0)), float(entry.metadata.get("seconds", 0))
    return "replaced" in entry.metadata or job.is_complete(images, seconds)
