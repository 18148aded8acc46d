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

from paragan.comm.flat_params import ALIGN_BYTES
from paragan.comm.process_group import CommunicationError, Group, PolledWork, WaitThread


@dataclass(frozen=True)
class TensorPack:
    """Tensors of these shapes and kinds, as one vector of bytes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor]) -> TensorPack:
        return TensorPack(tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors))

    @property
    def nbytes(self) -> int:
        return max(1, self._byte_slices()[-1].stop if self.shapes else 0)

    def _byte_slices(self) -> list[slice]:
        places, start = list[slice](), 0
        for shape, dtype in zip(self.shapes, self.dtypes):
            start = -(-start // ALIGN_BYTES) * ALIGN_BYTES
            places.append(slice(start, start + torch.Size(shape).numel() * dtype.itemsize))
            start = places[-1].stop
        return places

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[nbytes] uint8 on the CPU, a copy."""
        data = torch.zeros(self.nbytes, dtype=torch.uint8)
        for tensor, part in zip(tensors, self.unpack(data)):
            part.copy_(tensor.detach())
        return data

    def unpack(self, data: Tensor) -> list[Tensor]:
        """Views of what `packed` made."""
        rows = zip(self._byte_slices(), self.shapes, self.dtypes)
        return [data[place].view(dtype).view(shape) for place, shape, dtype in rows]


class SendQueue:
    """Messages to the other rank of a link. They leave when that rank asks for them."""

    def __init__(self, group: Group, wait_thread: WaitThread, tag: int):
        self.group, self.wait_thread, self.tag = group, wait_thread, tag
        self._pending_sends = deque[tuple[PolledWork, Tensor]]()

    def send(self, data: Tensor) -> None:
        """[n] uint8, which nobody may change any more."""
        while self._pending_sends and self._pending_sends[0][0].is_done:
            self._pending_sends.popleft()
        work = self.group.send_recv({1 - self.group.rank: data}, {}, self.tag)
        self._pending_sends.append((self.wait_thread.submit(work), data))

    def flush(self) -> None:
        """Wait until all have been asked for."""
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()


class RecvQueue:
    """Messages from the other rank of a link, in the order of their numbers.

    nbytes : of message k;  sender: how to name that rank in messages to people
    """

    def __init__(self, group: Group, wait_thread: WaitThread, tag: int, nbytes: Callable[[int], int], sender_name: str):
        self.group, self.wait_thread, self.tag, self.nbytes, self.sender_name = (
            group,
            wait_thread,
            tag,
            nbytes,
            sender_name,
        )
        self._pending_recvs = deque[tuple[int, Tensor, PolledWork]]()
        self._next_number: int | None = None

    def receive(self, post_until: int, wait_until: int) -> list[tuple[int, Tensor]]:
        """Ask for all messages up to `until`; those that are here now, after waiting for all up to `needed`. The first
        that is ever asked for is `until`: who goes on with a run has had those before."""
        first = post_until if self._next_number is None else self._next_number
        for number in range(first, post_until + 1):
            data = torch.empty(self.nbytes(number), dtype=torch.uint8)
            work = self.group.send_recv({}, {1 - self.group.rank: data}, self.tag)
            self._pending_recvs.append((number, data, self.wait_thread.submit(work)))
        self._next_number = max(first, post_until + 1)
        found: list[tuple[int, Tensor]] = []
        while self._pending_recvs and (self._pending_recvs[0][0] <= wait_until or self._is_next_received()):
            number, data, pending = self._pending_recvs.popleft()
            try:
                pending.wait()
            except CommunicationError as lost:
                raise CommunicationError(f"message {number} of {self.sender_name} did not come: {lost}") from lost
            found.append((number, data))
        return found

    def _is_next_received(self) -> bool:
        try:
            return self._pending_recvs[0][2].is_done
        except CommunicationError as lost:
            raise CommunicationError(
                f"message {self._pending_recvs[0][0]} of {self.sender_name} did not come: {lost}"
            ) from lost
