"""How many hands the data pipeline needs: a pure function of what a window of time showed.

Congestion is told by the latency of fetches against what it is when there is none, as in ParaGAN (Shi, Li, You; SoCC
2024, section on the data pipeline). The paper gives no rule; this one is ours:

* of what is fetched from afar two seconds of the step are ahead, always: a burst that nobody expected begins with that;
* the quiet latency is the lower quartile of the medians of the last minute;
* congestion begins at twice the quiet latency and ends below 1.3 times (hysteresis);
* under congestion, or while the step waits, hands grow at once: as many fetches as Little's law asks for at the pace of
  the step, as many decoders as their work needs; depth doubles under congestion, or where it was what is short: the
  batches ahead had been complete since it last grew;
* where near images are so small that as many threads as may be are still too few, each has a process to decode them;
* after a time without either (cool-down) hands are released, a quarter at a time; where trouble comes back after that,
  the next cool-down is twice as long, so that bursts which come and go find the buffer still there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WINDOW_S = 0.5  # what one decision looks at
CONGESTION_ON, CONGESTION_OFF = 2.0, 1.3  # congestion, in quiet latencies
BASELINE_WINDOWS = 120  # windows whose medians are remembered
MAX_WAIT_FRACTION = 0.01  # share of a window that the step may wait
RESERVE_S = 2.0  # of batches ahead of a step that is fed from afar
HEADROOM = 1.5  # more than Little's law asks for: latencies have a tail
NEGLIGIBLE_LATENCY_S = 0.001  # a latency that nobody has to wait for
FAST_DECODE_S = 0.0001  # an image that is decoded in less has threads wait for the interpreter's lock
COOLDOWN_WINDOWS, MAX_COOLDOWN_WINDOWS = 40, 1200  # windows without trouble before something is released


@dataclass(frozen=True)
class PipelineKnobs:
    """What the pipeline works with.

    workers : threads that decode;  fetches : requests under way at once;  depth : batches begun and not yet taken
    apart : 1 where each worker has a process to decode
    """

    workers: int
    concurrent_requests: int
    batches: int
    use_processes: int = 0

    def clamp(self, upper: PipelineKnobs, lower: PipelineKnobs) -> PipelineKnobs:
        pairs = zip(self.as_tuple(), upper.as_tuple(), lower.as_tuple())
        return PipelineKnobs(*(max(min(value, high), low) for value, high, low in pairs))

    def as_tuple(self) -> tuple[int, int, int, int]:
        return self.workers, self.concurrent_requests, self.batches, self.use_processes


@dataclass(frozen=True)
class WindowStats:
    """What a window of time showed. Latencies and costs are in seconds an image; 0 where there were none.

    wait_s : the step waited, of `seconds`;  taken : images it took, in `batches`
    fetch_s : median latency of a fetch;  high_s : its 90th percentile
    decode_s : processor time of decoding one
    ready : batches that are complete at its end
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
    """Where the tuner stands.

    quiet : medians of the windows that are remembered;  calm : windows since the last trouble
    cool : windows of calm before a release;  why : of the last change, "" where nothing changed
    filled : whether at least half of what is ahead was complete since depth last changed
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
        """Latency of a fetch without congestion, as far as is known; 0 before the first."""
        return sorted(self.baseline_latencies)[len(self.baseline_latencies) // 4] if self.baseline_latencies else 0.0


def workers_to_saturate(cores: int, window: WindowStats) -> int:
    """How many threads that read and decode in turns keep so many cores busy, four for each at most."""
    return round(cores * min(4.0, 1 + window.fetch_s / window.decode_s)) if window.decode_s else cores


def tune(state: TunerState, window: WindowStats, upper: PipelineKnobs, lower: PipelineKnobs) -> TunerState:
    """The next decision. most, least : bounds of every number; depth's is what the memory cap allows."""
    state = _update_baseline(state, window)
    lower = replace(lower, batches=min(max(lower.batches, _reserve_batches(window)), upper.batches))
    state = replace(state, half_filled=state.half_filled or 2 * window.ready_batches >= state.knobs.batches)
    waiting = window.wait_s > MAX_WAIT_FRACTION * window.duration_s
    if state.congested or waiting:
        hands = _scale_up(state, window, upper, waiting).clamp(upper, lower)
        cool = min(2 * state.cooldown_windows, MAX_COOLDOWN_WINDOWS) if state.released else state.cooldown_windows
        why = "" if hands == state.knobs else "congestion" if state.congested else "the step waited"
        filled = state.half_filled and hands.batches == state.knobs.batches
        return replace(
            state, knobs=hands, idle_windows=0, cooldown_windows=cool, released=False, half_filled=filled, reason=why
        )
    if state.idle_windows < state.cooldown_windows:
        hands = state.knobs.clamp(upper, lower)
        return replace(
            state, knobs=hands, idle_windows=state.idle_windows + 1, reason="" if hands == state.knobs else "reserve"
        )
    hands = _scale_down(state.knobs, window).clamp(upper, lower)
    if hands == state.knobs:
        return replace(state, reason="")
    return replace(state, knobs=hands, idle_windows=state.cooldown_windows // 2, released=True, reason="calm")


def _update_baseline(state: TunerState, window: WindowStats) -> TunerState:
    if not window.fetch_s:
        return state
    state = replace(state, baseline_latencies=(*state.baseline_latencies, window.fetch_s)[-BASELINE_WINDOWS:])
    return replace(
        state,
        congested=window.fetch_s
        > (CONGESTION_OFF if state.congested else CONGESTION_ON) * max(state.baseline_latency_s, NEGLIGIBLE_LATENCY_S),
    )


def _reserve_batches(window: WindowStats) -> int:
    """Batches that the step takes in RESERVE_S when it does not wait; 0 where they are near."""
    if window.fetch_s < NEGLIGIBLE_LATENCY_S:
        return 0
    return math.ceil(RESERVE_S * window.batches / _busy_s(window))


def _busy_s(window: WindowStats) -> float:
    """Seconds that the step did not wait."""
    return max(window.duration_s - window.wait_s, 0.02 * window.duration_s)


def _required_capacity(window: WindowStats) -> tuple[int, int]:
    """Decoders and fetches that keep up with the step as it goes when it does not wait."""
    pace = window.images / _busy_s(window)  # images/s
    return math.ceil(HEADROOM * pace * window.decode_s), math.ceil(
        HEADROOM * pace * max(window.fetch_s, window.fetch_p90_s / 2)
    )


def _scale_up(state: TunerState, window: WindowStats, upper: PipelineKnobs, is_waiting: bool) -> PipelineKnobs:
    hands = state.knobs
    workers, fetches = _required_capacity(window)
    brief = 0 < window.decode_s < FAST_DECODE_S and window.fetch_s < NEGLIGIBLE_LATENCY_S
    apart = int(hands.use_processes or (is_waiting and brief and hands.workers >= upper.workers))
    if is_waiting and not window.images:  # so slow that there is no pace to go by
        workers, fetches = hands.workers + 1, 2 * hands.concurrent_requests
    elif is_waiting:
        workers, fetches = max(workers, hands.workers + 1), max(fetches, math.ceil(1.5 * hands.concurrent_requests))
    depth = hands.batches * (2 if state.congested or state.half_filled else 1)
    return PipelineKnobs(max(workers, hands.workers), max(fetches, hands.concurrent_requests), depth, apart)


def _scale_down(knobs: PipelineKnobs, window: WindowStats) -> PipelineKnobs:
    """A quarter less of what is more than needed."""
    workers, fetches = _required_capacity(window)
    return PipelineKnobs(
        max(workers, knobs.workers - 1),
        max(fetches, knobs.concurrent_requests - math.ceil(knobs.concurrent_requests / 4)),
        knobs.batches - math.ceil(knobs.batches / 4),
        knobs.use_processes,
    )
