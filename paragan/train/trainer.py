"""From a run record to a finished run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paragan.comm.elastic.elastic_world import ElasticWorld
from paragan.comm.sockets import is_listening
from paragan.comm.world import LaunchInfo, World
from paragan.config.resolve import load_dataset, make_spec, resolve
from paragan.config.run import Run
from paragan.config.user_code import is_user_defined
from paragan.config.validate import (
    check_d_conditioning,
    check_gradient_penalty,
    check_weight_clip,
    describe_unreached_stages,
)
from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.nets.conditioning import resolve_d_conditioning
from paragan.report.page import write_report
from paragan.strategies import lag_trace
from paragan.train.build import build_game, build_networks, make_teacher
from paragan.train.callbacks.best_model import BestModelTracker, recover_interrupted_publish, resolve_best_metric
from paragan.train.callbacks.log import BadFilesCallback, LogCallback
from paragan.train.callbacks.report_figures import make_final_figures
from paragan.train.callbacks.sample_images import SampleCallback, draw_reals
from paragan.train.callbacks.save import CheckpointCallback
from paragan.train.callbacks.scoring import ScoringCallback, check_evaluation, make_feature_space
from paragan.train.checkpoint import Checkpoints
from paragan.train.console import RunConsole
from paragan.train.elastic_loop import ElasticTrainer
from paragan.train.health.monitor import HealthMonitor, drop_findings_after
from paragan.train.health.rollback import retire_undone_checkpoints, roll_back
from paragan.train.health.rollback_request import RollbackRequested
from paragan.train.loop import run_training_loop
from paragan.train.rank_agreement import check_same_config, locked_run_dir, on_all_ranks
from paragan.train.run_dir import RunDir, RunDirRequest, check_same_run, config_changes, find_live_runs
from paragan.train.session import (
    Callback,
    Session,
    build_session,
    check_init_from,
    find_checkpoint,
    init_from_model,
    rebind_to_world,
    set_threads,
    warn_schedules,
    warn_threads,
)

LOAD_TIMEOUT_S = 1800.0  # ranks may find the data at very different speed


DecideFn = Callable[[Run, Dataset, World, RunDirRequest, RunConsole], Run]


@dataclass(frozen=True)
class RunningRun:
    """A run that this rank comes to while others play it."""

    run_dir: RunDir
    run: Run
    dataset: Dataset


@dataclass
class TrainJob:
    """What a train command asks of one rank. decide: what a run is changed to before it begins."""

    run: Run
    launch_info: LaunchInfo
    request: RunDirRequest
    decide: DecideFn | None = None
    existing: RunningRun | None = None

    def join_world(self, device: torch.device) -> World:
        """Meet the other ranks: at MASTER_ADDR, or in the run where they play already (Elastic)."""
        run, place, lost_after_s = self.run, self.launch_info, self.run.strategy.rank_loss_timeout_s
        if place.size == 1 or not lost_after_s or device.type != "cpu":
            return World.join(place, device, run.timeout_s)
        for folder, addresses, data in find_live_runs(self.request):
            try:
                there = self._match_running_run(folder, data) if any(map(is_listening, addresses.values())) else None
            except UsageError as error:  # the others play on
                raise UsageError(str(error), same_on_all_ranks=False) from error
            if not there:
                continue
            RunConsole().print(f"rank {place.rank} asks to be let into {folder.path}, at its next line of stats")
            world = ElasticWorld.join_run(place, device, run.timeout_s, lost_after_s, addresses)
            if world:
                self.existing = there
                return world
        return ElasticWorld.start(place, device, run.timeout_s, lost_after_s)

    def _match_running_run(self, run_dir: RunDir, fingerprint: str) -> RunningRun | None:
        """The run in a folder, where it is ours; refused where it was given as --run-dir and is not."""
        images, former = load_dataset(self.run), run_dir.read_run_config() or {}
        run = prepare(self.run, images)
        if self.request.run_dir:
            check_same_run(former, run, run_dir.path)
        elif config_changes(former, run):
            return None
        if any(side.schedule != "constant" for side in (run.g, run.d)) and former.get("kimg") != run.kimg:
            raise UsageError(
                f"{run_dir.path} ends at {former.get('kimg')} kimg, and rates fall until then: repeat --kimg"
            )
        if fingerprint != images.fingerprint:
            raise UsageError(
                f"--data {run.data.redacted_path} holds other images than those that {run_dir.path} is trained on"
            )
        return RunningRun(run_dir, run, images)

    def train(self, world: World, console: RunConsole) -> Path:
        """The training itself; where it is written."""
        if self.existing:
            return join_running(self.existing, world, console)
        return train(self.run, world, self.request, console, self.decide)


def join_running(existing: RunningRun, world: World, console: RunConsole) -> Path:
    """Train with those who play already, from where they are."""
    run, images = existing.run, existing.dataset
    set_threads(run, world)
    alone = build_session(
        run, World.solo(world.device), images, build_networks(run, make_spec(run, images), world.device)
    )
    session = replace(alone, world=world)  # the others are met when it is their turn to meet: Table seats it anew
    checkpoints = Checkpoints(existing.run_dir.checkpoints_dir, world, run.output.max_checkpoints)
    with make_callbacks(run, existing.run_dir, images, console, checkpoints) as desk:
        run_session(session, desk, existing.run_dir, images, console)
    if world.is_main:
        make_final_figures(existing.run_dir.path, run.nets, images, world.device, console)
        write_report(existing.run_dir.path)
    return existing.run_dir.path


def run_session(
    session: Session,
    callbacks: Callbacks,
    run_dir: RunDir,
    dataset: Dataset,
    console: RunConsole,
    extra_callbacks: Sequence[Callback] = (),
) -> str:
    """From where the session stands to its end; see `train`."""
    late = ""
    world, observers = (
        session.world,
        [
            *extra_callbacks,
            callbacks.log,
            callbacks.bad_files,
            callbacks.samples,
            callbacks.checkpoint,
            callbacks.scoring,
        ],
    )
    if isinstance(world, ElasticWorld):
        table = ElasticTrainer(
            world,
            run_dir,
            dataset,
            console,
            callbacks.checkpoint,
            lambda s: rebind_to_world(s.run, world, dataset, s.game, s.clock),
        )
        table.train(session, observers, callbacks.finish)
    else:
        console.start(session.clock.kimg, session.run.total_images / 1000)

        def on_stop(session: Session) -> None:
            for look in (*extra_callbacks, callbacks.checkpoint.save):
                look(session)

        late = run_training_loop(session, observers, on_stop)
    console.stop()
    return late


def train(run: Run, world: World, request: RunDirRequest, console: RunConsole, decide: DecideFn | None = None) -> Path:
    """Train as the record says, on this rank of this world, and leave a complete run folder."""
    set_threads(run, world)
    images = on_all_ranks(world, lambda: load_dataset(run), LOAD_TIMEOUT_S)
    run = on_all_ranks(world, lambda: prepare(run, images))
    check_same_config(run, world)
    if decide:
        run = decide(run, images, world, request, console)
        set_threads(run, world)
    console.print(images.describe())
    with locked_run_dir(run, world, request, lambda: check_init_from(run, make_spec(run, images))) as folder:
        if there := folder.completed_duplicate:
            done = f"{there.path} is the same run, at {there.trained_images / 1000:g} kimg"
            console.print(f"{done}; this is a new one (--resume {there.path} --kimg K extends that)")
        console.print(f"run folder {folder.path}")
        if world.size == 1 and run.strategy.wire.lossy:
            console.print(f"one rank sends nothing: the {run.strategy.wire.name} wire has no effect")
        if late := describe_unreached_stages(run):
            console.print(late)
        train_in_dir(folder, run, world, images, console)
        return folder.path


def train_in_dir(
    run_dir: RunDir,
    run: Run,
    world: World,
    dataset: Dataset,
    console: RunConsole,
    extra_callbacks: Sequence[Callback] = (),
) -> tuple[Session, str]:
    """Train in a folder that is ours, until all is there that a run leaves: the session at its end, and the signal that
    came too late for it. watchers: who looks on beside the desk, before it, and before the first round too."""
    while True:
        try:
            return train_from_checkpoint(run_dir, run, world, dataset, console, extra_callbacks)
        except RollbackRequested as undo:
            roll_back(run_dir, run, world, console, undo)


def train_from_checkpoint(
    run_dir: RunDir, run: Run, world: World, dataset: Dataset, console: RunConsole, extra_callbacks: Sequence[Callback]
) -> tuple[Session, str]:
    """The same, from the newest checkpoint on, or until what was played is to be undone."""
    with open_session(run, world, run_dir, dataset, console) as (session, desk):
        for watcher in extra_callbacks:
            watcher(session)
        if session.clock.is_done:
            console.print(f"{run_dir.path} is complete at {session.clock.kimg:g} kimg; --kimg extends it")
            desk.checkpoint.write_model(session)  # it may have been stopped right after its last checkpoint
        elif session.clock.rollbacks:
            desk.checkpoint.replace_model(session)  # what stands there may have been undone
        if session.clock.images:
            desk.scoring(session)  # it may have been stopped while it was scored
        if session.role.description:
            console.print(session.role.description)
        late = run_session(session, desk, run_dir, dataset, console, extra_callbacks)
    if world.is_main:
        make_final_figures(run_dir.path, run.nets, dataset, world.device, console)
        write_report(run_dir.path)
    return session, late


def prepare(run: Run, dataset: Dataset) -> Run:
    """The complete record. Unusable is what could not be trained, or not be scored."""
    run = resolve(run, dataset)
    own = is_user_defined(run.nets, run.objective)
    if not own:
        check_weight_clip(run.objective, run.nets.spectral)
        check_gradient_penalty(run.objective, getattr(run.nets, "batch_norm", False))
        if not run.per_label:  # each of whose games has no labels, and is resolved by itself
            check_d_conditioning(run.objective, resolve_d_conditioning(run.nets, make_spec(run, dataset)))
    check_evaluation(run.evaluation, dataset, run.output.best_metric)
    if run.distill_from:
        make_teacher(run, dataset, CPU)
    if own and not run.per_label:
        plainly = replace(run, device=replace(run.device, compile=False), distill_from="")
        build_game(plainly, build_networks(plainly, make_spec(run, dataset), CPU), dataset, CPU)  # tries them
    return run


@dataclass(frozen=True)
class Callbacks:
    """Who looks on while a session is played."""

    log: LogCallback
    samples: SampleCallback
    checkpoint: CheckpointCallback
    scoring: ScoringCallback
    bad_files: BadFilesCallback

    def finish(self, session: Session) -> None:
        """What the end of a run leaves, whether or not somebody was lost while it was written."""
        self.checkpoint.forget_saved_step()
        self.checkpoint(session)
        self.scoring(session)


@contextlib.contextmanager
def make_callbacks(
    run: Run, run_dir: RunDir, dataset: Dataset, console: RunConsole, checkpoints: Checkpoints
) -> Iterator[Callbacks]:
    log = LogCallback(
        run_dir.path,
        console,
        checkpoints.latest_message,
        HealthMonitor(run_dir.path, console, run.health, run.on_divergence),
    )
    save, wanted = CheckpointCallback(run_dir.path, checkpoints, dataset, log), run.evaluation
    best = BestModelTracker(
        run_dir.path,
        save,
        resolve_best_metric(run.output.best_metric, wanted.metrics, make_feature_space(wanted, dataset)),
    )
    try:
        yield Callbacks(
            log,
            SampleCallback(run_dir.path, dataset, log),
            save,
            ScoringCallback(run_dir.path, dataset, console, wanted, best),
            BadFilesCallback(run_dir.path, dataset),
        )
    finally:
        console.stop()
        log.close()


@contextlib.contextmanager
def open_session(
    run: Run, world: World, run_dir: RunDir, dataset: Dataset, console: RunConsole
) -> Iterator[tuple[Session, Callbacks]]:
    """Everything a run needs, from its newest good checkpoint on."""
    pair = build_networks(run, make_spec(run, dataset), world.device)
    checkpoints = Checkpoints(run_dir.checkpoints_dir, world, run.output.max_checkpoints)
    rollbacks = retire_undone_checkpoints(run_dir, world)
    start = find_checkpoint(checkpoints, run, dataset, console)
    if run.init_from and not start:
        on_all_ranks(world, lambda: init_from_model(pair, Path(run.init_from)))
    session = build_session(run, world, dataset, pair, start, rollbacks)
    with make_callbacks(run, run_dir, dataset, console, checkpoints) as desk:
        if run.device.compile or (run.device.capture_passes and world.device.type == "cpu"):
            console.print("the first rounds compile what they play: a minute or two, less where torch has kept it")
        if start:
            warn_threads(start.metadata.get("threads"), console)
            warn_schedules(run, start, console)
            console.print(f"resumed from {start.path} at {session.clock.kimg:g} kimg")
        if world.is_main:
            checkpoints.clear_unfinished()
            desk.log.stats_file.truncate_after(session.clock.step)
            JsonlFile(run_dir.path / lag_trace.LAGS_FILE).truncate_after(session.clock.step)
            JsonlFile(run_dir.path / "metrics.jsonl").truncate_after(session.clock.kimg, key="kimg")
            drop_findings_after(run_dir.path, session.clock.step)
            recover_interrupted_publish(run_dir.path)
            draw_reals(dataset, run_dir.path, session.game.labels is not None, run.nets)
        world.all_gather_str("open")
        yield session, desk
