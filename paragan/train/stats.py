"""What a run shows of itself: sums on the device, one reduction a tick."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.core.types import Loss
from paragan.game.player import Player
from paragan.game.turn import Turn
from paragan.strategies.base import Role


class StatsCollector:
    """Collects the losses of every beat, and turns them into one line a tick, the same on all ranks.

    of_data : what this rank's data pipeline says of itself
    lags : of every round since the tick before the last line, by player: how old was what it saw
    """

    def __init__(
        self,
        world: World,
        players: tuple[Player, ...],
        role: Role | None = None,
        data_stats: Callable[[], Mapping[str, float]] = dict,
    ):
        self.world, self.players = world, players
        self.data_stats = data_stats
        self.staleness = role.staleness if role else {}
        self.is_split = role is not None and role.is_split
        self.lags: dict[str, list[int]] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self.data_wait_s = 0.0
        self._start = self._last_tick = time.perf_counter()
        self._last_images = 0
        self._last_sent_bytes = {player.name: 0 for player in players}
        self._last_wait_s = 0.0
        self._excluded_s = self._eval_s = 0.0
        self._recorders = [turn.recorder for beat in role.round for turn in beat if turn.recorder] if role else []
        self._last_build_s = 0.0

    @contextlib.contextmanager
    def exclude_from_timing(self) -> Generator[None]:
        """What happens inside (scores, grids, checkpoints) is not training: no tick's pace includes it."""
        start = time.perf_counter()
        yield
        self._excluded_s += time.perf_counter() - max(start, self._last_tick)

    @contextlib.contextmanager
    def time_scoring(self) -> Generator[None]:
        """What happens inside is the part of it that scores take."""
        start = time.perf_counter()
        yield
        self._eval_s += time.perf_counter() - start

    def excluded_times(self) -> dict[str, float]:
        """Seconds since the last tick that were not training, and those of them that scores took."""
        return {"Timing/aside_s": max(self._excluded_s, self._eval_s), "Timing/eval_s": self._eval_s}

    def add(self, losses: list[tuple[Turn, Loss, int]]) -> None:
        for turn, loss, lanes in losses:
            named = {f"Loss/{turn.player.name}/loss": loss.total.detach()}
            named |= {f"Loss/{name}": value for name, value in loss.parts.items()}
            for name, value in named.items():
                self._sums[name] = self._sums.get(name, 0) + value.double() * lanes
                self._counts[name] = self._counts.get(name, 0) + lanes

    def tick(self, images: int, step: int) -> dict[str, float]:
        """The line of stats.jsonl for what happened since the last tick; starts the next."""
        line = {"Progress/kimg": images / 1000, "Progress/step": float(step)}
        told = self._gather_rows(
            {"names": sorted(self._sums), "seen": self._pop_ages(), "sent": self._pop_sent_bytes()}
        )
        line |= self._reduce_means(told) | self._age_histogram(told)
        built_s = sum(recorder.capture_s for recorder in self._recorders)
        self._excluded_s, self._last_build_s = self._excluded_s + built_s - self._last_build_s, built_s
        now, shown = time.perf_counter(), images - self._last_images
        seconds = max(now - self._last_tick - self._excluded_s, 1e-9)
        line["Timing/img_per_sec"] = shown / seconds
        line["Timing/sec_per_kimg"] = 1000 * seconds / max(shown, 1)
        line["Timing/total_s"] = now - self._start
        line |= self.excluded_times()
        line["Timing/data_wait_s"] = self.data_wait_s
        waited = sum(player.meter.wait_s for player in self.players)
        line["Timing/exchange_wait_s"] = waited - self._last_wait_s
        line |= {f"Comm/{p.name}/sent_bytes": float(max(t["sent"][p.name] for t in told)) for p in self.players}
        line |= self.data_stats()
        line["Resources/peak_mem_gb"] = peak_memory_gb(self.world.device)
        self._last_tick, self._last_images, self._last_wait_s, self.data_wait_s = now, images, waited, 0.0
        self._excluded_s = self._eval_s = 0.0
        self._sums, self._counts = {}, {}
        return line

    def start_from(self, images: int) -> None:
        """Count from here: a resumed run has shown `images` before."""
        self._last_images = images
        self._start = self._last_tick = time.perf_counter()

    def mean_losses(self) -> dict[str, float]:
        """Means since the last tick, over all ranks."""
        return self._reduce_means(self._gather_rows({"names": sorted(self._sums)}))

    def _gather_rows(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Where ranks have different things to say everyone's, in rank order; else this rank's."""
        if not self.is_split:
            return [mine]
        self.world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()  # where one is gone, this says so at once
        return [json.loads(word) for word in self.world.all_gather_str(json.dumps(mine))]

    def _reduce_means(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        names = sorted({name for row in rows for name in row["names"]})
        if not names:
            return {}
        for name in names:
            self._sums.setdefault(name, torch.zeros((), dtype=torch.float64))
            self._counts.setdefault(name, 0)
        sums = torch.stack([self._sums[name].cpu() for name in names])
        counts = torch.tensor([self._counts[name] for name in names], dtype=torch.float64)
        both = torch.stack([sums, counts])
        self.world.all_ranks.all_reduce_sum(both).wait()
        return dict(zip(names, (both[0] / both[1]).tolist()))

    def _pop_ages(self) -> dict[str, tuple[dict[str, int], list[int]]]:
        """How old was what this rank saw since the last tick, and round by round."""
        taken = {name: seen.pop() for name, seen in self.staleness.items()}
        return {n: ({str(k): v for k, v in ages.items()}, [*lags.values()]) for n, (ages, lags) in taken.items()}

    def _age_histogram(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Async/NAME_age/K: how many of what was seen were K rounds old."""
        found: dict[str, float] = {}
        self.lags = {}
        for row in rows:
            for name, (ages, lags) in row["seen"].items():
                self.lags.setdefault(name, lags)
                for age, count in ages.items():
                    key = f"Async/{name}_age/{age}"
                    found[key] = found.get(key, 0.0) + count
        return found

    def _pop_sent_bytes(self) -> dict[str, int]:
        """Bytes since the last tick, by player."""
        sent = {player.name: player.meter.sent_bytes - self._last_sent_bytes[player.name] for player in self.players}
        self._last_sent_bytes = {player.name: player.meter.sent_bytes for player in self.players}
        return sent


def peak_memory_gb(device: torch.device) -> float:
    return backend_of(device).peak_bytes(device) / 1e9
