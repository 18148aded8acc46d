"""The profile of one worker: the measurements from which everything else is predicted (docs/profiling.md).

profile = read_profile(Path("profile.yaml"))        # written by `paragan bench step --out profile.yaml`
profile.turn("D", 16).total_s                       # seconds of D's turn with 16 real images on this worker
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
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Images = Annotated[float, Field(ge=0)]  # infinity: more than could be measured
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
MomentsNumel = Annotated[int, Field(ge=0, le=10**9)]
NUM_READY_PARTS = 16  # of a player's flat vector, for `grads_ready_s`


@config_class
class TurnProfile:
    """One player's turn (one optimizer step) on one worker. Times are medians, in seconds since it began.

    batch         : real images on this worker
    grads_ready_s : when each of NUM_READY_PARTS equal parts of the player's parameters had its gradient, in flat order
                    (last layer first: comm/flat_params.py); increasing
    backward_s    : when its passes were done
    total_s       : when the optimizer step and the update of the average were done
    g_forward_s   : duration of G's forward passes in it (0: not measured)
    """

    batch: Count
    grads_ready_s: tuple[Seconds, ...]
    backward_s: Seconds
    total_s: Seconds
    g_forward_s: Seconds = 0.0


@config_class
class NoiseScale:
    """The simple noise scale of a player's gradient (McCandlish et al. 2018, appendix A.1).

    With a smaller batch, twice as many images per step save nearly half of the steps. With a larger one they save few.

    images    : tr(covariance of one image's gradient) / |mean gradient|^2
    low, high : bounds of 95 % of the resamples
    kimg      : training of the networks before it was measured
    """

    images: Images
    low: Images
    high: Images
    kimg: NonNegative = 0.0


@config_class
class MemoryUse:
    """Peak memory of a worker in a round with a batch.

    batch           : real images on this worker
    estimated_bytes : of the tensors, counted
    measured_bytes  : of the process; None if the device cannot tell
    """

    batch: Count
    estimated_bytes: Bytes
    measured_bytes: Bytes | None = None


@config_class
class DeviceInfo:
    """The device of a profile.

    kind         : "cpu", "cuda" or "mps"
    name         : of the processor or card
    threads      : of the process
    precision    : of the run
    peak_flops   : operations per second of a matrix product in this precision, measured
    memory_bytes : of the device
    """

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
    """Measurements of one worker that trains one pair of networks on one device. Pairs are of G and D.

    recipe          : name of the run, for the screen
    network_digest  : of everything in the run that changes what a worker computes
    num_params      : trained parameters
    flops_per_image : operations of a round (d_steps turns of D, one of G), divided by D's batch
    g, d            : turns, by increasing batch
    d_steps         : turns of D in a round
    g_batch_ratio   : G's batch divided by D's
    op_shares       : fraction of a round's time by kind of operation, with the largest batch
    codec_cost      : seconds per number that exchanges compute, by operation ("int8/encode": codec_cost.py)
    memory          : peak memory, by increasing batch
    data_wait_s     : seconds that a round waits for data, with the largest batch
    noise_scale     : of G's and of D's gradient, if it was measured
    layer_numels    : numbers of every parameter tensor, in flat order; buckets are cut there (empty: equal layers)
    moments_numel   : numbers of the batch moments, which are summed over ranks
    measured_for_s  : the time that was planned for the measurement
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
        """Return a player's turn with any batch, by linear inter- or extrapolation of those measured."""
        return interpolate_turns(self.g if player == "G" else self.d, batch)

    def round_s(self, batch: float) -> float:
        """Return the seconds of a round of one worker without communication."""
        return self.d_steps * self.turn("D", batch).total_s + self.turn("G", batch).total_s


def interpolate_turns(turns: Sequence[TurnProfile], batch: float) -> TurnProfile:
    """Return the turn with this batch, by linear inter- or extrapolation; in proportion if there is one turn."""
    if len(turns) == 1:
        return _interpolate(turns[0], turns[0], 0.0, batch / turns[0].batch)
    i = next((i for i in range(1, len(turns) - 1) if batch <= turns[i].batch), len(turns) - 1)
    a = turns[i - 1]
    b = turns[i]
    return _interpolate(a, b, (batch - a.batch) / (b.batch - a.batch), 1.0)


def _interpolate(a: TurnProfile, b: TurnProfile, fraction: float, factor: float) -> TurnProfile:
    def mix(x: float, y: float) -> float:
        if fraction > 1:  # beyond what was measured a larger batch is not faster, whatever the noise of measuring says
            return factor * (y + (fraction - 1) * max(0.0, y - x))
        return max(0.0, factor * ((1 - fraction) * x + fraction * y))

    return TurnProfile(
        max(1, round(factor * ((1 - fraction) * a.batch + fraction * b.batch))),
        tuple(mix(x, y) for x, y in zip(a.grads_ready_s, b.grads_ready_s)),
        mix(a.backward_s, b.backward_s),
        mix(a.total_s, b.total_s),
        mix(a.g_forward_s, b.g_forward_s) if a.g_forward_s and b.g_forward_s else 0.0,
    )


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        UsageError: names the file and what is wrong in it.
    """
    try:
        return parse_profile(path.read_text("utf-8"), str(path))
    except FileNotFoundError as error:
        raise UsageError(f"profile={path}: it does not exist. Use `paragan bench step RECIPE --out {path}`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"profile={path}: it cannot be read: {error}") from error


def parse_profile(text: str, name: str) -> Profile:
    """Parse the text of a profile file.

    Raises:
        UsageError: names the file and what is wrong in it.
    """
    try:
        profile = from_dict(Profile, from_yaml(text, name))
    except UsageError as error:
        raise UsageError(f"profile={name}: {error}") from error
    for message in _find_errors(profile):
        raise UsageError(f"profile={name}: {message}. Use `paragan bench step RECIPE --out FILE`")
    return profile


def _find_errors(profile: Profile) -> Iterator[str]:
    """Yield what is inconsistent in a profile."""
    for name, turns in (("g", profile.g), ("d", profile.d)):
        if not turns or not _is_increasing([turn.batch for turn in turns]):
            yield f"{name} must be turns with increasing batches"
        for turn in turns:
            if len(turn.grads_ready_s) != NUM_READY_PARTS or list(turn.grads_ready_s) != sorted(turn.grads_ready_s):
                yield f"{name}.grads_ready_s must be {NUM_READY_PARTS} increasing numbers"
            elif turn.grads_ready_s[-1] > turn.backward_s:
                yield f"{name}.grads_ready_s must be at most backward_s"
            if not 0 < turn.backward_s <= turn.total_s:
                yield f"{name}.backward_s must be above 0, and at most total_s"
    for name, numels, numel in zip("gd", profile.layer_numels, profile.num_params, strict=True):
        if numels and sum(numels) != numel:
            yield f"layer_numels of {name} must add up to its num_params, {numel}, not to {sum(numels)}"
    if not _is_increasing([usage.batch for usage in profile.memory]):
        yield "memory must have increasing batches"


def _is_increasing(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def profile_to_yaml(profile: Profile) -> str:
    """Format a profile as the text of a file, with five digits."""
    return to_yaml(_round_digits(to_dict(profile)))


def _round_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round_digits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_digits(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
