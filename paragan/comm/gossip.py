"""Gossip: replicas that agree on parameters, each with a few others, and on the mean of all only in the long run."""

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
    """Parameters drift towards the neighbours': x_i <- sum_j W_ij x_j, `rounds` times a step (Liu et al. 2020: W^t).

    The first message leaves when the round begins, and is mixed in after backward, before the optimizer steps.
    """

    topology: Topology
    group: Group
    rounds: int = 1

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        size, rank = self.group.size, self.group.rank
        for turn in range(step * self.rounds, (step + 1) * self.rounds):
            those = neighbors(self.topology, size, rank, turn)
            heard = {j: bucket.workspace(f"heard {j}", bucket.params.numel()) for j in those.recv_from}
            yield self.group.send_recv(dict.fromkeys(those.send_to, bucket.params), heard)
            bucket.params.mul_(those.self_weight)
            for j, weight in those.recv_from.items():
                bucket.params.add_(heard[j], alpha=weight)

    def traffic(self, n: int) -> Traffic:
        sent = self.rounds * messages_per_step(self.topology, self.group.size)
        return Traffic(round(sent * 4 * n), round(sent))


@dataclass(frozen=True)
class CompressedGossip:
    """Gossip on public copies that follow the parameters over a lossy wire (CHOCO: Koloskova, Stich and Jaggi 2019).

    Every link i -> j has a copy of x_i, the same at both ends, moved by what travels on it:

        i sends Q(x_i - copy_ij);  copy_ij += Q(...), at i and at j
        x_i += rate * sum_j (W_ij copy_ji - W_ji copy_ij)

    A link that every step uses has CHOCO's copies; one that only some use keeps its own, so that graphs may change.
    The mean over ranks stays as it was for every doubly stochastic W. Copies are bucket memories, two for each link.
    """

    topology: Topology
    group: Group
    wire: Compressor
    rounds: int = 1
    consensus_rate: float = 1.0

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        size, rank, n = self.group.size, self.group.rank, bucket.params.numel()
        nbytes = self.wire.nbytes(n)
        moved = bucket.workspace("moved", n)
        for turn in range(step * self.rounds, (step + 1) * self.rounds):
            those = neighbors(self.topology, size, rank, turn)
            codes, inbox = (
                {j: bucket.workspace(f"{name} {j}", nbytes, dtype=torch.uint8) for j in ranks}
                for name, ranks in (("code", those.send_to), ("inbox", those.recv_from))
            )
            for j in those.send_to:
                seed = zlib.crc32(f"{turn} {rank} {j} {bucket.index}".encode()) >> 1
                torch.sub(bucket.params, self._sent_copy(bucket, j), out=moved)
                with wire_errors(self.wire):
                    self.wire.encode(moved, codes[j], seed)
            yield self.group.send_recv(codes, inbox)
            for j in those.send_to:
                with wire_errors(self.wire):
                    self.wire.decode(codes[j], moved)
                weight = neighbors(self.topology, size, j, turn).recv_from[rank]
                bucket.params.sub_(self._sent_copy(bucket, j).add_(moved), alpha=self.consensus_rate * weight)
            for j, weight in those.recv_from.items():
                with wire_errors(self.wire):
                    self.wire.decode(inbox[j], moved)
                bucket.params.add_(self._recv_copy(bucket, j).add_(moved), alpha=self.consensus_rate * weight)

    def _sent_copy(self, bucket: Bucket, j: int) -> torch.Tensor:
        return bucket.state(f"told +{(j - self.group.rank) % self.group.size}")

    def _recv_copy(self, bucket: Bucket, j: int) -> torch.Tensor:
        return bucket.state(f"heard -{(self.group.rank - j) % self.group.size}")

    def traffic(self, n: int) -> Traffic:
        sent = self.rounds * messages_per_step(self.topology, self.group.size)
        return Traffic(round(sent * self.wire.nbytes(n)), round(sent))
