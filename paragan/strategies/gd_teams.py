"""Two teams: the ranks that play G, then those that play D, and the links between them."""

from __future__ import annotations

import re
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from paragan.comm.mailbox import Inbox, Outbox, Parcel
from paragan.comm.process_group import Waiter
from paragan.comm.traffic import Traffic
from paragan.comm.world import World
from paragan.core.devices import kind_of
from paragan.core.types import Batch
from paragan.game.game import Game
from paragan.game.remote_opponents import CriticInbox, CriticPost, FakesInbox, FakesPost, Snapshots
from paragan.game.stale_opponents import Lanes
from paragan.strategies.base import Role, Share, deal

T = TypeVar("T")

IMAGES, SNAPSHOTS = 1, 2  # tags
REPEATS = 3


def counts(split: str) -> tuple[int, int]:
    """ "2:6" -> 2 ranks of G, 6 of D."""
    g, _, d = split.partition(":")
    return int(g), int(d)


def as_split(split: Any) -> str:
    """auto, none or 2:6, which YAML reads as two minutes and six seconds. ValueError says so."""
    text = "{}:{}".format(*divmod(split, 60)) if isinstance(split, int) and split >= 60 else str(split)
    if not re.fullmatch(r"auto|none|[1-9]\d*:[1-9]\d*", text):
        raise ValueError("it should be auto, none, or how many ranks play G and how many D: 2:6")
    return text


def divided(split: str, game: Game, world: World) -> tuple[int, int]:
    """How many ranks play G and how many D. "auto": so that their turns take equally long, as rank 0 measures it."""
    if split != "auto":
        return counts(split)
    seconds = profile(game, world.device) if world.first else (0.0, 0.0)
    words = world.agree(" ".join(map(repr, seconds)))
    g_s, d_s = map(float, words[0].split())
    return even(g_s, d_s, world.size)


def even(g_s: float, d_s: float, ranks: int) -> tuple[int, int]:
    """The division with which the slower of both teams is fastest. g_s, d_s: of the turns, on one rank."""
    g = min(range(1, ranks), key=lambda g: max(g_s / g, d_s / (ranks - g)))
    return g, ranks - g


@torch.no_grad()
def profile(game: Game, device: torch.device) -> tuple[float, float]:
    """Seconds that G's and D's turns of one round take on one rank, from forward passes of one lane: a backward
    pass costs a forward for the inputs and one for the weights."""
    hand = game.imagined(game.g_lane, device)
    with game.autocast():
        g, fake = _seconds(lambda: game.make(hand, "G"), device)
        d, _ = _seconds(lambda: game.d.net(fake.images, fake.labels), device)
    images = 1 / game.ratio  # of D's turn for one of G's
    return 3 * g + 2 * d, game.d_steps * images * (6 + 3 * game.objective.second_order) * d


def _seconds(action: Callable[[], T], device: torch.device) -> tuple[float, T]:
    action()
    times: list[float] = []
    while True:
        start = time.perf_counter()
        made = action()
        kind_of(device).synchronize(device)
        times.append(time.perf_counter() - start)
        if len(times) == REPEATS:
            return statistics.median(times), made


class Mail:
    """Who this rank is in its team, and its links to the other one.

    split : ranks of G, ranks of D
    """

    def __init__(self, game: Game, world: World, lanes: int, split: tuple[int, int], lead: int, snapshots: Snapshots):
        self.game, self.world, self.lead, self.snapshots = game, world, lead, snapshots
        self.g, self.d = range(split[0]), range(split[0], world.size)
        self.split = split
        self.plays_g = world.rank in self.g
        mine, others = (self.g, self.d) if self.plays_g else (self.d, self.g)
        groups = [world.group(ranks) for ranks in (self.g, self.d)]
        self.team = next(group for group in groups if group)
        self.share = deal(lanes, mine.index(world.rank), len(mine))
        theirs = {rank: deal(lanes, others.index(rank), len(others)) for rank in others}
        self.shared = {rank: _both(self.share, theirs[rank]) for rank in others}
        self.served = [rank for rank in others if self._serves(rank)]  # by snapshots, one way or the other
        player = game.g if self.plays_g else game.d
        wanted = [rank for rank in others if self.shared[rank] or rank in self.served]
        self.links = {rank: world.link(rank).metered(player.meter) for rank in wanted}
        self._waiters = list[Waiter]()

    def _serves(self, other: int) -> bool:
        """Whether a rank of D sends its snapshots to a rank of G, of whom this is one."""
        g, d = sorted((self.world.rank, other))
        return self.d.index(d) == g % len(self.d)

    def _waiter(self, rank: int) -> Waiter:
        waiter = self.world.waiter(self.links[rank])
        self._waiters.append(waiter)
        return waiter

    def _outbox(self, rank: int, tag: int) -> Outbox:
        return Outbox(self.links[rank], self._waiter(rank), tag)

    def _inbox(self, rank: int, tag: int, nbytes: Callable[[int], int]) -> Inbox:
        name = f"rank {rank}, which plays {'D' if self.plays_g else 'G'},"
        return Inbox(self.links[rank], self._waiter(rank), tag, nbytes, name)

    def fakes_post(self) -> FakesPost:
        return FakesPost({lanes: self._outbox(rank, IMAGES) for rank, lanes in self.shared.items() if lanes})

    def fakes_inbox(self) -> FakesInbox:
        parcels = {rank: self._of_images(lanes) for rank, lanes in self.shared.items() if lanes}
        boxes = {
            self.shared[rank]: self._inbox(rank, IMAGES, lambda _, nbytes=parcel.nbytes: nbytes)
            for rank, parcel in parcels.items()
        }
        by_lanes = {self.shared[rank]: parcel for rank, parcel in parcels.items()}
        return FakesInbox(boxes, by_lanes, self.team, self.lead, self.world.device, _layout(self._made().images))

    def critic_post(self) -> CriticPost:
        return CriticPost(self.snapshots, [self._outbox(rank, SNAPSHOTS) for rank in self.served])

    def critic_inbox(self) -> CriticInbox:
        (server,) = self.served
        return CriticInbox(self.snapshots, self._inbox(server, SNAPSHOTS, self.snapshots.nbytes), self.team, self.lead)

    @torch.no_grad()
    def _made(self) -> Batch:
        """What G makes for a lane."""
        with self.game.autocast():
            return self.game.make(self.game.imagined(self.game.g_lane, self.world.device), "G")

    def _of_images(self, lanes: Lanes) -> Parcel:
        """What a message with the images of these lanes holds: the kind of numbers that G makes."""
        made = self._made()
        count = len(lanes) * len(made.images)
        shapes, kinds = [(count, *made.images.shape[1:])], [made.images.dtype]
        if made.labels is not None:
            shapes, kinds = [*shapes, (count,)], [*kinds, made.labels.dtype]
        return Parcel(tuple(shapes), tuple(kinds))

    def bound(self, role: Role, every: int, *settle: Callable[[], None]) -> Role:
        """A role in this team."""
        for waiter in self._waiters:
            weakref.finalize(self, waiter.end)
        g, d = self.split
        about = f"{g} of {g + d} ranks play G, {d} play D"
        return replace(
            role,
            replicated=every == 1,
            speakers=(0, g),
            for_d=False,
            posts=self._posts(),
            settle=lambda: _each(settle, self),
            about=about,
        )

    def _posts(self) -> dict[str, Traffic]:
        if self.plays_g:
            sizes = [self._of_images(lanes).nbytes for lanes in self.shared.values() if lanes]
            return {"G": Traffic(sum(sizes), len(sizes))}
        mean = statistics.fmean(self.snapshots.nbytes(number) for number in range(self.snapshots.every))
        return {"D": Traffic(round(mean * len(self.served)), len(self.served))}


def _layout(images: torch.Tensor) -> torch.memory_format:
    last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _both(a: Share, b: Share) -> Lanes:
    return tuple(lane for lane in a.lanes if lane in b.lanes)


def _each(actions: Sequence[Callable[[], None]], mail: Mail) -> None:
    for action in actions:
        action()
    mail.world.everyone.sum(torch.zeros(1)).wait()
