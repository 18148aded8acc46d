"""Measure the profile of one worker: its game is played in one process and timed (docs/profiling.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from paragan.comm.world import World
from paragan.config.run import Run, with_lanes
from paragan.core.devices import backend_of
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.data.dataset import Dataset
from paragan.game.game import Game
from paragan.plan.memory import ResourceCounterMode
from paragan.plan.profile.codec_cost import measure_codec_cost
from paragan.plan.profile.hardware import PeakMemory, describe_device, measure_peak_flops
from paragan.plan.profile.noise_scale import SquaredGradNorms, estimate_noise_scale, measure_grad_norms
from paragan.plan.profile.op_breakdown import op_shares, time_by_op_kind
from paragan.plan.profile.profile import MemoryUse, NoiseScale, Profile, parse_profile, profile_to_yaml
from paragan.plan.profile.profile_cache import cache_file, network_digest, read_cached_profile, write_cached_profile
from paragan.plan.profile.turn_timing import RoundSamples, RoundTimes, step_kinds, time_rounds, weighted_sum
from paragan.strategies.sync import Sync
from paragan.train.build import Networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session, rebind_to_world

NOISE_LANES = 8  # lanes whose gradients are compared if the run has only one
MIN_NOISE_ROUNDS, MAX_NOISE_ROUNDS = 4, 32
VISITS_PER_BATCH = 3
TURNS_TIME_SHARE, TRAINING_TIME_SHARE, NOISE_TIME_SHARE = 0.4, 0.3, 0.15  # of ProfileOptions.seconds
OVERRUN_FACTOR = 4 / 3  # about how much longer a measurement takes than ProfileOptions.seconds
MAX_MEMORY_SHARE = 0.9  # of the device's memory: a batch that would need more is left out
Positive = Annotated[int, Field(ge=1)]


def discard_message(message: str) -> None:
    """Default log function."""


@config_class
class ProfileOptions:
    """Settings of a measurement.

    batches    : real images on this worker (empty: from those of one lane to the whole batch of the run)
    seconds    : about how long to measure; it takes up to a third longer
    noise_kimg : training before the noise scale is measured, if the time allows (0: do not measure it)
    remeasure  : whether to measure again what is in the cache
    """

    batches: tuple[Positive, ...] = ()
    seconds: Annotated[float, Field(ge=1, le=1e5)] = 30.0
    noise_kimg: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    remeasure: bool = False


def local_batches(run: Run, requested: Sequence[int] = ()) -> list[int]:
    """Return the batches to measure, in increasing order. They consist of whole lanes.

    Raises:
        UsageError: a requested batch is no multiple of a lane.
    """
    lane = run.batch // run.lanes
    for batch in requested:
        if batch % lane:
            down = max(lane, batch - batch % lane)
            raise UsageError(
                f"--batches {batch}: is no multiple of a lane's {lane} images (--batch {run.batch} over --lanes "
                f"{run.lanes}). Use {down} or {down + lane}, or other --lanes"
            )
    if requested:
        return sorted(set(requested))
    doubled = [lane * 2**i for i in range(run.lanes.bit_length())]
    return sorted({*(batch for batch in doubled if batch < run.batch), run.batch})


def profile_run(
    run: Run,
    images: Dataset,
    make_networks: Callable[[], Networks],
    device: torch.device,
    options: ProfileOptions,
    structure: str = "",
    log: Callable[[str], object] = discard_message,
) -> tuple[Profile, Path]:
    """Read the profile of a run from the cache, or measure it and store it there.

    A cached profile is used if it was measured for at least as long.

    Args:
        run: resolved.
        images: of the run.
        make_networks: makes new networks on the device.
        device: to measure.
        options: of the measurement.
        structure: digest of user-defined networks (`structure_digest`).
        log: is called with one line, before it takes time.

    Returns:
        The profile, and its file in the cache.

    Raises:
        UsageError: the run trains one game per label, or a batch is no multiple of a lane.
    """
    if run.per_label:
        raise UsageError(
            f"--strategy {run.strategy.name}: it trains one game per label. Profile one of them with --strategy sync "
            "--data.only=0"
        )
    batches = local_batches(run, options.batches)
    settings = {
        "batches": batches,
        "noise_kimg": options.noise_kimg,
        "data": run.data.redacted_path,
        "cache": run.data.cache,
        "content": images.fingerprint,
        "init_from": run.fingerprints.init_from or run.init_from,
    }
    digest = network_digest(run, structure)
    file = cache_file(digest, describe_device(device, run.device.precision), settings)
    profile = None if options.remeasure else read_cached_profile(file)
    if profile and profile.measured_for_s >= options.seconds:
        log(f"using the profile of one worker that an earlier measurement of {profile.measured_for_s:g} s wrote")
    else:
        log(f"profiling one worker: about {OVERRUN_FACTOR * options.seconds:.0f} s")
        profile = measure_profile(run, images, make_networks, device, options, batches)
        profile = dataclasses.replace(profile, network_digest=digest)
        profile = parse_profile(profile_to_yaml(profile), str(file))  # round as a cached one is
        write_cached_profile(file, profile)
    return profile, file


def measure_profile(
    run: Run,
    images: Dataset,
    make_networks: Callable[[], Networks],
    device: torch.device,
    options: ProfileOptions,
    batches: Sequence[int],
) -> Profile:
    """Measure a profile with these batches on this worker. Its `network_digest` is empty."""
    run = dataclasses.replace(run, strategy=Sync(), ramp=())  # one worker does not communicate
    peak_memory = PeakMemory(device)  # the baseline, before networks are made

    def make_profiler() -> WorkerProfiler:
        return WorkerProfiler(build_session(run, World.solo(device), images, make_networks()), images, options.seconds)

    peaks = [measure_peak_flops(device, run.device.precision)]
    fields = make_profiler().measure_fields(batches, peak_memory)
    noise_scale: dict[Literal["G", "D"], NoiseScale] = {}
    if options.noise_kimg:
        noise_scale = make_profiler().measure_noise(options.noise_kimg)  # of new networks
    peaks.append(measure_peak_flops(device, run.device.precision))  # twice: another process may have been busy
    return Profile(
        recipe=run.recipe,
        network_digest="",
        device=dataclasses.replace(describe_device(device, run.device.precision), peak_flops=max(peaks)),
        d_steps=run.d_steps,
        measured_for_s=options.seconds,
        noise_scale=noise_scale,
        **fields,
    )


class WorkerProfiler:
    """Plays one game with different numbers of lanes. Its clock is not reset between them."""

    def __init__(self, session: Session, images: Dataset, seconds: float):
        self.session = session
        self.images = images
        self.seconds = seconds
        self.device = session.world.device

    @contextlib.contextmanager
    def session_for(self, run: Run) -> Iterator[Session]:
        """Open a session of the same players with the lanes of `run`."""
        session = rebind_to_world(run, self.session.world, self.images, self.session.game, self.session.clock)
        with contextlib.closing(session.lanes):
            yield session

    def run_with_batch(self, batch: int) -> Run:
        """Return the run with as many lanes as make this batch."""
        run = self.session.run
        return with_lanes(run, batch * run.lanes // run.batch)

    def measure_fields(self, batches: Sequence[int], peak_memory: PeakMemory) -> dict[str, Any]:
        """Measure all fields of a profile but the noise scale."""
        game = self.session.game
        memory = self.measure_memory(batches, peak_memory)
        rounds = self.measure_rounds([usage.batch for usage in memory])
        shares, flops = self.measure_op_shares(rounds[-1])
        return {
            "layer_numels": tuple(tuple(size for _, size in player.flat.slices if size) for player in game.players),
            "moments_numel": tuple(player.moments.numel() for player in game.players),
            "num_params": tuple(sum(p.numel() for p in player.flat.parameters) for player in game.players),
            "flops_per_image": flops / memory[-1].batch,
            "g": tuple(times.g for times in rounds),
            "d": tuple(times.d for times in rounds),
            "g_batch_ratio": game.g_to_d_batch_ratio,
            "op_shares": shares,
            "codec_cost": measure_codec_cost(device=self.device),
            "memory": memory,
            "data_wait_s": rounds[-1].data_wait_s,
        }

    def measure_memory(self, batches: Sequence[int], peak_memory: PeakMemory) -> tuple[MemoryUse, ...]:
        """Measure the memory of every batch in increasing order, until one would not fit."""
        usages = list[MemoryUse]()
        available_bytes = describe_device(self.device, "").memory_bytes
        for batch in batches:
            if _extrapolate_bytes(usages, batch) > MAX_MEMORY_SHARE * available_bytes:
                break
            peak_memory.reset()
            with self.session_for(self.run_with_batch(batch)) as session:
                play_round(session)  # makes the state of the optimizers
                peaks = [count_round_cost(session, kind.step).peak_bytes for kind in step_kinds(session.run.objective)]
            backend_of(self.device).synchronize(self.device)
            usages.append(MemoryUse(batch, max(peaks), peak_memory.increase_bytes()))
        return tuple(usages)

    def measure_rounds(self, batches: Sequence[int]) -> list[RoundTimes]:
        """Time all batches in turns, several times, so that other load on the machine affects them equally."""
        samples = [RoundSamples(batch, step_kinds(self.session.run.objective)) for batch in batches]
        for _ in range(VISITS_PER_BATCH):
            for batch_samples in samples:
                seconds = TURNS_TIME_SHARE * self.seconds / len(samples) / VISITS_PER_BATCH
                with self.session_for(self.run_with_batch(batch_samples.batch)) as session:
                    time_rounds(session, seconds, batch_samples)
        return [batch_samples.medians() for batch_samples in samples]

    def measure_op_shares(self, rounds: RoundTimes) -> tuple[dict[str, float], float]:
        """Return the fractions of a round by kind of operation, and its FLOPs; means over kinds of steps."""
        seconds_by_step = list[dict[str, float]]()
        flops = list[float]()
        kinds = step_kinds(self.session.run.objective)
        with self.session_for(self.run_with_batch(rounds.d.batch)) as session:
            for kind in kinds:
                flops.append(count_round_cost(session, kind.step).flops)
                session.clock.step = kind.step
                seconds_by_step.append(time_by_op_kind(lambda: play_round(session), self.device))
        weights = [kind.share for kind in kinds]
        seconds = {name: weighted_sum([step[name] for step in seconds_by_step], weights) for name in seconds_by_step[0]}
        round_s = self.session.run.d_steps * rounds.d.total_s + rounds.g.total_s + rounds.data_wait_s
        return op_shares(seconds, round_s), weighted_sum(flops, weights)

    def measure_noise(self, kimg: float) -> dict[Literal["G", "D"], NoiseScale]:
        """Train for `kimg`, or as long as the time allows, then compare the gradients of lanes."""
        run = self.session.run
        clock = self.session.clock
        with self.session_for(run) as session:
            deadline = time.perf_counter() + TRAINING_TIME_SHARE * self.seconds
            while clock.images < 1000 * kimg and time.perf_counter() < deadline:
                play_round(session)
        trained_kimg = clock.kimg
        if run.lanes == 1:
            run = with_lanes(run, NOISE_LANES)
        run = dataclasses.replace(run, device=dataclasses.replace(run.device, lanes_per_pass=1))
        norms: dict[str, list[SquaredGradNorms]] = {"G": [], "D": []}
        with self.session_for(run) as session:
            deadline = time.perf_counter() + NOISE_TIME_SHARE * self.seconds
            while len(norms["G"]) < MAX_NOISE_ROUNDS and (
                len(norms["G"]) < MIN_NOISE_ROUNDS or time.perf_counter() < deadline
            ):
                for name, round_norms in measure_grad_norms(session).items():
                    norms[name].extend(round_norms)
        return _noise_scales(norms, self.session.game, run.lanes, trained_kimg)


def _extrapolate_bytes(measured: Sequence[MemoryUse], batch: int) -> float:
    """Extrapolate the memory of a batch from the last two; 0 if there are fewer."""
    if len(measured) < 2:
        return 0.0
    a, b = measured[-2:]
    bytes_per_image = max(0.0, (b.estimated_bytes - a.estimated_bytes) / (b.batch - a.batch))
    return b.estimated_bytes + bytes_per_image * (batch - b.batch)


def _noise_scales(
    norms: dict[str, list[SquaredGradNorms]], game: Game, lanes: int, kimg: float
) -> dict[Literal["G", "D"], NoiseScale]:
    scales = dict[Literal["G", "D"], NoiseScale]()
    g_scale = estimate_noise_scale(norms["G"], game.g_lane_batch, game.g_lane_batch * lanes, kimg)
    d_scale = estimate_noise_scale(norms["D"], game.d_lane_batch, game.d_lane_batch * lanes, kimg)
    if g_scale:
        scales["G"] = g_scale
    if d_scale:
        scales["D"] = d_scale
    return scales


def count_round_cost(session: Session, step: int) -> ResourceCounterMode:
    """Play a round with the number of this step. Returns its operations and the peak memory of all tensors."""
    session.clock.step = step
    with ResourceCounterMode(persistent_tensors(session.game)) as counter:
        play_round(session)
    return counter


def persistent_tensors(game: Game) -> list[torch.Tensor]:
    """Return the tensors that live between rounds: flat vectors, averages, optimizer states, buffers."""
    tensors = list[torch.Tensor]()
    for player in game.players:
        tensors += [player.flat.params, player.flat.grads, *player.net.buffers()]
        if player.ema:
            tensors.append(player.ema.params)
        for state in player.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors
