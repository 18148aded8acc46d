"""What the other team posts: to D the images of G, to G snapshots of D. Each is used as soon as everyone in the team
has it, and waited for when without it a team would begin more than `lead` rounds that the other has not ended.

Both ends count rounds, so they know what message k holds: the images that G made in round k; whether D's carries a
snapshot. In round k D may draw what was made up to round k, and G play against D as it was before round k, not against
anything later: what came early waits. So every run is one of the patterns that `PastFakes` and `PastCritic` can repeat.
G posts before it plays, so with a lead of 1, and all lanes of a rank in one pass, the slower team does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.comm.compression.compressors import Compressor
from paragan.comm.mailbox import RecvQueue, SendQueue, TensorPack
from paragan.comm.process_group import Group
from paragan.core.errors import UsageError
from paragan.core.types import Batch, DiscriminatorFn
from paragan.game.player import Player
from paragan.game.stale_opponents import FakeBatch, FakeReplayBuffer, LaneIds, StalenessStats, Tensors


def min_over_team(team: Group, value: int, device: torch.device) -> int:
    """The newest that every rank of the team has."""
    if team.size == 1:
        return value
    rows, work = team.all_gather(torch.tensor([value], device=device))
    work.wait()
    return int(rows.min())


class FakeSender:
    """Images on their way to the ranks that own their lanes. to : by the lanes that this rank shares with them."""

    def __init__(self, send_queues: Mapping[LaneIds, SendQueue]):
        self.send_queues = send_queues
        self._pending_fakes: dict[int, FakeBatch] = {}  # by lane

    def __call__(self, fake: Batch, step: int) -> None:
        """G made these in this step: they leave when all that go to one rank are there."""
        lanes = fake.rng.lanes
        for i, lane in enumerate(lanes):
            per_lane = len(fake.images) // len(lanes)
            self._pending_fakes[lane] = FakeBatch(fake.images.detach(), fake.labels).slice_rows(
                i * per_lane, (i + 1) * per_lane
            )
        for shared, outbox in self.send_queues.items():
            if all(lane in self._pending_fakes for lane in shared):
                made = FakeBatch.concat(self._pending_fakes.pop(lane) for lane in shared)
                tensors = [made.images] if made.labels is None else [made.images, made.labels]
                outbox.send(TensorPack.from_tensors(tensors).pack(tensors))

    def flush(self) -> None:
        for outbox in self.send_queues.values():
            outbox.flush()


class FakeReceiver:
    """Images from the ranks that own this rank's lanes, put into `fakes`.

    boxes : by the lanes that this rank shares with the sender;  parcels : what one message from there holds
    layout: in which G makes them
    """

    def __init__(
        self,
        recv_queues: Mapping[LaneIds, RecvQueue],
        packs: Mapping[LaneIds, TensorPack],
        team: Group,
        max_lead_rounds: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ):
        self.recv_queues, self.packs, self.team, self.max_lead_rounds = recv_queues, packs, team, max_lead_rounds
        self.device, self.memory_format = device, memory_format
        self._last_received = dict.fromkeys(recv_queues, -1)
        self._step, self._lag = -1, 0

    replay_buffer: FakeReplayBuffer

    def lag(self, step: int) -> int:
        """How many rounds ago the newest were made that everyone in the team has."""
        if self._step < 0:  # what a checkpoint had is complete
            self._last_received = dict.fromkeys(self.recv_queues, max(self.replay_buffer.rounds, default=-1))
        if step != self._step:
            self._receive(
                post_until=step, wait_until=step - self.max_lead_rounds + 1 if self.replay_buffer.rounds else step
            )
            mine = min(step, *self._last_received.values())
            self._step, self._lag = step, step - min_over_team(self.team, mine, self.device)
        return self._lag

    def _receive(self, post_until: int, wait_until: int) -> None:
        for lanes, box in self.recv_queues.items():
            for number, data in box.receive(post_until, wait_until):
                images, *labels = (t.to(self.device) for t in self.packs[lanes].unpack(data))
                images = images.contiguous(memory_format=self.memory_format)
                self.replay_buffer.insert(FakeBatch(images, labels[0] if labels else None), lanes, number)
                self._last_received[lanes] = number

    def drain(self) -> None:
        """Nothing is under way any more: of all rounds up to the last."""
        if self._step >= 0:
            self._receive(self._step, self._step)


@dataclass(frozen=True)
class SnapshotCodec:
    """How D travels: with every `every`-th of its messages, parameters over a wire and buffers as they are."""

    d: Player
    period: int
    wire: Compressor

    def __post_init__(self) -> None:
        if self.wire.lossy and self.d.flat.params.dtype != torch.float32:
            kind = str(self.d.flat.params.dtype).removeprefix("torch.")
            raise UsageError(f"D has {kind} parameters, which only --strategy.snapshot_wire=exact carries")

    def is_due(self, number: int) -> bool:
        return (number + 1) % self.period == 0

    def nbytes(self, number: int) -> int:
        return TensorPack.from_tensors(self._tensors() if self.is_due(number) else []).nbytes

    def encode(self, number: int) -> Tensor:
        """D as it stands, or a message that says no more than that there is none."""
        tensors = self._tensors() if self.is_due(number) else []
        if tensors and self.wire.lossy:
            self.wire.encode(self.d.flat.params.detach(), tensors[0], seed=number)
        return TensorPack.from_tensors(tensors).pack(tensors)

    @torch.no_grad()
    def load(self, data: Tensor) -> None:
        """Make D what was packed."""
        tensors = self._tensors()
        for tensor, value in zip(tensors, TensorPack.from_tensors(tensors).unpack(data)):
            tensor.copy_(value)
        if self.wire.lossy:
            self.wire.decode(tensors[0], self.d.flat.params)

    def _tensors(self) -> list[Tensor]:
        params = self.d.flat.params
        if self.wire.lossy:
            params = torch.empty(self.wire.nbytes(params.numel()), dtype=torch.uint8, device=params.device)
        return [params, *self.d.net.buffers()]


class SnapshotSender:
    """D's rounds, told to the ranks of G that this one serves."""

    def __init__(self, codec: SnapshotCodec, send_queues: Sequence[SendQueue]):
        self.codec, self.send_queues = codec, send_queues

    def __call__(self, step: int) -> None:
        """D has moved in this step."""
        if self.send_queues:
            data = self.codec.encode(step)
            for outbox in self.send_queues:
                outbox.send(data)

    def flush(self) -> None:
        for outbox in self.send_queues:
            outbox.flush()


class SnapshotReceiver:
    """D as it was posted last, for G to play against: in this rank's own copy of D, which does not move."""

    def __init__(self, codec: SnapshotCodec, recv_queue: RecvQueue, team: Group, max_lead_rounds: int):
        self.d, self.codec, self.recv_queue, self.team, self.max_lead_rounds = (
            codec.d,
            codec,
            recv_queue,
            team,
            max_lead_rounds,
        )
        self.staleness = StalenessStats()
        self.version: int | None = None  # what the copy is: D after so many rounds
        self._pending_snapshots: dict[int, Tensor] = {}
        self._step = -1

    def __call__(self, step: int) -> DiscriminatorFn:
        if step != self._step:
            self._step = step
            self._receive(post_until=step, wait_until=step - self.max_lead_rounds)
            newest = max(
                [v for v in self._pending_snapshots if v <= step],
                default=step if self.version is None else self.version,
            )
            self._load_version(min_over_team(self.team, newest, self.d.flat.params.device))
            assert self.version is not None
            self.staleness.record(step, self.version, Counter({step - self.version: 1}))
        return self.d.net

    def _receive(self, post_until: int, wait_until: int) -> None:
        for number, data in self.recv_queue.receive(post_until, wait_until):
            if self.codec.is_due(number):
                self._pending_snapshots[number + 1] = data

    def _load_version(self, version: int) -> None:
        if version == self.version:
            return
        if version in self._pending_snapshots:
            self.codec.load(self._pending_snapshots[version])
        self._pending_snapshots = {v: data for v, data in self._pending_snapshots.items() if v > version}
        self.version = version
        self.d.pre_step(self.d.net)  # as D did when it went on from there

    def drain(self) -> None:
        """Nothing is under way any more, and the copy is the newest."""
        if self._step >= 0:
            self._receive(self._step, self._step)
            self._load_version(max(self._pending_snapshots, default=self.version or 0))

    def state(self) -> Tensors:
        return (
            {}
            if self.version is None
            else {f"critic/{self.version}/{name}": t for name, t in self.d.net.state_dict().items()}
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.d.net.state_dict()
        for name, tensor in tensors.items():
            kind, version, what = name.split("/", 2)
            if kind == "critic":
                self.version = int(version)
                own[what].copy_(tensor)
