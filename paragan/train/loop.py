"""The loop: rounds of beats until the clock has run out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import replace

from paragan.comm.process_group import CommunicationError
from paragan.core.errors import Interrupted, RunError, UsageError
from paragan.game.turn import play_turns, start_exchanges
from paragan.train.data_readiness import DataReadiness
from paragan.train.health.rollback_request import RollbackRequested, rollback_on_divergence
from paragan.train.session import Callback, Session
from paragan.train.shutdown import POLL_S, StopCoordinator

STOPPED_WAITING = "stopped while it waited for data, at the last checkpoint"
STOP_DATA_TIMEOUT_S = 5.0  # a stop waits so long for the data of a round that was begun


def play_round(session: Session) -> None:
    """Every beat of the role once; D's beats each take the next batch of reals."""
    s, moved = session, session.run.current_round_images(session.clock.images)
    start_exchanges(s.role.round, s.clock.step)
    for beat in s.role.round:
        if any(turn.needs_new_reals for turn in beat):
            start = time.perf_counter()
            s.lanes.next_micro_batches()
            s.stats.data_wait_s += time.perf_counter() - start
        s.stats.add(play_turns(beat, s.lanes.micro_batches, s.clock.step, s.clock.images + moved, moved))
    s.clock.advance(moved)


def callbacks_due(session: Session) -> bool:
    """Whether observers may have something to do together after this round."""
    run, clock = session.run, session.clock
    output, scored = run.output, run.evaluation.every_kimg
    times = (output.tick_kimg, output.fakes_kimg, output.checkpoint_kimg, scored)
    return clock.step == 1 or clock.is_done or any(clock.has_crossed(round(1000 * kimg)) for kimg in times)


@contextlib.contextmanager
def report_errors(session: Session) -> Generator[None]:
    """A failure inside reaches the other ranks, with rank and step."""
    world, clock = session.world, session.clock
    try:
        yield
    except (RunError, OSError) as error:
        everywhere = isinstance(error, RunError) and error.same_on_all_ranks
        kind, told = (
            RunError if isinstance(error, CommunicationError | OSError) else type(error),
            world.report_failure(error, clock.step),
        )
        if told.endswith(STOPPED_WAITING):  # this rank, or one that it waited for
            world.abandon()
            raise Interrupted(told, same_on_all_ranks=not world.is_main) from error
        raise kind(told, everywhere) from error
    except Interrupted as error:
        if world.size > 1 and str(error).endswith(STOPPED_WAITING):
            world.abandon()  # others may be within the round, and wait for this rank's messages
        raise
    except (KeyboardInterrupt, RollbackRequested):
        raise
    except BaseException as error:
        world.report_failure(error, clock.step)
        raise


def run_training_loop(session: Session, callbacks: list[Callback], on_stop: Callback) -> str:
    """Play until the end. Each observer looks after every round and knows when it has something to do;
    `at_stop` writes the checkpoint with which a run that was asked to stop ends (Interrupted). Returns the signal that
    asked for the end when there was no round left."""
    with report_errors(session), StopCoordinator(session.world) as stop:
        run_rounds(session, callbacks, on_stop, stop)
        return stop.reason


def wait_for_data(session: Session, stop: StopCoordinator, readiness: DataReadiness) -> bool:
    """Wait for the data of the round, here and on ranks that play in step with this one. False where the run ends
    meanwhile, or since they fail: all of those are between rounds then."""
    start, step = time.perf_counter(), session.clock.step
    try:
        while not (session.lanes.wait(POLL_S) and readiness.ready_on_all_ranks(step)):
            if stop.is_due(step, is_starting=False):
                return False
            if session.world.size > 1:
                abort_wait(stop)
        return True
    except (RunError, UsageError) as error:
        if isinstance(error, CommunicationError) or (session.world.size > 1 and not readiness.is_active):
            raise
        stop.request(str(error), failed=True)
        if not stop.acknowledged(step):
            raise
        return False
    finally:
        session.stats.data_wait_s += time.perf_counter() - start


def abort_wait(stop: StopCoordinator) -> None:
    """Called while data are waited for within a round, or by ranks that do not agree on one: whoever asked for the end
    does not wait for far places."""
    if stop.requested_for_s > STOP_DATA_TIMEOUT_S:
        kind = (
            RunError if stop.world.size > 1 and not stop.world.is_elastic else Interrupted
        )  # others may be in the round
        raise kind(f"{stop.reason or 'stop'}: {STOPPED_WAITING}")


def run_rounds(session: Session, callbacks: list[Callback], on_stop: Callback, stop: StopCoordinator) -> None:
    """Play on until the end, or until the stop that is due."""
    session, clock = replace(session, is_stopping=lambda: stop.is_stopping), session.clock
    session.lanes.while_waiting = lambda: abort_wait(stop)
    with (
        contextlib.closing(session.lanes),
        DataReadiness(session.run, session.world, session.role, session.lanes) as supply,
    ):
        while not clock.is_done:
            start = time.perf_counter()
            if not wait_for_data(session, stop, supply) or stop.is_due(clock.step):
                on_stop(session)
                if stop.failed:
                    raise RunError(stop.reason, same_on_all_ranks=True)
                what = f"{stop.reason}: stopped at {clock.kimg:.1f} kimg (step {clock.step})"
                raise Interrupted(what, same_on_all_ranks=not session.world.is_main)
            with rollback_on_divergence(session.run.on_divergence.is_enabled, clock):
                play_round(session)
                clock.seconds += time.perf_counter() - start
                run_callbacks(session, callbacks)


def run_callbacks(session: Session, callbacks: list[Callback]) -> None:
    """Let everybody look at the round just played."""
    if session.role.barrier and callbacks_due(session):
        session.role.barrier()
    with session.stats.exclude_from_timing():
        for observer in callbacks:
            observer(session)
