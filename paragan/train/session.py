"""A session: everything one rank needs to play its rounds, built from a run record and, on resume, a checkpoint.

`Session` is what the loop and the callbacks get. It has parts that follow from the run (game, clock) and parts that
depend on the other ranks (role, lanes, stats): `rebind_to_world` rebuilds only the latter when ranks are lost or join.

The clock stands for all randomness and for the position in the data: both are functions of it, so a resumed session
continues exactly. After a rollback the learning rates and the seed are functions of the number of rollbacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paragan.comm import checkpoint_files, checkpoint_metadata
from paragan.comm.checkpoint_metadata import CorruptCheckpoint
from paragan.comm.world import World
from paragan.config.resolve import run_after_rollbacks, seed_after_rollbacks
from paragan.config.run import Run
from paragan.config.sections import DeviceOptions
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
from paragan.train.checkpoint import Checkpoints, CheckpointView
from paragan.train.console import RunConsole
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.run_dir_selection import check_same_inputs, check_same_run, other_data_error
from paragan.train.stats import StatsCollector


def never_stop() -> bool:
    """Return False: the default stop predicate."""
    return False


@dataclass(frozen=True)
class Session:
    """One run in progress on one rank.

    is_stopping : whether a stop was requested and this rank knows of it
    """

    run: Run
    world: World
    game: Game
    role: Role
    clock: Clock
    lanes: LaneLoader
    stats: StatsCollector
    is_stopping: Callable[[], bool] = never_stop


Callback = Callable[[Session], object]  # called after every round; decides itself whether it is due


def has_crossed_kimg(session: Session, kimg: float) -> bool:
    """Return True if the last round crossed a multiple of `kimg`."""
    return session.clock.has_crossed(round(1000 * kimg))


def callbacks_due(session: Session) -> bool:
    """Return True if a callback may need all ranks together after this round."""
    output = session.run.output
    periods_kimg = (
        output.tick_kimg,
        output.fakes_kimg,
        output.checkpoint_kimg,
        session.run.evaluation.every_kimg,
    )
    is_first = session.clock.step == 1
    return is_first or session.clock.is_done or any(has_crossed_kimg(session, kimg) for kimg in periods_kimg)


def set_process_options(options: DeviceOptions, world: World) -> None:
    """Set memory, kernels and CPU threads of this process: its share of the host's cores, unless the options say."""
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS depends on what ran before
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    set_huge_pages(options.huge_pages)
    tune_malloc()
    if options.threads:
        torch.set_num_threads(options.threads)
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
    """Build the session of this rank.

    Args:
        networks: initialised networks, which become the players.
        resume_from: the checkpoint to continue from; None to start.
        rollbacks: how often the run went back to a checkpoint before (health/rollback.py).

    Raises:
        UsageError: the checkpoint holds other networks.
    """
    game = build_game(run_after_rollbacks(run, rollbacks), networks, dataset, world.device)
    clock = Clock(run.total_images, rollbacks=rollbacks)
    if resume_from:
        try:
            for player in game.players:
                checkpoint.check_same_network(player, resume_from.metadata)
                checkpoint.restore_player(player, resume_from.tensors)
        except CorruptCheckpoint as error:
            raise UsageError(f"{resume_from.path}: {error}. Another version of paragan may have written it") from error
        clock.step = resume_from.step
        clock.images = resume_from.images
        clock.seconds = resume_from.seconds
        clock.last_round_images = run.current_round_images(clock.images - 1)
    session = rebind_to_world(run, world, dataset, game, clock)
    if resume_from:
        checkpoint.restore_replay_state(session.role, resume_from.tensors, world.device)
    return session


def rebind_to_world(run: Run, world: World, dataset: Dataset, game: Game, clock: Clock) -> Session:
    """Build the parts of a session that depend on the other ranks (role, lanes, stats) for the world as it is now."""
    role = run.strategy.role(game, world, run.lanes)
    lanes = LaneLoader(
        dataset.images,
        game.labels,
        local_lanes=role.share.lanes,
        num_lanes=run.lanes,
        batch_size=run.batch_at,
        seed=seed_after_rollbacks(run, clock.rollbacks),
        start=clock.images,
        # a rank of G alone plays once a round, on the data of D's first turn
        stride_images=0 if game.d in role.trained_players else run.round_images,
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
    """Return the newest readable checkpoint, the same on all ranks; None if there is none.

    Damaged ones are named and renamed to `damaged-*`.

    Raises:
        UsageError: all are damaged, the newest is of another run or other data, or ranks see different folders.
    """
    world = checkpoints.world
    paths = checkpoint_metadata.list_checkpoints(checkpoints.folder)
    loaded: CheckpointView | None = None

    def load_newest() -> str:
        nonlocal loaded
        loaded, damaged = checkpoint_files.read_newest(
            paths, lambda path: checkpoint.read_checkpoint(path, world.rank, world.size)
        )
        for path, reason in damaged:
            console.print(f"checkpoint {path} is damaged ({reason}); trying the one before")
        if loaded is None:
            if damaged:
                raise UsageError(
                    f"{checkpoints.folder}: every checkpoint is damaged. Use another --run-dir to start again"
                )
            return str(None)
        if loaded.metadata["data"] != dataset.fingerprint:
            raise other_data_error(run.data, loaded.path)
        check_same_run(loaded.metadata["run"], run, loaded.path)
        check_same_inputs(loaded.metadata["run"], run, loaded.path)
        return loaded.path.name

    names = world.all_gather_str(on_all_ranks(world, load_newest))
    if len(set(names)) > 1:
        raise UsageError(
            f"--run-dir: ranks see different checkpoints ({', '.join(names)}). Use storage that all ranks share"
        )
    if world.is_main:
        num_damaged = paths.index(loaded.path) if loaded else 0
        for path in paths[:num_damaged]:
            path.rename(path.with_name(f"damaged-{path.name}"))
    return loaded


def init_from_model(networks: Networks, model_path: Path) -> Networks:
    """Load the weights of another run's model: its averaged generator, and its discriminator if it has one."""
    model = read_consistent(find_init_model_dir(model_path))
    model.load_into(networks.g)
    if "discriminator" in model.weights:
        model.load_into(networks.d, "discriminator")
    return networks


def check_init_from(run: Run, spec: Spec) -> None:
    """Raise UsageError if the networks cannot start from the model that `init_from` names."""
    if run.init_from:
        init_from_model(build_networks(run, spec, CPU), Path(run.init_from))


def warn_threads(saved_threads: int | None, console: RunConsole) -> None:
    """Say that a checkpoint was written with another number of CPU threads, since results then round differently."""
    if saved_threads and saved_threads != torch.get_num_threads():
        console.print(
            f"this checkpoint was written with {saved_threads} CPU threads, now there are {torch.get_num_threads()}: "
            f"the same training, but rounded differently (--device.threads={saved_threads} repeats it bit for bit)"
        )


def warn_init_from(run: Run, resume_from: CheckpointView, console: RunConsole) -> None:
    """Say that the model that `init_from` names has changed since the run started from it, which has no effect."""
    saved = resume_from.metadata["run"].get("fingerprints", {}).get("init_from", "")
    current = run.fingerprints.init_from
    if saved and current and saved != current:
        console.print(f"--init-from {run.init_from}: has other weights now; this run started from the former ones")


def warn_schedules(run: Run, resume_from: CheckpointView, console: RunConsole) -> None:
    """Say how learning rate schedules change when a run is resumed with another length."""
    kimg_before = resume_from.metadata["run"]["kimg"]
    for name, player_optim in (("g", run.g), ("d", run.d)):
        if player_optim.ends_with_run and kimg_before != run.kimg:
            factor = player_optim.lr_schedule(run.total_images)(resume_from.images)
            console.print(
                f"{name}.schedule={player_optim.schedule} now ends at {run.kimg:g} kimg, not at {kimg_before:g}: the "
                f"learning rate continues at {factor:.0%} of the full one, unlike in a new run of {run.kimg:g} kimg"
            )
