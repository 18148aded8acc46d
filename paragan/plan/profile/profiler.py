"""A profile of one worker: its game is played here, alone, and timed. docs/profiling.md."""

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

NOISE_LANES = 8  # whose gradients are compared, where the run has one
MIN_NOISE_ROUNDS, MAX_NOISE_ROUNDS = 4, 32  # rounds for the noise scale
VISITS_PER_BATCH = 3  # to every batch
TURNS_TIME_SHARE, TRAINING_TIME_SHARE, NOISE_TIME_SHARE = 0.4, 0.3, 0.15  # of the seconds there are
MAX_MEMORY_SHARE = 0.9  # of the device's memory: a batch that would take more is not tried
Positive = Annotated[int, Field(ge=1)]


OVERRUN_FACTOR = 4 / 3  # so much longer than it is asked to take


def discard_message(message: str) -> None:
    """Nobody listens."""


@config_class
class ProfileOptions:
    """What is to be measured.

    batches    : images of the reals' batch on this worker (none: from one lane's to the whole batch of the run)
    seconds    : about how long, with a third more for what cannot be shortened (TAKES)
    noise_kimg : how far the networks are trained before their gradients' noise is taken, if the time is enough (0: not)
    again      : whether to measure what was measured before
    """

    batches: tuple[Positive, ...] = ()
    seconds: Annotated[float, Field(ge=1, le=1e5)] = 30.0
    noise_kimg: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    remeasure: bool = False


def local_batches(run: Run, requested: Sequence[int] = ()) -> list[int]:
    """Batches of whole lanes, in rising order. Unusable where one that is asked for is none."""
    lane = run.batch // run.lanes
    for batch in requested:
        if batch % lane:
            down = max(lane, batch - batch % lane)
            raise UsageError(
                f"--batches {batch} is no multiple of a lane's {lane} images (--batch {run.batch} over --lanes "
                f"{run.lanes}): try {down} or {down + lane}, or other --lanes"
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
    """The profile of a run that is resolved, and where it is kept: found there, if that was measured for as long, or
    measured and kept.

    pair: its networks anew, on the device; structure: what they are made of, if they are the user's own; say: is told
    which of both, before it takes time.
    """
    if run.per_label:
        raise UsageError(
            f"--strategy {run.strategy.name} plays a game for every label: profile one of them, with --strategy sync "
            "--data.only_class=0"
        )
    batches = local_batches(run, options.batches)
    of_data = {"data": run.data.redacted_path, "hold": run.data.cache, "from": run.init_from}
    else_asked = {"batches": batches, "noise_kimg": options.noise_kimg}
    network = network_digest(run, structure)
    file = cache_file(network, describe_device(device, run.device.precision), else_asked | of_data)
    profile = None if options.remeasure else read_cached_profile(file)
    if profile and profile.measured_for_s >= options.seconds:
        log(f"one worker was measured before, for {profile.measured_for_s:g} s")
    else:
        log(f"one worker is measured: about {OVERRUN_FACTOR * options.seconds:.0f} s")
        profile = dataclasses.replace(
            measure_profile(run, images, make_networks, device, options, batches), network_digest=network
        )
        profile = parse_profile(profile_to_yaml(profile), str(file))  # to the digit what is found again
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
    """Play it, with such batches on this worker."""
    run = dataclasses.replace(run, strategy=Sync(), ramp=())  # how ranks agree is no part of what one of them computes
    resident = PeakMemory(device)  # before there are networks

    def make_profiler() -> WorkerProfiler:
        return WorkerProfiler(build_session(run, World.solo(device), images, make_networks()), images, options.seconds)

    peaks = [measure_peak_flops(device, run.device.precision)]
    timed = make_profiler().measure_fields(batches, resident)
    noise = (
        make_profiler().measure_noise(options.noise_kimg) if options.noise_kimg else {}
    )  # of networks that start anew
    peaks.append(measure_peak_flops(device, run.device.precision))  # something else may have been busy then or now
    return Profile(
        recipe=run.recipe,
        network_digest="",
        device=dataclasses.replace(describe_device(device, run.device.precision), peak_flops=max(peaks)),
        d_steps=run.d_steps,
        measured_for_s=options.seconds,
        noise_scale=noise,
        **timed,
    )


class WorkerProfiler:
    """One game, played with some of its lanes or more, on a clock that goes on."""

    def __init__(self, session: Session, images: Dataset, seconds: float):
        self.session, self.images, self.seconds = session, images, seconds
        self.device = session.world.device

    @contextlib.contextmanager
    def session_for(self, run: Run) -> Iterator[Session]:
        """The same players before these lanes."""
        session = rebind_to_world(run, self.session.world, self.images, self.session.game, self.session.clock)
        with contextlib.closing(session.lanes):
            yield session

    def run_with_batch(self, batch: int) -> Run:
        run = self.session.run
        return with_lanes(run, batch * run.lanes // run.batch)

    def measure_fields(self, batches: Sequence[int], peak_memory: PeakMemory) -> dict[str, Any]:
        """Fields of a profile: all that does not ask how well networks learn."""
        game, memory = self.session.game, self.measure_memory(batches, peak_memory)
        rounds = self.measure_rounds([one.batch for one in memory])
        kinds, flops = self.measure_op_shares(rounds[-1])
        return {
            "layer_numels": tuple(tuple(size for _, size in player.flat.slices if size) for player in game.players),
            "moments_numel": tuple(player.moments.numel() for player in game.players),
            "num_params": tuple(sum(p.numel() for p in player.flat.parameters) for player in game.players),
            "flops_per_image": flops / memory[-1].batch,
            "g": tuple(found.g for found in rounds),
            "d": tuple(found.d for found in rounds),
            "g_batch_ratio": game.g_to_d_batch_ratio,
            "op_shares": kinds,
            "codec_cost": measure_codec_cost(device=self.device),
            "memory": memory,
            "data_wait_s": rounds[-1].data_wait_s,
        }

    def measure_memory(self, batches: Sequence[int], peak_memory: PeakMemory) -> tuple[MemoryUse, ...]:
        """Of every batch in rising order, as far as they fit."""
        found, there = list[MemoryUse](), describe_device(self.device, "").memory_bytes
        for batch in batches:
            if _extrapolate_bytes(found, batch) > MAX_MEMORY_SHARE * there:
                break
            peak_memory.reset()
            with self.session_for(self.run_with_batch(batch)) as session:
                play_round(session)  # from now on optimizers remember
                peaks = [count_round_cost(session, kind.step).peak_bytes for kind in step_kinds(session.run.objective)]
            backend_of(self.device).synchronize(self.device)
            found.append(MemoryUse(batch, max(peaks), peak_memory.increase_bytes()))
        return tuple(found)

    def measure_rounds(self, batches: Sequence[int]) -> list[RoundTimes]:
        """One batch after the other, and all of them several times: what else the machine does meets them alike."""
        samples = [RoundSamples(batch, step_kinds(self.session.run.objective)) for batch in batches]
        for _ in range(VISITS_PER_BATCH):
            for one in samples:
                with self.session_for(self.run_with_batch(one.batch)) as session:
                    time_rounds(session, TURNS_TIME_SHARE * self.seconds / len(samples) / VISITS_PER_BATCH, one)
        return [one.medians() for one in samples]

    def measure_op_shares(self, rounds: RoundTimes) -> tuple[dict[str, float], float]:
        """Shares of a round by kind of operation, and its operations: over all kinds of steps."""
        found, flops, kinds = list[dict[str, float]](), list[float](), step_kinds(self.session.run.objective)
        with self.session_for(self.run_with_batch(rounds.d.batch)) as session:
            for kind in kinds:
                flops.append(count_round_cost(session, kind.step).flops)
                session.clock.step = kind.step
                found.append(time_by_op_kind(lambda: play_round(session), self.device))
        of_steps = [kind.share for kind in kinds]
        seconds = {name: weighted_sum([one[name] for one in found], of_steps) for name in found[0]}
        whole = self.session.run.d_steps * rounds.d.total_s + rounds.g.total_s + rounds.data_wait_s
        return op_shares(seconds, whole), weighted_sum(flops, of_steps)

    def measure_noise(self, kimg: float) -> dict[Literal["G", "D"], NoiseScale]:
        """Train for so long, or as long as there is time, then compare lanes."""
        run, clock = self.session.run, self.session.clock
        with self.session_for(run) as session:
            ends = time.perf_counter() + TRAINING_TIME_SHARE * self.seconds
            while clock.images < 1000 * kimg and time.perf_counter() < ends:
                play_round(session)
        run, trained = run if run.lanes > 1 else with_lanes(run, NOISE_LANES), clock.kimg
        lengths: dict[str, list[SquaredGradNorms]] = {"G": [], "D": []}
        with self.session_for(
            dataclasses.replace(run, device=dataclasses.replace(run.device, lanes_per_pass=1))
        ) as session:
            ends = time.perf_counter() + NOISE_TIME_SHARE * self.seconds
            while len(lengths["G"]) < MAX_NOISE_ROUNDS and (
                len(lengths["G"]) < MIN_NOISE_ROUNDS or time.perf_counter() < ends
            ):
                for name, some in measure_grad_norms(session).items():
                    lengths[name].extend(some)
        return _noise_scales(lengths, self.session.game, run.lanes, trained)


def _extrapolate_bytes(measured: Sequence[MemoryUse], batch: int) -> float:
    """What a batch takes, as the two before it say."""
    if len(measured) < 2:
        return 0.0
    a, b = measured[-2:]
    return b.estimated_bytes + max(0.0, (b.estimated_bytes - a.estimated_bytes) / (b.batch - a.batch)) * (
        batch - b.batch
    )


def _noise_scales(
    norms: dict[str, list[SquaredGradNorms]], game: Game, lanes: int, kimg: float
) -> dict[Literal["G", "D"], NoiseScale]:
    scales = dict[Literal["G", "D"], NoiseScale]()
    if of_g := estimate_noise_scale(norms["G"], game.g_lane_batch, game.g_lane_batch * lanes, kimg):
        scales["G"] = of_g
    if of_d := estimate_noise_scale(norms["D"], game.d_lane_batch, game.d_lane_batch * lanes, kimg):
        scales["D"] = of_d
    return scales


def count_round_cost(session: Session, step: int) -> ResourceCounterMode:
    """Play a round; what tensors took at most, with those that stay between rounds, and its operations."""
    session.clock.step = step
    with ResourceCounterMode(persistent_tensors(session.game)) as counted:
        play_round(session)
    return counted


def persistent_tensors(game: Game) -> list[torch.Tensor]:
    """What stays between rounds: vectors, averages, what optimizers remember, buffers."""
    found = list[torch.Tensor]()
    for player in game.players:
        found += [player.flat.params, player.flat.grads, *player.net.buffers()]
        found += [player.ema.params] if player.ema else []
        state = [value for memory in player.optimizer.state.values() for value in memory.values()]
        found += [value for value in state if isinstance(value, torch.Tensor)]
    return found
