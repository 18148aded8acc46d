"""The loop: rounds of beats until the clock has run out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import replace

from paragan.comm.process_group import Lost
from paragan.core.errors import Failed, Interrupted, Unusable
from paragan.game.turn import begin, play
from paragan.train.data_readiness import Supply
from paragan.train.health.rollback_request import Undo, undoable
from paragan.train.session import Observer, Session
from paragan.train.shutdown import POLL_S, Stop

GAVE_UP = "stopped while it waited for data, at the last checkpoint"
STALLED_STOP_S = 5.0  # a stop waits so long for the data of a round that was begun


def play_round(session: Session) -> None:
    """Every beat of the role once; D's beats each take the next batch of reals."""
    s, moved = session, session.run.round_at(session.clock.images)
    begin(s.role.round, s.clock.step)
    for beat in s.role.round:
        if any(turn.fresh for turn in beat):
            start = time.perf_counter()
            s.lanes.next()
            s.stats.data_wait_s += time.perf_counter() - start
        s.stats.add(play(beat, s.lanes.hands, s.clock.step, s.clock.images + moved, moved))
    s.clock.advance(moved)


def eventful(session: Session) -> bool:
    """Whether observers may have something to do together after this round."""
    run, clock = session.run, session.clock
    output, scored = run.output, run.evaluation.every_kimg
    times = (output.tick_kimg, output.fakes_kimg, output.checkpoint_kimg, scored)
    return clock.step == 1 or clock.done or any(clock.crossed(round(1000 * kimg)) for kimg in times)


@contextlib.contextmanager
def explained(session: Session) -> Generator[None]:
    """A failure inside reaches the other ranks, with rank and step."""
    world, clock = session.world, session.clock
    try:
        yield
    except (Failed, OSError) as error:
        everywhere = isinstance(error, Failed) and error.everywhere
        kind, told = Failed if isinstance(error, Lost | OSError) else type(error), world.explain(error, clock.step)
        if told.endswith(GAVE_UP):  # this rank, or one that it waited for
            world.abandon()
            raise Interrupted(told, everywhere=not world.first) from error
        raise kind(told, everywhere) from error
    except Interrupted as error:
        if world.size > 1 and str(error).endswith(GAVE_UP):
            world.abandon()  # others may be within the round, and wait for this rank's messages
        raise
    except (KeyboardInterrupt, Undo):
        raise
    except BaseException as error:
        world.explain(error, clock.step)
        raise


def train(session: Session, observers: list[Observer], at_stop: Observer) -> str:
    """Play until the end. Each observer looks after every round and knows when it has something to do;
    `at_stop` writes the checkpoint with which a run that was asked to stop ends (Interrupted). Returns the signal that
    asked for the end when there was no round left."""
    with explained(session), Stop(session.world) as stop:
        rounds(session, observers, at_stop, stop)
        return stop.reason


def arrived(session: Session, stop: Stop, supply: Supply) -> bool:
    """Wait for the data of the round, here and on ranks that play in step with this one. False where the run ends
    meanwhile, or since they fail: all of those are between rounds then."""
    start, step = time.perf_counter(), session.clock.step
    try:
        while not (session.lanes.wait(POLL_S) and supply.everywhere(step)):
            if stop.due(step, begins=False):
                return False
            if session.world.size > 1:
                give_up(stop)
        return True
    except (Failed, Unusable) as error:
        if isinstance(error, Lost) or (session.world.size > 1 and not supply.active):
            raise
        stop.request(str(error), failed=True)
        if not stop.answered(step):
            raise
        return False
    finally:
        session.stats.data_wait_s += time.perf_counter() - start


def give_up(stop: Stop) -> None:
    """Called while data are waited for within a round, or by ranks that do not agree on one: whoever asked for the end
    does not wait for far places."""
    if stop.asked_s > STALLED_STOP_S:
        kind = Failed if stop.world.size > 1 and not stop.world.elastic else Interrupted  # others may be in the round
        raise kind(f"{stop.reason or 'stop'}: {GAVE_UP}")


def rounds(session: Session, observers: list[Observer], at_stop: Observer, stop: Stop) -> None:
    """Play on until the end, or until the stop that is due."""
    session, clock = replace(session, asked=lambda: stop.asked), session.clock
    session.lanes.meanwhile = lambda: give_up(stop)
    with contextlib.closing(session.lanes), Supply(session.run, session.world, session.role, session.lanes) as supply:
        while not clock.done:
            start = time.perf_counter()
            if not arrived(session, stop, supply) or stop.due(clock.step):
                at_stop(session)
                if stop.failed:
                    raise Failed(stop.reason, everywhere=True)
                what = f"{stop.reason}: stopped at {clock.kimg:.1f} kimg (step {clock.step})"
                raise Interrupted(what, everywhere=not session.world.first)
            with undoable(session.run.guard.acts, clock):
                play_round(session)
                clock.seconds += time.perf_counter() - start
                look_on(session, observers)


def look_on(session: Session, observers: list[Observer]) -> None:
    """Let everybody look at the round just played."""
    if session.role.meet and eventful(session):
        session.role.meet()
    with session.stats.aside():
        for observer in observers:
            observer(session)
