"""The training loop: play rounds until the clock reaches the length of the run.

A round is one pass through the turn groups of this rank's role, for example D, D, G. A turn group is a tuple of turns
whose players step at once (game/turn.py). `run_rounds` plays a round in this order:

1. `wait_for_data`: block until the real images of the round are decoded on this rank and, where data are remote, on all
   ranks. No message is in flight between rounds, so this is where a run can stop.
2. `stop.is_due`: if a stop was requested (by a signal, or because data failed) and the ranks agreed to stop before this
   round, write a checkpoint and raise `Interrupted`. As long as nobody asks, this needs no collective (shutdown.py).
3. `play_round`:
   a. `start_exchanges`: begin the exchange of each player's first turn. Gossip sends its parameters here.
   b. for every turn group: `lanes.next_micro_batches` loads real images, if the group needs new ones; `play_turns` runs
      forward and backward of its turns, exchanges gradients (buckets leave while backward runs), and steps the
      optimizers; `stats.add` sums the losses on the device.
   c. `clock.advance`: count the round and its images.
4. `run_callbacks`: call the callbacks (log, bad files, samples, checkpoint, scoring; trainer.py). Each is called after
   every round and decides whether it is due. Their time does not count as training.

If numbers are not finite and the run asks for it, `rollback_on_divergence` turns the error into a request to go back to
the last good checkpoint. `report_errors` tells the other ranks of any failure, with rank and step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from paragan.comm.process_group import CommunicationError
from paragan.core.errors import Interrupted, RunError, UsageError
from paragan.core.types import Batch
from paragan.game.turn import TurnGroup, play_turn_groups
from paragan.train.data_readiness import DataReadiness
from paragan.train.health.rollback_request import RollbackRequested, rollback_on_divergence
from paragan.train.session import Callback, Session, callbacks_due
from paragan.train.shutdown import POLL_S, StopCoordinator

STOPPED_WAITING = "stopped while waiting for data, at the last checkpoint"
STOP_DATA_TIMEOUT_S = 5.0  # after a stop was requested, for the data of a round that has begun


def run_training_loop(session: Session, callbacks: list[Callback], on_stop: Callback) -> str:
    """Train until the clock is done.

    Args:
        callbacks: called after every round, in this order.
        on_stop: called before `Interrupted` is raised; writes the checkpoint of a run that was asked to stop.

    Returns:
        The signal that asked for the end too late, when no round was left; "" if none did.

    Raises:
        Interrupted: the run was asked to stop and can be resumed.
        RunError: this rank failed, or another one did.
        RollbackRequested: the run must go back to an earlier checkpoint, on all ranks.
    """
    with report_errors(session), StopCoordinator(session.world) as stop:
        run_rounds(session, callbacks, on_stop, stop)
        return stop.reason


def run_rounds(
    session: Session,
    callbacks: list[Callback],
    on_stop: Callback,
    stop: StopCoordinator,
    repeated_callbacks: Sequence[Callback] = (),
) -> None:
    """Play rounds until the clock is done, or until the stop that is due.

    Args:
        repeated_callbacks: those of the last round, which were interrupted: they are called first.
    """
    clock = session.clock
    session = replace(session, is_stopping=lambda: stop.is_stopping)
    session.lanes.while_waiting = lambda: abort_wait(stop)
    with (
        contextlib.closing(session.lanes),
        DataReadiness(session.run, session.world, session.role, session.lanes) as readiness,
    ):
        if repeated_callbacks:
            session.lanes.reload(clock.images - session.run.batch_at(clock.images - 1))
            run_callbacks(session, repeated_callbacks)
        while not clock.is_done:
            start = time.perf_counter()
            if not wait_for_data(session, stop, readiness) or stop.is_due(clock.step):
                on_stop(session)
                if stop.failed:
                    raise RunError(stop.reason, same_on_all_ranks=True)
                kimg = f"{clock.kimg:.1f}" if clock.kimg >= 10 else f"{clock.kimg:.3f}"
                message = f"{stop.reason}: stopped at {kimg} kimg (step {clock.step})"
                raise Interrupted(message, same_on_all_ranks=not session.world.is_main)  # rank 0 prints it
            with rollback_on_divergence(session.run.on_divergence.is_enabled, clock):
                play_round(session)
                clock.seconds += time.perf_counter() - start
                run_callbacks(session, callbacks)


def wait_for_data(session: Session, stop: StopCoordinator, readiness: DataReadiness) -> bool:
    """Block until the data of the next round are ready here and, for remote data, on all ranks that play in step.

    Returns:
        False if the run ends before this round: a stop is due, or data failed and all ranks agreed to stop. All ranks
        are between rounds then.
    """
    start = time.perf_counter()
    step = session.clock.step
    try:
        while not (session.lanes.wait(POLL_S) and readiness.ready_on_all_ranks(step)):
            if stop.is_due(step, is_starting=False):
                return False
            if session.world.size > 1:
                abort_wait(stop)
        return True
    except (RunError, UsageError) as error:
        if isinstance(error, CommunicationError) or (session.world.size > 1 and not readiness.is_active):
            raise  # the ranks cannot agree on a stop, or do not wait for each other between rounds
        stop.request(str(error), failed=True)
        if not stop.acknowledged(step):
            raise
        return False
    finally:
        session.stats.data_wait_s += time.perf_counter() - start


def abort_wait(stop: StopCoordinator) -> None:
    """Stop waiting for remote data some seconds after a stop was requested.

    Called while this rank waits for data within a round, or where the ranks do not agree on the round to stop at.
    """
    if stop.requested_for_s > STOP_DATA_TIMEOUT_S:
        message = f"{stop.reason or 'stop'}: {STOPPED_WAITING}"
        if stop.world.size > 1 and not stop.world.is_elastic:
            raise RunError(message)  # other ranks may be within the round
        raise Interrupted(message)


def play_round(session: Session) -> None:
    """Play every turn group of the role once. Each group that trains D takes the next batch of real images."""
    role = session.role
    clock = session.clock
    new_images = session.run.current_round_images(clock.images)

    def next_reals(turns: TurnGroup) -> Sequence[Batch]:
        if any(turn.needs_new_reals for turn in turns):
            start = time.perf_counter()
            session.lanes.next_micro_batches()
            session.stats.data_wait_s += time.perf_counter() - start
        return session.lanes.micro_batches

    turn_groups = role.round_at(clock.images)
    for losses in play_turn_groups(turn_groups, next_reals, clock.step, clock.images + new_images, new_images):
        session.stats.add(losses)
    clock.advance(new_images)


def run_callbacks(session: Session, callbacks: Sequence[Callback]) -> None:
    """Call every callback after a round. Ranks with messages in flight first meet at a barrier, if one is due."""
    if session.role.barrier and callbacks_due(session):
        session.role.barrier()
    with session.stats.exclude_from_timing():
        for callback in callbacks:
            callback(session)


@contextlib.contextmanager
def report_errors(session: Session) -> Generator[None]:
    """Tell the other ranks of a failure inside, with rank and step, and raise it with all of their reasons."""
    world = session.world
    clock = session.clock
    try:
        yield
    except (RunError, OSError) as error:
        same_on_all_ranks = isinstance(error, RunError) and error.same_on_all_ranks
        kind = RunError if isinstance(error, CommunicationError | OSError) else type(error)
        message = world.report_failure(error, clock.step)
        if message.endswith(STOPPED_WAITING):  # this rank, or one that it waited for
            world.abandon()
            raise Interrupted(message, same_on_all_ranks=not world.is_main) from error
        raise kind(message, same_on_all_ranks) from error
    except Interrupted as error:
        if world.size > 1 and str(error).endswith(STOPPED_WAITING):
            world.abandon()  # other ranks may be within the round, waiting for messages of this one
        raise
    except (KeyboardInterrupt, RollbackRequested, torch.OutOfMemoryError):
        raise  # trainer.py explains what needs too much memory, and then tells the others
    except BaseException as error:
        problem = explain_missing_kernel(error)
        world.report_failure(problem or error, clock.step)
        if problem:
            raise problem from error
        raise


def explain_missing_kernel(error: BaseException) -> UsageError | None:
    """Return what to do if an operation has no deterministic kernel; None for other errors."""
    operation, found, _ = str(error).partition(" does not have a deterministic implementation")
    if not (found and isinstance(error, RuntimeError)):
        return None
    return UsageError(
        f"--device.deterministic=true: {operation} has no deterministic kernel on this device. "
        "Use --device.deterministic=false"
    )
