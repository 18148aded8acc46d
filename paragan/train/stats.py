"""What a run shows of itself: sums on the device, one reduction a tick."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Generator

import torch

from ..batch import Loss
from ..comm.world import World
from ..game.player import Player
from ..game.turn import Turn


class Stats:
    """Collects the losses of every beat, and turns them into one line a tick, the same on all ranks."""

    def __init__(self, world: World, players: tuple[Player, ...]):
        self.world, self.players = world, players
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self.data_wait_s = 0.0
        self._start = self._last = time.perf_counter()
        self._images = 0
        self._sent = {player.name: 0 for player in players}
        self._waited = 0.0
        self._aside_s = 0.0

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """What happens inside (scores, grids, checkpoints) is not training: no tick's pace includes it."""
        start = time.perf_counter()
        yield
        self._aside_s += time.perf_counter() - max(start, self._last)

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
        line |= self.losses()
        now, shown = time.perf_counter(), images - self._images
        seconds = max(now - self._last - self._aside_s, 1e-9)
        line["Timing/img_per_sec"] = shown / seconds
        line["Timing/sec_per_kimg"] = 1000 * seconds / max(shown, 1)
        line["Timing/total_s"] = now - self._start
        line["Timing/data_wait_s"] = self.data_wait_s
        waited = sum(player.meter.wait_s for player in self.players)
        line["Timing/exchange_wait_s"] = waited - self._waited
        for player in self.players:
            line[f"Comm/{player.name}/sent_bytes"] = float(player.meter.sent_bytes - self._sent[player.name])
            self._sent[player.name] = player.meter.sent_bytes
        line["Resources/peak_mem_gb"] = peak_memory_gb(self.world.device)
        self._last, self._images, self._waited, self.data_wait_s = now, images, waited, 0.0
        self._aside_s = 0.0
        self._sums, self._counts = {}, {}
        return line

    def start_at(self, images: int) -> None:
        """Count from here: a resumed run has shown `images` before."""
        self._images = images
        self._start = self._last = time.perf_counter()

    def losses(self) -> dict[str, float]:
        """Means since the last tick, over all ranks."""
        names = sorted(self._sums)
        if not names:
            return {}
        sums = torch.stack([self._sums[name] for name in names]).cpu()
        counts = torch.tensor([self._counts[name] for name in names], dtype=torch.float64)
        both = torch.stack([sums, counts])
        self.world.everyone.sum(both).wait()
        return dict(zip(names, (both[0] / both[1]).tolist()))


def peak_memory_gb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9
