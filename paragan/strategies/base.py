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
from paragan.core.errors import Unusable
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.stale_opponents import Seen
from paragan.game.turn import Beat, Turn

Order = Callable[[Turn, Turn, int], tuple[Beat, ...]]


class Past(Protocol):
    """Images or players of former rounds: game/opponents.py."""

    def state(self) -> dict[str, Tensor]:
        """This rank's part, by names that no other rank's part has unless it is the same."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the parts of all ranks back."""
        ...


@dataclass(frozen=True)
class Share:
    """The lanes of the total batch that one rank works on, out of `of`."""

    lanes: tuple[int, ...]
    of: int

    @property
    def weight(self) -> float:
        """This rank's part of the team's gradient."""
        return len(self.lanes) / self.of


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

    round: tuple[Beat, ...]
    share: Share
    replicated: bool = True
    speakers: tuple[int, int] = (0, 0)
    for_d: bool = True
    past: tuple[Past, ...] = ()
    seen: Mapping[str, Seen] = field(default_factory=dict[str, Seen])
    posts: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])
    meet: Callable[[], None] | None = None
    settle: Callable[[], None] | None = None
    about: str = ""

    @property
    def moves(self) -> tuple[Player, ...]:
        """The players that this rank moves."""
        return tuple(dict.fromkeys(turn.player for beat in self.round for turn in beat))

    @property
    def teams(self) -> bool:
        """Whether some ranks move G and others D."""
        return self.speakers[0] != self.speakers[1]

    @property
    def first_has_all(self) -> bool:
        """Whether rank 0 has both players as they are evaluated, without the others."""
        return self.replicated and not self.teams

    def speaker(self, player: Player) -> int:
        """The rank that has this player as it now is."""
        return self.speakers["GD".index(player.name)]


class Strategy(Protocol):
    """Pure wiring, called once per rank."""

    @property
    def wire(self) -> Compressor:
        """The form in which gradients or parameters travel."""
        ...

    @property
    def optimism(self) -> str:
        """What optimizers are wrapped in where the run does not say (optim/optimism.py)."""
        ...

    @property
    def extrapolation(self) -> float:
        """By how many steps they then look ahead, if they are optimistic."""
        ...

    @property
    def plain_descent(self) -> bool:
        """Whether its update is a gradient step, so that optimizers have to be gradient descent."""
        ...

    @property
    def lost_after_s(self) -> float:
        """How long a rank may be silent before the others go on without it; 0: the run ends with the first one lost."""
        ...

    def check(self, ranks: int) -> None:
        """Unusable where so many ranks cannot play it."""
        ...

    def role(self, game: Game, world: World, lanes: int) -> Role: ...


class Plain:
    """What strategies share that take any optimizers as they are, any number of ranks, and lose none."""

    optimism: ClassVar[str] = "none"
    extrapolation: ClassVar[float] = 1.0
    plain_descent: ClassVar[bool] = False
    lost_after_s: ClassVar[float] = 0.0

    def check(self, ranks: int) -> None:
        pass


class Optimistic:
    """What strategies share that are optimistic: by their optimizers, or with `exact` by looking ahead themselves."""

    exact: bool
    extrapolation: ClassVar[float] = 1.0

    @property
    def optimism(self) -> Literal["none", "optimistic"]:
        return "none" if self.exact else "optimistic"

    @property
    def plain_descent(self) -> bool:
        return self.exact

    def check(self, ranks: int) -> None:
        pass


def deal(lanes: int, rank: int, size: int) -> Share:
    """Lanes in contiguous runs, as even as can be: 8 lanes on 3 ranks are 3, 2 and 3."""
    if size > lanes:
        raise Unusable(
            f"{size} ranks cannot share --lanes {lanes}: start at most {lanes} ranks, or give --lanes {size} or more"
        )
    ends = [round((r + 1) * lanes / size) for r in range(size)]
    return Share(tuple(range(ends[rank - 1] if rank else 0, ends[rank])), lanes)


def lockstep(
    game: Game,
    team: Group,
    share: Share,
    exchange: Callable[[Player], Exchange],
    order: Order,
    *,
    weight: float | None = None,
    replicated: bool = True,
) -> Role:
    """D and G, each against the other as it now is. weight: of this rank's gradient (its share of the team's)."""
    weight = share.weight if weight is None else weight
    d = game.d_turn(game.live_fakes, exchange(game.d), team.metered(game.d.meter), weight)
    g = game.g_turn(game.live_critic, exchange(game.g), team.metered(game.g.meter), weight)
    return Role(order(d, g, game.d_steps), share, replicated)
