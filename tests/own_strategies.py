"""An exchange and a topology that the library does not have, as users would write them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paragan.comm.bucket import GRAD_READY, Bucket, ExchangeEvent
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Traffic
from paragan.comm.world import World
from paragan.core.schema import config_class
from paragan.strategies.base import ExchangedPlayer, PlayerExchange
from paragan.strategies.gossip_dposg import Decentralized
from paragan.strategies.sync import Sync


@dataclass(frozen=True)
class RecursiveDoubling:
    """Sum gradients with the rank at distance 1, then 2, 4, ...: for powers of two."""

    group: Group

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        received = bucket.workspace("received", bucket.grads.numel())
        yield GRAD_READY
        for bit in range((self.group.size - 1).bit_length()):
            partner = self.group.rank ^ 1 << bit
            yield self.group.send_recv({partner: bucket.grads}, {partner: received}, bucket.index)
            bucket.grads.add_(received)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        messages = (self.group.size - 1).bit_length()
        return Traffic(messages * itemsize * n, messages)


@config_class
class DoublingSync(Sync):
    """Synchronous training with `RecursiveDoubling`."""

    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        team = world.all_ranks.with_meter(player.meter)
        return PlayerExchange(RecursiveDoubling(team), team, weight)


@config_class
class Opposite:
    """Every rank with the next one and with the one opposite: directed, the same at every step."""

    name: Literal["opposite"] = "opposite"

    def unsupported_reason(self, size: int) -> str:
        return "" if size % 2 == 0 else "it needs an even number of ranks"

    def period(self, size: int) -> int:
        return 1

    def matrix(self, size: int, step: int) -> Any:
        eye = np.eye(size)
        return (eye + np.roll(eye, 1, axis=0) + np.roll(eye, size // 2, axis=0)) / 3


@config_class
class OppositeGossip(Decentralized):
    """Gossip over `Opposite`."""

    topology: Opposite = Opposite()  # pyright: ignore[reportIncompatibleVariableOverride]


OWN_STRATEGIES = {"own exchange: recursive doubling": DoublingSync, "own topology: opposite": OppositeGossip}
