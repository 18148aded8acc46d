"""Which rounds all ranks have the data of."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from paragan.comm.process_group import or_lost
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.data.lanes import Lanes
from paragan.data.streaming import Streamed
from paragan.strategies.base import Role

TELL_S = 0.2
SILENT_S = 3.0  # a rank that tells nothing for so long is not waited for: the next exchange says what is wrong with it
FIRST_S, LONGEST_S = 0.001, 0.05  # pauses between two looks


class Supply:
    """Ranks that play in step begin no round that one of them lacks the data of, where these come from afar: so they
    wait between rounds, where all can stop, or save what there is.

    Each tells through the store up to which round it has data, a few times a second and whenever it looks for others,
    so a round that everybody is known to have costs nothing. As a context manager.
    """

    def __init__(self, run: Run, world: World, role: Role, lanes: Lanes):
        far = isinstance(lanes.images, Streamed) and not lanes.images.source.near
        self.active = far and world.size > 1 and not world.elastic and role.first_has_all
        self.world, self.lanes = world, lanes
        self._name = f"supply/{run.data.only}"  # one world may play a game after another
        self._simple = run.d_steps == 1  # a round takes one position of the lanes
        self._mine = self._known = self._told = 0
        self._heard = dict[int, tuple[str, float]]()  # by rank: its last word, and since when
        self._lock, self._over = threading.Lock(), threading.Event()
        self._pause_s = FIRST_S
        self._teller = threading.Thread(target=self._tell_on, daemon=True, name="supply")

    def __enter__(self) -> Supply:
        if self.active:
            self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self.active:
            self._teller.join(5)

    def everywhere(self, step: int) -> bool:
        """Whether every rank has the data of round `step`, as this one does; where not, after a short pause."""
        if not self.active:
            return True
        self._mine = max(self._mine, step + 1 + (self.lanes.rounds_ahead() if self._simple else 0))
        if step < self._known:
            return True
        or_lost(self._look)
        if step < self._known or self._somebody_is_silent():
            self._pause_s = FIRST_S
            return True
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_S)
        return False

    def _look(self) -> None:
        self._tell()
        store, now = self.world.store, time.monotonic()
        for rank in range(self.world.size):
            name = f"{self._name}/{rank}"
            word = store.get(name).decode() if store.check([name]) else ""
            if rank not in self._heard or self._heard[rank][0] != word:
                self._heard[rank] = word, now
        self._known = min(int(word.partition(" ")[0] or 0) for word, _ in self._heard.values())

    def _somebody_is_silent(self) -> bool:
        return any(time.monotonic() - since > SILENT_S for _, since in self._heard.values())

    def _tell(self) -> None:
        with self._lock:
            self._told += 1
            self.world.store.set(f"{self._name}/{self.world.rank}", f"{self._mine} {self._told}")

    def _tell_on(self) -> None:
        try:
            while not self._over.wait(TELL_S):
                self._tell()
        except RuntimeError:
            return  # the store is gone, and with it its rank: the next exchange says so
