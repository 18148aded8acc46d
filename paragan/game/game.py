"""The game: two players, what they want, and what they play against; everything but who does what where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paragan.comm.bucket import Exchange
from paragan.comm.process_group import Group
from paragan.core.rng import Draw
from paragan.core.types import Batch, Loss, Net
from paragan.game.graph_capture import Recorder
from paragan.game.objective import Objective
from paragan.game.player import Player
from paragan.game.turn import Turn

Fakes = Callable[[Batch, int], Batch]  # (hand, step) -> fakes for D to judge
Critic = Callable[[int], Net]  # step -> the D that G plays against
Post = Callable[[Batch, int], None]  # (what G made, step)
Given = Callable[[Batch], Tensor]  # (hand) -> what G gets, row by row


@dataclass(frozen=True)
class Game:
    """G and D, an objective, and where latents and labels come from.

    latent   : size of z; z is standard normal [N, latent]
    labels   : the labels of the data, from which those of the fakes are drawn; None: unconditional
    g_lane, d_lane : images of a lane in G's turn and in D's
    autocast : the precision the losses are computed in
    given    : what of a hand G makes its images from (an autoencoder's: the images); None: of latents
    shape    : of one image or record of the data
    restless : a network draws random numbers of torch's own, which are seeded before every pass
    recorder : what plays the passes of a turn, where they are recorded and replayed (CUDA graphs)
    """

    g: Player
    d: Player
    objective: Objective
    latent: int
    labels: np.ndarray | None = None
    g_lane: int = 1
    d_lane: int = 1
    d_steps: int = 1
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    given: Given | None = None
    shape: tuple[int, ...] = ()
    restless: bool = False
    recorder: Callable[[], Recorder | None] = lambda: None

    @property
    def players(self) -> tuple[Player, Player]:
        return self.g, self.d

    @property
    def ratio(self) -> float:
        """Images that G makes in its turn, for one that D sees in its."""
        return self.g_lane / self.d_lane

    def d_turn(self, fakes: Fakes, exchange: Exchange, team: Group, weight: float = 1.0) -> Turn:
        """D's turn, against the images of `fakes`."""

        def loss(hand: Batch, step: int) -> Loss:
            self._seed(hand, "D")
            with self.autocast():
                fake = fakes(hand, step)
                self.d.see_lanes_of(hand.draw.per_lane)
                return self._whole(self.d, self.objective.discriminator(self.d.net, hand, fake, step))

        return Turn(self.d, loss, exchange, team, weight, recorder=self.recorder())

    def g_turn(
        self, critic: Critic, exchange: Exchange, team: Group, weight: float = 1.0, post: Post = lambda fake, step: None
    ) -> Turn:
        """G's turn, against the D that `critic` gives; `post` gets to see what it makes."""

        def loss(hand: Batch, step: int) -> Loss:
            mine = replace(hand, draw=replace(hand.draw, per_lane=hand.draw.per_lane * self.g_lane // self.d_lane))
            self._seed(mine, "G")
            with self.autocast():
                fake = self.make(mine, "G")
                post(fake, step)
                return self._whole(self.g, self.objective.generator(critic(step), fake, hand, step))

        return Turn(self.g, loss, exchange, team, weight, fresh=False, recorder=self.recorder())

    def _whole(self, player: Player, loss: Loss) -> Loss:
        """A player's loss with what its weights add."""
        own = self.objective.of_weights(player.name, player.net)
        return Loss(loss.total + own.total, {**loss.parts, **own.parts}) if own else loss

    def make(self, hand: Batch, turn: str) -> Batch:
        """Fakes for a hand: as many, from latents and labels of its lanes' own streams, or from what is given; and
        those nearby, if wanted."""
        for player in self.players:
            player.see_lanes_of(hand.draw.per_lane)
        z, y = self.inputs(hand, turn)
        images, nearby = self.g.net(z, y), None
        if self.objective.nearby:
            beside = hand.draw.normal(f"nearby/{turn}", *z.shape[1:])
            nearby = self.g.net(z + self.objective.nearby * beside, y)
        return Batch(images, y, hand.draw, z, nearby)

    def inputs(self, hand: Batch, turn: str) -> tuple[Tensor, Tensor | None]:
        """What G gets: latents and labels, or what it makes of this very hand, with its labels."""
        if self.given:
            return self.given(hand), hand.labels
        return hand.draw.normal(f"latent/{turn}", self.latent), self.draw_labels(hand, turn)

    def imagined(self, per_lane: int, device: torch.device) -> Batch:
        """A hand of one lane, all zeros."""
        labels = None if self.labels is None else torch.zeros(per_lane, dtype=torch.int64, device=device)
        images = torch.zeros(per_lane, *self.shape, device=device)
        return Batch(images, labels, Draw(0, 0, (0,), per_lane, device))

    def _seed(self, hand: Batch, turn: str) -> None:
        if self.restless:
            hand.draw.seed_torch(turn)

    def draw_labels(self, hand: Batch, turn: str) -> Tensor | None:
        return None if self.labels is None else hand.draw.choice(f"label/{turn}", self.labels)

    @torch.no_grad()
    def live_fakes(self, hand: Batch, step: int) -> Batch:
        """What G makes as it now is."""
        return self.make(hand, "D")

    def live_critic(self, step: int) -> Net:
        """D as it now is."""
        return self.d.net
