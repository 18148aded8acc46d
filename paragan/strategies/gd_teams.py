"""Two teams: the ranks that train G, then those that train D, and the links between them.

Images go from each rank of G to the ranks of D that own the same lanes; snapshots of D go from one rank of D to each
rank of G (game/remote_opponents.py).
"""

from __future__ import annotations

import re
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from paragan.comm.mailbox import RecvQueue, SendQueue, TensorPack
from paragan.comm.process_group import WaitThread
from paragan.comm.traffic import Traffic
from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.game.game import Game
from paragan.game.remote_opponents import FakeReceiver, FakeSender, SnapshotCodec, SnapshotReceiver, SnapshotSender
from paragan.game.stale_opponents import FakeBatch, LaneIds
from paragan.strategies.base import LaneShare, Role, assign_lanes

T = TypeVar("T")

IMAGES_TAG = 1
SNAPSHOTS_TAG = 2
TIMING_REPEATS = 3


def parse_split(split: str) -> tuple[int, int]:
    """ "2:6" -> 2 ranks of G, 6 of D."""
    g, _, d = split.partition(":")
    return int(g), int(d)


def validate_split(split: Any) -> str:
    """Return a split as text: auto, none or 2:6, which YAML reads as a number in base 60. Else raise ValueError."""
    text = "{}:{}".format(*divmod(split, 60)) if isinstance(split, int) and split >= 60 else str(split)
    if not re.fullmatch(r"auto|none|[1-9]\d*:[1-9]\d*", text):
        raise ValueError("it should be auto, none, or how many ranks play G and how many D: 2:6")
    return text


def split_ranks(split: str, game: Game, world: World) -> tuple[int, int]:
    """Return the numbers of ranks of G and of D. "auto": turns of equal length, as rank 0 measures them."""
    if split != "auto":
        return parse_split(split)
    seconds = measure_turns(game, world.device) if world.is_main else (0.0, 0.0)
    words = world.all_gather_str(" ".join(map(repr, seconds)))
    g_s, d_s = map(float, words[0].split())
    return balance(g_s, d_s, world.size)


def balance(g_s: float, d_s: float, ranks: int) -> tuple[int, int]:
    """Return the split with which the slower team is fastest. g_s, d_s: seconds of the turns on one rank."""
    g = min(range(1, ranks), key=lambda g: max(g_s / g, d_s / (ranks - g)))
    return g, ranks - g


@torch.no_grad()
def measure_turns(game: Game, device: torch.device) -> tuple[float, float]:
    """Estimate the seconds of G's and D's turns of one round on one rank, from forward passes of one lane.

    A backward pass costs one forward pass for the inputs and one for the weights.
    """
    batch = game.dummy_batch(game.g_lane_batch, device)
    with game.autocast():
        g, fake = _median_seconds(lambda: game.generate(batch, "G"), device)
        d, _ = _median_seconds(lambda: game.d.net(fake.images, fake.labels), device)
    images = 1 / game.g_to_d_batch_ratio  # of D's turn, for one of G's
    return 3 * g + 2 * d, game.d_steps * images * (6 + 3 * game.objective.second_order) * d


def _median_seconds(action: Callable[[], T], device: torch.device) -> tuple[float, T]:
    action()
    times: list[float] = []
    while True:
        start = time.perf_counter()
        result = action()
        backend_of(device).synchronize(device)
        times.append(time.perf_counter() - start)
        if len(times) == TIMING_REPEATS:
            return statistics.median(times), result


class TeamLinks:
    """The team of this rank, and its links to the ranks of the other team.

    split : number of ranks of G, and of D
    """

    def __init__(
        self, game: Game, world: World, lanes: int, split: tuple[int, int], max_lead_rounds: int, codec: SnapshotCodec
    ):
        self.game = game
        self.world = world
        self.max_lead_rounds = max_lead_rounds
        self.codec = codec
        self.g_ranks = range(split[0])
        self.d_ranks = range(split[0], world.size)
        self.split = split
        self.plays_g = world.rank in self.g_ranks
        members, others = (self.g_ranks, self.d_ranks) if self.plays_g else (self.d_ranks, self.g_ranks)
        groups = [world.new_group(ranks) for ranks in (self.g_ranks, self.d_ranks)]
        self.team = next(group for group in groups if group)
        self.share = assign_lanes(lanes, members.index(world.rank), len(members))
        other_shares = {rank: assign_lanes(lanes, others.index(rank), len(others)) for rank in others}
        self.shared_lanes = {rank: _common_lanes(self.share, other_shares[rank]) for rank in others}
        self.snapshot_peers = [rank for rank in others if self._shares_snapshots(rank)]
        player = game.g if self.plays_g else game.d
        peers = [rank for rank in others if self.shared_lanes[rank] or rank in self.snapshot_peers]
        self.pair_groups = {rank: world.pair_group(rank).with_meter(player.meter) for rank in peers}
        self._wait_threads = list[WaitThread]()

    def _shares_snapshots(self, other: int) -> bool:
        """Return whether this rank and `other` share a snapshot link."""
        g, d = sorted((self.world.rank, other))
        return self.d_ranks.index(d) == g % len(self.d_ranks)

    def _make_wait_thread(self, rank: int) -> WaitThread:
        waiter = self.world.make_wait_thread(self.pair_groups[rank])
        self._wait_threads.append(waiter)
        return waiter

    def _make_send_queue(self, rank: int, tag: int) -> SendQueue:
        return SendQueue(self.pair_groups[rank], self._make_wait_thread(rank), tag)

    def _make_recv_queue(self, rank: int, tag: int, nbytes: Callable[[int], int]) -> RecvQueue:
        name = f"rank {rank}, which trains {'D' if self.plays_g else 'G'},"
        return RecvQueue(self.pair_groups[rank], self._make_wait_thread(rank), tag, nbytes, name)

    def make_fake_sender(self) -> FakeSender:
        """Return what sends the images of this rank of G."""
        return FakeSender(
            {lanes: self._make_send_queue(rank, IMAGES_TAG) for rank, lanes in self.shared_lanes.items() if lanes},
            self.game.objective.replayed_fields,
        )

    def make_fake_receiver(self) -> FakeReceiver:
        """Return what receives images on this rank of D."""
        packs = {rank: self._image_pack(lanes) for rank, lanes in self.shared_lanes.items() if lanes}
        recv_queues = {
            self.shared_lanes[rank]: self._make_recv_queue(rank, IMAGES_TAG, lambda _, nbytes=pack.nbytes: nbytes)
            for rank, pack in packs.items()
        }
        packs_by_lanes = {self.shared_lanes[rank]: pack for rank, pack in packs.items()}
        return FakeReceiver(
            recv_queues,
            packs_by_lanes,
            tuple(self._example_fakes().arrays),
            self.team,
            self.max_lead_rounds,
            self.world.device,
            _memory_format(self._example_fakes().images),
        )

    def make_snapshot_sender(self) -> SnapshotSender:
        """Return what sends the snapshots of this rank of D."""
        return SnapshotSender(self.codec, [self._make_send_queue(rank, SNAPSHOTS_TAG) for rank in self.snapshot_peers])

    def make_snapshot_receiver(self) -> SnapshotReceiver:
        """Return what receives snapshots on this rank of G."""
        (server,) = self.snapshot_peers
        return SnapshotReceiver(
            self.codec, self._make_recv_queue(server, SNAPSHOTS_TAG, self.codec.nbytes), self.team, self.max_lead_rounds
        )

    @torch.no_grad()
    def _example_fakes(self) -> FakeBatch:
        """Return what is sent of the fakes of one lane."""
        with self.game.autocast():
            fake = self.game.generate(self.game.dummy_batch(self.game.g_lane_batch, self.world.device), "G")
        return FakeBatch.from_batch(fake, self.game.objective.replayed_fields)

    def _image_pack(self, lanes: LaneIds) -> TensorPack:
        """Return the shapes and dtypes of a message with the fakes of these lanes."""
        arrays = self._example_fakes().arrays.values()
        shapes = [(len(lanes) * len(x), *x.shape[1:]) for x in arrays]
        return TensorPack(tuple(shapes), tuple(x.dtype for x in arrays))

    def to_role(self, role: Role, replicated: bool, *drains: Callable[[], None]) -> Role:
        """Complete a role with what follows from the teams.

        Args:
            replicated: whether all ranks of a team hold the same player.
            drains: wait until no message of this rank is in flight.
        """
        for waiter in self._wait_threads:
            weakref.finalize(self, waiter.close)
        g, d = self.split
        return replace(
            role,
            replicated=replicated,
            owner_ranks=(0, g),
            extra_fakes_for_d=False,
            extra_traffic=self._extra_traffic(),
            drain=lambda: _drain_all(drains, self),
            description=f"{g} of {g + d} ranks train G, {d} train D",
        )

    def _extra_traffic(self) -> dict[str, Traffic]:
        if self.plays_g:
            sizes = [self._image_pack(lanes).nbytes for lanes in self.shared_lanes.values() if lanes]
            return {"G": Traffic(sum(sizes), len(sizes))}
        mean = statistics.fmean(self.codec.nbytes(number) for number in range(self.codec.period))
        return {"D": Traffic(round(mean * len(self.snapshot_peers)), len(self.snapshot_peers))}


def _memory_format(images: torch.Tensor) -> torch.memory_format:
    is_channels_last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format


def _common_lanes(a: LaneShare, b: LaneShare) -> LaneIds:
    return tuple(lane for lane in a.lanes if lane in b.lanes)


def _drain_all(actions: Sequence[Callable[[], None]], links: TeamLinks) -> None:
    for action in actions:
        action()
    links.world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
