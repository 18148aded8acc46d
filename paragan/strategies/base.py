"""What a strategy decides once per rank: who moves, agreed with whom, on which lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Compressor
from paragan.comm.process_group import Group
from paragan.comm.traffic import Traffic
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.stale_opponents import StalenessStats
from paragan.game.turn import Turn, TurnGroup

TurnOrder = Callable[[Turn, Turn, int], tuple[TurnGroup, ...]]


class ReplayState(Protocol):
    """Images or players of former rounds: game/opponents.py."""

    def state(self) -> dict[str, Tensor]:
        """This rank's part, by names that no other rank's part has unless it is the same."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the parts of all ranks back."""
        ...


@dataclass(frozen=True)
class LaneShare:
    """The lanes of the total batch that one rank works on, out of `of`."""

    lanes: tuple[int, ...]
    total_lanes: int

    @property
    def weight(self) -> float:
        """This rank's part of the team's gradient."""
        return len(self.lanes) / self.total_lanes


@dataclass(frozen=True)
class Role:
    """A rank's round (the beats it repeats), its share of the data, and whether all ranks that move a player hold the
    same one (then one of them writes the checkpoint for all).

    speakers : the ranks that have G and D as they now are, where not all move both
    for_d    : whether G makes images that are for D alone
    past     : what of former rounds is played against, and has to be in a checkpoint
    seen     : how old that was, by name
    posts    : what this rank sends beside gradients in one round, by player
    meet     : where messages may be under way between rounds, what all ranks call before they do anything else together
    settle   : the same, and nothing is under way any more
    about    : who plays what, for the screen
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

    @property
    def trained_players(self) -> tuple[Player, ...]:
        """The players that this rank moves."""
        return tuple(dict.fromkeys(turn.player for beat in self.round for turn in beat))

    @property
    def is_split(self) -> bool:
        """Whether some ranks move G and others D."""
        return self.owner_ranks[0] != self.owner_ranks[1]

    @property
    def main_has_all_players(self) -> bool:
        """Whether rank 0 has both players as they are evaluated, without the others."""
        return self.replicated and not self.is_split

    def owner_rank(self, player: Player) -> int:
        """The rank that has this player as it now is."""
        return self.owner_ranks["GD".index(player.name)]


class Strategy(Protocol):
    """Pure wiring, called once per rank."""

    @property
    def wire(self) -> Compressor:
        """The form in which gradients or parameters travel."""
        ...

    @property
    def optimizer_wrapper(self) -> str:
        """What optimizers are wrapped in where the run does not say (optim/optimism.py)."""
        ...

    @property
    def extrapolation(self) -> float:
        """By how many steps they then look ahead, if they are optimistic."""
        ...

    @property
    def requires_sgd(self) -> bool:
        """Whether its update is a gradient step, so that optimizers have to be gradient descent."""
        ...

    @property
    def peer_timeout_s(self) -> float:
        """How long a rank may be silent before the others go on without it; 0: the run ends with the first one lost."""
        ...

    def check(self, ranks: int) -> None:
        """Unusable where so many ranks cannot play it."""
        ...

    def role(self, game: Game, world: World, lanes: int) -> Role: ...


class StrategyDefaults:
    """What strategies share that take any optimizers as they are, any number of ranks, and lose none."""

    optimizer_wrapper: ClassVar[str] = "none"
    extrapolation: ClassVar[float] = 1.0
    requires_sgd: ClassVar[bool] = False
    peer_timeout_s: ClassVar[float] = 0.0

    def check(self, ranks: int) -> None:
        pass


class OptimisticDefaults:
    """What strategies share that are optimistic: by their optimizers, or with `exact` by looking ahead themselves."""

    paper_update: bool
    extrapolation: ClassVar[float] = 1.0

    @property
    def optimizer_wrapper(self) -> Literal["none", "optimistic"]:
        return "none" if self.paper_update else "optimistic"

    @property
    def requires_sgd(self) -> bool:
        return self.paper_update

    def check(self, ranks: int) -> None:
        pass


def assign_lanes(lanes: int, rank: int, size: int) -> LaneShare:
    """Lanes in contiguous runs, as even as can be: 8 lanes on 3 ranks are 3, 2 and 3."""
    if size > lanes:
        raise UsageError(
            f"{size} ranks cannot share --lanes {lanes}: start at most {lanes} ranks, or give --lanes {size} or more"
        )
    ends = [round((r + 1) * lanes / size) for r in range(size)]
    return LaneShare(tuple(range(ends[rank - 1] if rank else 0, ends[rank])), lanes)


def make_lockstep_role(
    game: Game,
    team: Group,
    share: LaneShare,
    make_exchange: Callable[[Player], Exchange],
    order: TurnOrder,
    *,
    weight: float | None = None,
    replicated: bool = True,
) -> Role:
    """D and G, each against the other as it now is. weight: of this rank's gradient (its share of the team's)."""
    weight = share.weight if weight is None else weight
    d = game.d_turn(game.current_fakes, make_exchange(game.d), team.with_meter(game.d.meter), weight)
    g = game.g_turn(game.current_discriminator, make_exchange(game.g), team.with_meter(game.g.meter), weight)
    return Role(order(d, g, game.d_steps), share, replicated)
