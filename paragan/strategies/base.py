"""What a strategy is asked: the role of each rank, and the facts that validation and planning need.

A strategy is a frozen record. `role` is called once per rank and wires turns, exchanges and lanes together; nothing
in the training loop depends on the kind of strategy. Whoever needs to know what a strategy supports asks one of the
properties of `StrategyDefaults`; no code outside this package looks at its class or its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field
from torch import Tensor

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Compressor
from paragan.comm.process_group import Group
from paragan.comm.topology import Topology
from paragan.comm.traffic import Meter, Traffic
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.game.game import Game
from paragan.game.late_start import LateStart
from paragan.game.player import Player
from paragan.game.shared_forward import SharedForward
from paragan.game.stale_opponents import StalenessStats
from paragan.game.turn import Turn, TurnGroup, alternating

PeerTimeout = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MinRanks = Annotated[int, Field(ge=1)]
TurnOrder = Callable[[Turn, Turn, int], tuple[TurnGroup, ...]]
Coordination = Literal["all-reduce", "teams", "gossip", "none"]
Semantics = Literal["equivalent", "compressed", "stale", "decentralized", "periodic", "per-label models"]


class ReplayState(Protocol):
    """Images or players of former rounds that a role uses, for the checkpoint (game/stale_opponents.py)."""

    def state(self) -> dict[str, Tensor]:
        """Return this rank's part. Ranks use the same name only for the same tensor."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from the parts of all ranks."""
        ...


@dataclass(frozen=True)
class LaneShare:
    """The lanes of the total batch that one rank works on, out of `total_lanes`."""

    lanes: tuple[int, ...]
    total_lanes: int

    @property
    def weight(self) -> float:
        """This rank's part of the team's gradient."""
        return len(self.lanes) / self.total_lanes


@dataclass(frozen=True)
class Role:
    """What one rank does in every round.

    round             : the groups of turns that it plays, in order
    round_before_d    : the same before D starts, where D starts late (game/late_start.py)
    share             : the lanes of the data that it works on
    replicated        : all ranks that train a player hold the same one, so one of them writes the checkpoint for all
    owner_ranks       : the ranks that hold the current G and the current D
    extra_fakes_for_d : G makes images that only D uses
    replay_state      : what of former rounds it uses, and the checkpoint has to hold
    staleness         : how old that was, by name
    extra_traffic     : what this rank sends beside gradients in one round, by player
    barrier           : where messages may be in flight between rounds: all ranks call it before any other collective
    drain             : where messages may be in flight between rounds: wait until none is
    description       : which ranks train which player, for the console
    """

    round: tuple[TurnGroup, ...]
    share: LaneShare
    replicated: bool = True
    owner_ranks: tuple[int, int] = (0, 0)
    extra_fakes_for_d: bool = True
    replay_state: tuple[ReplayState, ...] = ()
    staleness: Mapping[str, StalenessStats] = field(default_factory=dict[str, StalenessStats])
    extra_traffic: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])
    barrier: Callable[[], None] | None = None
    drain: Callable[[], None] | None = None
    description: str = ""
    round_before_d: tuple[TurnGroup, ...] = ()
    late_start: LateStart = field(default_factory=LateStart)

    def round_at(self, images: int) -> tuple[TurnGroup, ...]:
        """Return the groups of turns of the round that begins after so many real images."""
        return self.round if self.late_start.has_started(images) else self.round_before_d

    @property
    def trained_players(self) -> tuple[Player, ...]:
        """The players that this rank trains."""
        return tuple(dict.fromkeys(turn.player for group in self.round for turn in group))

    @property
    def is_split(self) -> bool:
        """Whether some ranks train G and others D."""
        return self.owner_ranks[0] != self.owner_ranks[1]

    @property
    def has_all_players(self) -> bool:
        """Whether this rank holds both players, the same as all others."""
        return self.replicated and not self.is_split

    @property
    def main_has_all_players(self) -> bool:
        """Whether rank 0 alone holds both players as they are evaluated, with their averages."""
        return self.has_all_players and not any(player.sharded for player in self.trained_players)

    def owner_rank(self, player: Player) -> int:
        """Return the rank that holds the current state of a player."""
        return self.owner_ranks["GD".index(player.name)]


class ExchangedPlayer(Protocol):
    """What an exchange asks of the player, or replica, whose numbers it exchanges."""

    @property
    def meter(self) -> Meter:
        """Counts what this rank sends."""
        ...

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current step."""
        ...

    @property
    def number(self) -> int:
        """0: G, 1: D; replicas count on."""
        ...


@dataclass(frozen=True)
class PlayerExchange:
    """How one rank exchanges a player that every rank trains.

    exchange : of its parameters and gradients
    team     : the ranks that take the same step
    weight   : of this rank's gradient in it
    barrier  : as in `Role`
    drain    : as in `Role`
    """

    exchange: Exchange
    team: Group
    weight: float
    barrier: Callable[[], None] | None = None
    drain: Callable[[], None] | None = None


class StrategyFields(Protocol):
    """The fields of every strategy."""

    @property
    def name(self) -> str: ...
    @property
    def wire(self) -> Compressor: ...
    @property
    def sync_period(self) -> int: ...


class FeedbackFields(StrategyFields, Protocol):
    """The fields of strategies that exchange gradients."""

    @property
    def feedback(self) -> float | None: ...


class Strategy(StrategyFields, Protocol):
    """The parts of a strategy that are used where its exchange is measured."""

    @property
    def gossip_topology(self) -> Topology | None: ...
    @property
    def uses_single_bucket(self) -> bool: ...
    @property
    def num_fragments(self) -> int: ...
    @property
    def traffic_period(self) -> int: ...
    def role(self, game: Game, world: World, lanes: int) -> Role: ...


class StrategyDefaults:
    """The answers of a strategy that runs on any number of ranks with any optimizer, and ends with the first lost rank.

    A strategy overrides what differs.
    """

    # ---- optimizers

    @property
    def optimizer_wrapper(self) -> str:
        """What optimizers are wrapped in where the run does not say (optim/optimistic.py)."""
        return "none"

    @property
    def extrapolation(self) -> float:
        """How many steps a wrapped optimizer looks ahead."""
        return 1.0

    @property
    def requires_sgd(self) -> bool:
        """Whether its update is a plain gradient step, so that the optimizer has to be SGD."""
        return False

    @property
    def uses_single_bucket(self) -> bool:
        """Whether a network is one bucket; a lossy wire then also takes parameters of other dtypes than float32."""
        return False

    @property
    def sync_mode(self) -> str:
        """Return how ranks agree at the end of a `sync_period`: they average parameters, unless it can be chosen."""
        return "parameters"

    @property
    def shard_optimizer(self) -> bool:
        """Return whether each rank keeps the optimizer state and the average of its part of the parameters only."""
        return False

    @property
    def outer_is_mean(self) -> bool:
        """Return whether the outer steps of both players go to the mean of the parameters."""
        return True

    @property
    def has_outer_of_d(self) -> bool:
        """Whether D has an outer optimizer of its own."""
        return False

    @property
    def num_fragments(self) -> int:
        """How many parts of a player are sent in rounds of their own."""
        return 1

    @property
    def rounds_in_flight(self) -> int:
        """How many rounds after they are sent messages are waited for."""
        return 0

    @property
    def sends_in(self: StrategyFields) -> tuple[int, ...]:
        """The rounds of a period in which something is sent, if it is not sent in the last one."""
        return (0,)

    @property
    def step_period(self) -> int:
        """In how many rounds optimizers step once; more than 1 where gradients are accumulated."""
        return 1

    # ---- what it goes with

    @property
    def replicas_drift(self) -> bool:
        """Whether ranks that train the same player hold different parameters between exchanges."""
        return False

    @property
    def supports_late_start(self) -> bool:
        """Whether rounds may train G alone until D starts."""
        return False

    @property
    def supports_batch_ramp(self) -> bool:
        """Whether the batch may grow during a run."""
        return False

    @property
    def supports_graph_capture(self) -> bool:
        """Whether its passes on one rank can be captured and replayed."""
        return False

    @property
    def reuses_fakes(self) -> bool:
        """Whether D trains on the images of G's own turns, so that none can be made for D."""
        return False

    @property
    def splits_ranks(self) -> bool:
        """Whether, on two ranks or more, some train G and others D."""
        return False

    @property
    def has_auto_split(self) -> bool:
        """Whether it splits ranks by measured time."""
        return False

    @property
    def rank_loss_timeout_s(self) -> float:
        """How long a rank may be silent before the others go on without it; 0: the run ends with the first lost one."""
        return 0.0

    @property
    def survives_rank_loss(self) -> bool:
        return self.rank_loss_timeout_s > 0

    @property
    def min_surviving_ranks(self) -> int:
        """With how many ranks it goes on at least."""
        return 2

    @property
    def replays_broken_rounds(self) -> bool:
        """Whether, after a loss, ranks return to the end of a round that all of them can continue from."""
        return False

    def num_agreements(self, step: int) -> int:
        """Return how often ranks have agreed on their players before round `step`; 0 if each always keeps its own."""
        return 0

    # ---- what it does, for predictions

    @property
    def coordination(self) -> Coordination:
        """How ranks agree."""
        return "all-reduce"

    @property
    def semantics(self: StrategyFields) -> Semantics:
        """What is trained, compared with one worker that does it all."""
        if self.sync_period > 1:
            return "periodic"
        return "compressed" if self.wire.lossy else "equivalent"

    @property
    def error_feedback(self: FeedbackFields) -> float:
        """The fraction of what the wire loses that a later message carries."""
        return self.wire.feedback if self.feedback is None else self.feedback

    @property
    def traffic_period(self: StrategyFields) -> int:
        """After how many rounds the bytes sent per round repeat."""
        return self.sync_period

    @property
    def gossip_topology(self) -> Topology | None:
        """The graph over which parameters are mixed, if they are."""
        return None

    @property
    def max_message_delay(self) -> int:
        """Return how many rounds late a neighbor's message may arrive."""
        return 0

    @property
    def mean_lags(self) -> tuple[float, float]:
        """Mean age in rounds of the images that D sees, and of the D that G sees, where ages are fixed."""
        return 0.0, 0.0

    # ---- other forms of it

    @property
    def per_label(self) -> Any:
        """This strategy, if it trains a game of its own for every label (a `PerLabel`), else None."""
        return None

    @property
    def auto_request(self) -> Any:
        """This strategy, if it stands for one that is still to be chosen (an `Auto`), else None."""
        return None

    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange | None:
        """Return how this rank exchanges one player of several that all ranks train; None if ranks have roles.

        Args:
            player: a player of its own, or a replica in a loop of the user.
            world: all ranks.
            weight: this rank's part of the total batch.
        """
        return None

    def check(self, ranks: int) -> None:
        """Raise UsageError if so many ranks cannot run it."""

    def with_recorded_fields(self) -> Self:
        """Return it with the fields filled in that files of other runs hold."""
        return self

    def without_rank_loss(self) -> Self:
        """Return it as ranks run it that end with the first lost one."""
        return self

    def on_one_rank(self) -> Self:
        """Return it without the fields that only matter on several ranks."""
        return self

    def can_resume_from(self: StrategyFields, previous: StrategyFields) -> bool:
        """Return whether it goes on from a checkpoint of `previous`: the same players, optimizers and replay state."""
        return previous.name == self.name


class OptimisticDefaults(StrategyDefaults):
    """Answers of strategies that are optimistic: by their optimizers, or with `paper_update` by a step of their own."""

    paper_update: bool

    @property
    def optimizer_wrapper(self) -> str:
        return "none" if self.paper_update else "optimistic"

    @property
    def requires_sgd(self) -> bool:
        return self.paper_update


class SurvivesRankLoss:
    """For StrategyDefaults: answers of strategies that go on without lost ranks where `peer_timeout_s` is above 0."""

    peer_timeout_s: PeerTimeout
    min_ranks: MinRanks

    @property
    def rank_loss_timeout_s(self) -> float:
        return self.peer_timeout_s

    @property
    def min_surviving_ranks(self) -> int:
        return self.min_ranks

    def without_rank_loss(self) -> Self:
        return replace(self, peer_timeout_s=0.0, min_ranks=2)  # pyright: ignore

    def check_rank_loss(self, **fitting: bool) -> None:
        """Raise UsageError if it cannot go on without lost ranks as it is set.

        Args:
            fitting: by name of a field, whether its value goes with `peer_timeout_s` above 0.
        """
        if 0 < self.peer_timeout_s < 1:
            raise UsageError(
                f"strategy.peer_timeout_s={self.peer_timeout_s:g}: too short to tell a slow rank from a lost one. Use "
                "1 or more, or 0 to end the run with the first lost rank."
            )
        if self.peer_timeout_s == 0 and self.min_ranks != 2:
            raise UsageError(
                f"strategy.min_ranks={self.min_ranks}: has no effect with strategy.peer_timeout_s=0. Use "
                "--strategy.peer_timeout_s=10, or --strategy.min_ranks=2."
            )
        for field_name, fits in fitting.items():
            if self.peer_timeout_s and not fits:
                raise UsageError(
                    f"strategy.peer_timeout_s={self.peer_timeout_s:g}: does not work with strategy.{field_name}="
                    f"{getattr(self, field_name)}. Use --strategy.peer_timeout_s=0, or leave --strategy.{field_name} "
                    "out."
                )


class ReplaysBrokenRounds(SurvivesRankLoss):
    """Answers of strategies whose ranks agree on their players after every `sync_period` rounds."""

    sync_period: int

    @property
    def replays_broken_rounds(self) -> bool:
        return self.peer_timeout_s > 0

    def num_agreements(self, step: int) -> int:
        return -(-step // self.sync_period)  # with a period above 1, they agree when rounds 0, p, 2p, ... start


def assign_lanes(lanes: int, rank: int, size: int) -> LaneShare:
    """Return the lanes of one rank: contiguous, and as even as possible (8 lanes on 3 ranks are 3, 2 and 3)."""
    if size > lanes:
        raise UsageError(
            f"--lanes={lanes}: {size} ranks need one lane each. Use --lanes={size} or more, or at most {lanes} ranks."
        )
    ends = [round((r + 1) * lanes / size) for r in range(size)]
    return LaneShare(tuple(range(ends[rank - 1] if rank else 0, ends[rank])), lanes)


def make_lockstep_role(
    game: Game, share: LaneShare, exchanges: tuple[PlayerExchange, PlayerExchange], order: TurnOrder, ranks: int = 1
) -> Role:
    """Return the role of a rank that trains D and G, each against the current other one.

    Args:
        exchanges: of G and of D.
        ranks: how many there are. If they take the same steps, all hold the same players.
    """
    of_g, of_d = exchanges
    shared = SharedForward(game) if game.shares_forward and order is alternating else None
    d = game.d_turn(
        shared.fakes_for_d if shared else game.current_fakes,
        of_d.exchange,
        of_d.team.with_meter(game.d.meter),
        of_d.weight,
    )
    g = game.g_turn(
        game.current_discriminator,
        of_g.exchange,
        of_g.team.with_meter(game.g.meter),
        of_g.weight,
        get_fakes=shared.fakes_for_g if shared else None,
    )
    drains = dict.fromkeys(exchange.drain for exchange in exchanges if exchange.drain)  # players may share one

    def drain_all() -> None:
        for drain in drains:
            drain()

    return Role(
        order(d, g, game.d_steps),
        share,
        replicated=of_d.team.size == ranks,
        extra_fakes_for_d=shared is None,
        barrier=of_d.barrier,
        drain=drain_all if drains else None,
        round_before_d=replace(g, needs_new_reals=True).repeated(game.d_steps),
        late_start=game.late_start,
    )
