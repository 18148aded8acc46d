"""Strategies by name, and the candidates that a plan compares.

parse_strategy("sync+int8+sync_period=4")     # a strategy, + its wire, + any field=value
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

# {split}: the split of the ranks with which neither team waits for the other
DEFAULT_CANDIDATES = (
    *("sync", "sync+bf16", "sync+int8", "sync+int4", "quantized", "quantized+int4"),
    *("sync+sync_period=4", "sync+int8+sync_period=4", "quantized+sync_period=4"),
    *("sync+sync_period=32", "sync+int4+sync_period=32", "sync+sync_period=32+fragments=4+delay=8"),
    *("sync+int4+sync_period=32+fragments=4+delay=8", "sync+sync_period=128", "sync+int4+sync_period=128"),
    *("gossip", "gossip+int8", "gossip+int4", "gossip+sync_period=4", "gossip+int8+sync_period=4"),
    *(f"gossip+topology={graph}" for graph in ("ring", "torus", "hypercube", "exponential", "random-ring")),
    *("gossip+topology=ring+int8", "gossip+topology=ring+rounds=4", "async-gossip"),
    *("async-gossip+topology=hypercube", "async+split=none", "async+split=none+int8"),
    *("async+split={split}", "async+split={split}+max_lead_rounds=2", "async+split={split}+sync_period=2"),
    *("async+split={split}+int8+snapshot_wire=int8", "async+split={split}+int8+snapshot_wire=int8+max_lead_rounds=2"),
    "per-label",
)
SINGLE_RANK_CANDIDATES = ("sync", "async")
MAX_COMPARED_RANKS = 64  # up to which graphs are compared by their matrices


@dataclass(frozen=True)
class Candidate:
    """A strategy to compare."""

    name: str  # as the user gives it
    strategy: Any

    @property
    def cli_options(self) -> list[str]:
        """Options of `paragan train` that select the strategy."""
        return [f"--{field}={value}" for field, value in parse_settings(self.name)]

    @property
    def semantics(self) -> Semantics:
        """What the strategy computes, compared with one worker."""
        return self.strategy.semantics


def parse_settings(name: str) -> list[tuple[str, str]]:
    """Return the fields that a name sets. A word without "=" is the wire."""
    kind, *words = name.split("+")
    settings = [("strategy", kind)]
    for word in words:
        field, is_field, value = word.partition("=")
        settings.append((f"strategy.{field}", value) if is_field else ("strategy.wire", word))
    return settings


def parse_strategy(name: str) -> Any:
    """Make a strategy from its name.

    Raises:
        UsageError: names the wrong field.
    """
    return from_dict(StrategyField, apply_overrides({}, parse_settings(name))).strategy


@config_class
class StrategyField:
    """A strategy as a field, which reads its name or its fields."""

    strategy: AnyStrategy


def default_candidates(ranks: int, profile: Profile, batch: int) -> list[Candidate]:
    """Return the strategies that are worth comparing on `ranks` ranks; some may not support this number."""
    if ranks == 1:
        return [Candidate(name, parse_strategy(name)) for name in SINGLE_RANK_CANDIDATES]
    local_batch = batch / ranks
    g_s = profile.turn("G", local_batch).total_s
    d_s = profile.d_steps * profile.turn("D", local_batch).total_s
    split = "{}:{}".format(*balance(g_s, d_s, ranks))
    names = [template.format(split=split) for template in DEFAULT_CANDIDATES]
    candidates = [Candidate(name, parse_strategy(name)) for name in names]
    distinct = {_equivalence_key(one.strategy, ranks): one for one in reversed(candidates)}  # the first of equals
    return list(reversed(distinct.values()))


def _equivalence_key(strategy: Any, ranks: int) -> Any:
    """Return a key that is equal for strategies that do the same: on few ranks, several graphs are equal."""
    topology: Topology | None = strategy.gossip_topology
    if (
        topology is None
        or ranks > MAX_COMPARED_RANKS
        or topology.unsupported_reason(ranks)
        or not topology.period(ranks)
    ):
        return strategy
    matrices = b"".join(topology.matrix(ranks, step).tobytes() for step in range(topology.period(ranks)))
    return dataclasses.replace(strategy, topology=Complete()), matrices
