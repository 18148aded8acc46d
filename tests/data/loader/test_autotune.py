"""The tuner: laws of a pure function, and a simulated storage whose congestion comes and goes."""

from dataclasses import replace

import numpy as np
import pytest

from paragan.data.loader.autotune import (
    COOLDOWN_WINDOWS,
    PipelineKnobs,
    TunerState,
    WindowStats,
    tune,
    workers_to_saturate,
)

MOST, LEAST = PipelineKnobs(8, 128, 200), PipelineKnobs(1, 4, 2)
QUIET = WindowStats(
    duration_s=0.5,
    wait_s=0.0,
    images=320,
    batches=5,
    fetch_s=0.005,
    fetch_p90_s=0.007,
    decode_s=0.0001,
    ready_batches=4,
)
START = TunerState(PipelineKnobs(1, 16, 20))


def after(tuning, *windows):
    for observed in windows:
        tuning = tune(tuning, observed, MOST, LEAST)
    return tuning


def test_a_steady_pipeline_is_not_changed():
    assert after(START, *[QUIET] * (COOLDOWN_WINDOWS - 1)).knobs == START.knobs


def test_congestion_is_relative_to_base_latency_with_hysteresis():
    calm = after(START, *[QUIET] * 20)
    assert not tune(calm, replace(QUIET, fetch_s=0.009), MOST, LEAST).congested  # 1.8 times: not yet
    slow = tune(calm, replace(QUIET, fetch_s=0.011), MOST, LEAST)
    assert slow.congested
    assert tune(slow, replace(QUIET, fetch_s=0.009), MOST, LEAST).congested  # it goes on ...
    assert not tune(slow, replace(QUIET, fetch_s=0.006), MOST, LEAST).congested  # ... until below 1.3


def test_congestion_raises_fetches_to_littles_law():
    result = tune(after(START, *[QUIET] * 20), replace(QUIET, fetch_s=0.05, fetch_p90_s=0.06), MOST, LEAST)
    assert result.knobs.concurrent_requests == 48  # 640 images/s x 50 ms x 1.5
    assert result.knobs.batches == 40
    assert result.reason == "congestion"


def test_a_latency_of_microseconds_is_never_congestion():
    fast = replace(QUIET, fetch_s=2e-6, fetch_p90_s=3e-6)
    assert not after(START, *[fast] * 20, replace(fast, fetch_s=5e-5, fetch_p90_s=9e-5)).congested


def test_depth_grows_where_the_step_waits_though_all_had_been_ready():
    waits = replace(QUIET, wait_s=0.02, ready_batches=0)
    once = after(START, replace(QUIET, ready_batches=20), waits)
    assert once.knobs.batches == 40
    assert after(once, *[waits] * 5).knobs.batches == 40  # supply is what is short: more depth would not help
    assert after(once, *[waits] * 5).knobs.workers > 1
    assert after(once, replace(QUIET, ready_batches=30), waits).knobs.batches == 80


def test_unneeded_workers_are_released_after_a_calm_period():
    grown = after(START, *[QUIET] * 20, *[replace(QUIET, fetch_s=0.05, fetch_p90_s=0.06)] * 8)
    assert grown.knobs.batches == MOST.batches
    back = after(grown, *[QUIET] * COOLDOWN_WINDOWS)
    assert back.knobs == replace(grown.knobs)
    first = after(back, QUIET)
    assert first.knobs.batches == 150
    assert first.reason == "idle"
    end = after(grown, *[QUIET] * 100 * COOLDOWN_WINDOWS)
    assert end.knobs == PipelineKnobs(1, 5, 20)  # 640/s x 5 ms x 1.5 = 4.8 requests, two seconds ahead


def test_remote_data_are_prefetched_two_seconds_ahead():
    few = TunerState(PipelineKnobs(1, 16, 4))
    first = tune(few, QUIET, MOST, LEAST)
    assert (first.knobs.batches, first.reason) == (20, "reserve")
    assert tune(few, QUIET, replace(MOST, batches=9), LEAST).knobs.batches == 9  # what the cap allows
    assert tune(few, replace(QUIET, fetch_s=1e-5, fetch_p90_s=1e-5), MOST, LEAST).knobs.batches == 4


def test_a_release_that_was_too_early_makes_the_next_come_later():
    burst = [replace(QUIET, fetch_s=0.05, fetch_p90_s=0.06)] * 8
    calm = after(START, *[QUIET] * 20, *burst, *[QUIET] * (COOLDOWN_WINDOWS + 2))
    assert calm.released
    repeated = after(calm, *burst)
    assert repeated.cooldown_windows == 2 * COOLDOWN_WINDOWS
    assert after(repeated, *[QUIET] * (2 * COOLDOWN_WINDOWS - 1)).knobs == repeated.knobs


def test_reading_threads_fill_the_cores():
    assert workers_to_saturate(2, replace(QUIET, fetch_s=1e-6, decode_s=1e-4)) == 2
    assert workers_to_saturate(2, replace(QUIET, fetch_s=0.0, decode_s=1e-4)) == 2
    assert workers_to_saturate(2, replace(QUIET, fetch_s=1e-4, decode_s=1e-4)) == 4
    assert workers_to_saturate(2, replace(QUIET, fetch_s=1.0, decode_s=1e-4)) == 8
    assert workers_to_saturate(2, replace(QUIET, decode_s=0.0)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_worker_counts_stay_within_bounds(seed):
    rng, tuning = np.random.default_rng(seed), START
    for _ in range(300):
        seconds = rng.uniform(0.01, 60)
        observed = WindowStats(
            seconds,
            seconds * rng.choice([0, 0, rng.random(), 1]),
            int(rng.integers(0, 5000)),
            int(rng.integers(0, 80)),
            *np.sort(rng.choice([0, 1e-6, 1e-3, 0.1, 30], 2)),
            rng.choice([0, 1e-5, 1.0]),
            int(rng.integers(0, 300)),
        )
        tuning = tune(tuning, observed, MOST, LEAST)
        for value, high, low in zip(tuning.knobs.as_tuple(), MOST.as_tuple(), LEAST.as_tuple()):
            assert low <= value <= high
        assert bool(tuning.reason) or tuning.idle_windows >= 0


def simulate(rule, seconds=120.0, pace=10.0, quiet=0.02, period=15.0, burst=3.0):
    """Share of time a step waits for batches of 64, `pace` a second. In bursts a fetch takes ten times as long, and the
    storage gives a third of what the step takes. rule : a window to new hands"""
    tuning, prefetched, waited, now, window = TunerState(PipelineKnobs(1, 16, 4)), 0.0, 0.0, 0.0, [0.0, 0]
    tick = 0.05
    for i in range(int(seconds / tick)):
        now = i * tick
        congested = now % period > period - burst
        latency = quiet * (10 if congested else 1)
        supply = min(tuning.knobs.concurrent_requests / latency / 64, 3 * pace * (0.1 if congested else 1))  # batches/s
        prefetched = min(prefetched + supply * tick, tuning.knobs.batches)
        if prefetched >= pace * tick:
            prefetched -= pace * tick
            window[1] += 64 * pace * tick
        else:
            waited += tick
            window[0] += tick
        if (i + 1) % 10 == 0:
            observed = WindowStats(
                0.5, window[0], int(window[1]), int(window[1] / 64), latency, 1.3 * latency, 1e-4, int(prefetched)
            )
            tuning, window = rule(tuning, observed), [0.0, 0]
    return waited / seconds


def test_bursts_do_not_stall_the_step_where_fixed_workers_do():
    fixed = simulate(lambda tuning, observed: tuning)
    paragan_result = simulate(lambda tuning, observed: tune(tuning, observed, MOST, LEAST))
    assert fixed > 0.10
    assert paragan_result < 0.03
