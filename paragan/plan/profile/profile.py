"""What one worker was measured to do: the record that everything else is predicted from.

profile = read_profile(Path("profile.yaml"))        # as `paragan bench step --out profile.yaml` wrote it
profile.turn("D", 16).whole                         # seconds of D's turn with 16 images of reals on this worker
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from paragan.core.errors import UsageError
from paragan.core.schema import config_class, from_dict, from_yaml, to_dict, to_yaml

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = NonNegative
Images = Annotated[float, Field(ge=0)]  # inf: more than could be told
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
MomentsNumel = Annotated[int, Field(ge=0, le=10**9)]
NUM_READY_PARTS = 16  # of a player's vector, for `ready`


@config_class
class TurnProfile:
    """One player's turn (one optimizer step) on one worker. Seconds since it began, medians.

    batch    : images of the reals' batch on this worker
    ready    : when each of PARTS equal parts of the player's parameters had its gradient, in flat order (last layer
               first: comm/flat.py); rising
    backward : when its passes were over
    whole    : when the optimizer had stepped, and the average followed
    made     : what G's forward passes in it took (0: not measured)
    """

    batch: Count
    grads_ready_s: tuple[Seconds, ...]
    backward_s: Seconds
    total_s: Seconds
    g_forward_s: Seconds = 0.0


@config_class
class NoiseScale:
    """The simple noise scale of a player's gradient (McCandlish et al. 2018, appendix A.1), in images: where the batch
    is smaller, twice as many images a step save nearly half of the steps; where it is larger, they save few.

    batch : tr(covariance of one image's gradient) / |mean gradient|^2;  low, high : 95 % of resamples
    kimg  : how far the networks were trained where it was measured
    """

    images: Images
    low: Images
    high: Images
    kimg: NonNegative = 0.0


@config_class
class MemoryUse:
    """Bytes on a worker in a round with a batch: what the tensors take (foreseen), what the process took (None where
    the device does not tell)."""

    batch: Count
    estimated_bytes: Bytes
    measured_bytes: Bytes | None = None


@config_class
class DeviceInfo:
    """Where it was measured. name : processor or card;  peak_flops : operations a second of a matrix product in the
    precision of the run, measured;  memory : bytes there are"""

    kind: str
    name: str
    threads: Count
    precision: str
    peak_flops: NonNegative
    memory_bytes: Count
    torch_version: str
    paragan_version: str


@config_class
class Profile:
    """One worker, one network, one device.

    recipe     : what was measured, for the screen;  network : a digest of all in the run that changes what is computed
    params     : numbers of G's and D's vectors;  flops : of one image in a round (d_steps turns of D, one of G)
    g, d       : their turns, by rising batch
    fixed      : D's steps in a round, and images that G makes for one that D sees
    kinds      : the share of a round's time by kind of operation, at the largest batch
    handling   : seconds for a number that exchanges compute, by wire and what is done ("int8/encode": handling.py)
    data       : seconds that a round waits for data beyond computing, at the largest batch
    noise      : of G's and of D's gradient, where it was measured
    layers     : numbers of every tensor of G's and of D's vector, in flat order: buckets are cut there (empty: alike)
    moments    : numbers of G's and of D's batch moments, which are summed over ranks
    seconds    : about how long measuring it was to take
    """

    recipe: str
    network_digest: str
    device: DeviceInfo
    num_params: tuple[int, int]
    flops_per_image: NonNegative
    g: tuple[TurnProfile, ...]
    d: tuple[TurnProfile, ...]
    d_steps: Count = 1
    g_batch_ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    op_shares: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    codec_cost: Mapping[str, Seconds] = dataclasses.field(default_factory=dict[str, float])
    memory: tuple[MemoryUse, ...] = ()
    data_wait_s: Seconds = 0.0
    noise_scale: Mapping[Literal["G", "D"], NoiseScale] = dataclasses.field(default_factory=dict)
    layer_numels: tuple[tuple[Count, ...], tuple[Count, ...]] = ((), ())
    moments_numel: tuple[MomentsNumel, MomentsNumel] = (0, 0)
    measured_for_s: NonNegative = 0.0

    def turn(self, player: Literal["G", "D"], batch: float) -> TurnProfile:
        """A turn with any batch: between those measured linear, beyond them as the last two (or in proportion)."""
        return interpolate_turns(self.g if player == "G" else self.d, batch)

    def round_s(self, batch: float) -> float:
        """Seconds of a round that one worker plays alone."""
        return self.d_steps * self.turn("D", batch).total_s + self.turn("G", batch).total_s


def interpolate_turns(turns: Sequence[TurnProfile], batch: float) -> TurnProfile:
    """The turn with this batch."""
    if len(turns) == 1:
        return _interpolate(turns[0], turns[0], 0.0, batch / turns[0].batch)
    i = next((i for i in range(1, len(turns) - 1) if batch <= turns[i].batch), len(turns) - 1)
    a, b = turns[i - 1], turns[i]
    return _interpolate(a, b, (batch - a.batch) / (b.batch - a.batch), 1.0)


def _interpolate(a: TurnProfile, b: TurnProfile, fraction: float, factor: float) -> TurnProfile:
    def mix(x: float, y: float) -> float:
        return max(0.0, factor * ((1 - fraction) * x + fraction * y))

    ready = tuple(mix(x, y) for x, y in zip(a.grads_ready_s, b.grads_ready_s))
    return TurnProfile(
        max(1, round(factor * ((1 - fraction) * a.batch + fraction * b.batch))),
        ready,
        mix(a.backward_s, b.backward_s),
        mix(a.total_s, b.total_s),
        mix(a.g_forward_s, b.g_forward_s) if a.g_forward_s and b.g_forward_s else 0.0,
    )


def read_profile(path: Path) -> Profile:
    """Unusable names the file, the field and what fits."""
    try:
        return parse_profile(path.read_text("utf-8"), str(path))
    except FileNotFoundError as error:
        raise UsageError(
            f"profile: {path} does not exist; `paragan bench step RECIPE --out {path}` makes one"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"profile: {path} cannot be read: {error}") from error


def parse_profile(text: str, name: str) -> Profile:
    """The same from the text of a file of this name."""
    try:
        profile = from_dict(Profile, from_yaml(text, name))
    except UsageError as error:
        raise UsageError(f"profile: {name}: {error}") from error
    for wrong in _find_errors(profile):
        raise UsageError(f"profile: {name}: {wrong}; `paragan bench step RECIPE --out FILE` makes one")
    return profile


def _find_errors(profile: Profile) -> Iterator[str]:
    """What no worker was measured to do."""
    for name, turns in (("g", profile.g), ("d", profile.d)):
        if not turns or not _is_increasing([turn.batch for turn in turns]):
            yield f"{name} must have turns, of rising batches"
        if any(
            len(turn.grads_ready_s) != NUM_READY_PARTS or list(turn.grads_ready_s) != sorted(turn.grads_ready_s)
            for turn in turns
        ):
            yield f"{name}.grads_ready_s must be {NUM_READY_PARTS} rising numbers"
        if any(not 0 < turn.backward_s <= turn.total_s for turn in turns):
            yield f"{name}: a turn takes time, and backward_s is a part of total_s"
    if not _is_increasing([one.batch for one in profile.memory]):
        yield "memory must be of rising batches"


def _is_increasing(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def profile_to_yaml(profile: Profile) -> str:
    return to_yaml(_round_digits(to_dict(profile)))


def _round_digits(value: Any) -> Any:
    """With as many digits as were measured."""
    if isinstance(value, dict):
        return {key: _round_digits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_digits(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
