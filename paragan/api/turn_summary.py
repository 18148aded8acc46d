"""The messages of a turn beside gradients.

At the end of a turn ranks exchange their weights, the number of the replica and of its turn, which parameters got a
gradient, and the buffers. Where gradients are summed without loss, all of it but the buffers is appended to them
("marks", guarded_params.py), since a message of its own would cost more than its contents. The host reads them, so on
an accelerator they are a message between hosts instead: no host waits for a device at the end of a turn, and one that
has lost another rank notices it there.

A rank that left out a turn would send gradients of one replica where others wait for those of another, which the
libraries below mix or abort at. So ranks compare whose turn it is when one begins, in the first turns of a replica;
later they notice it at the end, if the two have equal sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.api.guarded_params import GuardedParams
    from paragan.comm.process_group import Work
    from paragan.comm.traffic import Meter

CHECKED_TURNS = 100  # the first ones of a replica, in which everything is checked before a gradient is sent
LOW_BITS = (1 << 32) - 1
TURN_PERIOD = 1024  # turns are compared by their remainder, which is exact in float32
HOST = torch.device("cpu")


class ReplicaInTurn(Protocol):
    """What the messages of a turn need of its replica (replica.py)."""

    world: World
    label: str
    number: int
    turns: int
    strategy: Any
    guarded: list[GuardedParams]
    buffers: str
    meter: Meter

    @property
    def shares_steps(self) -> bool: ...
    @property
    def trained(self) -> Sequence[Tensor]: ...
    def shared_buffers(self) -> list[Tensor]: ...
    def summed_buffers(self) -> set[Tensor]: ...


def gradients_carry_marks(strategy: Any, dtypes: set[torch.dtype], world: World) -> bool:
    """Return whether numbers that are appended to the gradient arrive as their sums over ranks, and exact enough."""
    sums = strategy.coordination == "all-reduce" and strategy.sync_period == 1 and not strategy.requires_sgd
    is_precise = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}
    is_on_host = not backend_of(world.device).has_streams
    return world.size > 1 and sums and is_precise and not strategy.wire.lossy and is_on_host


class TurnNumbers:
    """Compare whose turn it is on each rank, by a small message between hosts that is sent during the forward pass."""

    def __init__(self, replica: ReplicaInTurn):
        self._replica = replica
        self._work = None
        if replica.world.size > 1 and replica.turns < CHECKED_TURNS:
            numbers = torch.tensor([replica.number, replica.turns])
            self._sums = torch.cat([numbers, numbers.square()])
            self._work = replica.world.all_ranks.with_meter(replica.meter).all_reduce_sum(self._sums)

    def check(self) -> None:
        """Raise UsageError on all ranks unless all play the same turn. Only the first call waits for the others."""
        if self._work:
            self._work.wait()
            self._work = None
            size = self._replica.world.size
            number, turn, *squares = self._sums.tolist()  # pyright: ignore[reportUnknownMemberType]
            if [number**2, turn**2] != [size * square for square in squares]:
                raise_other_turn(self._replica)


def raise_other_turn(replica: ReplicaInTurn) -> None:
    """Raise UsageError: ranks play turns of different replicas."""
    raise UsageError(
        f"{replica.label}: another rank plays the turn of another replica. Take the same turns in the same order on "
        "all ranks: decide by the step, not by the loss or random numbers of a rank"
    )


class TurnSummary:
    """The end of a turn on all ranks.

    mean_factor : the gradient, which was averaged with equal weights, is multiplied by this
    """

    def __init__(self, replica: ReplicaInTurn, weight: float):
        strategy = replica.strategy
        self._replica = replica
        self._size = replica.world.size
        self._follows_period = strategy.sync_period > 1 and strategy.sync_mode != "parameters"
        # gradients of earlier turns may arrive in this one
        self._steps_all = (
            self._follows_period or strategy.requires_sgd or (strategy.wire.lossy and replica.shares_steps)
        )
        self._used = [used for flat in replica.guarded for used in flat.has_gradient]
        self._buffers = replica.shared_buffers()
        self.mean_factor = 1.0
        self._works: list[Work] = []
        self._values: dict[torch.device, Tensor] = {}  # what is summed over ranks
        self._num_marks = 0  # at the start of the values of the host
        if replica.shares_steps:
            self._send(weight)

    def _send(self, weight: float) -> None:
        """Send what the gradients do not carry: in one message what is on the host, in another what is on a device."""
        parts: dict[torch.device, list[Tensor]] = {}
        if self._replica.guarded[0].marks is None:
            marks = [*marks_of(self._replica), *map(float, self._used)]
            self._num_marks = len(marks)
            parts[HOST] = [torch.tensor(marks, dtype=torch.float64) * (weight / self._size)]
        summed = self._replica.summed_buffers()
        for b in self._buffers:
            device = self._device_for(b)
            part = _to_float64(b.detach()).to(device)
            if b not in summed and self._replica.buffers == "mean":
                part = part / self._size
            elif b not in summed and not self._replica.world.is_main:
                part = torch.zeros_like(part)  # 0 times infinity is none
            parts.setdefault(device, []).append(part)
        group = self._replica.world.all_ranks.with_meter(self._replica.meter)
        self._values = {device: torch.cat(parts[device]) for device in parts}
        self._works = [group.all_reduce_sum(values) for values in self._values.values()]

    def _device_for(self, b: Tensor) -> torch.device:
        """Return where the message is from that has this buffer."""
        return HOST if b.device == HOST else self._replica.guarded[0].params.device

    def any_gradient(self) -> bool:
        """Wait for the other hosts. Returns whether there is a step to take.

        Raises:
            UsageError: they are in another turn.
        """
        for work in self._works:
            work.wait()
        if self._replica.shares_steps:
            total, number, turn, *used = self._received_marks()
            if not total:
                return False
            expected = marks_of(self._replica)
            if any(abs(mark / total - own) > 0.1 for mark, own in zip((number, turn), expected[1:])):
                raise_other_turn(self._replica)
            self._used = [mark > 0 for mark in used]
            precision = self._size * torch.finfo(self._replica.guarded[0].params.dtype).eps
            self.mean_factor = 1.0 if abs(total - 1) < precision else 1 / total
        return any(self._used) or self._follows_period

    def _received_marks(self) -> Sequence[float]:
        if not self._num_marks:
            return self._replica.guarded[0].take_marks()
        return self._values[HOST][: self._num_marks].tolist()  # pyright: ignore[reportUnknownMemberType]

    @property
    def unused(self) -> list[Tensor]:
        """Parameters that no rank used, and that keep no gradient: optimizers leave them as they are."""
        return [] if self._steps_all else [p for p, used in zip(self._replica.trained, self._used) if not used]

    @torch.no_grad()
    def set_buffers(self) -> None:
        """Set every buffer to that of all ranks."""
        starts = dict.fromkeys(self._values, 0) | {HOST: self._num_marks}
        for b in self._buffers:
            device = self._device_for(b)
            end = starts[device] + _num_values(b)
            _from_float64(self._values[device][starts[device] : end], b)
            starts[device] = end


def _to_float64(b: Tensor) -> Tensor:
    """Return numbers of any dtype as float64 [_num_values(b)], exactly: int64 in two halves."""
    if b.is_complex():
        b = torch.view_as_real(b)
    if b.dtype == torch.int64:
        b = torch.stack([b >> 32, b & LOW_BITS])
    return b.flatten().to(torch.float64)


def _num_values(b: Tensor) -> int:
    return b.numel() * (2 if b.is_complex() or b.dtype == torch.int64 else 1)


def _from_float64(values: Tensor, b: Tensor) -> None:
    """Write what `_to_float64` returned to b."""
    if b.dtype == torch.int64:
        high, low = values.to(torch.int64).view(2, *b.shape)
        b.copy_((high << 32) + low)
    elif b.is_complex():
        torch.view_as_real(b).copy_(values.view(*b.shape, 2))
    else:
        b.copy_(values.view_as(b))


def marks_of(replica: ReplicaInTurn) -> list[float]:
    """Return what says whose turn it is, [NUM_TURN_MARKS]. Ranks average it by their weights."""
    return [1.0, float(replica.number), float(replica.turns % TURN_PERIOD)]
