"""Strategies by name, and those that a plan compares.

strategy_of("sync+int8+sync_period=4")        # a strategy, + its wire, + any field=value
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paragan.comm.topology import Complete, Topology
from paragan.config.run import AnyStrategy
from paragan.core.schema import apply_overrides, config_class, from_dict
from paragan.plan.profile.profile import Profile
from paragan.strategies.base import Semantics
from paragan.strategies.gd_teams import balance
from paragan.strategies.per_label_wcgan import PER_LABEL_NAMES

# what a promise is less than "equivalent": the part of the margin by which it has to be faster
SEMANTICS_PENALTY: dict[Semantics, float] = {
    "equivalent": 0.0,
    "compressed": 0.4,
    "decentralized": 0.4,
    "stale": 0.7,
    "periodic": 1.0,
    "per-label models": 1.0,
}
# {split}: the division of the ranks with which neither team waits
DEFAULT_CANDIDATES = (
    *("sync", "sync+bf16", "sync+int8", "sync+int4", "quantized", "quantized+int4"),
    *("sync+sync_period=4", "sync+sync_period=16", "sync+int8+sync_period=4", "quantized+sync_period=4"),
    *("gossip", "gossip+int8", "gossip+int4", "gossip+sync_period=4", "gossip+int8+sync_period=4"),
    *(f"gossip+topology={graph}" for graph in ("ring", "torus", "hypercube", "exponential", "random-ring")),
    *("gossip+topology=ring+int8", "gossip+topology=ring+rounds=4", "async-gossip"),
    *("async-gossip+topology=hypercube", "async+split=none", "async+split=none+int8"),
    *("async+split={split}", "async+split={split}+max_lead_rounds=2", "async+split={split}+sync_period=2"),
    *("async+split={split}+int8+snapshot_wire=int8", "async+split={split}+int8+snapshot_wire=int8+max_lead_rounds=2"),
    "per-label",
)
SINGLE_RANK_CANDIDATES = ("sync", "async")
MAX_COMPARED_RANKS = 64  # ranks up to which graphs are looked at


@dataclass(frozen=True)
class Candidate:
    """A way to train. name: as it is asked for;  strategy: the record"""

    name: str
    strategy: Any

    @property
    def cli_options(self) -> list[str]:
        """What `paragan train` is to be told."""
        return [f"--{field}={value}" for field, value in parse_settings(self.name)]

    @property
    def semantics(self) -> Semantics:
        return self.strategy.semantics


def parse_settings(name: str) -> list[tuple[str, str]]:
    """The fields that a name sets: its wire is given by its own name alone."""
    kind, *more = name.split("+")
    fields = [word.partition("=") if "=" in word else ("wire", "=", word) for word in more]
    return [("strategy", kind), *((f"strategy.{field}", value) for field, _, value in fields)]


def parse_strategy(name: str) -> Any:
    """Unusable names the field that is wrong, and what fits."""
    return from_dict(_StrategyField, apply_overrides({}, parse_settings(name))).strategy


@config_class
class _StrategyField:
    strategy: AnyStrategy


def default_candidates(ranks: int, profile: Profile, batch: int) -> list[Candidate]:
    """What is worth comparing on so many ranks; which of them fit is the search's to say."""
    if ranks == 1:
        return [Candidate(name, parse_strategy(name)) for name in SINGLE_RANK_CANDIDATES]
    local, turns = batch / ranks, profile.d_steps
    split = "{}:{}".format(*balance(profile.turn("G", local).total_s, turns * profile.turn("D", local).total_s, ranks))
    found = [
        Candidate(name, parse_strategy(name)) for name in (usual.format(split=split) for usual in DEFAULT_CANDIDATES)
    ]
    return list({_equivalence_key(one.strategy, ranks): one for one in reversed(found)}.values())[
        ::-1
    ]  # the first of its like


def _equivalence_key(strategy: Any, ranks: int) -> Any:
    """What two strategies share that do the same: on few ranks, several graphs are one."""
    topology: Topology | None = strategy.gossip_topology
    if (
        topology is None
        or ranks > MAX_COMPARED_RANKS
        or topology.unsupported_reason(ranks)
        or not topology.period(ranks)
    ):
        return strategy
    seen = b"".join(topology.matrix(ranks, step).tobytes() for step in range(topology.period(ranks)))
    return dataclasses.replace(strategy, topology=Complete()), seen


def is_per_label(name: str) -> bool:
    return name.partition("+")[0] in PER_LABEL_NAMES
