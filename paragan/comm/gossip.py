"""Gossip: every replica averages its parameters with a few neighbors, and so approaches the mean of all.

Which neighbors, and with what weights, says a mixing matrix W (comm/topology.py). W is doubly stochastic, so a step
keeps the mean over ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass

import torch

from paragan.comm.bucket import Bucket, ExchangeEvent
from paragan.comm.compression.compressors import Compressor, wire_errors
from paragan.comm.process_group import Group, Work
from paragan.comm.topology import Topology, messages_per_step, neighbors
from paragan.comm.traffic import Traffic


@dataclass(frozen=True)
class Gossip:
    """Average with the neighbors: x_i <- sum_j W_ij x_j, `rounds` times a step (DPOSG: Liu et al. 2020, W^t).

    The first message is sent when the round begins, and is averaged in after backward, before the optimizer steps.
    """

    topology: Topology
    group: Group
    rounds: int = 1

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        size, rank = self.group.size, self.group.rank
        for mixing_step in range(step * self.rounds, (step + 1) * self.rounds):
            peers = neighbors(self.topology, size, rank, mixing_step)
            received = {j: bucket.workspace(f"recv {j}", bucket.params.numel()) for j in peers.recv_from}
            yield self.group.send_recv(dict.fromkeys(peers.send_to, bucket.params), received)
            bucket.params.mul_(peers.self_weight)
            for j, weight in peers.recv_from.items():
                bucket.params.add_(received[j], alpha=weight)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the mean over ranks and steps."""
        messages = self.rounds * messages_per_step(self.topology, self.group.size)
        return Traffic(round(messages * itemsize * n), round(messages))


@dataclass(frozen=True)
class CompressedGossip:
    """Gossip over a lossy wire, by public copies of the parameters (CHOCO-SGD: Koloskova, Stich and Jaggi 2019).

    Both ends of a link i -> j hold the same copy of x_i, and update it by what is sent:

        i sends Q(x_i - copy_ij);  copy_ij += Q(...), at i and at j
        x_i += consensus_rate * sum_j (W_ij copy_ji - W_ji copy_ij)

    The paper has one copy for each rank. Here every link has its own, so that the graph may change from step to step;
    on a fixed graph both are the same. The mean over ranks is kept for every doubly stochastic W. The copies are bucket
    states, two for each neighbor ("sent_copy +1", "recv_copy -1": by the distance of the ranks).
    """

    topology: Topology
    group: Group
    wire: Compressor
    rounds: int = 1
    consensus_rate: float = 1.0

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        size, rank = self.group.size, self.group.rank
        n = bucket.params.numel()
        nbytes = self.wire.nbytes(n)
        delta = bucket.workspace("delta", n)
        for mixing_step in range(step * self.rounds, (step + 1) * self.rounds):
            peers = neighbors(self.topology, size, rank, mixing_step)
            sent = {j: bucket.workspace(f"send_code {j}", nbytes, dtype=torch.uint8) for j in peers.send_to}
            received = {j: bucket.workspace(f"recv_code {j}", nbytes, dtype=torch.uint8) for j in peers.recv_from}
            for j in peers.send_to:
                seed = zlib.crc32(f"{mixing_step} {rank} {j} {bucket.index}".encode()) >> 1
                torch.sub(bucket.params, self._sent_copy(bucket, j), out=delta)
                with wire_errors(self.wire):
                    self.wire.encode(delta, sent[j], seed)
            yield self.group.send_recv(sent, received)
            for j in peers.send_to:
                with wire_errors(self.wire):
                    self.wire.decode(sent[j], delta)
                weight = neighbors(self.topology, size, j, mixing_step).recv_from[rank]
                bucket.params.sub_(self._sent_copy(bucket, j).add_(delta), alpha=self.consensus_rate * weight)
            for j, weight in peers.recv_from.items():
                with wire_errors(self.wire):
                    self.wire.decode(received[j], delta)
                bucket.params.add_(self._recv_copy(bucket, j).add_(delta), alpha=self.consensus_rate * weight)

    def _sent_copy(self, bucket: Bucket, j: int) -> torch.Tensor:
        return bucket.state(f"sent_copy +{(j - self.group.rank) % self.group.size}")

    def _recv_copy(self, bucket: Bucket, j: int) -> torch.Tensor:
        return bucket.state(f"recv_copy -{(self.group.rank - j) % self.group.size}")

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the mean over ranks and steps."""
        messages = self.rounds * messages_per_step(self.topology, self.group.size)
        return Traffic(round(messages * self.wire.nbytes(n)), round(messages))
