"""Parallel W-CGAN (Lupo Pasini, Yin; J. Supercomputing 2022): every label a game of its own, and nothing between them.

    rank r -> label r (or several labels, or several ranks a label); until the budget ends, without a word to others:
        d_steps times:  D up mean D(x) - mean D(G(z));   once:  G up mean D(G(z))
    sample label c -> G_c

Which game a worker plays next is not decided here: it takes one from a queue (train/labels.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paragan.comm.compression.compressors import Compressor
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class, name_shorthand
from paragan.game.game import Game
from paragan.strategies.async_paragan import Async
from paragan.strategies.base import Role
from paragan.strategies.gossip_dposg import (
    DPOSG,
    AsyncGossipPreset,
    CPOAdamCentral,
    Decentralized,
    DPOAdam,
    RandDPOAdam,
)
from paragan.strategies.quantized_dqgan import CPOAdam, CPOAdamGQ, Quantized
from paragan.strategies.sync import Sync

LockstepStrategy = Sync | Quantized | CPOAdam | CPOAdamGQ | CPOAdamCentral
GossipStrategy = Decentralized | AsyncGossipPreset | DPOSG | DPOAdam | RandDPOAdam
WithinLabelStrategy = LockstepStrategy | GossipStrategy | Async


def _default_strategy(default: str) -> BeforeValidator:
    """A strategy by its name alone, or fields of the one that it is by default."""

    def add_name(value: Any) -> Any:
        return {"name": default, **value} if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]

    return BeforeValidator(add_name)


SyncByDefault = Annotated[WithinLabelStrategy, Field(discriminator="name"), _default_strategy("sync"), name_shorthand]
AsyncByDefault = Annotated[WithinLabelStrategy, Field(discriminator="name"), _default_strategy("async"), name_shorthand]


@config_class
class PerLabel:
    """A generator and a discriminator for every label, trained on its images alone; sampled as one conditional model.
    --batch is every game's, --kimg is shared out over them. Any number of workers can be started, and die, at any time.

    within     : how the ranks of one label work together
    ranks      : that many train a label together (0: one, or more where there are more ranks than labels)
    share      : of the budget, for every label "equal", or as its share of the "data"
    minutes    : training of all labels together; whichever of it and --kimg ends first (0: --kimg)
    rare       : labels with fewer images than this are warned of
    warm_start : "nearest": a rare label starts from the finished game of the label whose mean image is nearest
    lease_s    : a worker that was not heard of for so long is dead, and its label another's
    wait       : a worker that finds nothing to do waits until all is done, to take over from who dies
    """

    name: Literal["per-label"] = "per-label"
    per_label_strategy: SyncByDefault = Sync()
    ranks_per_label: Annotated[int, Field(ge=0)] = 0
    budget_by: Literal["equal", "data"] = "equal"
    minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    rare_below: Annotated[int, Field(ge=0)] = 100
    warm_start: Literal["none", "nearest"] = "none"
    lease_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    wait_for_all: bool = True

    @property
    def wire(self) -> Compressor:
        return self.per_label_strategy.wire

    @property
    def optimizer_wrapper(self) -> str:
        return self.per_label_strategy.optimizer_wrapper

    @property
    def extrapolation(self) -> float:
        return self.per_label_strategy.extrapolation

    @property
    def requires_sgd(self) -> bool:
        return self.per_label_strategy.requires_sgd

    @property
    def peer_timeout_s(self) -> float:
        """None: a worker takes part in no group but that of its label's ranks, which ends with each of them."""
        return 0.0

    def check(self, ranks: int) -> None:
        if self.ranks_per_label > ranks:
            raise UsageError(
                f"--strategy.ranks_per_label={self.ranks_per_label}: {ranks} were started; use {ranks} or less, or more ranks"
            )
        self.per_label_strategy.check(self.ranks_per_label or 1)

    def role(self, game: Game, world: World, lanes: int) -> Role:
        """Of a rank among those of its label."""
        return self.per_label_strategy.role(game, world, lanes)

    def budget_fractions(self, counts: Sequence[int]) -> list[float]:
        """Every label's part of the budget, of how many images there are of each."""
        weights = counts if self.budget_by == "data" else [1] * len(counts)
        return [weight / sum(weights) for weight in weights]

    def ranks_of_label(self, rank: int, ranks: int, labels: int) -> range:
        """The ranks that train a label together with this one: as many teams as have work, as even as can be."""
        teams = min(max(1, ranks // self.ranks_per_label) if self.ranks_per_label else ranks, labels)
        ends = [0, *(round((team + 1) * ranks / teams) for team in range(teams))]
        return next(range(a, b) for a, b in itertools.pairwise(ends) if a <= rank < b)


@config_class
class DCCGAN(PerLabel):
    """Parallel DC-CGAN, the same authors' earlier baseline: of the two ranks of a label one moves D, the other G.
    --policy dcgan gives its losses and optimizers."""

    name: Literal["DC-CGAN"] = "DC-CGAN"  # pyright: ignore[reportIncompatibleVariableOverride]
    per_label_strategy: AsyncByDefault = Async()
    ranks_per_label: Annotated[int, Field(ge=0)] = 2

    def check(self, ranks: int) -> None:
        """One rank alone can play both players."""
        if ranks > 1:
            super().check(ranks)


AnyPerLabel = PerLabel | DCCGAN
PER_LABEL_NAMES = (PerLabel.name, DCCGAN.name)
