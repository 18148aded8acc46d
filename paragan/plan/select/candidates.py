"""Strategies by name, and those that a plan compares.

strategy_of("sync+int8+every=4")        # a strategy, + its wire, + any field=value
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from paragan.comm.topology import Complete, Topology
from paragan.config.run import Strategy
from paragan.core.schema import build, override, record
from paragan.plan.profile.profile import Profile
from paragan.strategies.async_paragan import Async
from paragan.strategies.gd_teams import even
from paragan.strategies.gossip_dposg import Decentralized
from paragan.strategies.per_label_wcgan import NAMES, PerLabel

Promise = Literal["as one worker", "compressed", "stale", "decentralized", "periodic", "a game per label"]

# what a promise is less than "as one worker": the part of the margin by which it has to be faster
GIVES_UP: dict[Promise, float] = {
    "as one worker": 0.0,
    "compressed": 0.4,
    "decentralized": 0.4,
    "stale": 0.7,
    "periodic": 1.0,
    "a game per label": 1.0,
}
# {split}: the division of the ranks with which neither team waits
USUAL = (
    *("sync", "sync+bf16", "sync+int8", "sync+int4", "quantized", "quantized+int4"),
    *("sync+every=4", "sync+every=16", "sync+int8+every=4", "quantized+every=4"),
    *("gossip", "gossip+int8", "gossip+int4", "gossip+local_steps=4", "gossip+int8+local_steps=4"),
    *(f"gossip+topology={graph}" for graph in ("ring", "torus", "hypercube", "exponential", "random-ring")),
    *("gossip+topology=ring+int8", "gossip+topology=ring+rounds=4", "async-gossip"),
    *("async-gossip+topology=hypercube", "async+split=none", "async+split=none+int8"),
    *("async+split={split}", "async+split={split}+lead=2", "async+split={split}+every=2"),
    *("async+split={split}+int8+snapshot_wire=int8", "async+split={split}+int8+snapshot_wire=int8+lead=2"),
    "per-label",
)
ALONE = ("sync", "async")
FEW = 64  # ranks up to which graphs are looked at


@dataclass(frozen=True)
class Candidate:
    """A way to train. name: as it is asked for;  strategy: the record"""

    name: str
    strategy: Any

    @property
    def options(self) -> list[str]:
        """What `paragan train` is to be told."""
        return [f"--{field}={value}" for field, value in settings_of(self.name)]

    @property
    def promise(self) -> Promise:
        return promise_of(self.strategy)


def settings_of(name: str) -> list[tuple[str, str]]:
    """The fields that a name sets: its wire is given by its own name alone."""
    kind, *more = name.split("+")
    fields = [word.partition("=") if "=" in word else ("wire", "=", word) for word in more]
    return [("strategy", kind), *((f"strategy.{field}", value) for field, _, value in fields)]


def strategy_of(name: str) -> Any:
    """Unusable names the field that is wrong, and what fits."""
    return build(_Holder, override({}, settings_of(name))).strategy


@record
class _Holder:
    strategy: Strategy


def promise_of(strategy: Any) -> Promise:
    """What one gets, compared with a single worker that does it all."""
    if isinstance(strategy, PerLabel):
        return "a game per label"
    if getattr(strategy, "every", 1) > 1 or getattr(strategy, "local_steps", 1) > 1:
        return "periodic"
    if isinstance(strategy, Async) or getattr(strategy, "staleness", 0):
        return "stale"
    if isinstance(strategy, Decentralized):
        return "decentralized"
    return "compressed" if strategy.wire.lossy else "as one worker"


def candidates(ranks: int, profile: Profile, batch: int) -> list[Candidate]:
    """What is worth comparing on so many ranks; which of them fit is the search's to say."""
    if ranks == 1:
        return [Candidate(name, strategy_of(name)) for name in ALONE]
    local, turns = batch / ranks, profile.d_steps
    split = "{}:{}".format(*even(profile.turn("G", local).whole, turns * profile.turn("D", local).whole, ranks))
    found = [Candidate(name, strategy_of(name)) for name in (usual.format(split=split) for usual in USUAL)]
    return list({_alike(one.strategy, ranks): one for one in reversed(found)}.values())[::-1]  # the first of its like


def _alike(strategy: Any, ranks: int) -> Any:
    """What two strategies share that do the same: on few ranks, several graphs are one."""
    topology: Topology | None = getattr(strategy, "topology", None)
    if topology is None or ranks > FEW or topology.misfit(ranks) or not topology.period(ranks):
        return strategy
    seen = b"".join(topology.matrix(ranks, step).tobytes() for step in range(topology.period(ranks)))
    return dataclasses.replace(strategy, topology=Complete()), seen


def is_per_label(name: str) -> bool:
    return name.partition("+")[0] in NAMES
