"""From a run record to a finished run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..clock import Clock
from ..comm.world import World
from ..data.lanes import Lanes
from ..data.source import Images
from ..errors import Unusable
from ..report.page import write_report
from ..report.records import Records
from . import checkpoint
from .checkpoint import Checkpoints, Damaged
from .folder import RunFolder, Wanted, choose, refuse_differences
from .loop import Observer, Session, train
from .model import load_weights
from .observers import Log, Pictures, Save
from .progress import Screen
from .run import Pair, Run, build_game, build_nets, load_images, resolve, spec_of
from .scoring import Scoring
from .stats import Stats

T = TypeVar("T")
LOAD_TIMEOUT_S = 1800.0  # ranks may find the data at very different speed


def execute(run: Run, world: World, wanted: Wanted, screen: Screen) -> Path:
    """Train as the record says, on this rank of this world, and leave a complete run folder."""
    set_threads(run, world)
    images = together(world, lambda: load_images(run), LOAD_TIMEOUT_S)
    run = together(world, lambda: resolve(run, images))
    screen.say(images.describe())
    with owned_folder(run, world, wanted) as folder:
        screen.say(f"run folder {folder.path}")
        with open_session(run, world, folder, images, screen) as opened:
            session, observers, save = opened
            if session.clock.done:
                screen.say(f"{folder.path} is complete at {session.clock.kimg:g} kimg; --kimg extends it")
            screen.start(session.clock.kimg, session.run.images / 1000)
            train(session, observers, save.save)
            screen.stop()
        if world.first:
            write_report(folder.path)
        return folder.path


def together(world: World, action: Callable[[], T], timeout_s: float | None = None) -> T:
    """Do it on every rank, and go on only if all could: else every rank refuses, with everyone's reasons."""
    result, reason = None, ""
    try:
        result = action()
    except Unusable as error:
        reason = str(error)
    reasons = world.agree(reason, timeout_s)
    if any(reasons):
        distinct = dict.fromkeys(r for r in reasons if r)
        ranks = {r: [i for i, other in enumerate(reasons) if other == r] for r in distinct}
        some = len(ranks) > 1 or any(len(who) < world.size for who in ranks.values())
        raise Unusable(
            "; ".join((f"rank {', '.join(map(str, who))}: " if some else "") + r for r, who in ranks.items())
        )
    assert result is not None
    return result


def set_threads(run: Run, world: World) -> None:
    """This rank's part of the host's cores, unless the run says otherwise."""
    if run.device.threads:
        torch.set_num_threads(run.device.threads)
    elif world.place.local_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.place.local_size))


@contextlib.contextmanager
def owned_folder(run: Run, world: World, wanted: Wanted) -> Iterator[RunFolder]:
    """The run's folder, chosen and locked by rank 0."""
    mine: RunFolder | None = None

    def pick() -> str:
        nonlocal mine
        if world.first:
            mine = choose(wanted, run, world.size)
            mine.write_record(run)
            return str(mine.path)
        return "."

    picked = together(world, pick)
    path = Path(world.agree(picked)[0])
    try:
        yield mine or RunFolder(path)
    finally:
        if mine:
            mine.release()


@contextlib.contextmanager
def open_session(
    run: Run, world: World, folder: RunFolder, images: Images, screen: Screen
) -> Iterator[tuple[Session, list[Observer], Save]]:
    """Everything a run needs, from its newest good checkpoint on."""
    pair = build_nets(run, spec_of(run, images), world.device)
    checkpoints = Checkpoints(folder.checkpoints, world, run.output.keep)
    found = together(world, lambda: Found(find_checkpoint(checkpoints, run, images, screen)))
    if run.init_from and not found.path:
        initialise(pair, Path(run.init_from))
    session = assemble(run, world, images, pair, found.path)
    clock = session.clock
    if found.path:
        warn_threads(checkpoint.read_about(found.path).get("threads"), screen)
        screen.say(f"resumed from {found.path} at {clock.kimg:g} kimg")
    log = Log(folder.path, screen, checkpoints.standing)
    if world.first:
        checkpoints.clear_unfinished()
        log.stats.truncate_after(clock.step)
        Records(folder.path / "metrics.jsonl").truncate_after(clock.kimg, key="kimg")
    world.agree("open")
    pictures, save = Pictures(folder.path, images, log), Save(folder.path, checkpoints, images, log)
    if world.first and not (folder.path / "reals.png").exists():
        pictures.draw_reals(session.game.labels is not None)
    try:
        yield session, [log, pictures, save, Scoring(folder.path, images, screen)], save
    finally:
        screen.stop()
        session.lanes.close()
        log.close()


def assemble(run: Run, world: World, images: Images, pair: Pair, start: Path | None = None) -> Session:
    """A session on this rank, from a checkpoint or from the beginning."""
    game = build_game(run, pair, images, world.device)
    role = run.strategy.role(game, world, run.lanes)
    clock = Clock(run.images)
    if start:
        loaded = checkpoint.read(start, world.rank, world.size)
        for player in game.players:
            checkpoint.restore(player, loaded.tensors)
        clock.step, clock.images = loaded.step, loaded.images
    stats = Stats(world, game.players)
    stats.start_at(clock.images)
    lanes = Lanes(
        images.images,
        game.labels,
        owned=role.share.lanes,
        lanes=run.lanes,
        batch=run.batch,
        seed=run.seed,
        start=clock.images,
        mirror=run.data.mirror,
        merge=run.device.merge,
        device=world.device,
        channels_last=run.device.channels_last,
    )
    return Session(run, world, game, role, clock, lanes, stats)


@dataclass(frozen=True)
class Found:
    path: Path | None


def find_checkpoint(checkpoints: Checkpoints, run: Run, images: Images, screen: Screen) -> Path | None:
    """The newest checkpoint that is whole; says which ones are not. Every rank reads, so all find the same."""
    for path in checkpoint.complete(checkpoints.folder):
        try:
            about = checkpoint.read(path, checkpoints.world.rank, checkpoints.world.size).about
        except Damaged as error:
            screen.say(f"checkpoint {path} is damaged ({error}); trying the one before")
            continue
        if about["data"] != images.fingerprint:
            raise Unusable(
                f"--data {run.data.path} holds other images than those this run was trained on; {path} stays"
            )
        refuse_differences(about["run"], run, path)
        return path
    if checkpoint.complete(checkpoints.folder):
        raise Unusable(f"every checkpoint in {checkpoints.folder} is damaged: start again with another --run-dir")
    return None


def initialise(pair: Pair, model: Path) -> None:
    """Start from another run's model: its averaged generator, and its discriminator where there is one."""
    folder = next((f for f in (model, model / "model", model.parent) if (f / "model.safetensors").exists()), None)
    if folder is None:
        raise Unusable(f"--init-from {model}: there is no model.safetensors; give a run folder or its model folder")
    load_weights(pair.g, folder / "model.safetensors")
    if (folder / "discriminator.safetensors").exists():
        load_weights(pair.d, folder / "discriminator.safetensors")


def warn_threads(threads: int | None, screen: Screen) -> None:
    if threads and threads != torch.get_num_threads():
        screen.say(
            f"this checkpoint was made with {threads} CPU threads, now there are {torch.get_num_threads()}: the same "
            f"training, but rounded differently (--device.threads={threads} repeats it bit for bit)"
        )
