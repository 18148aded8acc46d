"""Gossip over links that may lag: a rank mixes with a slow neighbour as often as the link allows, and plays on.

After AD-PSGD (Lian, Zhang, Zhang and Liu 2018), made symmetric. Both ends of a link number their swaps. For the k-th
each sends its parameters as they are when it gets to it, and goes on; whenever the other's have arrived, at whichever
step that is, it moves by w (heard - told). What one end gains the other loses, so the mean over ranks is kept under any
delay. A rank waits for a swap that it began `late` of its steps ago.

Whoever waits for anything else than a swap has to go on swapping meanwhile, since a neighbour may wait for that: `meet`
is where all ranks come together, `settle` where nothing is left under way.
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

PROGRESS_POLL_S = 0.001


@dataclass(frozen=True)
class PendingSwap:
    """One exchange of parameters over a link: both vectors [n], on the CPU; begun: at which step."""

    sent_copy: Tensor
    recv_copy: Tensor
    start_step: int
    work: PolledWork


class AsyncGossip:
    """x_i += w_ij (heard_ji - told_ij) for every neighbour j, whenever that has arrived.

    weights : of the neighbours, the same at both ends;  groups : of this rank and a neighbour
    waiter  : makes one for a neighbour;  late : how many steps may pass until a swap is waited for
    tag     : tells this player's messages from those of the other
    """

    def __init__(
        self,
        weights: Mapping[int, float],
        groups: Mapping[int, Group],
        make_wait_thread: Callable[[int], WaitThread],
        max_staleness: int,
        tag: int,
    ):
        self.weights, self.groups, self.make_wait_thread, self.max_staleness, self.tag = (
            weights,
            groups,
            make_wait_thread,
            max_staleness,
            tag,
        )
        self._buckets: dict[int, Bucket] = {}
        self._pending_swaps: dict[tuple[int, int], PendingSwap] = {}  # under way, by (neighbour, bucket)
        self._started_swaps: dict[tuple[int, int], int] = {}
        self._wait_threads: dict[tuple[int, int], WaitThread] = {}
        self._step = 0  # the last one that was taken

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

    def traffic(self, n: int) -> Traffic:
        """At most: a link that lags carries less."""
        return Traffic(len(self.weights) * 4 * n, len(self.weights))

    def progress(self) -> None:
        """Go on swapping without a step. What is begun here is as old as the last step, not older: ranks that leave off
        serving and then wait at once, each for the next one round a ring, would wait for ever."""
        for (j, i), swap in list(self._pending_swaps.items()):
            if swap.work.is_done:
                self._apply_swap(j, self._buckets[i])
                self._start_swap(j, self._buckets[i], self._step)
        for j, i in itertools.product(self.weights, self._buckets):
            if (j, i) not in self._pending_swaps:
                self._start_swap(j, self._buckets[i], self._step)

    def finish(self) -> None:
        """Finish what is under way, where no rank takes steps. Each end begins a swap only when the one before has
        arrived, so one of them may be ahead by one: the other does likewise."""
        indices = sorted(self._buckets)
        for j in sorted(self.weights):
            mine = torch.tensor([self._started_swaps[j, i] for i in indices])
            theirs, other = torch.empty_like(mine), 1 - self.groups[j].rank
            self.groups[j].send_recv({other: mine}, {other: theirs}, self.tag - 1).wait()
            for i in (i for n, i in enumerate(indices) if theirs[n] > mine[n]):
                self._finish_swap(j, i)
                self._start_swap(j, self._buckets[i], 0)
        for j, i in itertools.product(self.weights, indices):
            self._finish_swap(j, i)

    def _start_swap(self, j: int, bucket: Bucket, step: int) -> None:
        group, key = self.groups[j], (j, bucket.index)
        told = bucket.params.detach().to("cpu", copy=True)
        heard, other = torch.empty_like(told), 1 - group.rank
        work = group.send_recv({other: told}, {other: heard}, self.tag + bucket.index)
        self._started_swaps[key] = self._started_swaps.get(key, 0) + 1
        if key not in self._wait_threads:  # its own: behind another bucket's swap, both ends might wait for each other
            self._wait_threads[key] = self.make_wait_thread(j)
        self._pending_swaps[key] = PendingSwap(told, heard, step, self._wait_threads[key].submit(work))

    def _finish_swap(self, j: int, index: int) -> None:
        if (j, index) in self._pending_swaps:
            self._pending_swaps[j, index].work.wait()
            self._apply_swap(j, self._buckets[index])

    def _apply_swap(self, j: int, bucket: Bucket) -> None:
        swap = self._pending_swaps.pop((j, bucket.index))
        moved = swap.recv_copy.sub_(swap.sent_copy).to(bucket.params.device)
        bucket.params.add_(moved, alpha=self.weights[j])


def barrier(exchanges: Sequence[AsyncGossip], group: Group, timeout_s: float) -> None:
    """Wait until all ranks have come here, after the same step."""
    waiter = WaitThread(timeout_s)
    there = waiter.submit(group.all_reduce_sum(torch.zeros(1)))
    waiter.close()
    deadline = time.monotonic() + timeout_s
    while not there.is_done:
        for mixing in exchanges:
            mixing.progress()
        if time.monotonic() > deadline:
            raise CommunicationError(f"not all ranks came to the end of this step within {timeout_s:g} s")
        time.sleep(PROGRESS_POLL_S)


def drain(exchanges: Sequence[AsyncGossip], group: Group, timeout_s: float) -> None:
    """Meet, and leave nothing under way."""
    barrier(exchanges, group, timeout_s)
    for mixing in exchanges:
        mixing.finish()
