"""From a run record to a finished run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paragan.comm.elastic.elastic_world import Elastic
from paragan.comm.sockets import answers
from paragan.comm.world import Place, World
from paragan.config import lag_trace
from paragan.config.resolve import load_images, resolve, spec_of
from paragan.config.run import Run
from paragan.config.user_code import is_own
from paragan.config.validate import refuse_clip, refuse_mixed, refuse_unheard, unreached
from paragan.core.errors import Unusable
from paragan.core.jsonl import Records
from paragan.core.rng import CPU
from paragan.data.dataset import Images
from paragan.nets.conditioning import judging
from paragan.report.page import write_report
from paragan.train.build import build_game, build_nets, teacher_of
from paragan.train.callbacks.best_model import Best, chosen, restore
from paragan.train.callbacks.log import BadFiles, Log
from paragan.train.callbacks.report_figures import at_end
from paragan.train.callbacks.sample_images import Pictures, draw_reals
from paragan.train.callbacks.save import Save
from paragan.train.callbacks.scoring import Scoring, check, feature_space
from paragan.train.checkpoint import Checkpoints
from paragan.train.console import Screen
from paragan.train.elastic_loop import Table
from paragan.train.health.monitor import Watch, forget_after
from paragan.train.health.rollback import go_back, set_aside
from paragan.train.health.rollback_request import Undo
from paragan.train.loop import train
from paragan.train.rank_agreement import owned_folder, refuse_disagreement, together
from paragan.train.run_dir import RunFolder, Wanted, changed, refuse_differences, under_way
from paragan.train.session import (
    Observer,
    Session,
    assemble,
    find_checkpoint,
    initialise,
    refuse_start,
    seat,
    set_threads,
    warn_schedules,
    warn_threads,
)

LOAD_TIMEOUT_S = 1800.0  # ranks may find the data at very different speed


Decide = Callable[[Run, Images, World, Wanted, Screen], Run]


@dataclass(frozen=True)
class UnderWay:
    """A run that this rank comes to while others play it."""

    folder: RunFolder
    run: Run
    images: Images


@dataclass
class Training:
    """What a train command asks of one rank. decide: what a run is changed to before it begins."""

    run: Run
    place: Place
    wanted: Wanted
    decide: Decide | None = None
    there: UnderWay | None = None

    def join(self, device: torch.device) -> World:
        """Meet the other ranks: at MASTER_ADDR, or in the run where they play already (Elastic)."""
        run, place, lost_after_s = self.run, self.place, self.run.strategy.lost_after_s
        if place.size == 1 or not lost_after_s or device.type != "cpu":
            return World.join(place, device, run.timeout_s)
        for folder, addresses, data in under_way(self.wanted):
            try:
                there = self._same(folder, data) if any(map(answers, addresses.values())) else None
            except Unusable as error:  # the others play on
                raise Unusable(str(error), everywhere=False) from error
            if not there:
                continue
            Screen().say(f"rank {place.rank} asks to be let into {folder.path}, at its next line of stats")
            world = Elastic.enter(place, device, run.timeout_s, lost_after_s, addresses)
            if world:
                self.there = there
                return world
        return Elastic.begin(place, device, run.timeout_s, lost_after_s)

    def _same(self, folder: RunFolder, data: str) -> UnderWay | None:
        """The run in a folder, where it is ours; refused where it was given as --run-dir and is not."""
        images, former = load_images(self.run), folder.record() or {}
        run = resolved(self.run, images)
        if self.wanted.run_dir:
            refuse_differences(former, run, folder.path)
        elif changed(former, run):
            return None
        if any(side.schedule != "constant" for side in (run.g, run.d)) and former.get("kimg") != run.kimg:
            raise Unusable(f"{folder.path} ends at {former.get('kimg')} kimg, and rates fall until then: repeat --kimg")
        if data != images.fingerprint:
            raise Unusable(f"--data {run.data.told} holds other images than those that {folder.path} is trained on")
        return UnderWay(folder, run, images)

    def play(self, world: World, screen: Screen) -> Path:
        """The training itself; where it is written."""
        if self.there:
            return join_in(self.there, world, screen)
        return execute(self.run, world, self.wanted, screen, self.decide)


def join_in(there: UnderWay, world: World, screen: Screen) -> Path:
    """Train with those who play already, from where they are."""
    run, images = there.run, there.images
    set_threads(run, world)
    alone = assemble(run, World.solo(world.device), images, build_nets(run, spec_of(run, images), world.device))
    session = replace(alone, world=world)  # the others are met when it is their turn to meet: Table seats it anew
    checkpoints = Checkpoints(there.folder.checkpoints, world, run.output.keep)
    with at_desk(run, there.folder, images, screen, checkpoints) as desk:
        play(session, desk, there.folder, images, screen)
    if world.first:
        at_end(there.folder.path, run.nets, images, world.device, screen)
        write_report(there.folder.path)
    return there.folder.path


def play(
    session: Session,
    desk: Desk,
    folder: RunFolder,
    images: Images,
    screen: Screen,
    watchers: Sequence[Observer] = (),
) -> str:
    """From where the session stands to its end; see `train`."""
    late = ""
    world, observers = session.world, [*watchers, desk.log, desk.bad_files, desk.pictures, desk.save, desk.scoring]
    if isinstance(world, Elastic):
        table = Table(world, folder, images, screen, desk.save, lambda s: seat(s.run, world, images, s.game, s.clock))
        table.play(session, observers, desk.finish)
    else:
        screen.start(session.clock.kimg, session.run.images / 1000)

        def at_stop(session: Session) -> None:
            for look in (*watchers, desk.save.save):
                look(session)

        late = train(session, observers, at_stop)
    screen.stop()
    return late


def execute(run: Run, world: World, wanted: Wanted, screen: Screen, decide: Decide | None = None) -> Path:
    """Train as the record says, on this rank of this world, and leave a complete run folder."""
    set_threads(run, world)
    images = together(world, lambda: load_images(run), LOAD_TIMEOUT_S)
    run = together(world, lambda: resolved(run, images))
    refuse_disagreement(run, world)
    if decide:
        run = decide(run, images, world, wanted, screen)
        set_threads(run, world)
    screen.say(images.describe())
    with owned_folder(run, world, wanted, lambda: refuse_start(run, spec_of(run, images))) as folder:
        if there := folder.finished:
            done = f"{there.path} is the same run, at {there.images_seen / 1000:g} kimg"
            screen.say(f"{done}; this is a new one (--resume {there.path} --kimg K extends that)")
        screen.say(f"run folder {folder.path}")
        if world.size == 1 and run.strategy.wire.lossy:
            screen.say(f"one rank sends nothing: the {run.strategy.wire.name} wire has no effect")
        if late := unreached(run):
            screen.say(late)
        play_in(folder, run, world, images, screen)
        return folder.path


def play_in(
    folder: RunFolder, run: Run, world: World, images: Images, screen: Screen, watchers: Sequence[Observer] = ()
) -> tuple[Session, str]:
    """Train in a folder that is ours, until all is there that a run leaves: the session at its end, and the signal that
    came too late for it. watchers: who looks on beside the desk, before it, and before the first round too."""
    while True:
        try:
            return play_on(folder, run, world, images, screen, watchers)
        except Undo as undo:
            go_back(folder, run, world, screen, undo)


def play_on(
    folder: RunFolder, run: Run, world: World, images: Images, screen: Screen, watchers: Sequence[Observer]
) -> tuple[Session, str]:
    """The same, from the newest checkpoint on, or until what was played is to be undone."""
    with open_session(run, world, folder, images, screen) as (session, desk):
        for watcher in watchers:
            watcher(session)
        if session.clock.done:
            screen.say(f"{folder.path} is complete at {session.clock.kimg:g} kimg; --kimg extends it")
            desk.save.write_model(session)  # it may have been stopped right after its last checkpoint
        elif session.clock.rollbacks:
            desk.save.replace_model(session)  # what stands there may have been undone
        if session.clock.images:
            desk.scoring(session)  # it may have been stopped while it was scored
        if session.role.about:
            screen.say(session.role.about)
        late = play(session, desk, folder, images, screen, watchers)
    if world.first:
        at_end(folder.path, run.nets, images, world.device, screen)
        write_report(folder.path)
    return session, late


def resolved(run: Run, images: Images) -> Run:
    """The complete record. Unusable is what could not be trained, or not be scored."""
    run = resolve(run, images)
    own = is_own(run.nets, run.objective)
    if not own:
        refuse_clip(run.objective, run.nets.spectral)
        refuse_mixed(run.objective, getattr(run.nets, "batch_norm", False))
        if not run.per_label:  # each of whose games has no labels, and is resolved by itself
            refuse_unheard(run.objective, judging(run.nets, spec_of(run, images)))
    check(run.evaluation, images, run.output.best)
    if run.teacher:
        teacher_of(run, images, CPU)
    if own and not run.per_label:
        plainly = replace(run, device=replace(run.device, compile=False), teacher="")
        build_game(plainly, build_nets(plainly, spec_of(run, images), CPU), images, CPU)  # tries them
    return run


@dataclass(frozen=True)
class Desk:
    """Who looks on while a session is played."""

    log: Log
    pictures: Pictures
    save: Save
    scoring: Scoring
    bad_files: BadFiles

    def finish(self, session: Session) -> None:
        """What the end of a run leaves, whether or not somebody was lost while it was written."""
        self.save.again()
        self.save(session)
        self.scoring(session)


@contextlib.contextmanager
def at_desk(run: Run, folder: RunFolder, images: Images, screen: Screen, checkpoints: Checkpoints) -> Iterator[Desk]:
    log = Log(folder.path, screen, checkpoints.standing, Watch(folder.path, screen, run.health, run.guard))
    save, wanted = Save(folder.path, checkpoints, images, log), run.evaluation
    best = Best(folder.path, save, chosen(run.output.best, wanted.metrics, feature_space(wanted, images)))
    try:
        yield Desk(
            log,
            Pictures(folder.path, images, log),
            save,
            Scoring(folder.path, images, screen, wanted, best),
            BadFiles(folder.path, images),
        )
    finally:
        screen.stop()
        log.close()


@contextlib.contextmanager
def open_session(
    run: Run, world: World, folder: RunFolder, images: Images, screen: Screen
) -> Iterator[tuple[Session, Desk]]:
    """Everything a run needs, from its newest good checkpoint on."""
    pair = build_nets(run, spec_of(run, images), world.device)
    checkpoints = Checkpoints(folder.checkpoints, world, run.output.keep)
    rollbacks = set_aside(folder, world)
    start = find_checkpoint(checkpoints, run, images, screen)
    if run.init_from and not start:
        together(world, lambda: initialise(pair, Path(run.init_from)))
    session = assemble(run, world, images, pair, start, rollbacks)
    with at_desk(run, folder, images, screen, checkpoints) as desk:
        if run.device.compile or (run.device.graph and world.device.type == "cpu"):
            screen.say("the first rounds compile what they play: a minute or two, less where torch has kept it")
        if start:
            warn_threads(start.about.get("threads"), screen)
            warn_schedules(run, start, screen)
            screen.say(f"resumed from {start.path} at {session.clock.kimg:g} kimg")
        if world.first:
            checkpoints.clear_unfinished()
            desk.log.stats.truncate_after(session.clock.step)
            Records(folder.path / lag_trace.NAME).truncate_after(session.clock.step)
            Records(folder.path / "metrics.jsonl").truncate_after(session.clock.kimg, key="kimg")
            forget_after(folder.path, session.clock.step)
            restore(folder.path)
            draw_reals(images, folder.path, session.game.labels is not None, run.nets)
        world.agree("open")
        yield session, desk
