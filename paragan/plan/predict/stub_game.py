"""A game in place of a run's own: flat vectors of the same lengths and buckets, and networks that compute nothing.

A strategy builds the same role in it as in the run, since exchanges only look at flat vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paragan.comm.flat_params import bucket_bytes
from paragan.core.image_shape import ImageSize
from paragan.core.types import Batch, DiscriminatorFn, Loss, run_discriminator
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.plan.memory import fake_tensor_mode
from paragan.plan.profile.profile import Profile

DEFAULT_NUM_LAYERS = 24  # of a player whose layers are unknown


class PlannedData(Protocol):
    """What is used of config.sections.DataOptions."""

    @property
    def resolution(self) -> int | str: ...
    @property
    def channels(self) -> int: ...
    @property
    def labels(self) -> bool: ...


class PlannedDevice(Protocol):
    """What is used of the device section of a run."""

    @property
    def precision(self) -> str: ...


class PlannedRun(Protocol):
    """What is used of a resolved config.run.Run."""

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
    """Batch moments of `count` numbers (protocol: game/player.py)."""

    def __init__(self, count: int):
        super().__init__()
        self.lane_batch: int | None = None
        self.tracking = False
        self.moments = torch.zeros(count)

    def apply_moments(self) -> None:
        pass


class StubNet(nn.Module):
    """A network with parameters of these sizes, in flat order, and batch moments. Its output is blank images."""

    def __init__(self, layer_numels: Sequence[int], moments: int, shape: Sequence[int], dtype: torch.dtype):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in reversed(layer_numels)])
        self.batch_coupled = StubMoments(moments) if moments else None
        self.shape, self.dtype = shape, dtype

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x.new_zeros(len(x), *self.shape, dtype=self.dtype)


class StubObjective:
    """Losses whose gradients reach both networks."""

    second_order = False
    latent_perturbation = 0.0
    replayed_fields: tuple[str, ...] = ()

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        return Loss(_sum_logits(d, real.images) + _sum_logits(d, fake.images.detach()))

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return Loss(_sum_logits(d, fake.images))

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return None


def _sum_logits(d: DiscriminatorFn, images: Tensor) -> Tensor:
    return run_discriminator(d, images, None).logits.sum()


def make_stub_game(run: PlannedRun, profile: Profile) -> Game:
    """Make a game with the shapes of a run and the sizes of a profile, of tensors without storage."""
    data = run.data
    dtype = torch.bfloat16 if run.device.precision == "bf16" else torch.float32
    size = ImageSize.of(data.resolution)
    shape = (max(1, data.channels), max(1, size.height), max(1, size.width))
    g_batch = run.g_batch or run.batch

    def make_player(index: int, name: str) -> Player:
        sizes = profile.layer_numels[index] or equal_layers(profile.num_params[index])
        net = StubNet(sizes, profile.moments_numel[index], shape, dtype)
        return Player(
            name,
            net,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            bucket_bytes=bucket_bytes(run.strategy.wire, single_bucket=run.strategy.uses_single_bucket),
        )

    with fake_tensor_mode():
        return Game(
            g=make_player(0, "G"),
            d=make_player(1, "D"),
            objective=StubObjective(),
            latent=1,
            labels=np.zeros(1, np.int64) if data.labels else None,
            g_lane_batch=max(1, g_batch // run.lanes),
            d_lane_batch=max(1, run.batch // run.lanes),
            d_steps=run.d_steps,
            shape=shape,
        )


def equal_layers(numel: int) -> list[int]:
    """Divide `numel` numbers into DEFAULT_NUM_LAYERS layers of equal size, give or take one; leave out empty ones."""
    size, remainder = divmod(numel, DEFAULT_NUM_LAYERS)
    sizes = [size + 1] * remainder + [size] * (DEFAULT_NUM_LAYERS - remainder)
    return [size for size in sizes if size]
