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
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorFn, Loss
from paragan.game.graph_capture import GraphRecorder
from paragan.game.objective import Objective
from paragan.game.player import Player
from paragan.game.turn import Turn

FakesFn = Callable[[Batch, int], Batch]  # (hand, step) -> fakes for D to judge
DiscriminatorGetter = Callable[[int], DiscriminatorFn]  # step -> the D that G plays against
FakesCallback = Callable[[Batch, int], None]  # (what G made, step)
ConditioningFn = Callable[[Batch], Tensor]  # (hand) -> what G gets, row by row


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
    g_lane_batch: int = 1
    d_lane_batch: int = 1
    d_steps: int = 1
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    conditioning_input: ConditioningFn | None = None
    shape: tuple[int, ...] = ()
    uses_torch_rng: bool = False
    make_recorder: Callable[[], GraphRecorder | None] = lambda: None

    @property
    def players(self) -> tuple[Player, Player]:
        return self.g, self.d

    @property
    def g_to_d_batch_ratio(self) -> float:
        """Images that G makes in its turn, for one that D sees in its."""
        return self.g_lane_batch / self.d_lane_batch

    def d_turn(self, get_fakes: FakesFn, exchange: Exchange, team: Group, weight: float = 1.0) -> Turn:
        """D's turn, against the images of `fakes`."""

        def loss(micro_batch: Batch, step: int) -> Loss:
            self._seed_torch(micro_batch, "D")
            with self.autocast():
                fake = get_fakes(micro_batch, step)
                self.d.set_images_per_lane(micro_batch.rng.per_lane)
                return self._with_weight_penalty(
                    self.d, self.objective.discriminator(self.d.net, micro_batch, fake, step)
                )

        return Turn(self.d, loss, exchange, team, weight, recorder=self.make_recorder())

    def g_turn(
        self,
        get_discriminator: DiscriminatorGetter,
        exchange: Exchange,
        team: Group,
        weight: float = 1.0,
        on_fakes: FakesCallback = lambda fake, step: None,
    ) -> Turn:
        """G's turn, against the D that `critic` gives; `post` gets to see what it makes."""

        def loss(micro_batch: Batch, step: int) -> Loss:
            mine = replace(
                micro_batch,
                rng=replace(
                    micro_batch.rng, per_lane=micro_batch.rng.per_lane * self.g_lane_batch // self.d_lane_batch
                ),
            )
            self._seed_torch(mine, "G")
            with self.autocast():
                fake = self.generate(mine, "G")
                on_fakes(fake, step)
                return self._with_weight_penalty(
                    self.g, self.objective.generator(get_discriminator(step), fake, micro_batch, step)
                )

        return Turn(self.g, loss, exchange, team, weight, needs_new_reals=False, recorder=self.make_recorder())

    def _with_weight_penalty(self, player: Player, loss: Loss) -> Loss:
        """A player's loss with what its weights add."""
        own = self.objective.weight_penalty(player.name, player.net)
        return Loss(loss.total + own.total, {**loss.parts, **own.parts}) if own else loss

    def generate(self, micro_batch: Batch, turn: str) -> Batch:
        """Fakes for a hand: as many, from latents and labels of its lanes' own streams, or from what is given; and
        those nearby, if wanted."""
        for player in self.players:
            player.set_images_per_lane(micro_batch.rng.per_lane)
        z, y = self.generator_inputs(micro_batch, turn)
        images, nearby = self.g.net(z, y), None
        if self.objective.latent_perturbation:
            beside = micro_batch.rng.normal(f"nearby/{turn}", *z.shape[1:])
            nearby = self.g.net(z + self.objective.latent_perturbation * beside, y)
        return Batch(images, y, micro_batch.rng, z, nearby)

    def generator_inputs(self, micro_batch: Batch, turn: str) -> tuple[Tensor, Tensor | None]:
        """What G gets: latents and labels, or what it makes of this very hand, with its labels."""
        if self.conditioning_input:
            return self.conditioning_input(micro_batch), micro_batch.labels
        return micro_batch.rng.normal(f"latent/{turn}", self.latent), self.draw_labels(micro_batch, turn)

    def dummy_batch(self, per_lane: int, device: torch.device) -> Batch:
        """A hand of one lane, all zeros."""
        labels = None if self.labels is None else torch.zeros(per_lane, dtype=torch.int64, device=device)
        images = torch.zeros(per_lane, *self.shape, device=device)
        return Batch(images, labels, LaneRng(0, 0, (0,), per_lane, device))

    def _seed_torch(self, micro_batch: Batch, turn: str) -> None:
        if self.uses_torch_rng:
            micro_batch.rng.seed_torch(turn)

    def draw_labels(self, micro_batch: Batch, turn: str) -> Tensor | None:
        return None if self.labels is None else micro_batch.rng.choice(f"label/{turn}", self.labels)

    @torch.no_grad()
    def current_fakes(self, micro_batch: Batch, step: int) -> Batch:
        """What G makes as it now is."""
        return self.generate(micro_batch, "D")

    def current_discriminator(self, step: int) -> DiscriminatorFn:
        """D as it now is."""
        return self.d.net
