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

from paragan.comm.bucket import ARRIVED, Bucket, Moment
from paragan.comm.process_group import Group, Lost, Pending, Waiter, Work
from paragan.comm.traffic import Traffic

LOOK_S = 0.001


@dataclass(frozen=True)
class Swap:
    """One exchange of parameters over a link: both vectors [n], on the CPU; begun: at which step."""

    told: Tensor
    heard: Tensor
    begun: int
    pending: Pending


class LateGossip:
    """x_i += w_ij (heard_ji - told_ij) for every neighbour j, whenever that has arrived.

    weights : of the neighbours, the same at both ends;  groups : of this rank and a neighbour
    waiter  : makes one for a neighbour;  late : how many steps may pass until a swap is waited for
    tag     : tells this player's messages from those of the other
    """

    def __init__(
        self,
        weights: Mapping[int, float],
        groups: Mapping[int, Group],
        waiter: Callable[[int], Waiter],
        late: int,
        tag: int,
    ):
        self.weights, self.groups, self.waiter, self.late, self.tag = weights, groups, waiter, late, tag
        self._buckets: dict[int, Bucket] = {}
        self._swaps: dict[tuple[int, int], Swap] = {}  # under way, by (neighbour, bucket)
        self._begun: dict[tuple[int, int], int] = {}
        self._waiters: dict[tuple[int, int], Waiter] = {}
        self._step = 0  # the last one that was taken

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | Moment]:
        self._buckets[bucket.index], self._step = bucket, step
        for j in self.weights:
            if (j, bucket.index) not in self._swaps:
                self._begin(j, bucket, step)
        for j in self.weights:
            swap = self._swaps[j, bucket.index]
            if step - swap.begun >= self.late:
                yield swap.pending
        yield ARRIVED
        for j in self.weights:
            if self._swaps[j, bucket.index].pending.arrived:
                self._mix(j, bucket)

    def traffic(self, n: int) -> Traffic:
        """At most: a link that lags carries less."""
        return Traffic(len(self.weights) * 4 * n, len(self.weights))

    def serve(self) -> None:
        """Go on swapping without a step. What is begun here is as old as the last step, not older: ranks that leave off
        serving and then wait at once, each for the next one round a ring, would wait for ever."""
        for (j, i), swap in list(self._swaps.items()):
            if swap.pending.arrived:
                self._mix(j, self._buckets[i])
                self._begin(j, self._buckets[i], self._step)
        for j, i in itertools.product(self.weights, self._buckets):
            if (j, i) not in self._swaps:
                self._begin(j, self._buckets[i], self._step)

    def conclude(self) -> None:
        """Finish what is under way, where no rank takes steps. Each end begins a swap only when the one before has
        arrived, so one of them may be ahead by one: the other does likewise."""
        indices = sorted(self._buckets)
        for j in sorted(self.weights):
            mine = torch.tensor([self._begun[j, i] for i in indices])
            theirs, other = torch.empty_like(mine), 1 - self.groups[j].rank
            self.groups[j].swap({other: mine}, {other: theirs}, self.tag - 1).wait()
            for i in (i for n, i in enumerate(indices) if theirs[n] > mine[n]):
                self._finish(j, i)
                self._begin(j, self._buckets[i], 0)
        for j, i in itertools.product(self.weights, indices):
            self._finish(j, i)

    def _begin(self, j: int, bucket: Bucket, step: int) -> None:
        group, key = self.groups[j], (j, bucket.index)
        told = bucket.params.detach().to("cpu", copy=True)
        heard, other = torch.empty_like(told), 1 - group.rank
        work = group.swap({other: told}, {other: heard}, self.tag + bucket.index)
        self._begun[key] = self._begun.get(key, 0) + 1
        if key not in self._waiters:  # its own: behind another bucket's swap, both ends might wait for each other
            self._waiters[key] = self.waiter(j)
        self._swaps[key] = Swap(told, heard, step, self._waiters[key].give(work))

    def _finish(self, j: int, index: int) -> None:
        if (j, index) in self._swaps:
            self._swaps[j, index].pending.wait()
            self._mix(j, self._buckets[index])

    def _mix(self, j: int, bucket: Bucket) -> None:
        swap = self._swaps.pop((j, bucket.index))
        moved = swap.heard.sub_(swap.told).to(bucket.params.device)
        bucket.params.add_(moved, alpha=self.weights[j])


def meet(mixings: Sequence[LateGossip], everyone: Group, timeout_s: float) -> None:
    """Wait until all ranks have come here, after the same step."""
    waiter = Waiter(timeout_s)
    there = waiter.give(everyone.sum(torch.zeros(1)))
    waiter.end()
    deadline = time.monotonic() + timeout_s
    while not there.arrived:
        for mixing in mixings:
            mixing.serve()
        if time.monotonic() > deadline:
            raise Lost(f"not all ranks came to the end of this step within {timeout_s:g} s")
        time.sleep(LOOK_S)


def settle(mixings: Sequence[LateGossip], everyone: Group, timeout_s: float) -> None:
    """Meet, and leave nothing under way."""
    meet(mixings, everyone, timeout_s)
    for mixing in mixings:
        mixing.conclude()
