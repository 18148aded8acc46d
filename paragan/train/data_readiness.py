"""Which rounds all ranks have the data of."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from paragan.comm.process_group import as_comm_error
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.data.lanes import LaneLoader
from paragan.data.streaming import StreamingImages
from paragan.strategies.base import Role

PUBLISH_INTERVAL_S = 0.2
MAX_SILENCE_S = (
    3.0  # a rank that tells nothing for so long is not waited for: the next exchange says what is wrong with it
)
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05  # pauses between two looks


class DataReadiness:
    """Ranks that play in step begin no round that one of them lacks the data of, where these come from afar: so they
    wait between rounds, where all can stop, or save what there is.

    Each tells through the store up to which round it has data, a few times a second and whenever it looks for others,
    so a round that everybody is known to have costs nothing. As a context manager.
    """

    def __init__(self, run: Run, world: World, role: Role, lanes: LaneLoader):
        far = isinstance(lanes.images, StreamingImages) and not lanes.images.source.is_local
        self.is_active = far and world.size > 1 and not world.is_elastic and role.main_has_all_players
        self.world, self.lanes = world, lanes
        self._key_prefix = f"supply/{run.data.only_class}"  # one world may play a game after another
        self._has_single_d_step = run.d_steps == 1  # a round takes one position of the lanes
        self._local_rounds = self._common_rounds = self._publish_count = 0
        self._last_messages = dict[int, tuple[str, float]]()  # by rank: its last word, and since when
        self._lock, self._closed = threading.Lock(), threading.Event()
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
        """Whether every rank has the data of round `step`, as this one does; where not, after a short pause."""
        if not self.is_active:
            return True
        self._local_rounds = max(
            self._local_rounds, step + 1 + (self.lanes.num_buffered_positions() if self._has_single_d_step else 0)
        )
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
        self._publish()
        store, now = self.world.store, time.monotonic()
        for rank in range(self.world.size):
            name = f"{self._key_prefix}/{rank}"
            word = store.get(name).decode() if store.check([name]) else ""
            if rank not in self._last_messages or self._last_messages[rank][0] != word:
                self._last_messages[rank] = word, now
        self._common_rounds = min(int(word.partition(" ")[0] or 0) for word, _ in self._last_messages.values())

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
            return  # the store is gone, and with it its rank: the next exchange says so
