"""What a run shows of itself: sums on the device, one reduction a tick."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from paragan.comm.world import World
from paragan.core.devices import kind_of
from paragan.core.types import Loss
from paragan.game.player import Player
from paragan.game.turn import Turn
from paragan.strategies.base import Role


class Stats:
    """Collects the losses of every beat, and turns them into one line a tick, the same on all ranks.

    of_data : what this rank's data pipeline says of itself
    lags : of every round since the tick before the last line, by player: how old was what it saw
    """

    def __init__(
        self,
        world: World,
        players: tuple[Player, ...],
        role: Role | None = None,
        of_data: Callable[[], Mapping[str, float]] = dict,
    ):
        self.world, self.players = world, players
        self.of_data = of_data
        self.seen = role.seen if role else {}
        self.teams = role is not None and role.teams
        self.lags: dict[str, list[int]] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self.data_wait_s = 0.0
        self._start = self._last = time.perf_counter()
        self._images = 0
        self._sent = {player.name: 0 for player in players}
        self._waited = 0.0
        self._aside_s = self._eval_s = 0.0
        self._recorders = [turn.recorder for beat in role.round for turn in beat if turn.recorder] if role else []
        self._built_s = 0.0

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """What happens inside (scores, grids, checkpoints) is not training: no tick's pace includes it."""
        start = time.perf_counter()
        yield
        self._aside_s += time.perf_counter() - max(start, self._last)

    @contextlib.contextmanager
    def scoring(self) -> Generator[None]:
        """What happens inside is the part of it that scores take."""
        start = time.perf_counter()
        yield
        self._eval_s += time.perf_counter() - start

    def beside(self) -> dict[str, float]:
        """Seconds since the last tick that were not training, and those of them that scores took."""
        return {"Timing/aside_s": max(self._aside_s, self._eval_s), "Timing/eval_s": self._eval_s}

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
        told = self._tell({"names": sorted(self._sums), "seen": self._taken(), "sent": self._sent_now()})
        line |= self._means(told) | self._ages(told)
        built_s = sum(recorder.built_s for recorder in self._recorders)
        self._aside_s, self._built_s = self._aside_s + built_s - self._built_s, built_s
        now, shown = time.perf_counter(), images - self._images
        seconds = max(now - self._last - self._aside_s, 1e-9)
        line["Timing/img_per_sec"] = shown / seconds
        line["Timing/sec_per_kimg"] = 1000 * seconds / max(shown, 1)
        line["Timing/total_s"] = now - self._start
        line |= self.beside()
        line["Timing/data_wait_s"] = self.data_wait_s
        waited = sum(player.meter.wait_s for player in self.players)
        line["Timing/exchange_wait_s"] = waited - self._waited
        line |= {f"Comm/{p.name}/sent_bytes": float(max(t["sent"][p.name] for t in told)) for p in self.players}
        line |= self.of_data()
        line["Resources/peak_mem_gb"] = peak_memory_gb(self.world.device)
        self._last, self._images, self._waited, self.data_wait_s = now, images, waited, 0.0
        self._aside_s = self._eval_s = 0.0
        self._sums, self._counts = {}, {}
        return line

    def start_at(self, images: int) -> None:
        """Count from here: a resumed run has shown `images` before."""
        self._images = images
        self._start = self._last = time.perf_counter()

    def losses(self) -> dict[str, float]:
        """Means since the last tick, over all ranks."""
        return self._means(self._tell({"names": sorted(self._sums)}))

    def _tell(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Where ranks have different things to say everyone's, in rank order; else this rank's."""
        if not self.teams:
            return [mine]
        self.world.everyone.sum(torch.zeros(1)).wait()  # where one is gone, this says so at once
        return [json.loads(word) for word in self.world.agree(json.dumps(mine))]

    def _means(self, told: list[dict[str, Any]]) -> dict[str, float]:
        names = sorted({name for row in told for name in row["names"]})
        if not names:
            return {}
        for name in names:
            self._sums.setdefault(name, torch.zeros((), dtype=torch.float64))
            self._counts.setdefault(name, 0)
        sums = torch.stack([self._sums[name].cpu() for name in names])
        counts = torch.tensor([self._counts[name] for name in names], dtype=torch.float64)
        both = torch.stack([sums, counts])
        self.world.everyone.sum(both).wait()
        return dict(zip(names, (both[0] / both[1]).tolist()))

    def _taken(self) -> dict[str, tuple[dict[str, int], list[int]]]:
        """How old was what this rank saw since the last tick, and round by round."""
        taken = {name: seen.taken() for name, seen in self.seen.items()}
        return {n: ({str(k): v for k, v in ages.items()}, [*lags.values()]) for n, (ages, lags) in taken.items()}

    def _ages(self, told: list[dict[str, Any]]) -> dict[str, float]:
        """Async/NAME_age/K: how many of what was seen were K rounds old."""
        found: dict[str, float] = {}
        self.lags = {}
        for row in told:
            for name, (ages, lags) in row["seen"].items():
                self.lags.setdefault(name, lags)
                for age, count in ages.items():
                    key = f"Async/{name}_age/{age}"
                    found[key] = found.get(key, 0.0) + count
        return found

    def _sent_now(self) -> dict[str, int]:
        """Bytes since the last tick, by player."""
        sent = {player.name: player.meter.sent_bytes - self._sent[player.name] for player in self.players}
        self._sent = {player.name: player.meter.sent_bytes for player in self.players}
        return sent


def peak_memory_gb(device: torch.device) -> float:
    return kind_of(device).peak_bytes(device) / 1e9
