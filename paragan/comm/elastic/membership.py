"""Memberships: which ranks belong to an elastic world."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from paragan.comm.elastic.kv_store import ServerAddress

MEMBERSHIP_KEY = "membership"  # where each rank's store has its `MembershipVersion`


@dataclass(frozen=True)
class Membership:
    """Which ranks belong to the world from a step on. Ranks are called by the numbers they were started with.

    epoch           : rises with every membership
    members         : the ranks, in ascending order
    step            : the round at which they continue
    store_rank      : whose store they use to form the group
    store_prefix    : of the keys there; another one for every attempt
    addresses       : of the members' stores
    answered        : the number of each rank's latest request that this answers; earlier requests are void
    without_state   : members that have no parameters yet, or whose parameters lack an agreement that others have
    after_loss      : whether it was formed because a group broke: a round, or what follows one, may be incomplete
    shutdown_reason : why it is only for a last checkpoint; empty if training continues
    partitioned     : whether it shuts down because other ranks cannot be reached. They may be training on, so this part
                      must not write to the run folder what they would find.
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    store_rank: int
    store_prefix: str
    addresses: dict[int, ServerAddress]
    answered: dict[int, int]
    without_state: tuple[int, ...] = ()
    shutdown_reason: str = ""
    partitioned: bool = False
    after_loss: bool = False

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Membership:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data["members"] = tuple(data["members"])
        data["addresses"] = {int(rank): ServerAddress(*address) for rank, address in data["addresses"].items()}
        data["answered"] = {int(rank): number for rank, number in data["answered"].items()}
        data["without_state"] = tuple(data["without_state"])
        return Membership(**data)


@dataclass(frozen=True)
class MembershipVersion:
    """The membership that a rank is in, as its store says."""

    epoch: int
    members: tuple[int, ...]

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps([self.epoch, self.members])

    @staticmethod
    def from_json(text: str) -> MembershipVersion:
        """Read what `to_json` wrote."""
        epoch, members = json.loads(text)
        return MembershipVersion(epoch, tuple(members))


NO_MEMBERSHIP = MembershipVersion(-1, ())
