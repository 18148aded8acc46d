"""The game: two players, an objective, and the source of latents and labels.

A game knows nothing of ranks. A strategy asks it for turns (`d_turn`, `g_turn`) and says what each player trains
against: the current opponent, or a stale one (stale_opponents.py, remote_opponents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paragan.comm.bucket import Exchange
from paragan.comm.process_group import Group
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorFn, Loss, named_fields, primary_array
from paragan.game.graph_capture import GraphRecorder
from paragan.game.late_start import LateStart
from paragan.game.objective import Objective
from paragan.game.player import Player
from paragan.game.turn import Turn

FakesFn = Callable[[Batch, int], Batch]  # (micro-batch, step) -> fakes for D
DiscriminatorGetter = Callable[[int], DiscriminatorFn]  # step -> the D that G trains against
FakesCallback = Callable[[Batch, int], None]  # (fakes that G made, step)
GeneratorFn = Callable[[Batch], Batch]  # (micro-batch) -> fakes for G's own turn
ConditioningFn = Callable[[Batch], Tensor]  # (micro-batch) -> the input of G, row by row


@dataclass(frozen=True)
class Game:
    """G and D, an objective, and the source of latents and labels.

    latent             : size of z; z is standard normal [N, latent]
    labels             : the labels of the data, from which those of the fakes are drawn; None: unconditional
    g_lane_batch, d_lane_batch : images of a lane in G's turn and in D's
    d_steps            : turns of D in a round
    autocast           : makes the context in which losses are computed (precision)
    conditioning_input : what G gets in place of latents (for an autoencoder, the images); None: latents
    shape              : of one image or array of the data
    primary            : the field of G's output that D judges, if G returns a NamedTuple
    field_shapes       : of data whose records have several arrays, the shape of each by name
    late_start         : when D starts
    shares_forward     : D judges the images of the pass that G's turn differentiates (shared_forward.py)
    uses_torch_rng     : a network draws from torch's own generator, which is then seeded before every pass
    make_recorder      : makes what captures and replays the passes of a turn, or None
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
    primary: str = "images"
    field_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    late_start: LateStart = field(default_factory=LateStart)
    shares_forward: bool = False
    uses_torch_rng: bool = False
    make_recorder: Callable[[], GraphRecorder | None] = lambda: None

    @property
    def players(self) -> tuple[Player, Player]:
        return self.g, self.d

    @property
    def g_to_d_batch_ratio(self) -> float:
        """Images of G's turn for one real image of D's turn."""
        return self.g_lane_batch / self.d_lane_batch

    def d_turn(self, get_fakes: FakesFn, exchange: Exchange, team: Group, weight: float = 1.0) -> Turn:
        """Return a turn of D.

        Args:
            get_fakes: gives the fakes for a micro-batch of reals.
            exchange: how the gradient is exchanged with the team.
            weight: this rank's part of the team's gradient.
        """

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
        get_fakes: GeneratorFn | None = None,
    ) -> Turn:
        """Return a turn of G.

        Args:
            get_discriminator: gives the D to train against.
            exchange: how the gradient is exchanged with the team.
            weight: this rank's part of the team's gradient.
            on_fakes: is called with the fakes of every pass.
            get_fakes: generates them; None: `generate`.
        """

        def loss(micro_batch: Batch, step: int) -> Loss:
            per_lane = micro_batch.rng.per_lane * self.g_lane_batch // self.d_lane_batch
            g_batch = replace(micro_batch, rng=replace(micro_batch.rng, per_lane=per_lane))
            self._seed_torch(g_batch, "G")
            with self.autocast():
                if not self.objective.uses_fakes:
                    fake = g_batch
                else:
                    fake = get_fakes(micro_batch) if get_fakes else self.generate(g_batch, "G")
                on_fakes(fake, step)
                weight = self.late_start.weight(self.g.images_before)
                fake = replace(fake, generator=self.g.net, adversarial_weight=weight)
                return self._with_weight_penalty(
                    self.g, self.objective.generator(get_discriminator(step), fake, micro_batch, step)
                )

        return Turn(self.g, loss, exchange, team, weight, needs_new_reals=False, recorder=self.make_recorder())

    def _with_weight_penalty(self, player: Player, loss: Loss) -> Loss:
        penalty = self.objective.weight_penalty(player.name, player.net)
        if not penalty:
            return loss
        return Loss(loss.total + penalty.total, {**loss.parts, **penalty.parts})

    def generate(self, micro_batch: Batch, turn: str) -> Batch:
        """Make as many fakes as a micro-batch has rows.

        Latents and labels come from the random streams of its lanes, or from `conditioning_input`. If the objective
        asks for it, a second set is made from perturbed latents.

        Args:
            turn: "G" or "D", the name of the random streams.
        """
        for player in self.players:
            player.set_images_per_lane(micro_batch.rng.per_lane)
        z, y = self.generator_inputs(micro_batch, turn)
        output = self.g.net(z, y)
        perturbed = None
        if self.objective.latent_perturbation:
            noise = micro_batch.rng.normal(f"nearby/{turn}", *z.shape[1:])
            perturbed = primary_array(self.g.net(z + self.objective.latent_perturbation * noise, y), self.primary)
        images = primary_array(output, self.primary)
        return Batch(images, y, micro_batch.rng, z, perturbed, named_fields(output))

    def generator_inputs(self, micro_batch: Batch, turn: str) -> tuple[Tensor, Tensor | None]:
        """Return input and labels of G: latents and drawn labels, or `conditioning_input` and data labels."""
        if self.conditioning_input:
            return self.conditioning_input(micro_batch), micro_batch.labels
        return micro_batch.rng.normal(f"latent/{turn}", self.latent), self.draw_labels(micro_batch, turn)

    def dummy_batch(self, per_lane: int, device: torch.device) -> Batch:
        """Return a micro-batch of one lane, all zeros."""
        labels = None if self.labels is None else torch.zeros(per_lane, dtype=torch.int64, device=device)
        images = torch.zeros(per_lane, *self.shape, device=device)
        fields = {name: torch.zeros(per_lane, *shape, device=device) for name, shape in self.field_shapes.items()}
        return Batch(images, labels, LaneRng(0, 0, (0,), per_lane, device), fields=fields)

    def _seed_torch(self, micro_batch: Batch, turn: str) -> None:
        if self.uses_torch_rng:
            micro_batch.rng.seed_torch(turn)

    def draw_labels(self, micro_batch: Batch, turn: str) -> Tensor | None:
        """Draw labels for fakes [N] with the frequencies of the data; None if unconditional."""
        return None if self.labels is None else micro_batch.rng.choice(f"label/{turn}", self.labels)

    @torch.no_grad()
    def current_fakes(self, micro_batch: Batch, step: int) -> Batch:
        """Make fakes with the current G."""
        return self.generate(micro_batch, "D")

    def current_discriminator(self, step: int) -> DiscriminatorFn:
        """Return the current D."""
        return self.d.net
