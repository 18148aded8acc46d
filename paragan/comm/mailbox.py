"""Numbered messages between two ranks that do not wait for each other: message k is about step k.

Both ends know what a message holds from its number, so nothing travels but the tensors. A receiver asks for message k
when it comes to step k itself, which the sender will do too: nothing is asked for that never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.comm.flat_params import ALIGN
from paragan.comm.process_group import Group, Lost, Pending, Waiter


@dataclass(frozen=True)
class Parcel:
    """Tensors of these shapes and kinds, as one vector of bytes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Parcel:
        return Parcel(tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors))

    @property
    def nbytes(self) -> int:
        return max(1, self._places()[-1].stop if self.shapes else 0)

    def _places(self) -> list[slice]:
        places, start = list[slice](), 0
        for shape, dtype in zip(self.shapes, self.dtypes):
            start = -(-start // ALIGN) * ALIGN
            places.append(slice(start, start + torch.Size(shape).numel() * dtype.itemsize))
            start = places[-1].stop
        return places

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """[nbytes] uint8 on the CPU, a copy."""
        data = torch.zeros(self.nbytes, dtype=torch.uint8)
        for tensor, part in zip(tensors, self.unpacked(data)):
            part.copy_(tensor.detach())
        return data

    def unpacked(self, data: Tensor) -> list[Tensor]:
        """Views of what `packed` made."""
        rows = zip(self._places(), self.shapes, self.dtypes)
        return [data[place].view(dtype).view(shape) for place, shape, dtype in rows]


class Outbox:
    """Messages to the other rank of a link. They leave when that rank asks for them."""

    def __init__(self, group: Group, waiter: Waiter, tag: int):
        self.group, self.waiter, self.tag = group, waiter, tag
        self._leaving = deque[tuple[Pending, Tensor]]()

    def send(self, data: Tensor) -> None:
        """[n] uint8, which nobody may change any more."""
        while self._leaving and self._leaving[0][0].arrived:
            self._leaving.popleft()
        work = self.group.swap({1 - self.group.rank: data}, {}, self.tag)
        self._leaving.append((self.waiter.give(work), data))

    def settle(self) -> None:
        """Wait until all have been asked for."""
        while self._leaving:
            self._leaving.popleft()[0].wait()


class Inbox:
    """Messages from the other rank of a link, in the order of their numbers.

    nbytes : of message k;  sender: how to name that rank in messages to people
    """

    def __init__(self, group: Group, waiter: Waiter, tag: int, nbytes: Callable[[int], int], sender: str):
        self.group, self.waiter, self.tag, self.nbytes, self.sender = group, waiter, tag, nbytes, sender
        self._asked = deque[tuple[int, Tensor, Pending]]()
        self._next: int | None = None

    def receive(self, until: int, needed: int) -> list[tuple[int, Tensor]]:
        """Ask for all messages up to `until`; those that are here now, after waiting for all up to `needed`. The first
        that is ever asked for is `until`: who goes on with a run has had those before."""
        first = until if self._next is None else self._next
        for number in range(first, until + 1):
            data = torch.empty(self.nbytes(number), dtype=torch.uint8)
            work = self.group.swap({}, {1 - self.group.rank: data}, self.tag)
            self._asked.append((number, data, self.waiter.give(work)))
        self._next = max(first, until + 1)
        found: list[tuple[int, Tensor]] = []
        while self._asked and (self._asked[0][0] <= needed or self._here()):
            number, data, pending = self._asked.popleft()
            try:
                pending.wait()
            except Lost as lost:
                raise Lost(f"message {number} of {self.sender} did not come: {lost}") from lost
            found.append((number, data))
        return found

    def _here(self) -> bool:
        try:
            return self._asked[0][2].arrived
        except Lost as lost:
            raise Lost(f"message {self._asked[0][0]} of {self.sender} did not come: {lost}") from lost
