"""Find out for which rounds all ranks have remote data, so that ranks in step wait between rounds and not within one.

Only between rounds can all of them stop and save. Each rank publishes through the store up to which round it has data,
a few times a second and whenever it polls the others; a round that all are known to have costs nothing. This is advice
only: a rank that publishes nothing for some seconds is not waited for, and the next exchange reports what is wrong.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from paragan.comm.process_group import as_comm_error
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.data.lanes import LaneLoader
from paragan.data.streaming import StreamingRows
from paragan.strategies.base import Role

PUBLISH_INTERVAL_S = 0.2
MAX_SILENCE_S = 3.0  # a rank that publishes nothing for so long is not waited for
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05  # between two polls


class DataReadiness:
    """Tells which rounds all ranks have the data of. A context manager.

    is_active : whether there is anything to agree on: remote data, several ranks, all of them in step
    """

    def __init__(self, run: Run, world: World, role: Role, lanes: LaneLoader):
        is_remote = isinstance(lanes.images, StreamingRows) and not lanes.images.source.is_local
        self.is_active = is_remote and world.size > 1 and not world.is_elastic and role.has_all_players
        self.world = world
        self.lanes = lanes
        self._key_prefix = f"supply/{run.data.only}"  # one world may play several games, one after the other
        self._has_single_d_step = run.d_steps == 1  # then a round takes one position of the lanes
        self._local_rounds = 0
        self._common_rounds = 0
        self._publish_count = 0
        self._last_messages = dict[int, tuple[str, float]]()  # by rank: the last message, and since when
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pause_s = MIN_PAUSE_S
        self._publish_thread = threading.Thread(target=self._publish_loop, daemon=True, name="supply")

    def __enter__(self) -> DataReadiness:
        if self.is_active:
            self._publish_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self.is_active:
            self._publish_thread.join(5)

    def ready_on_all_ranks(self, step: int) -> bool:
        """Return True if every rank has the data of round `step`, as this one does. If not, pause and return False."""
        if not self.is_active:
            return True
        buffered_rounds = self.lanes.num_buffered_positions() if self._has_single_d_step else 0
        self._local_rounds = max(self._local_rounds, step + 1 + buffered_rounds)
        if step < self._common_rounds:
            return True
        as_comm_error(self._poll_ranks)
        if step < self._common_rounds or self._has_silent_rank():
            self._pause_s = MIN_PAUSE_S
            return True
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return False

    def _poll_ranks(self) -> None:
        """Read the newest messages of all ranks."""
        self._publish()
        store = self.world.store
        now = time.monotonic()
        for rank in range(self.world.size):
            name = f"{self._key_prefix}/{rank}"
            message = store.get(name).decode() if store.check([name]) else ""
            if rank not in self._last_messages or self._last_messages[rank][0] != message:
                self._last_messages[rank] = message, now
        self._common_rounds = min(int(message.partition(" ")[0] or 0) for message, _ in self._last_messages.values())

    def _has_silent_rank(self) -> bool:
        return any(time.monotonic() - since > MAX_SILENCE_S for _, since in self._last_messages.values())

    def _publish(self) -> None:
        with self._lock:
            self._publish_count += 1
            self.world.store.set(f"{self._key_prefix}/{self.world.rank}", f"{self._local_rounds} {self._publish_count}")

    def _publish_loop(self) -> None:
        try:
            while not self._closed.wait(PUBLISH_INTERVAL_S):
                self._publish()
        except RuntimeError:
            return  # the store is gone, and with it its rank: the next exchange reports that
