"""Gossip that does not wait: a rank averages with a slow neighbor as often as the link allows, and trains on.

After AD-PSGD (Lian, Zhang, Zhang and Liu 2018), made symmetric. Both ends of a link number their swaps. For the k-th
swap each end sends its parameters as they are when it reaches that swap, and continues. When the other's parameters
arrive, at whatever step that is, it moves by w (received - sent). What one end gains the other loses, so the mean over
ranks is kept under any delay. A rank waits for a swap that it started `max_staleness` of its own steps ago.

Between steps, a rank that waits for anything else must continue to swap, since a neighbor may be waiting for one.
`barrier` does that until all ranks have arrived; it comes before anything that all ranks do together. `drain` also
completes all swaps; it comes before a checkpoint. Swaps use gloo groups of two ranks, and a `WaitThread` waits for
them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.comm.bucket import ALL_RECEIVED, Bucket, ExchangeEvent
from paragan.comm.process_group import CommunicationError, Group, PolledWork, WaitThread, Work
from paragan.comm.traffic import Traffic
from paragan.core.host_copies import HostCopy, copy_to_device

PROGRESS_POLL_S = 0.001


@dataclass(frozen=True)
class PendingSwap:
    """One exchange of parameters over a link.

    sent, received : [n] on the CPU
    start_step     : when it was started
    """

    sent: Tensor
    received: Tensor
    start_step: int
    work: PolledWork


class AsyncGossip:
    """x_i += w_ij (x_j received - x_i sent) for every neighbor j, when its message has arrived.

    weights          : w_ij of each neighbor j, the same at both ends
    groups           : of this rank and neighbor j
    make_wait_thread : makes the thread that waits for a neighbor's messages
    max_staleness    : how many steps may pass until a swap is waited for
    tag              : separates this player's messages from those of the other player
    """

    def __init__(
        self,
        weights: Mapping[int, float],
        groups: Mapping[int, Group],
        make_wait_thread: Callable[[int], WaitThread],
        max_staleness: int,
        tag: int,
    ):
        self.weights, self.groups = weights, groups
        self.make_wait_thread = make_wait_thread
        self.max_staleness = max_staleness
        self.tag = tag
        self._buckets: dict[int, Bucket] = {}
        self._pending_swaps: dict[tuple[int, int], PendingSwap] = {}  # in flight, by (neighbor, bucket)
        self._started_swaps: dict[tuple[int, int], int] = {}  # how many were started
        self._wait_threads: dict[tuple[int, int], WaitThread] = {}
        self._step = 0  # the latest

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        self._buckets[bucket.index], self._step = bucket, step
        for j in self.weights:
            if (j, bucket.index) not in self._pending_swaps:
                self._start_swap(j, bucket, step)
        for j in self.weights:
            swap = self._pending_swaps[j, bucket.index]
            if step - swap.start_step >= self.max_staleness:
                yield swap.work
        yield ALL_RECEIVED
        for j in self.weights:
            if self._pending_swaps[j, bucket.index].work.is_done:
                self._apply_swap(j, bucket)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the most that is sent: a slow link carries less."""
        return Traffic(len(self.weights) * itemsize * n, len(self.weights))

    def progress(self) -> None:
        """Continue to swap without a step.

        Swaps started here count as started at the latest step. If they counted as older, ranks on a ring that then take
        a step could each wait for the next one for ever.
        """
        for (j, i), swap in list(self._pending_swaps.items()):
            if swap.work.is_done:
                self._apply_swap(j, self._buckets[i])
                self._start_swap(j, self._buckets[i], self._step)
        for j, i in itertools.product(self.weights, self._buckets):
            if (j, i) not in self._pending_swaps:
                self._start_swap(j, self._buckets[i], self._step)

    def finish(self) -> None:
        """Complete all swaps. All ranks call this between steps.

        An end starts a swap only when the one before has arrived, so one end of a link may have started one more than
        the other. The other then starts that one too.
        """
        indices = sorted(self._buckets)
        for j in sorted(self.weights):
            local_counts = torch.tensor([self._started_swaps[j, i] for i in indices])
            peer_counts = torch.empty_like(local_counts)
            peer = 1 - self.groups[j].rank
            self.groups[j].send_recv({peer: local_counts}, {peer: peer_counts}, self.tag - 1).wait()
            for n, i in enumerate(indices):
                if peer_counts[n] > local_counts[n]:
                    self._finish_swap(j, i)
                    self._start_swap(j, self._buckets[i], 0)
        for j, i in itertools.product(self.weights, indices):
            self._finish_swap(j, i)

    def _start_swap(self, j: int, bucket: Bucket, step: int) -> None:
        group = self.groups[j]
        key = j, bucket.index
        sent = HostCopy(bucket.params.detach().clone()).wait()
        received = torch.empty_like(sent)
        peer = 1 - group.rank
        work = group.send_recv({peer: sent}, {peer: received}, self.tag + bucket.index)
        self._started_swaps[key] = self._started_swaps.get(key, 0) + 1
        if key not in self._wait_threads:  # one for each bucket: with a shared one, both ends could wait for each other
            self._wait_threads[key] = self.make_wait_thread(j)
        self._pending_swaps[key] = PendingSwap(sent, received, step, self._wait_threads[key].submit(work))

    def _finish_swap(self, j: int, index: int) -> None:
        if (j, index) in self._pending_swaps:
            self._pending_swaps[j, index].work.wait()
            self._apply_swap(j, self._buckets[index])

    def _apply_swap(self, j: int, bucket: Bucket) -> None:
        swap = self._pending_swaps.pop((j, bucket.index))
        delta = copy_to_device(swap.received.sub_(swap.sent), bucket.params.device)
        bucket.params.add_(delta, alpha=self.weights[j])


def barrier(exchanges: Sequence[AsyncGossip], group: Group, wait_thread: WaitThread) -> None:
    """Wait until all ranks have called this after the same step; continue to swap meanwhile.

    Args:
        exchanges: of this rank's players.
        group: of all ranks.
        wait_thread: waits for them, with its timeout, unless a rank is lost.

    Raises:
        CommunicationError: not all ranks arrived in time, or one was lost.
    """
    arrival = wait_thread.submit(group.all_reduce_sum(torch.zeros(1)))
    deadline = time.monotonic() + wait_thread.timeout_s
    while not arrival.is_done:
        for exchange in exchanges:
            exchange.progress()
        if time.monotonic() > deadline:
            raise CommunicationError(f"not all ranks finished this step within {wait_thread.timeout_s:g} s")
        time.sleep(PROGRESS_POLL_S)


def drain(exchanges: Sequence[AsyncGossip], group: Group, wait_thread: WaitThread) -> None:
    """Wait as `barrier` does, then complete all swaps, so that no message is in flight."""
    barrier(exchanges, group, wait_thread)
    for exchange in exchanges:
        exchange.finish()
