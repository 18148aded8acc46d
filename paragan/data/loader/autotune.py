"""Tuning of the prefetch pipeline: a pure function of what a window of half a second showed.

Congestion is detected by the latency of fetches relative to their latency without congestion, as in ParaGAN (Shi, Li,
You; SoCC 2024, section on the data pipeline). The paper gives no rule; this one is ours:

* From remote storage the pipeline keeps two seconds of training ahead at any time, for bursts of congestion.
* The baseline latency is the lower quartile of the median latencies of the last minute.
* Congestion begins at twice the baseline latency and ends below 1.3 times (hysteresis).
* Under congestion, or while the step waits, workers and requests grow at once: requests to what Little's law demands at
  the pace of the step, workers to what decoding needs. The number of batches doubles under congestion, or if it limits
  the step: if at least half of the batches ahead had been ready since it last grew.
* If small local images are decoded by as many threads as allowed and the step still waits, workers get processes.
* After a cooldown without congestion and waiting, a quarter is released at a time. If trouble returns after a release,
  the next cooldown is twice as long, so recurring bursts find the buffer still large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WINDOW_S = 0.5  # time between two decisions
CONGESTION_ON = 2.0  # congestion begins at this multiple of the baseline latency
CONGESTION_OFF = 1.3  # and ends below this one
BASELINE_WINDOWS = 120  # windows whose median latencies give the baseline
MAX_WAIT_FRACTION = 0.01  # of a window that the step may wait
RESERVE_S = 2.0  # of training ahead when data is remote
HEADROOM = 1.5  # factor on Little's law: latencies have a tail
NEGLIGIBLE_LATENCY_S = 0.001
FAST_DECODE_S = 0.001  # a record decoded faster than this makes threads wait for the interpreter's lock
COOLDOWN_WINDOWS = 40  # windows without trouble before something is released
MAX_COOLDOWN_WINDOWS = 1200


@dataclass(frozen=True)
class PipelineKnobs:
    """What the tuner controls.

    workers             : threads that decode
    concurrent_requests : requests to remote storage at the same time
    batches             : batches started and not yet taken
    use_processes       : 1 if each worker decodes in a process of its own
    """

    workers: int
    concurrent_requests: int
    batches: int
    use_processes: int = 0

    def clamp(self, upper: PipelineKnobs, lower: PipelineKnobs) -> PipelineKnobs:
        """Return the knobs limited to `lower`..`upper`, each by itself; `lower` wins."""
        bounds = zip(self.as_tuple(), upper.as_tuple(), lower.as_tuple())
        return PipelineKnobs(*(max(min(value, high), low) for value, high, low in bounds))

    def as_tuple(self) -> tuple[int, int, int, int]:
        """Return the values in the order of the fields."""
        return self.workers, self.concurrent_requests, self.batches, self.use_processes


@dataclass(frozen=True)
class WindowStats:
    """Measurements of one window. Latencies and costs are in seconds per image; 0 without any.

    duration_s    : length of the window
    wait_s        : time the step waited
    images        : images the step took
    batches       : batches the step took
    fetch_s       : median latency of a fetch
    fetch_p90_s   : its 90th percentile
    decode_s      : CPU time of decoding one image
    ready_batches : batches complete at the end of the window
    """

    duration_s: float
    wait_s: float
    images: int
    batches: int
    fetch_s: float
    fetch_p90_s: float
    decode_s: float
    ready_batches: int


@dataclass(frozen=True)
class TunerState:
    """State of the tuner.

    knobs              : the current values
    baseline_latencies : median latencies of the last windows
    congested          : whether there is congestion
    idle_windows       : windows since the last congestion or wait
    cooldown_windows   : idle windows before a release
    released           : whether something was released since the last trouble
    half_filled        : whether half of the batches ahead were ready since their number last changed
    reason             : of the last change; "" if nothing changed
    """

    knobs: PipelineKnobs
    baseline_latencies: tuple[float, ...] = ()
    congested: bool = False
    idle_windows: int = 0
    cooldown_windows: int = COOLDOWN_WINDOWS
    released: bool = False
    half_filled: bool = False
    reason: str = ""

    @property
    def baseline_latency_s(self) -> float:
        """Latency of a fetch without congestion; 0 before the first measurement."""
        if not self.baseline_latencies:
            return 0.0
        return sorted(self.baseline_latencies)[len(self.baseline_latencies) // 4]


def workers_to_saturate(cores: int, window: WindowStats) -> int:
    """Return how many threads that alternate between reading and decoding keep `cores` busy, at most four per core."""
    return round(cores * min(4.0, 1 + window.fetch_s / window.decode_s)) if window.decode_s else cores


def tune(state: TunerState, window: WindowStats, upper: PipelineKnobs, lower: PipelineKnobs) -> TunerState:
    """Decide about the next window.

    Args:
        state: the state so far.
        window: what the last window showed.
        upper: largest allowed knobs; `batches` is what the memory limit allows.
        lower: smallest allowed knobs.

    Returns:
        The new state, with `reason` set if knobs changed.
    """
    state = _update_baseline(state, window)
    lower = replace(lower, batches=min(max(lower.batches, _reserve_batches(window)), upper.batches))
    state = replace(state, half_filled=state.half_filled or 2 * window.ready_batches >= state.knobs.batches)
    is_waiting = window.wait_s > MAX_WAIT_FRACTION * window.duration_s
    if state.congested or is_waiting:
        knobs = _scale_up(state, window, upper, is_waiting).clamp(upper, lower)
        cooldown = state.cooldown_windows
        if state.released:
            cooldown = min(2 * cooldown, MAX_COOLDOWN_WINDOWS)
        reason = "congestion" if state.congested else "the step waited"
        return replace(
            state,
            knobs=knobs,
            idle_windows=0,
            cooldown_windows=cooldown,
            released=False,
            half_filled=state.half_filled and knobs.batches == state.knobs.batches,
            reason="" if knobs == state.knobs else reason,
        )
    if state.idle_windows < state.cooldown_windows:
        knobs = state.knobs.clamp(upper, lower)
        reason = "" if knobs == state.knobs else "reserve"
        return replace(state, knobs=knobs, idle_windows=state.idle_windows + 1, reason=reason)
    knobs = _scale_down(state.knobs, window).clamp(upper, lower)
    if knobs == state.knobs:
        return replace(state, reason="")
    return replace(state, knobs=knobs, idle_windows=state.cooldown_windows // 2, released=True, reason="idle")


def _update_baseline(state: TunerState, window: WindowStats) -> TunerState:
    if not window.fetch_s:
        return state
    latencies = (*state.baseline_latencies, window.fetch_s)[-BASELINE_WINDOWS:]
    state = replace(state, baseline_latencies=latencies)
    threshold = CONGESTION_OFF if state.congested else CONGESTION_ON
    congested = window.fetch_s > threshold * max(state.baseline_latency_s, NEGLIGIBLE_LATENCY_S)
    return replace(state, congested=congested)


def _reserve_batches(window: WindowStats) -> int:
    """Return the batches that the step takes in RESERVE_S when it does not wait; 0 if fetches take no time."""
    if window.fetch_s < NEGLIGIBLE_LATENCY_S:
        return 0
    return math.ceil(RESERVE_S * window.batches / _busy_s(window))


def _busy_s(window: WindowStats) -> float:
    """Return the seconds that the step did not wait, at least 2 % of the window."""
    return max(window.duration_s - window.wait_s, 0.02 * window.duration_s)


def _required_capacity(window: WindowStats) -> tuple[int, int]:
    """Return the workers and requests that keep up with a step that does not wait (Little's law)."""
    images_per_s = window.images / _busy_s(window)
    latency_s = max(window.fetch_s, window.fetch_p90_s / 2)
    workers = math.ceil(HEADROOM * images_per_s * window.decode_s)
    requests = math.ceil(HEADROOM * images_per_s * latency_s)
    return workers, requests


def _scale_up(state: TunerState, window: WindowStats, upper: PipelineKnobs, is_waiting: bool) -> PipelineKnobs:
    knobs = state.knobs
    workers, requests = _required_capacity(window)
    decodes_fast = 0 < window.decode_s < FAST_DECODE_S and window.fetch_s < NEGLIGIBLE_LATENCY_S
    needs_processes = is_waiting and decodes_fast and knobs.workers >= upper.workers
    if is_waiting and not window.images:  # no batch was taken, so the pace of the step is unknown
        workers = knobs.workers + 1
        requests = 2 * knobs.concurrent_requests
    elif is_waiting:
        workers = max(workers, knobs.workers + 1)
        requests = max(requests, math.ceil(1.5 * knobs.concurrent_requests))
    batches = knobs.batches
    if state.congested or state.half_filled:
        batches *= 2
    return PipelineKnobs(
        max(workers, knobs.workers),
        max(requests, knobs.concurrent_requests),
        batches,
        int(knobs.use_processes or needs_processes),
    )


def _scale_down(knobs: PipelineKnobs, window: WindowStats) -> PipelineKnobs:
    """Release one worker and a quarter of the rest, but nothing that is needed."""
    workers, requests = _required_capacity(window)
    return PipelineKnobs(
        max(workers, knobs.workers - 1),
        max(requests, knobs.concurrent_requests - math.ceil(knobs.concurrent_requests / 4)),
        knobs.batches - math.ceil(knobs.batches / 4),
        knobs.use_processes,
    )
