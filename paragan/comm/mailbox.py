"""Numbered messages between two ranks that do not wait for each other: message k belongs to round k.

Both ends know from its number what a message holds, so only the tensors are sent. A receiver posts the receive for
message k in its own round k. The sender will play that round too, so no receive is posted for a message that is never
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.comm.flat_params import ALIGN_BYTES
from paragan.comm.process_group import CommunicationError, Group, PolledWork, WaitThread
from paragan.core.host_copies import HostCopy


@dataclass(frozen=True)
class TensorPack:
    """The layout of tensors of these shapes and dtypes in one vector of bytes, each aligned to `ALIGN_BYTES`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor]) -> TensorPack:
        """Return the layout for tensors like these."""
        return TensorPack(tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors))

    @property
    def nbytes(self) -> int:
        """The length of the vector; at least 1."""
        return max(1, self._byte_slices()[-1].stop if self.shapes else 0)

    def _byte_slices(self) -> list[slice]:
        slices: list[slice] = []
        end = 0
        for shape, dtype in zip(self.shapes, self.dtypes):
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            end = start + torch.Size(shape).numel() * dtype.itemsize
            slices.append(slice(start, end))
        return slices

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the tensors, of one device, into a new vector [nbytes] uint8 on the CPU. Waits for the device once."""
        data = torch.zeros(self.nbytes, dtype=torch.uint8, device=tensors[0].device if tensors else None)
        for tensor, view in zip(tensors, self.unpack(data)):
            view.copy_(tensor.detach())
        return HostCopy(data).wait()

    def unpack(self, data: Tensor) -> list[Tensor]:
        """Return the tensors as views of a vector [nbytes] uint8."""
        rows = zip(self._byte_slices(), self.shapes, self.dtypes)
        return [data[part].view(dtype).view(shape) for part, shape, dtype in rows]


class SendQueue:
    """Messages to the other rank of a pair. They are sent when that rank posts the receive.

    group : of the two ranks;  wait_thread : waits for the messages;  tag : the same at both ends
    """

    def __init__(self, group: Group, wait_thread: WaitThread, tag: int):
        self.group, self.wait_thread, self.tag = group, wait_thread, tag
        self._pending_sends = deque[tuple[PolledWork, Tensor]]()

    def send(self, data: Tensor) -> None:
        """Queue a message [n] uint8, which must not be changed afterwards."""
        while self._pending_sends and self._pending_sends[0][0].is_done:
            self._pending_sends.popleft()
        work = self.group.send_recv({1 - self.group.rank: data}, {}, self.tag)
        self._pending_sends.append((self.wait_thread.submit(work), data))

    def flush(self) -> None:
        """Wait until all messages have been received."""
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()


class RecvQueue:
    """Messages from the other rank of a pair, in the order of their numbers.

    group       : of the two ranks;  wait_thread : waits for the messages;  tag : the same at both ends
    nbytes      : the size of message k
    sender_name : the other rank's name in error messages
    """

    def __init__(self, group: Group, wait_thread: WaitThread, tag: int, nbytes: Callable[[int], int], sender_name: str):
        self.group, self.wait_thread, self.tag = group, wait_thread, tag
        self.nbytes = nbytes
        self.sender_name = sender_name
        self._pending_recvs = deque[tuple[int, Tensor, PolledWork]]()
        self._next_number: int | None = None

    def receive(self, post_until: int, wait_until: int) -> list[tuple[int, Tensor]]:
        """Post receives and return the messages that have arrived.

        Args:
            post_until: post the receives of all messages up to this number. The first call posts this number only: a
                resumed run has had the ones before.
            wait_until: block until all messages up to this number have arrived.

        Returns:
            (number, [nbytes(number)] uint8) of each message that no former call returned.

        Raises:
            CommunicationError: a message did not arrive; it is named by number and sender.
        """
        first = post_until if self._next_number is None else self._next_number
        for number in range(first, post_until + 1):
            data = torch.empty(self.nbytes(number), dtype=torch.uint8)
            work = self.group.send_recv({}, {1 - self.group.rank: data}, self.tag)
            self._pending_recvs.append((number, data, self.wait_thread.submit(work)))
        self._next_number = max(first, post_until + 1)
        received: list[tuple[int, Tensor]] = []
        while self._pending_recvs:
            number, data, pending = self._pending_recvs[0]
            try:
                if number <= wait_until:
                    pending.wait()
                elif not pending.is_done:
                    break
            except CommunicationError as error:
                raise CommunicationError(f"message {number} of {self.sender_name} did not arrive: {error}") from error
            self._pending_recvs.popleft()
            received.append((number, data))
        return received
