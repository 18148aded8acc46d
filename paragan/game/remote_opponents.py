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
from paragan.comm.mailbox import Inbox, Outbox, Parcel
from paragan.comm.process_group import Group
from paragan.core.errors import Unusable
from paragan.core.types import Batch, Net
from paragan.game.player import Player
from paragan.game.stale_opponents import Lanes, Made, PastFakes, Seen, Tensors


def newest_of_all(team: Group, mine: int, device: torch.device) -> int:
    """The newest that every rank of the team has."""
    if team.size == 1:
        return mine
    rows, work = team.gather(torch.tensor([mine], device=device))
    work.wait()
    return int(rows.min())


class FakesPost:
    """Images on their way to the ranks that own their lanes. to : by the lanes that this rank shares with them."""

    def __init__(self, to: Mapping[Lanes, Outbox]):
        self.to = to
        self._made: dict[int, Made] = {}  # by lane

    def __call__(self, fake: Batch, step: int) -> None:
        """G made these in this step: they leave when all that go to one rank are there."""
        lanes = fake.draw.lanes
        for i, lane in enumerate(lanes):
            per_lane = len(fake.images) // len(lanes)
            self._made[lane] = Made(fake.images.detach(), fake.labels).part(i * per_lane, (i + 1) * per_lane)
        for shared, outbox in self.to.items():
            if all(lane in self._made for lane in shared):
                made = Made.joined(self._made.pop(lane) for lane in shared)
                tensors = [made.images] if made.labels is None else [made.images, made.labels]
                outbox.send(Parcel.of(tensors).packed(tensors))

    def settle(self) -> None:
        for outbox in self.to.values():
            outbox.settle()


class FakesInbox:
    """Images from the ranks that own this rank's lanes, put into `fakes`.

    boxes : by the lanes that this rank shares with the sender;  parcels : what one message from there holds
    layout: in which G makes them
    """

    def __init__(
        self,
        boxes: Mapping[Lanes, Inbox],
        parcels: Mapping[Lanes, Parcel],
        team: Group,
        lead: int,
        device: torch.device,
        layout: torch.memory_format,
    ):
        self.boxes, self.parcels, self.team, self.lead = boxes, parcels, team, lead
        self.device, self.layout = device, layout
        self._arrived = dict.fromkeys(boxes, -1)
        self._step, self._lag = -1, 0

    fakes: PastFakes

    def lag(self, step: int) -> int:
        """How many rounds ago the newest were made that everyone in the team has."""
        if self._step < 0:  # what a checkpoint had is complete
            self._arrived = dict.fromkeys(self.boxes, max(self.fakes.rounds, default=-1))
        if step != self._step:
            self._receive(until=step, needed=step - self.lead + 1 if self.fakes.rounds else step)
            mine = min(step, *self._arrived.values())
            self._step, self._lag = step, step - newest_of_all(self.team, mine, self.device)
        return self._lag

    def _receive(self, until: int, needed: int) -> None:
        for lanes, box in self.boxes.items():
            for number, data in box.receive(until, needed):
                images, *labels = (t.to(self.device) for t in self.parcels[lanes].unpacked(data))
                images = images.contiguous(memory_format=self.layout)
                self.fakes.keep(Made(images, labels[0] if labels else None), lanes, number)
                self._arrived[lanes] = number

    def settle(self) -> None:
        """Nothing is under way any more: of all rounds up to the last."""
        if self._step >= 0:
            self._receive(self._step, self._step)


@dataclass(frozen=True)
class Snapshots:
    """How D travels: with every `every`-th of its messages, parameters over a wire and buffers as they are."""

    d: Player
    every: int
    wire: Compressor

    def __post_init__(self) -> None:
        if self.wire.lossy and self.d.flat.params.dtype != torch.float32:
            kind = str(self.d.flat.params.dtype).removeprefix("torch.")
            raise Unusable(f"D has {kind} parameters, which only --strategy.snapshot_wire=exact carries")

    def due(self, number: int) -> bool:
        return (number + 1) % self.every == 0

    def nbytes(self, number: int) -> int:
        return Parcel.of(self._tensors() if self.due(number) else []).nbytes

    def packed(self, number: int) -> Tensor:
        """D as it stands, or a message that says no more than that there is none."""
        tensors = self._tensors() if self.due(number) else []
        if tensors and self.wire.lossy:
            self.wire.encode(self.d.flat.params.detach(), tensors[0], seed=number)
        return Parcel.of(tensors).packed(tensors)

    @torch.no_grad()
    def show(self, data: Tensor) -> None:
        """Make D what was packed."""
        tensors = self._tensors()
        for tensor, value in zip(tensors, Parcel.of(tensors).unpacked(data)):
            tensor.copy_(value)
        if self.wire.lossy:
            self.wire.decode(tensors[0], self.d.flat.params)

    def _tensors(self) -> list[Tensor]:
        params = self.d.flat.params
        if self.wire.lossy:
            params = torch.empty(self.wire.nbytes(params.numel()), dtype=torch.uint8, device=params.device)
        return [params, *self.d.net.buffers()]


class CriticPost:
    """D's rounds, told to the ranks of G that this one serves."""

    def __init__(self, snapshots: Snapshots, to: Sequence[Outbox]):
        self.snapshots, self.to = snapshots, to

    def __call__(self, step: int) -> None:
        """D has moved in this step."""
        if self.to:
            data = self.snapshots.packed(step)
            for outbox in self.to:
                outbox.send(data)

    def settle(self) -> None:
        for outbox in self.to:
            outbox.settle()


class CriticInbox:
    """D as it was posted last, for G to play against: in this rank's own copy of D, which does not move."""

    def __init__(self, snapshots: Snapshots, box: Inbox, team: Group, lead: int):
        self.d, self.snapshots, self.box, self.team, self.lead = snapshots.d, snapshots, box, team, lead
        self.seen = Seen()
        self.version: int | None = None  # what the copy is: D after so many rounds
        self._newer: dict[int, Tensor] = {}
        self._step = -1

    def __call__(self, step: int) -> Net:
        if step != self._step:
            self._step = step
            self._receive(until=step, needed=step - self.lead)
            newest = max([v for v in self._newer if v <= step], default=step if self.version is None else self.version)
            self._show(newest_of_all(self.team, newest, self.d.flat.params.device))
            assert self.version is not None
            self.seen.note(step, self.version, Counter({step - self.version: 1}))
        return self.d.net

    def _receive(self, until: int, needed: int) -> None:
        for number, data in self.box.receive(until, needed):
            if self.snapshots.due(number):
                self._newer[number + 1] = data

    def _show(self, version: int) -> None:
        if version == self.version:
            return
        if version in self._newer:
            self.snapshots.show(self._newer[version])
        self._newer = {v: data for v, data in self._newer.items() if v > version}
        self.version = version
        self.d.iterate(self.d.net)  # as D did when it went on from there

    def settle(self) -> None:
        """Nothing is under way any more, and the copy is the newest."""
        if self._step >= 0:
            self._receive(self._step, self._step)
            self._show(max(self._newer, default=self.version or 0))

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
