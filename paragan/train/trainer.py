"""Train a run from its record to a complete run folder, on one rank of a world.

`TrainJob` is the entry point of the command line and the API. The nesting, outermost first:

    train                  load data, fill in and check the record, agree with the other ranks, choose the folder
    train_in_dir           repeat after every rollback
    train_from_checkpoint  open a session from the newest checkpoint; afterwards figures and the report
    run_session            run the training loop, or the elastic one

Anything a user can get wrong is refused before a folder is created.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paragan.comm.elastic.elastic_world import ElasticWorld
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.sockets import is_listening
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.run import Run, may_differ_when_joining, to_saved_dict
from paragan.config.validate import (
    describe_unused_length,
)
from paragan.core.devices import release_memory
from paragan.core.errors import DeviceOutOfMemory, UsageError
from paragan.data.dataset import Dataset
from paragan.report.page import write_report
from paragan.train.build import build_networks
from paragan.train.callbacks.best_model import BestModelTracker, recover_interrupted_publish, resolve_best_metric
from paragan.train.callbacks.log import BadFilesCallback, LogCallback, drop_lines_after
from paragan.train.callbacks.report_figures import make_final_figures
from paragan.train.callbacks.sample_images import SampleCallback, draw_reals
from paragan.train.callbacks.save import CheckpointCallback
from paragan.train.callbacks.scoring import ScoringCallback, make_feature_space
from paragan.train.checkpoint import Checkpoints
from paragan.train.console import RunConsole
from paragan.train.elastic_loop import ElasticTrainer
from paragan.train.health.monitor import HealthMonitor
from paragan.train.health.rollback import retire_undone_checkpoints, roll_back
from paragan.train.health.rollback_request import RollbackRequested
from paragan.train.loggers.logger import RunInfo
from paragan.train.loggers.logger_set import LoggerSet, open_loggers
from paragan.train.loop import run_training_loop
from paragan.train.prepare import prepare, prepare_on_all_ranks
from paragan.train.rank_agreement import locked_run_dir, on_all_ranks
from paragan.train.remote_run.remote_run import RemoteRun, open_remote_run
from paragan.train.run_dir import RunDir
from paragan.train.run_dir_selection import RunDirRequest, check_same_settings, config_changes, find_live_runs
from paragan.train.session import (
    Callback,
    Session,
    build_session,
    check_init_from,
    find_checkpoint,
    init_from_model,
    rebind_to_world,
    set_process_options,
    warn_init_from,
    warn_schedules,
    warn_threads,
)

# (run, dataset, world, request, console) -> the run with everything decided that was left open
DecideFn = Callable[[Run, Dataset, World, RunDirRequest, RunConsole], Run]
# (run, dataset, world, torch's reason) -> the error of a run that ran out of memory on the device of this rank
ExplainFn = Callable[[Run, Dataset, World, str], DeviceOutOfMemory]


@dataclass(frozen=True)
class RunningRun:
    """A run that other ranks are training and that this rank joins."""

    run_dir: RunDir
    run: Run
    dataset: Dataset


@dataclass
class TrainJob:
    """What a train command asks of one rank.

    decide   : completes a run whose strategy or settings were left open, before training starts
    explain  : says which settings would fit, if the device runs out of memory
    existing : the running run that this rank joins, set by `join_world`
    """

    run: Run
    launch_info: LaunchInfo
    request: RunDirRequest
    decide: DecideFn | None = None
    explain: ExplainFn | None = None
    existing: RunningRun | None = None

    def join_world(self, device: torch.device) -> World:
        """Connect to the other ranks: at MASTER_ADDR, or, with an elastic strategy, in the run they are training.

        A process group that exists is used instead. It ends with the first rank that is lost.
        """
        run = self.run
        rank_loss_timeout_s = run.strategy.rank_loss_timeout_s
        min_ranks = run.strategy.min_surviving_ranks
        if self.launch_info.size == 1 or not rank_loss_timeout_s or World.can_adopt():
            return World.join(self.launch_info, device, run.timeout_s)
        for run_dir, addresses, fingerprint in find_live_runs(self.request):
            if not any(is_listening(address.host, address.port) for address in addresses.values()):
                continue
            try:
                running = self._match_running_run(run_dir, fingerprint)
            except UsageError as error:  # refuses this rank only, the others train on
                raise UsageError(str(error), same_on_all_ranks=False) from error
            if not running:
                continue
            RunConsole().print(
                f"rank {self.launch_info.rank} asks to join {run_dir.path}; it is admitted at the next line of stats"
            )
            world = ElasticWorld.join_run(
                self.launch_info, device, run.timeout_s, rank_loss_timeout_s, addresses, min_ranks
            )
            if world:
                self.existing = running
                return world
        return ElasticWorld.start(self.launch_info, device, run.timeout_s, rank_loss_timeout_s, min_ranks=min_ranks)

    def _match_running_run(self, run_dir: RunDir, fingerprint: str) -> RunningRun | None:
        """Return the run in a folder if it is the one asked for, else None.

        Raises:
            UsageError: the folder was named with --run-dir, and is trained with other settings or data.
        """
        previous = run_dir.read_run_config() or {}
        prepared = prepare(self.run, self.launch_info.size)
        run = prepared.run
        dataset = prepared.dataset
        if self.request.run_dir:
            check_same_settings(previous, run, run_dir.path)
        elif config_changes(previous, run, may_differ_when_joining):
            return None
        if fingerprint != dataset.fingerprint:
            raise UsageError(
                f"--data {run.data.redacted_path}: not the images that {run_dir.path} is trained on. Use those"
            )
        return RunningRun(run_dir, run, dataset)

    def train(self, world: World, console: RunConsole) -> Path:
        """Train to the end of the run. Returns the run folder."""
        if self.existing:
            return join_running(self.existing, world, console)
        return train(self.run, world, self.request, console, self.decide, self.explain)


def join_running(existing: RunningRun, world: World, console: RunConsole) -> Path:
    """Train together with ranks that are already training, from the state they are in. Returns the run folder."""
    run = existing.run
    dataset = existing.dataset
    set_process_options(run.device, world)
    networks = build_networks(run, make_spec(run.data, dataset), world.device)
    solo_session = build_session(run, World.solo(world.device), dataset, networks)
    session = replace(solo_session, world=world)  # ElasticTrainer rebinds it when the others admit this rank
    checkpoints = Checkpoints(existing.run_dir.checkpoints_dir, world, run.output.max_checkpoints)
    with make_callbacks(run, existing.run_dir, dataset, console, checkpoints) as callbacks:
        run_session(session, callbacks, existing.run_dir, dataset, console)
    if world.is_main:
        make_final_figures(existing.run_dir.path, run.nets, dataset, world.device, console)
        write_report(existing.run_dir.path)
    return existing.run_dir.path


def train(
    run: Run,
    world: World,
    request: RunDirRequest,
    console: RunConsole,
    decide: DecideFn | None = None,
    explain: ExplainFn | None = None,
) -> Path:
    """Train the run of a record on this rank. Every rank of the world calls this. Returns the run folder."""
    set_process_options(run.device, world)
    prepared = prepare_on_all_ranks(run, world)
    run = prepared.run
    dataset = prepared.dataset
    with open_remote_run(request.address, run.output.upload_s, world, console) as remote:
        if decide:
            reason = ""
            try:
                run = decide(run, dataset, world, request, console)
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
            if reason:
                raise _out_of_memory(run, dataset, world, reason, explain)
            set_process_options(run.device, world)
        console.print(dataset.describe())
        return train_prepared(run, dataset, world, request, console, explain, remote)


def train_prepared(
    run: Run,
    dataset: Dataset,
    world: World,
    request: RunDirRequest,
    console: RunConsole,
    explain: ExplainFn | None,
    remote: RemoteRun | None,
) -> Path:
    """Choose the folder of a run that is decided, and train in it. Returns the folder."""
    with locked_run_dir(run, world, request, lambda: check_init_from(run, make_spec(run.data, dataset))) as run_dir:
        run_dir.is_shared = remote is None or remote.shares_folder
        duplicate = run_dir.completed_duplicate
        if duplicate:
            console.print(
                f"{duplicate.path} is the same run, at {duplicate.trained_images / 1000:g} kimg; this is a new one "
                f"(--resume {duplicate.path} --kimg K extends that)"
            )
        console.print(f"run folder {run_dir.path}" + (f", a copy of {remote.folder.address}" if remote else ""))
        if world.size == 1 and run.strategy.wire.lossy:
            console.print(f"one rank sends nothing: the {run.strategy.wire.name} wire has no effect")
        for note in describe_unused_length(run):
            console.print(note)
        train_in_dir(run_dir, run, world, dataset, console, explain=explain)
        return run_dir.path


def train_in_dir(
    run_dir: RunDir,
    run: Run,
    world: World,
    dataset: Dataset,
    console: RunConsole,
    extra_callbacks: Sequence[Callback] = (),
    explain: ExplainFn | None = None,
) -> tuple[Session, str]:
    """Train in a folder that this process owns, until the folder is complete.

    Args:
        extra_callbacks: called before the first round, and before the other callbacks after every round.

    Returns:
        The session at its end, and the signal that asked for the end too late for it ("" if none did).

    Raises:
        DeviceOutOfMemory: the device of this rank has too little memory.
    """
    while True:
        release_memory(world.device)  # of the label before, or of the rounds that were undone
        try:
            return train_from_checkpoint(run_dir, run, world, dataset, console, extra_callbacks)
        except RollbackRequested as rollback_request:
            roll_back(run_dir, run.on_divergence, world, console, rollback_request)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            break
    raise _out_of_memory(run, dataset, world, reason, explain)


def _out_of_memory(
    run: Run, dataset: Dataset, world: World, reason: str, explain: ExplainFn | None
) -> DeviceOutOfMemory:
    """Return the error of a run that does not fit, and tell the other ranks.

    Not to be called inside `except`: the error of torch holds the tensors of the run, and which settings fit is tried
    on the device.
    """
    error = explain(run, dataset, world, reason) if explain else DeviceOutOfMemory(reason)
    return DeviceOutOfMemory(world.report_failure(error))


def train_from_checkpoint(
    run_dir: RunDir, run: Run, world: World, dataset: Dataset, console: RunConsole, extra_callbacks: Sequence[Callback]
) -> tuple[Session, str]:
    """Train from the newest checkpoint to the end, or until a rollback is requested. See `train_in_dir`."""
    with open_session(run, world, run_dir, dataset, console) as (session, callbacks):
        for callback in extra_callbacks:
            callback(session)
        if session.clock.is_done:
            console.print(f"{run_dir.path} is complete at {session.clock.kimg:g} kimg; --kimg extends it")
            callbacks.checkpoint.write_model(session)  # it may have been stopped right after its last checkpoint
        elif session.clock.rollbacks:
            callbacks.checkpoint.replace_model(session)  # the model may be of rounds that were undone
        if session.clock.images:
            callbacks.scoring(session)  # it may have been stopped while it was scored
        if session.role.description:
            console.print(session.role.description)
        late_signal = run_session(session, callbacks, run_dir, dataset, console, extra_callbacks)
    if world.is_main:
        make_final_figures(run_dir.path, run.nets, dataset, world.device, console)
        write_report(run_dir.path)
    return session, late_signal


def run_session(
    session: Session,
    callbacks: Callbacks,
    run_dir: RunDir,
    dataset: Dataset,
    console: RunConsole,
    extra_callbacks: Sequence[Callback] = (),
) -> str:
    """Run the loop to the end of the session. Returns a signal that came too late, see `train_in_dir`."""
    world = session.world
    late_signal = ""
    in_order: list[Callback] = [
        *extra_callbacks,
        callbacks.log,
        callbacks.bad_files,
        callbacks.samples,
        callbacks.checkpoint,
        callbacks.scoring,
    ]
    if isinstance(world, ElasticWorld):
        trainer = ElasticTrainer(
            world,
            run_dir,
            dataset,
            console,
            callbacks.log,
            callbacks.checkpoint,
            callbacks.loggers,
            lambda s: rebind_to_world(s.run, world, dataset, s.game, s.clock),
        )
        trainer.train(session, in_order, callbacks.write_interrupted)
    else:
        console.start(session.clock.kimg, session.run.total_images / 1000)

        def on_stop(session: Session) -> None:
            for callback in (*extra_callbacks, callbacks.checkpoint.save):
                callback(session)

        late_signal = run_training_loop(session, in_order, on_stop)
    console.stop()
    return late_signal


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run."""

    log: LogCallback
    samples: SampleCallback
    checkpoint: CheckpointCallback
    scoring: ScoringCallback
    bad_files: BadFilesCallback
    loggers: LoggerSet

    def write_interrupted(self, session: Session) -> None:
        """Write the checkpoint and scores of this step, if they are due: a lost rank may have interrupted them."""
        self.checkpoint.forget_saved_step()
        self.checkpoint(session)
        self.scoring(session)


@contextlib.contextmanager
def make_callbacks(
    run: Run, run_dir: RunDir, dataset: Dataset, console: RunConsole, checkpoints: Checkpoints
) -> Iterator[Callbacks]:
    """Make the callbacks of a run; on exit stop the console and end the loggers."""
    folder = run_dir.path
    evaluation = run.evaluation
    space = make_feature_space(evaluation, dataset)
    best_metric = resolve_best_metric(run.output.best_metric, evaluation.metrics, space)
    info = RunInfo(run_dir.run_name, folder, to_saved_dict(run))
    with open_loggers(run.output.loggers, info, console.print, run.output.upload_s) as loggers:
        monitor = HealthMonitor(folder, console, run.health, run.on_divergence, loggers)
        log = LogCallback(folder, console, checkpoints.latest_message, monitor, loggers)
        save = CheckpointCallback(folder, checkpoints, dataset, log, loggers)
        best = BestModelTracker(folder, save, best_metric, loggers)
        try:
            yield Callbacks(
                log,
                SampleCallback(folder, dataset, loggers),
                save,
                ScoringCallback(folder, dataset, console, evaluation, best, loggers),
                BadFilesCallback(folder, dataset),
                loggers,
            )
        except RollbackRequested as request:
            if checkpoints.world.is_main:
                loggers.on_finding(f"{request.finding.message}; the run goes back to a checkpoint", request.images)
            raise
        finally:
            console.stop()


@contextlib.contextmanager
def open_session(
    run: Run, world: World, run_dir: RunDir, dataset: Dataset, console: RunConsole
) -> Iterator[tuple[Session, Callbacks]]:
    """Build the session and the callbacks of a run, from its newest readable checkpoint.

    Lines that were written after that checkpoint are dropped from the files of the folder: those rounds come again.
    """
    networks = build_networks(run, make_spec(run.data, dataset), world.device)
    checkpoints = Checkpoints(run_dir.checkpoints_dir, world, run.output.max_checkpoints, run_dir.is_shared)
    rollbacks = retire_undone_checkpoints(run_dir, world)
    resume_from = find_checkpoint(checkpoints, run, dataset, console)
    if run.init_from and not resume_from:
        on_all_ranks(world, lambda: init_from_model(networks, Path(run.init_from)))
        console.print(f"starts from the weights of {run.init_from}")
    session = build_session(run, world, dataset, networks, resume_from, rollbacks)
    with make_callbacks(run, run_dir, dataset, console, checkpoints) as callbacks:
        if run.device.compile or (run.device.capture_passes and world.device.type == "cpu"):
            console.print("the first rounds compile the passes: a minute or two, less if torch has them in its cache")
        if resume_from:
            warn_threads(resume_from.metadata.get("threads"), console)
            warn_init_from(run, resume_from, console)
            warn_schedules(run, resume_from, console)
            console.print(f"resumed from {resume_from.path} at {session.clock.kimg:g} kimg")
        if world.is_main or not run_dir.is_shared:
            checkpoints.clear_unfinished()
        if world.is_main:
            drop_lines_after(run_dir.path, session.clock.step, session.clock.kimg)
            recover_interrupted_publish(run_dir.path)
            draw_reals(dataset, run_dir.path, session.game.labels is not None, run.nets)
        world.all_gather_str("open")
        yield session, callbacks
