"""From a run record to a finished run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..clock import Clock
from ..comm.elastic import Elastic
from ..comm.keys import answers
from ..comm.world import Place, World
from ..data.images import Images
from ..data.lanes import Lanes
from ..devices import huge_pages, keep_memory
from ..errors import Unusable
from ..game.game import Game
from ..nets import Spec
from ..nets.conditioning import judging
from ..report.page import write_report
from ..report.records import Records
from ..rng import CPU
from . import checkpoint, lags
from .best import Best, chosen, restore
from .checkpoint import Checkpoints, Damaged, Loaded
from .exhibits import at_end
from .fitting import refuse_unheard
from .folder import RunFolder, Wanted, changed, refuse_differences, under_way
from .guard import changed as changed_by
from .guard import go_back, set_aside
from .guard import seed as seed_of
from .loop import Observer, Session, train
from .model import folder_to_start_from
from .observers import BadFiles, Log, Pictures, Save, draw_reals
from .own import is_own
from .progress import Screen
from .ramp import stage, unreached
from .regroup import Table
from .run import Pair, Run, build_game, build_nets, load_images, refuse_clip, refuse_mixed, resolve, spec_of, teacher_of
from .scoring import Scoring, check, feature_space
from .snapshot import whole
from .stats import Stats
from .together import owned_folder, refuse_disagreement, together
from .undo import Undo
from .watch import Watch, forget_after

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


def set_threads(run: Run, world: World) -> None:
    """This rank's part of the host's cores, unless the run says otherwise; and its memory."""
    huge_pages(run.device.huge_pages)
    keep_memory()
    if run.device.threads:
        torch.set_num_threads(run.device.threads)
    elif world.place.local_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.place.local_size))


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
            Records(folder.path / lags.NAME).truncate_after(session.clock.step)
            Records(folder.path / "metrics.jsonl").truncate_after(session.clock.kimg, key="kimg")
            forget_after(folder.path, session.clock.step)
            restore(folder.path)
            draw_reals(images, folder.path, session.game.labels is not None, run.nets)
        world.agree("open")
        yield session, desk


def assemble(
    run: Run, world: World, images: Images, pair: Pair, start: Loaded | None = None, rollbacks: int = 0
) -> Session:
    """A session on this rank, from a checkpoint or from the beginning."""
    game = build_game(changed_by(run, rollbacks), pair, images, world.device)
    clock = Clock(run.images, rollbacks=rollbacks)
    if start:
        try:
            for player in game.players:
                checkpoint.refuse_other_network(player, start.about)
                checkpoint.restore(player, start.tensors)
        except Damaged as error:
            raise Unusable(f"{start.path}: {error}; the paragan that wrote it may have been another") from error
        clock.step, clock.images, clock.seconds = start.step, start.images, start.seconds
        clock.moved = run.round_at(clock.images - 1)
    session = seat(run, world, images, game, clock)
    if start:
        checkpoint.restore_past(session.role, start.tensors)
    return session


def seat(run: Run, world: World, images: Images, game: Game, clock: Clock) -> Session:
    """What a session has of its world, as it is now: role, lanes and stats."""
    role = run.strategy.role(game, world, run.lanes)
    lanes = Lanes(
        images.images,
        game.labels,
        owned=role.share.lanes,
        lanes=run.lanes,
        batch=lambda position: stage(run, position)[1],
        seed=seed_of(run, clock.rollbacks),
        start=clock.images,
        stride=0 if game.d in role.moves else run.round,  # G's turn goes with the first of D's
        mirror=run.data.mirror,
        merge=run.device.merge,
        device=world.device,
        channels_last=run.device.layout_of("D") is torch.channels_last,
        feed=run.data.feed,
        cores=max(1, len(os.sched_getaffinity(0)) // world.place.local_size),
    )
    stats = Stats(world, game.players, role, lanes.told)
    stats.start_at(clock.images)
    return Session(run, world, game, role, clock, lanes, stats)


def find_checkpoint(checkpoints: Checkpoints, run: Run, images: Images, screen: Screen) -> Loaded | None:
    """The newest checkpoint that is whole; damaged ones are named and set aside. All ranks find the same."""
    world, there = checkpoints.world, checkpoint.complete(checkpoints.folder)
    loaded: Loaded | None = None

    def newest() -> str:
        nonlocal loaded
        loaded, damaged = checkpoint.newest(there, world.rank, world.size)
        for path, reason in damaged:
            screen.say(f"checkpoint {path} is damaged ({reason}); trying the one before")
        if damaged and not loaded:
            raise Unusable(f"every checkpoint in {checkpoints.folder} is damaged: start again with another --run-dir")
        if loaded and loaded.about["data"] != images.fingerprint:
            raise Unusable(f"--data {run.data.told} holds other images than those that {loaded.path} was trained on")
        if loaded:
            refuse_differences(loaded.about["run"], run, loaded.path)
        return str(loaded and loaded.path.name)

    found = world.agree(together(world, newest))
    if len(set(found)) > 1:
        raise Unusable(f"ranks see other checkpoints ({', '.join(found)}): put the run folder on storage they share")
    if world.first:
        for path in there[: there.index(loaded.path) if loaded else 0]:
            path.rename(path.with_name(f"damaged-{path.name}"))
    return loaded


def initialise(pair: Pair, model: Path) -> Pair:
    """Start from another run's model: its averaged generator, and its discriminator where there is one."""
    found = whole(folder_to_start_from(model))
    found.fill(pair.g)
    if "discriminator" in found.weights:
        found.fill(pair.d, "discriminator")
    return pair


def refuse_start(run: Run, spec: Spec) -> None:
    """Unusable where networks cannot start from the model that the run says."""
    if run.init_from:
        initialise(build_nets(run, spec, CPU), Path(run.init_from))


def warn_threads(threads: int | None, screen: Screen) -> None:
    if threads and threads != torch.get_num_threads():
        screen.say(
            f"this checkpoint was made with {threads} CPU threads, now there are {torch.get_num_threads()}: the same "
            f"training, but rounded differently (--device.threads={threads} repeats it bit for bit)"
        )


def warn_schedules(run: Run, start: Loaded, screen: Screen) -> None:
    """A run may become longer or shorter; a rate that falls until its end then falls otherwise from here on."""
    before = start.about["run"]["kimg"]
    for name, side in (("g", run.g), ("d", run.d)):
        if side.schedule != "constant" and before != run.kimg:
            now = side.rate(run.images)(start.images)
            screen.say(
                f"{name}.schedule={side.schedule} now ends at {run.kimg:g} kimg, not at {before:g}: its rate goes on "
                f"at {now:.0%} of the full one, and this is not what a run of {run.kimg:g} kimg would have been"
            )
