"""Simulated time: scheduled actions, events, and tasks, which are ordinary blocking code in threads of their own.

One thing runs at a time. The loop hands the only baton to a task, and gets it back when the task waits or has ended, so
what happens is a function of the code alone, on any number of cores. Collectives are processes: generators that yield
seconds to sleep, or a `SimEvent` to wait for.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from paragan.core.errors import UsageError

CANCEL_TIMEOUT_S = 10.0  # of a task that does not wait in simulated time; its thread ends with the process
MAX_DESCRIBED_TASKS = 4  # of those that wait for something that never happens


class Deadlock(RuntimeError):
    """Tasks wait for something that never happens. The text says which waits for what."""


class SimEvent:
    """An event that is triggered once."""

    __slots__ = ("_callbacks", "triggered")

    def __init__(self) -> None:
        self.triggered = False
        self._callbacks: list[Callable[[], None]] = []

    def trigger(self) -> None:
        """Run the callbacks, in the order in which they were added."""
        self.triggered = True
        callbacks = self._callbacks
        self._callbacks = []
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the event is triggered, or now if it was."""
        if self.triggered:
            callback()
        else:
            self._callbacks.append(callback)


Process = Generator[float | SimEvent, None, Any]


class SimClock:
    """The simulated time, the queue of scheduled actions, and the tasks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._tasks: list[Task] = []

    def schedule(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at `time_s`. Actions of one time run in the order in which they were scheduled."""
        self._sequence += 1
        heapq.heappush(self._queue, (time_s, self._sequence, action))

    def start_process(self, process: Process) -> SimEvent:
        """Run a process until it waits. The returned event is triggered when it has ended."""
        done = SimEvent()
        self._resume(process, done)
        return done

    def start_task(self, name: str, function: Callable[[Task], None]) -> Task:
        """Call `function` with its task in a thread, as soon as `run` is called."""
        task = Task(self, name, function)
        self._tasks.append(task)
        self.schedule(self.now_s, task.resume)
        return task

    def skip_to(self, time_s: float) -> bool:
        """Advance the time to `time_s` if nothing is scheduled until then. Returns whether it did."""
        if self._queue and self._queue[0][0] <= time_s:
            return False
        self.now_s = time_s
        return True

    def _resume(self, process: Process, done: SimEvent) -> None:
        for awaited in process:
            if isinstance(awaited, SimEvent):
                if awaited.triggered:
                    continue
                awaited.add_callback(lambda: self._resume(process, done))
                return
            if awaited > 0:
                self.schedule(self.now_s + awaited, lambda: self._resume(process, done))
                return
        done.trigger()

    def run(self) -> None:
        """Run scheduled actions until none is left, and all tasks have ended or may stop.

        Raises:
            Deadlock: tasks still wait.
        """
        try:
            while self._queue:
                self.now_s, _, action = heapq.heappop(self._queue)
                action()
            waiting = [task for task in self._tasks if not task.has_ended and not task.may_stop]
            if waiting:
                raise Deadlock(_describe_waiting(waiting))
        finally:
            for task in self._tasks:
                task.cancel()


def _describe_waiting(tasks: Sequence[Task]) -> str:
    """Say which task waits for what, of the first ones."""
    words = [f"{task.name} waits for {task.awaited}" for task in tasks[:MAX_DESCRIBED_TASKS]]
    if len(tasks) > MAX_DESCRIBED_TASKS:
        words.append(f"{len(tasks) - MAX_DESCRIBED_TASKS} more wait")
    return "; ".join(words)


class _Cancelled(BaseException):
    """Ends the thread of a task that is not needed any more."""


class Task:
    """Blocking code in simulated time.

    name     : for messages
    awaited  : what it waits for, for messages
    may_stop : it has done what it is for: nobody minds if it waits forever
    """

    def __init__(self, clock: SimClock, name: str, function: Callable[[Task], None]):
        self.clock = clock
        self.name = name
        self.awaited = "its start"
        self.has_ended = False
        self.may_stop = False
        self._function = function
        self._baton, self._returned = threading.Lock(), threading.Lock()
        self._baton.acquire()
        self._returned.acquire()
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Let the task run until it waits. Raises what it raises. Called by the loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._baton.release()
        self._returned.acquire()
        if self._error:
            raise self._error

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of simulated time pass. Called by the task."""
        self._check_thread()
        if seconds > 0 and not self.clock.skip_to(self.clock.now_s + seconds):
            self.clock.schedule(self.clock.now_s + seconds, self.resume)
            self._yield_baton()

    def wait(self, event: SimEvent, awaited: str) -> None:
        """Wait for an event. Called by the task.

        Args:
            event: to wait for.
            awaited: what it is, for the message of a deadlock.
        """
        self._check_thread()
        if not event.triggered:
            self.awaited = awaited
            event.add_callback(lambda: self.clock.schedule(self.clock.now_s, self.resume))
            self._yield_baton()

    def cancel(self) -> None:
        """End the thread. Called by the loop, which a signal may have interrupted while the task runs."""
        if self._thread and self._thread.is_alive():
            self._is_cancelled = True
            _release(self._baton)
            self._thread.join(CANCEL_TIMEOUT_S)

    def _check_thread(self) -> None:
        """End a thread that the task has started itself: it has no simulated time. The loop raises the reason."""
        if self._thread and self._thread is not threading.current_thread():
            self._error = UsageError(
                f"{self.name}: an exchange sends or waits in a thread of its own, which cannot be predicted. "
                "Use the thread that calls the exchange"
            )
            _release(self._returned)
            raise SystemExit  # which ends a thread without a word
        if self._is_cancelled:
            raise _Cancelled

    def _yield_baton(self) -> None:
        _release(self._returned)
        self._baton.acquire()
        if self._is_cancelled:
            raise _Cancelled

    def _run(self) -> None:
        try:
            self._function(self)
        except _Cancelled:
            pass
        except BaseException as error:  # raised in the loop
            self._error = error
        self.has_ended = True
        _release(self._returned)


def _release(lock: threading.Lock) -> None:
    """Release a lock, also if the loop was interrupted before it has taken it again."""
    with contextlib.suppress(RuntimeError):
        lock.release()


class SimThreads:
    """Runs at most `num_threads` processes at a time, first come first served."""

    def __init__(self, clock: SimClock, num_threads: int):
        self.clock = clock
        self.num_idle = num_threads
        self._queue = deque[tuple[Process, SimEvent]]()

    def submit(self, process: Process) -> SimEvent:
        """Run a process, or queue it. The returned event is triggered when it has ended."""
        done = SimEvent()
        if self.num_idle:
            self._start(process, done)
        else:
            self._queue.append((process, done))
        return done

    def _start(self, process: Process, done: SimEvent) -> None:
        self.num_idle -= 1
        self.clock.start_process(process).add_callback(lambda: self._on_finished(done))

    def _on_finished(self, done: SimEvent) -> None:
        self.num_idle += 1
        if self._queue:
            self._start(*self._queue.popleft())
        done.trigger()
