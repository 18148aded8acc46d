"""A game that takes the time of a profile in place of computing: the real turns and exchanges run on it.

Its networks have a parameter for each bucket of the run. Their passes spend the times of the profile on the clock of
the rank, and gradients appear when the profile says, so the hooks of backward fire in their order and at their time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paragan.comm.flat_params import FlatParams, bucket_bytes
from paragan.core.image_shape import ImageSize
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorFn, Loss, run_discriminator
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.plan.predict.rank_clock import RankClock
from paragan.plan.predict.skip_compute import SkipComputeMode, compute_all
from paragan.plan.profile.profile import Profile, TurnProfile

DEFAULT_NUM_LAYERS = 24  # of a player whose layers are unknown


class PlannedData(Protocol):
    """The fields of config.sections.DataOptions that a prediction reads."""

    @property
    def resolution(self) -> int | str: ...
    @property
    def channels(self) -> int: ...
    @property
    def labels(self) -> bool: ...


class PlannedDevice(Protocol):
    """The fields of the device section of a run that a prediction reads."""

    @property
    def precision(self) -> str: ...


class PlannedRun(Protocol):
    """The fields of a resolved config.run.Run that a prediction reads."""

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


# Times ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnTimes:
    """Seconds of one player's turn, without what G computes for D.

    fakes_s         : D's turn: G makes images for it, if it does. G's turn: until G has made its images
    forward_s       : all forward passes are done
    grads_ready_s   : when each parameter has its gradient, in flat order
    backward_s      : all passes are done
    total_s         : the optimizer has stepped
    """

    fakes_s: float = 0.0
    forward_s: float = 0.0
    grads_ready_s: tuple[float, ...] = ()
    backward_s: float = 0.0
    total_s: float = 0.0


def turn_times(profile: Profile, name: str, batch: float, numels: Sequence[int]) -> TurnTimes:
    """Return the times of a turn with `batch` real images, of a player with parameters of these sizes."""
    turn = profile.turn("G" if name == "G" else "D", batch)
    fakes_s = fakes_ready_s(profile, batch)
    if name == "D":
        fakes_s = min(d_fakes_s(profile, batch), turn.grads_ready_s[0])
        turn = skip_start(turn, fakes_s)
    ends = np.cumsum(numels) / max(1, sum(numels))
    grads = tuple(grads_ready_s(turn, float(end)) for end in ends)
    # The forward pass ends about one part of the gradient before the first part is ready.
    ready = turn.grads_ready_s
    forward_s = min(grads[0], max(0.0, 2 * ready[0] - ready[min(1, len(ready) - 1)]))
    return TurnTimes(fakes_s, forward_s, grads, turn.backward_s, turn.total_s)


def fakes_ready_s(profile: Profile, batch: float) -> float:
    """Return the seconds from the start of G's turn until its images are ready.

    If that was not measured, the backward pass is assumed to take twice as long as the forward pass.
    """
    turn = profile.turn("G", batch)
    if turn.g_forward_s:
        return turn.g_forward_s
    ready = turn.grads_ready_s
    if len(ready) < 2:
        return turn.backward_s / 5
    return min(ready[0], (ready[-1] - ready[0]) * len(ready) / (len(ready) - 1) / 2)


def d_fakes_s(profile: Profile, batch: float) -> float:
    """Return the seconds of D's turn in which G makes images for it."""
    return profile.turn("D", batch).g_forward_s or fakes_ready_s(profile, batch) / profile.g_batch_ratio


def skip_start(turn: TurnProfile, seconds: float) -> TurnProfile:
    """Return the turn without its first `seconds`, at most until its first gradients are ready."""
    skipped_s = min(seconds, turn.grads_ready_s[0]) if turn.grads_ready_s else 0.0
    return dataclasses.replace(
        turn,
        grads_ready_s=tuple(ready - skipped_s for ready in turn.grads_ready_s),
        backward_s=turn.backward_s - skipped_s,
        total_s=turn.total_s - skipped_s,
    )


def grads_ready_s(turn: TurnProfile, fraction: float) -> float:
    """Return when this fraction of a player's flat vector has its gradients, by linear interpolation."""
    ready = turn.grads_ready_s
    position = fraction * len(ready) - 1
    below = min(len(ready) - 1, max(0, int(position)))
    above = min(len(ready) - 1, below + 1)
    weight = min(1.0, max(0.0, position - below))
    return min(turn.backward_s, (1 - weight) * ready[below] + weight * ready[above])


class Pace:
    """The progress of the turn that a rank plays, in seconds of computing.

    times : of each player's turn, by name
    """

    def __init__(self, clock: RankClock):
        self.clock = clock
        self.times: dict[str, TurnTimes] = {}
        self.player = ""  # whose turn it is; "": nobody's
        self._computed_s = 0.0

    def begin(self, player: str) -> TurnTimes:
        """Begin a player's turn."""
        self.player = player
        self._computed_s = 0.0
        return self.times[player]

    def compute_until(self, seconds: float) -> None:
        """Compute until so many seconds after the beginning of the turn."""
        self.clock.compute(max(0.0, seconds - self._computed_s))
        self._computed_s = max(self._computed_s, seconds)

    def on_forward(self, network: str) -> None:
        """Spend the time of a forward pass of a network."""
        if not self.player:
            return
        times = self.times[self.player]
        if network == "D":
            self.compute_until(times.forward_s)
        elif self.player == "G":
            self.compute_until(times.fakes_s)
        else:
            self.clock.compute(times.fakes_s)

    def on_gradient(self, player: str, number: int) -> None:
        """Spend the time until a parameter has its gradient."""
        if self.player == player:
            self.compute_until(self.times[player].grads_ready_s[number])


# Networks -----------------------------------------------------------------------------------------------------


class _Moments(nn.Module):
    """Batch moments of `count` numbers (protocol: game/player.py)."""

    def __init__(self, count: int):
        super().__init__()
        self.lane_batch: int | None = None
        self.tracking = False
        self.moments = torch.zeros(count)

    def apply_moments(self) -> None:
        pass


class _FirstNumber(torch.autograd.Function):
    """A number that depends on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.zeros(1).expand(ctx.shape)


class _Layer(torch.autograd.Function):
    """A layer that computes nothing; its weight gets this gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.gradient if ctx.needs_input_grad[1] else None, None


class PacedNet(nn.Module):
    """A network with a layer for each of its buckets, of these sizes, in flat order. Its output is blank images."""

    def __init__(
        self,
        name: str,
        bucket_numels: Sequence[int],
        moments: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        pace: Pace,
    ):
        super().__init__()
        self.name, self.shape, self.dtype, self.pace = name, shape, dtype, pace
        self.layers = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in reversed(bucket_numels)])
        self.batch_coupled = _Moments(moments) if moments else None
        self._weights = [(p, torch.zeros(1).expand(len(p))) for p in self.layers]  # each with its gradient
        for i, p in enumerate(reversed(self.layers)):
            p.register_post_accumulate_grad_hook(lambda _, i=i: pace.on_gradient(name, i))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.pace.on_forward(self.name)
        with compute_all():
            number = _FirstNumber.apply(x)
            for weight, gradient in self._weights:
                number = _Layer.apply(number, weight, gradient)
            return number.to(self.dtype).expand(len(x), *self.shape)  # pyright: ignore


class StubObjective:
    """Losses whose gradients reach both networks."""

    second_order = False
    uses_fakes = True
    latent_perturbation = 0.0
    replayed_fields: tuple[str, ...] = ()

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        return Loss(_sum_logits(d, real.images) + _sum_logits(d, fake.images.detach()))

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return Loss(_sum_logits(d, fake.images))

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return None


def _sum_logits(d: DiscriminatorFn, images: Tensor) -> Tensor:
    return run_discriminator(d, images, None).logits.flatten()[:1].sum()


class OnePassObjective(StubObjective):
    """Run D once in its turn, on reals: `Pace` spends the time of both passes in the first one."""

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        return Loss(_sum_logits(d, real.images))


# The game -----------------------------------------------------------------------------------------------------


class PacedPlayer(Player):
    """A player whose turn takes the time of a profile."""

    net: PacedNet

    @contextlib.contextmanager
    def requiring_grad(self) -> Generator[None]:
        times = self.net.pace.begin(self.name)
        with super().requiring_grad():
            yield
        self.net.pace.compute_until(times.backward_s)
        self.net.pace.player = ""

    def _step_optimizer(self) -> None:
        times = self.net.pace.times[self.name]
        ranks = self.sharded.step_group.size if self.sharded else 1
        self.net.pace.clock.compute((times.total_s - times.backward_s) / ranks)


@dataclass(frozen=True)
class SimulatedGame(Game):
    """A game of paced networks, without latents and random labels."""

    def generator_inputs(self, micro_batch: Batch, turn: str) -> tuple[Tensor, Tensor | None]:
        rows = len(micro_batch.rng.lanes) * micro_batch.rng.per_lane
        return torch.zeros(rows, 1), None if self.labels is None else torch.zeros(rows, dtype=torch.int64)

    def make_reals(self, lanes: Sequence[int]) -> Batch:
        """Return blank images for these lanes."""
        rows = self.d_lane_batch * len(lanes)
        images = torch.zeros(1).expand(rows, *self.shape)
        labels = None if self.labels is None else torch.zeros(rows, dtype=torch.int64)
        return Batch(images, labels, LaneRng(0, 0, tuple(lanes), self.d_lane_batch))


@dataclass(frozen=True)
class BucketSizes:
    """Numbers of every bucket of G and of D, as the flat vectors of a run have them."""

    g: tuple[int, ...]
    d: tuple[int, ...]

    @staticmethod
    def of(run: PlannedRun, profile: Profile) -> BucketSizes:
        """Cut the vectors of a run: at the ends of the layers of its profile."""
        least_bytes = bucket_bytes(run.strategy.wire, single_bucket=run.strategy.uses_single_bucket)

        def cut(numels: Sequence[int], numel: int) -> tuple[int, ...]:
            layers = [nn.Parameter(torch.empty(size)) for size in reversed(numels or equal_layers(numel))]
            flat = FlatParams([("", layer) for layer in layers], least_bytes, run.strategy.num_fragments)
            return tuple(bucket.grads.numel() for bucket in flat.buckets)

        with SkipComputeMode(lambda op, numel: None):
            return BucketSizes(*map(cut, profile.layer_numels, profile.num_params))


def make_simulated_game(run: PlannedRun, profile: Profile, sizes: BucketSizes, pace: Pace) -> SimulatedGame:
    """Make a game with the shapes of a run, whose networks have a layer for each of their buckets."""
    data = run.data
    dtype = torch.bfloat16 if run.device.precision == "bf16" else torch.float32
    size = ImageSize.of(data.resolution)
    shape = (max(1, data.channels), max(1, size.height), max(1, size.width))
    g_batch = run.g_batch or run.batch

    def make_player(index: int, name: str) -> PacedPlayer:
        layers = sizes.g if name == "G" else sizes.d
        net = PacedNet(name, layers, profile.moments_numel[index], shape, dtype, pace)
        fragments = run.strategy.num_fragments  # whose borders are between two buckets
        sgd = torch.optim.SGD
        return PacedPlayer(name, net, lambda parameters: sgd(parameters, lr=1.0), bucket_bytes=1, fragments=fragments)

    return SimulatedGame(
        g=make_player(0, "G"),
        d=make_player(1, "D"),
        objective=OnePassObjective(),
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
