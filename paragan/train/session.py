"""TODO: docstring of paragan/train/session.py"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paragan.comm.world import World
from paragan.config.resolve import changed as changed_by
from paragan.config.resolve import seed as seed_of
from paragan.config.run import Run
from paragan.core.clock import Clock
from paragan.core.devices import huge_pages, keep_memory
from paragan.core.errors import Unusable
from paragan.core.rng import CPU
from paragan.data.dataset import Images
from paragan.data.lanes import Lanes
from paragan.game.game import Game
from paragan.models.model import folder_to_start_from
from paragan.models.model_files import whole
from paragan.nets import Spec
from paragan.strategies.base import Role
from paragan.train import checkpoint
from paragan.train.build import Pair, build_game, build_nets
from paragan.train.checkpoint import Checkpoints, Damaged, Loaded
from paragan.train.console import Screen
from paragan.train.rank_agreement import together
from paragan.train.run_dir import refuse_differences
from paragan.train.stats import Stats


def nobody() -> bool:
    """Asked for the end."""
    return False


@dataclass(frozen=True)
class Session:
    """One run under way on one rank. asked: whether the end is asked for, and known to be on this rank."""

    run: Run
    world: World
    game: Game
    role: Role
    clock: Clock
    lanes: Lanes
    stats: Stats
    asked: Callable[[], bool] = nobody


Observer = Callable[[Session], object]


def set_threads(run: Run, world: World) -> None:
    """This rank's part of the host's cores, unless the run says otherwise; and its memory."""
    huge_pages(run.device.huge_pages)
    keep_memory()
    if run.device.threads:
        torch.set_num_threads(run.device.threads)
    elif world.place.local_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.place.local_size))


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
        batch=run.batch_at,
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


def every(session: Session, kimg: float) -> bool:
    """Whether the round just played crossed a multiple of `kimg`."""
    return session.clock.crossed(round(1000 * kimg))
