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
from paragan.core.errors import Diverged, Failed, Interrupted, Unusable
from paragan.core.jsonl import latest, read
from paragan.data.dataset import Images
from paragan.models.model import part, put_part
from paragan.train.console import Screen
from paragan.train.loop import eventful
from paragan.train.per_label import finalize
from paragan.train.per_label.jobs import Job
from paragan.train.per_label.label_dirs import found, seed_of, taken
from paragan.train.per_label.lease_queue import Entry, Lease, Leases
from paragan.train.run_dir import RunFolder
from paragan.train.session import Session
from paragan.train.trainer import play_in

POLL_S = 1.0
ATTEMPTS = 5  # workers that may end in a label, one after the other, without coming further
POOLED = "all"  # the last job: what is made of all labels together
END = "end"
OVERTAKEN = "this worker was silent for too long and another took it over, or its file in the queue is gone"


class TooShort(Unusable):
    """A budget of time that is less than a step."""


@dataclass(frozen=True)
class Fence:
    """An observer: nothing is written for a label that is another's by now."""

    lease: Lease

    def __call__(self, session: Session) -> None:
        if not self.lease.look():
            raise Failed(OVERTAKEN)


@dataclass(frozen=True)
class Budget:
    """An observer: the game ends where its time does. Ranks that play it together go by the first one's clock."""

    seconds: float
    screen: Screen

    def __call__(self, session: Session) -> None:
        clock, world = session.clock, session.world
        if not self.seconds or clock.done or (world.size > 1 and clock.step and not eventful(session)):
            return
        spent = clock.seconds if world.size == 1 else float(world.agree(str(clock.seconds))[0])
        self.screen.left_s = self.seconds - spent
        if spent < self.seconds:
            return
        if clock.step == 1:
            raise TooShort(
                f"--strategy.minutes leaves {self.seconds:.2g} s for this label, and its first step took {spent:.2g} "
                f"s: use {2 * spent / self.seconds:.1g} times as much, or more"
            )
        clock.end()


@dataclass
class Worker:
    """The ranks that train one label together, as one of them sees it.

    jobs   : the games of the run, the longest first
    world  : the ranks of this worker, and nobody else
    before : labels that had failed when it was started: it tries them again
    """

    run: Run
    images: Images
    jobs: Sequence[Job]
    folder: Path
    world: World
    screen: Screen
    before: Mapping[str, int] = field(default_factory=dict[str, int])
    lease: Lease | None = None

    def __post_init__(self) -> None:
        strategy = self.run.per_label
        assert strategy is not None
        self.wait, self.leases = strategy.wait, Leases(self.folder / "queue", strategy.lease_s)
        self.before = {job: e.number for job, e in self.leases.entries().items() if e.state == "failed"}
        self.named = {job.name: job for job in self.jobs}

    def work(self) -> None:
        """Take games until all are done, or none is left for us. Failed lists those that could not be trained."""
        while (name := self.world.agree(self.next() if self.world.first else "")[0]) != END:
            if name == POOLED:
                self.conclude()
            elif name:
                self.train(self.named[name])
            else:
                time.sleep(POLL_S)
        self.refuse_failed()

    # What comes next -------------------------------------------------------------------------------------

    def next(self) -> str:
        """The name of a job that was taken for this worker; "" where it has to wait, END where all is done."""
        entries = self.leases.entries()
        left = [job for job in self.jobs if not self.settled(job, entries.get(job.name))]
        self.screen.about = f"{len(self.jobs) - len(left)} of {len(self.jobs)} labels done"
        for job in left:
            entry, source = entries.get(job.name), job.source
            begins = source is None or self.settled(self.named[f"{source:04d}"], entries.get(f"{source:04d}"))
            if begins and self.may_take(entry) and self.take(job, entry):
                return job.name
        if left:
            return "" if self.wait else END
        return self.next_pooled(entries)

    def settled(self, job: Job, entry: Entry | None) -> bool:
        """Whether there is nothing more to do for a label."""
        if entry is None:
            return False
        if entry.state == "done":
            return had(job, entry)
        return entry.state == "failed" and not self.again(entry)

    def again(self, entry: Entry) -> bool:
        return self.before.get(entry.job) == entry.number

    def may_take(self, entry: Entry | None) -> bool:
        return entry is None or entry.state != "held" or self.leases.dead(entry)

    def take(self, job: Job, entry: Entry | None) -> bool:
        """Try to have a label; one in which workers end again and again is given up instead."""
        number, former = (entry.number, found(self.folder, job.label)) if entry else (0, None)
        reached = RunFolder(former).images_seen if former else 0
        ended = entry is not None and entry.state == "held" and entry.about.get("from") == reached
        attempts = 1 + (int(entry.about.get("attempts", 1)) if entry and ended else 0)
        about = {"label": job.label, "from": reached, "attempts": attempts}
        self.lease = self.leases.take(job.name, number, about)
        if self.lease and attempts > ATTEMPTS:
            reason = f"{ATTEMPTS} workers ended in it, one after the other, without a checkpoint"
            self.lease.end("failed", images=reached, seconds=0.0, reason=reason)
            return False
        return self.lease is not None

    def next_pooled(self, entries: Mapping[str, Entry]) -> str:
        """All labels being settled: what is made of them together, once, by one worker."""
        self.restore_parts()
        if any(entries[job.name].state == "failed" for job in self.jobs):
            return END
        entry, of = entries.get(POOLED), {job.name: entries[job.name].number for job in self.jobs}
        if entry and entry.about.get("of") == of:
            if entry.state == "done" or (entry.state == "failed" and not self.again(entry)):
                return END
            if entry.state == "held" and not self.leases.dead(entry):
                return "" if self.wait else END
        elif entry and not self.may_take(entry):
            return "" if self.wait else END
        self.lease = self.leases.take(POOLED, entry.number if entry else 0, {"of": of})
        return POOLED if self.lease else ""

    def restore_parts(self) -> None:
        """Generators that somebody has removed from the model are put back from their labels."""
        for job in self.jobs:
            model, here = part(self.folder / "labels", job.label) / "model", part(self.folder / "model", job.label)
            if not (here / "model.safetensors").exists() and (model / "model.safetensors").exists():
                put_part(self.folder / "model", job.label, model)

    # What is done ----------------------------------------------------------------------------------------

    def train(self, job: Job) -> None:
        """Play a label's game to its end, or leave it as it is for another worker."""
        self.screen.say(job.told())
        folder = self.opened(job)
        try:
            with self.lease or contextlib.nullcontext():
                late = self.play(job, folder)
        except TooShort:
            self.give_back("free", folder)
            raise
        except (Failed, Unusable, OSError) as error:
            if self.lease and not self.lease.look():
                self.screen.say(f"label {job.label} ({job.title}): {OVERTAKEN}")
            elif isinstance(error, Diverged | Unusable):
                self.give_back("failed", folder, reason=str(error))
                self.screen.say(f"label {job.label} ({job.title}) failed: {error}")
            else:
                self.let_go(folder)
                raise
            if self.world.size > 1:  # ranks that play together do not go on after a failure: their world is broken
                raise
        except (Interrupted, KeyboardInterrupt):
            self.let_go(folder)
            raise
        else:
            if asked := next(filter(None, self.world.agree(late)), ""):
                raise Interrupted(f"{asked}: stopped after label {job.label}", everywhere=not self.world.first)

    def opened(self, job: Job) -> RunFolder:
        """The folder of a label that was just taken, under a name that is ours alone."""
        path = ""
        if self.lease:
            former, mine = found(self.folder, job.label), taken(self.folder, job.label, self.lease.number)
            with contextlib.suppress(FileNotFoundError):  # whoever took it over was faster, which the fence will see
                if mine.exists() and mine != former:
                    mine.rename(mine.with_name(f"{mine.name}.stray-{secrets.token_hex(4)}"))
                former.rename(mine) if former else mine.mkdir(parents=True)
            if former and (reached := RunFolder(mine).images_seen):
                self.screen.say(f"it goes on from {reached / 1000:g} kimg")
            path = str(mine)
        return RunFolder(Path(self.world.agree(path)[0]))

    def play(self, job: Job, folder: RunFolder) -> str:
        """Returns which signal asked for the end when it was too late for this label."""
        run, images = self.as_begun(job, folder), self.images.of_class(job.label)
        if self.world.first:
            folder.write_record(run)
        fence = [Fence(self.lease)] if self.lease else []
        watchers = [*fence, Budget(job.seconds, self.screen)]
        session, late = play_in(folder, run, self.world, images, self.screen, watchers)
        if self.lease and self.lease.look():
            folder.path.rename(final := part(self.folder / "labels", job.label))
            put_part(self.folder / "model", job.label, final / "model")
            images_seen, seconds = session.clock.images, round(session.clock.seconds, 3)
            self.lease.end("done", images=images_seen, seconds=seconds, scores=latest(read(final / "metrics.jsonl")))
        return late

    def as_begun(self, job: Job, folder: RunFolder) -> Run:
        """A label's run with its seed, and, where it has come further than its beginning, from what it was begun with
        (the folder may have been moved since): read by the first rank for all."""
        about = {"seed": job.run.seed, "init_from": job.run.init_from}
        if self.world.first:
            about["seed"] = seed_of(self.folder, job.label, job.run.seed)
            about["init_from"] = (folder.record() or about)["init_from"] if folder.images_seen else job.run.init_from
        about = json.loads(self.world.agree(json.dumps(about))[0])
        return replace(job.run, seed=int(about["seed"]), init_from=str(about["init_from"]))

    def let_go(self, folder: RunFolder) -> None:
        with contextlib.suppress(OSError):  # which may be what is wrong
            self.give_back("free", folder)

    def give_back(self, state: str, folder: RunFolder, **about: str) -> None:
        """Let others have it, or know that it cannot be trained."""
        if self.lease and self.lease.look():
            images, seconds = folder.reached
            self.lease.end(state, images=images, seconds=seconds, **about)

    def conclude(self) -> None:
        """Score and draw the model of all labels."""
        if not self.lease:
            return
        with self.lease as lease:
            finalize.conclude(self.run, self.images, self.jobs, self.leases.entries(), self.folder, self.screen)
            lease.end("done")

    def refuse_failed(self) -> None:
        entries = self.leases.entries()
        failed = [(job, e) for job in self.jobs if (e := entries.get(job.name)) and e.state == "failed"]
        if failed:
            listed = "; ".join(f"label {job.label} ({job.title}): {e.about.get('reason')}" for job, e in failed[:4])
            more = f" and {len(failed) - 4} more labels" if len(failed) > 4 else ""
            raise Failed(f"{listed}{more}; the same command tries again", everywhere=True)


def had(job: Job, entry: Entry) -> bool:
    """Whether a label that is done has had the budget that it now has."""
    images, seconds = float(entry.about.get("images", 0)), float(entry.about.get("seconds", 0))
    return "replaced" in entry.about or job.done(images, seconds)
