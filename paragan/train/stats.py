"""Collect the losses and timings of a run: sums stay on the device, with one reduction a tick.

A tick ends with a line of stats.jsonl, the same on all ranks. Keys: `Progress/`, `Loss/`, `Optim/`, `Timing/`, `Comm/`,
`Data/`, `Resources/`, and under async `Async/NAME_age/K`, the number of images (or players) that were K rounds old.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.core.host_copies import copy_to_host
from paragan.core.types import Loss
from paragan.game.player import Player
from paragan.game.turn import Turn
from paragan.strategies.base import Role


@dataclass
class OpenTick:
    """What is counted between two lines.

    sums, counts : of losses, by name
    start        : when counting began
    last_tick    : when the tick began
    images       : real images seen by then
    sent_bytes   : that each player had sent by then
    wait_s       : that exchanges had waited by then
    excluded_s   : since then, that were not training
    eval_s       : those of them that scoring took
    """

    start: float
    last_tick: float
    images: int
    sent_bytes: dict[str, int]
    wait_s: float
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    excluded_s: float = 0.0
    eval_s: float = 0.0


class StatsCollector:
    """Collects the losses of every turn group and turns them into one line a tick, the same on all ranks.

    data_stats : returns the statistics of this rank's data pipeline
    lags       : by player: the age of what it trained against, of every round since the tick before the last line
    """

    def __init__(
        self,
        world: World,
        players: tuple[Player, ...],
        role: Role | None = None,
        data_stats: Callable[[], Mapping[str, float]] = dict,
    ):
        self.world = world
        self.players = players
        self.data_stats = data_stats
        self.staleness = role.staleness if role else {}
        self.is_split = role is not None and role.is_split
        self.lags: dict[str, list[int]] = {}
        self.data_wait_s = 0.0
        self._tick = self._new_tick(0)
        self._differs_over_ranks = False  # whether ranks may have counted other losses
        turns = [turn for turn_group in role.round for turn in turn_group] if role else []
        self._recorders = [turn.recorder for turn in turns if turn.recorder]
        self._last_build_s = 0.0

    def _new_tick(self, images: int, start: float | None = None) -> OpenTick:
        now = time.perf_counter()
        sent_bytes = {player.name: player.meter.sent_bytes for player in self.players}
        wait_s = sum(player.meter.wait_s for player in self.players)
        return OpenTick(now if start is None else start, now, images, sent_bytes, wait_s)

    def copy_tick(self) -> OpenTick:
        """Return a copy of what was counted since the last line."""
        return replace(self._tick, sums=dict(self._tick.sums), counts=dict(self._tick.counts))

    def continue_tick(self, tick: OpenTick | None, line_is_written: bool) -> None:
        """Continue a tick that was begun among other ranks. All ranks call this, after `start_from`.

        Args:
            tick: what this rank had counted; None if it has none.
            line_is_written: whether there is a line of the images so far. It has what was counted before.
        """
        self._differs_over_ranks = True
        if tick and line_is_written and tick.images < self._tick.images:
            self._tick.start = tick.start
        elif tick:
            self._tick = replace(tick, sums=dict(tick.sums), counts=dict(tick.counts))

    @contextlib.contextmanager
    def exclude_from_timing(self) -> Generator[None]:
        """Leave the time inside (scores, grids, checkpoints) out of the images per second."""
        start = time.perf_counter()
        yield
        self._tick.excluded_s += time.perf_counter() - max(start, self._tick.last_tick)

    @contextlib.contextmanager
    def time_scoring(self) -> Generator[None]:
        """Count the time inside as scoring. Used within `exclude_from_timing`."""
        start = time.perf_counter()
        yield
        self._tick.eval_s += time.perf_counter() - start

    def excluded_times(self) -> dict[str, float]:
        """Return the seconds since the last tick that were not training, and those of them that scoring took."""
        tick = self._tick
        return {"Timing/aside_s": max(tick.excluded_s, tick.eval_s), "Timing/eval_s": tick.eval_s}

    def add(self, losses: list[tuple[Turn, Loss, int]]) -> None:
        """Add the losses of passes, (turn, loss, number of lanes), and the norms of gradients that are clipped.

        Does not wait for the device.
        """
        for turn, loss, lanes in losses:
            named = {f"Loss/{turn.player.name}/loss": loss.total.detach()}
            named |= {f"Loss/{name}": value for name, value in loss.parts.items()}
            for name, value in named.items():
                self._add(name, value.double() * lanes, lanes)
        for player in dict.fromkeys(turn.player for turn, _, _ in losses):
            if player.gradient_clip:
                norms, steps = player.gradient_clip.pop_norms()
                if steps:
                    self._add(f"Optim/{player.name}/grad_norm", norms.double(), steps)

    def _add(self, name: str, value: Tensor, count: int) -> None:
        self._tick.sums[name] = self._tick.sums.get(name, 0) + value
        self._tick.counts[name] = self._tick.counts.get(name, 0) + count

    def read_device(self, measure: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Copy the sums of the losses to the host, and in the same copy what `measure` computes on the device.

        This is the one time in a tick that the host waits for the device. The time of `measure` is left out of the
        images per second.

        Returns:
            What `measure` returned, on the host.
        """
        backend = backend_of(self.world.device)
        start = backend.record_time()
        measured = measure()
        end = backend.record_time()
        host = copy_to_host(self._tick.sums | dict(measured))
        self._tick.sums = {name: host[name] for name in self._tick.sums}
        if measured:
            self._tick.excluded_s += backend.elapsed_s(start, end)
        return {name: host[name] for name in measured}

    def tick(self, images: int, step: int) -> dict[str, float]:
        """Return the line of stats.jsonl for the time since the last tick, and start the next. All ranks call this."""
        line = {"Progress/kimg": images / 1000, "Progress/step": float(step)}
        rows = self._gather_rows(
            {"names": sorted(self._tick.sums), "staleness": self._pop_ages(), "sent": self._sent_bytes()}
        )
        line |= self._reduce_means(rows)
        line |= self._age_histogram(rows)
        build_s = sum(recorder.capture_s for recorder in self._recorders)
        tick = self._tick
        tick.excluded_s += build_s - self._last_build_s
        self._last_build_s = build_s
        now = time.perf_counter()
        new_images = images - tick.images
        seconds = max(now - tick.last_tick - tick.excluded_s, 1e-9)
        line["Timing/img_per_sec"] = new_images / seconds
        line["Timing/sec_per_kimg"] = 1000 * seconds / max(new_images, 1)
        line["Timing/total_s"] = now - tick.start
        line |= self.excluded_times()
        line["Timing/data_wait_s"] = self.data_wait_s
        wait_s = sum(player.meter.wait_s for player in self.players)
        line["Timing/exchange_wait_s"] = wait_s - tick.wait_s
        for player in self.players:
            line[f"Comm/{player.name}/sent_bytes"] = float(max(row["sent"][player.name] for row in rows))
        line |= self.data_stats()
        line["Resources/peak_mem_gb"] = backend_of(self.world.device).peak_bytes(self.world.device) / 1e9
        self._tick = self._new_tick(images, tick.start)
        self._differs_over_ranks = False
        self.data_wait_s = 0.0
        return line

    def start_from(self, images: int) -> None:
        """Count from now on: a resumed run has trained on `images` before."""
        self._tick = self._new_tick(images)

    def mean_losses(self) -> dict[str, float]:
        """Return the mean losses since the last tick, over all ranks. All ranks call this."""
        return self._reduce_means(self._gather_rows({"names": sorted(self._tick.sums)}))

    def _gather_rows(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of all ranks, in rank order, if they may differ; else that of this rank."""
        if not (self.is_split or self._differs_over_ranks):
            return [row]
        self.world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()  # if a rank is gone, this fails at once
        return [json.loads(text) for text in self.world.all_gather_str(json.dumps(row))]

    def _reduce_means(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        names = sorted({name for row in rows for name in row["names"]})
        if not names:
            return {}
        for name in names:
            self._tick.sums.setdefault(name, torch.zeros((), dtype=torch.float64))
            self._tick.counts.setdefault(name, 0)
        host = copy_to_host(self._tick.sums)
        sums = torch.stack([host[name] for name in names])
        counts = torch.tensor([self._tick.counts[name] for name in names], dtype=torch.float64)
        both = torch.stack([sums, counts])
        self.world.all_ranks.all_reduce_sum(both).wait()
        return dict(zip(names, (both[0] / both[1]).tolist()))

    def _pop_ages(self) -> dict[str, tuple[dict[str, int], list[int]]]:
        """Return, by player, the histogram of ages since the last tick, and the age in every round."""
        popped = {name: stats.pop() for name, stats in self.staleness.items()}
        return {
            name: ({str(age): count for age, count in ages.items()}, [*lags.values()])
            for name, (ages, lags) in popped.items()
        }

    def _age_histogram(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Return Async/NAME_age/K -> count over all ranks, and keep the ages of every round in `lags`."""
        histogram: dict[str, float] = {}
        self.lags = {}
        for row in rows:
            for name, (ages, lags) in row["staleness"].items():
                self.lags.setdefault(name, lags)
                for age, count in ages.items():
                    key = f"Async/{name}_age/{age}"
                    histogram[key] = histogram.get(key, 0.0) + count
        return histogram

    def _sent_bytes(self) -> dict[str, int]:
        """Return the bytes sent since the last tick, by player."""
        return {player.name: player.meter.sent_bytes - self._tick.sent_bytes[player.name] for player in self.players}
