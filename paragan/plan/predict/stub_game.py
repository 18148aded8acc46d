"""A game in the place of a run's own: vectors as long as its networks', cut as theirs, that compute nothing.

What a strategy wires it with is what it wires the run with, so long as exchanges look at nothing but vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paragan.comm.flat_params import bucket_bytes
from paragan.core.types import Batch, DiscriminatorFn, Loss, run_discriminator
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.plan.memory import fake_tensor_mode
from paragan.plan.profile.profile import Profile

DEFAULT_NUM_LAYERS = 24  # of a player whose layers nobody knows


class PlannedData(Protocol):
    """What a run says of its data (train/run.py Data)."""

    @property
    def resolution(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def labels(self) -> bool: ...


class PlannedDevice(Protocol):
    """What a run says of its device (train/run.py Device)."""

    @property
    def precision(self) -> str: ...


class PlannedRun(Protocol):
    """What is asked of a run (train/run.py Run), resolved."""

    @property
    def strategy(self) -> Any: ...
    @property
    def batch(self) -> int: ...
    @property
    def g_batch(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def d_steps(self) -> int: ...
    @property
    def round_images(self) -> int: ...
    @property
    def data(self) -> PlannedData: ...
    @property
    def device(self) -> PlannedDevice: ...


class StubMoments(nn.Module):
    """Batch moments of so many numbers (game/player.py BatchCoupled)."""

    def __init__(self, count: int):
        super().__init__()
        self.lane_batch: int | None = None
        self.tracking, self.moments = False, torch.zeros(count)

    def apply_moments(self) -> None:
        pass


class StubNet(nn.Module):
    """Parameters of these sizes, in flat order, and moments; it makes blank pictures."""

    def __init__(self, layer_numels: Sequence[int], moments: int, shape: Sequence[int], dtype: torch.dtype):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in reversed(layer_numels)])
        self.batch_coupled = StubMoments(moments) if moments else None
        self.shape, self.dtype = shape, dtype

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x.new_zeros(len(x), *self.shape, dtype=self.dtype)


class StubObjective:
    """Losses that lead through both networks."""

    second_order, latent_perturbation = False, 0.0

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        return Loss(sum_logits(d, real.images) + sum_logits(d, fake.images.detach()))

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return Loss(sum_logits(d, fake.images))

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return None


def sum_logits(d: DiscriminatorFn, images: Tensor) -> Tensor:
    return run_discriminator(d, images, None).logits.sum()


def make_stub_game(run: PlannedRun, profile: Profile) -> Game:
    """A game like the run's, of tensors without storage."""
    data, half = run.data, run.device.precision == "bf16"
    shape = (max(1, data.channels), max(1, data.resolution), max(1, data.resolution))
    g_batch = run.g_batch or run.batch

    def player(which: int, name: str) -> Player:
        sizes = profile.layer_numels[which] or equal_layers(profile.num_params[which])
        net = StubNet(sizes, profile.moments_numel[which], shape, torch.bfloat16 if half else torch.float32)
        cut = bucket_bytes(run.strategy.wire)
        return Player(name, net, lambda parameters: torch.optim.SGD(parameters, lr=1.0), bucket_bytes=cut)

    with fake_tensor_mode():
        return Game(
            g=player(0, "G"),
            d=player(1, "D"),
            objective=StubObjective(),
            latent=1,
            labels=np.zeros(1, np.int64) if data.labels else None,
            g_lane_batch=max(1, g_batch // run.lanes),
            d_lane_batch=max(1, run.batch // run.lanes),
            d_steps=run.d_steps,
            shape=shape,
        )


def equal_layers(numel: int) -> list[int]:
    """So many numbers in LAYERS equal layers."""
    return [
        size
        for i in range(DEFAULT_NUM_LAYERS)
        if (size := numel // DEFAULT_NUM_LAYERS + (i < numel % DEFAULT_NUM_LAYERS))
    ]


def vector_layout(game: Game) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
    """What a profile says of a game's vectors: `layers`, `moments`."""
    g, d = (tuple(numel for _, numel in player.flat.slices) for player in game.players)
    return (g, d), (game.g.moments.numel(), game.d.moments.numel())
