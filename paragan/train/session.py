"""TODO: docstring of paragan/train/session.py"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paragan.comm.world import World
from paragan.config.resolve import run_after_rollbacks as changed_by
from paragan.config.resolve import seed_after_rollbacks as seed_of
from paragan.config.run import Run
from paragan.core.clock import Clock
from paragan.core.devices import set_huge_pages, tune_malloc
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.data.lanes import LaneLoader
from paragan.game.game import Game
from paragan.models.model import find_init_model_dir
from paragan.models.model_files import read_consistent
from paragan.nets import Spec
from paragan.strategies.base import Role
from paragan.train import checkpoint
from paragan.train.build import Networks, build_game, build_networks
from paragan.train.checkpoint import Checkpoints, CheckpointView, CorruptCheckpoint
from paragan.train.console import RunConsole
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.run_dir import check_same_run
from paragan.train.stats import StatsCollector


def never_stop() -> bool:
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
    lanes: LaneLoader
    stats: StatsCollector
    is_stopping: Callable[[], bool] = never_stop


Callback = Callable[[Session], object]


def set_threads(run: Run, world: World) -> None:
    """This rank's part of the host's cores, unless the run says otherwise; and its memory."""
    set_huge_pages(run.device.huge_pages)
    tune_malloc()
    if run.device.threads:
        torch.set_num_threads(run.device.threads)
    elif world.launch_info.local_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.launch_info.local_size))


def build_session(
    run: Run,
    world: World,
    dataset: Dataset,
    networks: Networks,
    resume_from: CheckpointView | None = None,
    rollbacks: int = 0,
) -> Session:
    """A session on this rank, from a checkpoint or from the beginning."""
    game = build_game(changed_by(run, rollbacks), networks, dataset, world.device)
    clock = Clock(run.total_images, rollbacks=rollbacks)
    if resume_from:
        try:
            for player in game.players:
                checkpoint.check_same_network(player, resume_from.metadata)
                checkpoint.restore_player(player, resume_from.tensors)
        except CorruptCheckpoint as error:
            raise UsageError(f"{resume_from.path}: {error}; the paragan that wrote it may have been another") from error
        clock.step, clock.images, clock.seconds = resume_from.step, resume_from.images, resume_from.seconds
        clock.last_round_images = run.current_round_images(clock.images - 1)
    session = rebind_to_world(run, world, dataset, game, clock)
    if resume_from:
        checkpoint.restore_replay_state(session.role, resume_from.tensors)
    return session


def rebind_to_world(run: Run, world: World, dataset: Dataset, game: Game, clock: Clock) -> Session:
    """What a session has of its world, as it is now: role, lanes and stats."""
    role = run.strategy.role(game, world, run.lanes)
    lanes = LaneLoader(
        dataset.images,
        game.labels,
        local_lanes=role.share.lanes,
        num_lanes=run.lanes,
        batch_size=run.batch_at,
        seed=seed_of(run, clock.rollbacks),
        start=clock.images,
        stride_images=0 if game.d in role.trained_players else run.round_images,  # G's turn goes with the first of D's
        mirror=run.data.mirror,
        lanes_per_pass=run.device.lanes_per_pass,
        device=world.device,
        channels_last=run.device.memory_format_of("D") is torch.channels_last,
        prefetch=run.data.prefetch,
        cores=max(1, len(os.sched_getaffinity(0)) // world.launch_info.local_size),
    )
    stats = StatsCollector(world, game.players, role, lanes.stats)
    stats.start_from(clock.images)
    return Session(run, world, game, role, clock, lanes, stats)


def find_checkpoint(checkpoints: Checkpoints, run: Run, dataset: Dataset, console: RunConsole) -> CheckpointView | None:
    """The newest checkpoint that is whole; damaged ones are named and set aside. All ranks find the same."""
    world, there = checkpoints.world, checkpoint.list_checkpoints(checkpoints.folder)
    loaded: CheckpointView | None = None

    def load_newest() -> str:
        nonlocal loaded
        loaded, damaged = checkpoint.read_newest(there, world.rank, world.size)
        for path, reason in damaged:
            console.print(f"checkpoint {path} is damaged ({reason}); trying the one before")
        if damaged and not loaded:
            raise UsageError(f"every checkpoint in {checkpoints.folder} is damaged: start again with another --run-dir")
        if loaded and loaded.metadata["data"] != dataset.fingerprint:
            raise UsageError(
                f"--data {run.data.redacted_path} holds other images than those that {loaded.path} was trained on"
            )
        if loaded:
            check_same_run(loaded.metadata["run"], run, loaded.path)
        return str(loaded and loaded.path.name)

    found = world.all_gather_str(on_all_ranks(world, load_newest))
    if len(set(found)) > 1:
        raise UsageError(f"ranks see other checkpoints ({', '.join(found)}): put the run folder on storage they share")
    if world.is_main:
        for path in there[: there.index(loaded.path) if loaded else 0]:
            path.rename(path.with_name(f"damaged-{path.name}"))
    return loaded


def init_from_model(networks: Networks, model_path: Path) -> Networks:
    """Start from another run's model: its averaged generator, and its discriminator where there is one."""
    found = read_consistent(find_init_model_dir(model_path))
    found.load_into(networks.g)
    if "discriminator" in found.weights:
        found.load_into(networks.d, "discriminator")
    return networks


def check_init_from(run: Run, spec: Spec) -> None:
    """Unusable where networks cannot start from the model that the run says."""
    if run.init_from:
        init_from_model(build_networks(run, spec, CPU), Path(run.init_from))


def warn_threads(saved_threads: int | None, console: RunConsole) -> None:
    if saved_threads and saved_threads != torch.get_num_threads():
        console.print(
            f"this checkpoint was made with {saved_threads} CPU threads, now there are {torch.get_num_threads()}: the same "
            f"training, but rounded differently (--device.threads={saved_threads} repeats it bit for bit)"
        )


def warn_schedules(run: Run, resume_from: CheckpointView, console: RunConsole) -> None:
    """A run may become longer or shorter; a rate that falls until its end then falls otherwise from here on."""
    before = resume_from.metadata["run"]["kimg"]
    for name, side in (("g", run.g), ("d", run.d)):
        if side.schedule != "constant" and before != run.kimg:
            now = side.lr_schedule(run.total_images)(resume_from.images)
            console.print(
                f"{name}.schedule={side.schedule} now ends at {run.kimg:g} kimg, not at {before:g}: its rate goes on "
                f"at {now:.0%} of the full one, and this is not what a run of {run.kimg:g} kimg would have been"
            )


def has_crossed_kimg(session: Session, kimg: float) -> bool:
    """Whether the round just played crossed a multiple of `kimg`."""
    return session.clock.has_crossed(round(1000 * kimg))
