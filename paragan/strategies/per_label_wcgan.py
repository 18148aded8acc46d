"""Parallel W-CGAN: a game of its own for every label, and no communication between them.

Lupo Pasini and Yin, "Stable parallel training of Wasserstein conditional generative adversarial neural networks", J.
Supercomputing 2022.

    rank r -> label r (or several labels, or several ranks for a label); until the budget ends:
        d_steps times:  D ascends mean D(x) - mean D(G(z));   once:  G ascends mean D(G(z))
    sample label c -> G_c

Which label a worker trains next is not decided here: it takes one from a queue (train/per_label/worker.py). The same
authors' earlier baseline DC-CGAN is a preset (presets.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from paragan.comm.compression.compressors import Compressor
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.strategies.base import Coordination, Role, Semantics, StrategyDefaults
from paragan.strategies.presets import SharedStrategy
from paragan.strategies.sync import Sync

PerLabelName = Literal["per-label", "DC-CGAN"]


@config_class
class PerLabel(StrategyDefaults):
    """A generator and a discriminator for every label, trained on its images alone; sampled as one conditional model.
    --batch is that of every game, --kimg is shared among them. Workers can be started, and can die, at any time.

    per_label_strategy : how the ranks of one label work together
    ranks_per_label    : how many ranks train a label together (0: one, or more where there are more ranks than labels)
    budget_by          : how --kimg is shared: "equal" for every label, or in proportion to its "data"
    minutes            : training time of all labels in total; the run ends with it or with --kimg (0: with --kimg)
    rare_below         : labels with fewer images than this cause a warning
    warm_start         : "nearest": a rare label starts from the finished game of the label with the nearest mean image
    lease_s            : a worker that was silent for so long counts as dead, and another takes its label
    wait_for_all       : a worker that finds no label left waits until all are done, to replace one that dies
    """

    name: PerLabelName = "per-label"
    per_label_strategy: SharedStrategy = Sync()
    ranks_per_label: Annotated[int, Field(ge=0)] = 0
    budget_by: Literal["equal", "data"] = "equal"
    minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    rare_below: Annotated[int, Field(ge=0)] = 100
    warm_start: Literal["none", "nearest"] = "none"
    lease_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    wait_for_all: bool = True

    @property
    def per_label(self) -> Self:
        return self

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
    def uses_single_bucket(self) -> bool:
        return self.per_label_strategy.uses_single_bucket

    @property
    def step_period(self) -> int:
        return self.per_label_strategy.step_period

    @property
    def reuses_fakes(self) -> bool:
        return self.per_label_strategy.reuses_fakes

    @property
    def coordination(self) -> Coordination:
        return "none"

    @property
    def semantics(self) -> Semantics:
        return "per-label models"

    @property
    def sync_period(self) -> int:
        return self.per_label_strategy.sync_period

    @property
    def sync_mode(self) -> str:
        return self.per_label_strategy.sync_mode

    @property
    def num_fragments(self) -> int:
        return self.per_label_strategy.num_fragments

    @property
    def error_feedback(self) -> float:
        return self.per_label_strategy.error_feedback

    @property
    def traffic_period(self) -> int:
        return self.per_label_strategy.traffic_period

    def check(self, ranks: int) -> None:
        if self.per_label_strategy.replays_broken_rounds:
            raise UsageError(
                f"strategy.per_label_strategy.peer_timeout_s={self.per_label_strategy.rank_loss_timeout_s:g}: the "
                "ranks of a label end with the first lost one. Use --strategy.per_label_strategy.peer_timeout_s=0."
            )
        if ranks == 1 and self.per_label_strategy.splits_ranks:
            return  # one rank trains both players, without a second one
        if self.ranks_per_label > ranks:
            raise UsageError(
                f"--strategy.ranks_per_label={self.ranks_per_label}: only {ranks} ranks were started. Use "
                f"--strategy.ranks_per_label={ranks} or less, or start more ranks."
            )
        self.per_label_strategy.check(self.ranks_per_label or 1)

    def role(self, game: Game, world: World, lanes: int) -> Role:
        """Return the role of a rank among those of its label."""
        return self.per_label_strategy.role(game, world, lanes)

    def budget_fractions(self, counts: Sequence[int]) -> list[float]:
        """Return the fraction of the budget of each label, from its number of images."""
        weights = counts if self.budget_by == "data" else [1] * len(counts)
        return [weight / sum(weights) for weight in weights]

    def ranks_of_label(self, rank: int, ranks: int, labels: int) -> range:
        """Return the ranks that train the label of `rank`: as many teams as there is work for, of nearly even size."""
        teams = min(max(1, ranks // self.ranks_per_label) if self.ranks_per_label else ranks, labels)
        ends = [0, *(round((team + 1) * ranks / teams) for team in range(teams))]
        return next(range(a, b) for a, b in itertools.pairwise(ends) if a <= rank < b)
