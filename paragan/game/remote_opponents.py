"""Opponents that are trained on other ranks: images of G that are sent to D, and snapshots of D that are sent to G.

A message is used as soon as every rank of the team has it. A team waits for it only where more than `max_lead_rounds`
rounds would otherwise be in progress at once.

Both ends count rounds, so they know what message k holds: the images that G made in round k, and whether D's message
carries a snapshot. In round k D may use images up to round k, and G the D from before round k; what arrives earlier
waits. So every run is a pattern that `FakeReplayBuffer` and `StaleDiscriminator` can repeat in one process. G sends its
images before its backward pass, so with a lead of 1 and all lanes of a rank in one pass the slower team does not wait.
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
from paragan.core.host_copies import copy_to_device
from paragan.core.types import Batch, DiscriminatorFn
from paragan.game.player import Player
from paragan.game.stale_opponents import FakeBatch, FakeReplayBuffer, LaneIds, StalenessStats, Tensors


def min_over_team(team: Group, value: int) -> int:
    """Return the smallest value of all ranks of the team. It is sent from the host: no device is waited for."""
    if team.size == 1:
        return value
    rows, work = team.all_gather(torch.tensor([value]))
    work.wait()
    return int(rows.min())


class FakeSender:
    """Sends the images of G to the ranks of D that own their lanes.

    send_queues : by the lanes that this rank shares with the receiver
    fields      : the fields of G's output that D's loss uses
    """

    def __init__(self, send_queues: Mapping[LaneIds, SendQueue], fields: Sequence[str] = ()):
        self.send_queues = send_queues
        self.fields = tuple(fields)
        self._pending_fakes: dict[int, FakeBatch] = {}  # by lane

    def __call__(self, fake: Batch, step: int) -> None:
        """Collect the images of one pass of G, and send those of a rank when all are made."""
        lanes = fake.rng.lanes
        per_lane = len(fake.images) // len(lanes)
        fakes = FakeBatch.from_batch(fake, self.fields)
        for i, lane in enumerate(lanes):
            self._pending_fakes[lane] = fakes.slice_rows(i * per_lane, (i + 1) * per_lane)
        for shared, send_queue in self.send_queues.items():
            if all(lane in self._pending_fakes for lane in shared):
                batch = FakeBatch.concat(self._pending_fakes.pop(lane) for lane in shared)
                tensors = [*batch.arrays.values()]
                send_queue.send(TensorPack.from_tensors(tensors).pack(tensors))

    def flush(self) -> None:
        """Wait until everything is sent."""
        for send_queue in self.send_queues.values():
            send_queue.flush()


class FakeReceiver:
    """Receives images from the ranks of G that own this rank's lanes, and puts them into `replay_buffer`.

    recv_queues   : by the lanes that this rank shares with the sender
    packs         : what one message of each sender holds
    names         : of the arrays in a message
    memory_format : of the images, as G makes them
    """

    def __init__(
        self,
        recv_queues: Mapping[LaneIds, RecvQueue],
        packs: Mapping[LaneIds, TensorPack],
        names: Sequence[str],
        team: Group,
        max_lead_rounds: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ):
        self.recv_queues = recv_queues
        self.packs = packs
        self.names = tuple(names)
        self.team = team
        self.max_lead_rounds = max_lead_rounds
        self.device = device
        self.memory_format = memory_format
        self._last_received = dict.fromkeys(recv_queues, -1)
        self._step = -1
        self._lag = 0

    replay_buffer: FakeReplayBuffer

    def lag(self, step: int) -> int:
        """Return how many rounds ago the newest images were made that every rank of the team has."""
        if self._step < 0:  # rounds from a checkpoint are complete
            self._last_received = dict.fromkeys(self.recv_queues, max(self.replay_buffer.rounds, default=-1))
        if step != self._step:
            wait_until = step - self.max_lead_rounds + 1 if self.replay_buffer.rounds else step
            self._receive(post_until=step, wait_until=wait_until)
            newest = min(step, *self._last_received.values())
            self._step = step
            self._lag = step - min_over_team(self.team, newest)
        return self._lag

    def _receive(self, post_until: int, wait_until: int) -> None:
        for lanes, recv_queue in self.recv_queues.items():
            for number, data in recv_queue.receive(post_until, wait_until):
                arrays = dict(zip(self.names, self.packs[lanes].unpack(copy_to_device(data, self.device))))
                arrays["images"] = arrays["images"].contiguous(memory_format=self.memory_format)
                self.replay_buffer.insert(FakeBatch(arrays), lanes, number)
                self._last_received[lanes] = number

    def drain(self) -> None:
        """Receive everything up to the last round."""
        if self._step >= 0:
            self._receive(self._step, self._step)


@dataclass(frozen=True)
class SnapshotCodec:
    """How D is sent: every `period`-th message carries its parameters over a wire, and its buffers as they are."""

    d: Player
    period: int
    wire: Compressor

    def __post_init__(self) -> None:
        if self.wire.lossy and self.d.flat.params.dtype != torch.float32:
            kind = str(self.d.flat.params.dtype).removeprefix("torch.")
            raise UsageError(
                f"strategy.snapshot_wire={self.wire.name}: D has {kind} parameters. Use --strategy.snapshot_wire=exact"
            )

    def is_due(self, number: int) -> bool:
        """Return whether message `number` carries a snapshot."""
        return (number + 1) % self.period == 0

    def nbytes(self, number: int) -> int:
        """Return the size of message `number`."""
        return TensorPack.from_tensors(self._tensors() if self.is_due(number) else []).nbytes

    def encode(self, number: int) -> Tensor:
        """Return message `number`: the current D, or an empty message."""
        tensors = self._tensors() if self.is_due(number) else []
        if tensors and self.wire.lossy:
            self.wire.encode(self.d.flat.params.detach(), tensors[0], seed=number)
        return TensorPack.from_tensors(tensors).pack(tensors)

    @torch.no_grad()
    def load(self, data: Tensor) -> None:
        """Load a snapshot into D."""
        tensors = self._tensors()
        data = copy_to_device(data, tensors[0].device)
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
    """Sends D to the ranks of G that this rank serves, one message per round."""

    def __init__(self, codec: SnapshotCodec, send_queues: Sequence[SendQueue]):
        self.codec = codec
        self.send_queues = send_queues

    def __call__(self, step: int) -> None:
        """Send the message of one step, after D's step."""
        if self.send_queues:
            data = self.codec.encode(step)
            for send_queue in self.send_queues:
                send_queue.send(data)

    def flush(self) -> None:
        """Wait until everything is sent."""
        for send_queue in self.send_queues:
            send_queue.flush()


class SnapshotReceiver:
    """The newest D that was received, for G to train against: it is loaded into this rank's own, untrained D."""

    def __init__(self, codec: SnapshotCodec, recv_queue: RecvQueue, team: Group, max_lead_rounds: int):
        self.d = codec.d
        self.codec = codec
        self.recv_queue = recv_queue
        self.team = team
        self.max_lead_rounds = max_lead_rounds
        self.staleness = StalenessStats()
        self.version: int | None = None  # the copy is D after so many rounds
        self._pending_snapshots: dict[int, Tensor] = {}
        self._step = -1

    def __call__(self, step: int) -> DiscriminatorFn:
        """Return the newest D that every rank of the team has."""
        if step != self._step:
            self._step = step
            self._receive(post_until=step, wait_until=step - self.max_lead_rounds)
            newest = max(
                [v for v in self._pending_snapshots if v <= step],
                default=step if self.version is None else self.version,
            )
            self._load_version(min_over_team(self.team, newest))
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
        self.d.pre_step(self.d.net)  # as the trained D did before its next step

    def drain(self) -> None:
        """Receive everything up to the last round, and load the newest D."""
        if self._step >= 0:
            self._receive(self._step, self._step)
            self._load_version(max(self._pending_snapshots, default=self.version or 0))

    def state(self) -> Tensors:
        """Return the loaded version of D."""
        if self.version is None:
            return {}
        return {f"critic/{self.version}/{name}": t for name, t in self.d.net.state_dict().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from the `state` of all ranks."""
        state = self.d.net.state_dict()
        for name, tensor in tensors.items():
            kind, version, what = name.split("/", 2)
            if kind == "critic":
                self.version = int(version)
                state[what].copy_(tensor)
