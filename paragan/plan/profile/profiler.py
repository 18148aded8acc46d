"""A profile of one worker: its game is played here, alone, and timed. docs/profile.md."""

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
from paragan.config.run import Run, on_lanes
from paragan.core.devices import kind_of
from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.data.dataset import Images
from paragan.game.game import Game
from paragan.plan.memory import Footprint
from paragan.plan.profile.codec_cost import handling
from paragan.plan.profile.hardware import Resident, described, peak_flops
from paragan.plan.profile.noise_scale import Lengths, gradient_lengths, noise_scale
from paragan.plan.profile.op_breakdown import shares, time_by_kind
from paragan.plan.profile.profile import Memory, Noise, Profile, profile_from, written_profile
from paragan.plan.profile.profile_cache import found, keep, kept_file, network_digest
from paragan.plan.profile.turn_timing import Rounds, Samples, kinds_of, time_rounds, weighted
from paragan.strategies.sync import Sync
from paragan.train.build import Pair
from paragan.train.loop import play_round
from paragan.train.session import Session, assemble, seat

LANES = 8  # whose gradients are compared, where the run has one
FEWEST, STEPS = 4, 32  # rounds for the noise scale
VISITS = 3  # to every batch
TURNS, TRAINING, NOISE = 0.4, 0.3, 0.15  # of the seconds there are
FULL = 0.9  # of the device's memory: a batch that would take more is not tried
Positive = Annotated[int, Field(ge=1)]


TAKES = 4 / 3  # so much longer than it is asked to take


def unsaid(text: str) -> None:
    """Nobody listens."""


@record
class Asked:
    """What is to be measured.

    batches    : images of the reals' batch on this worker (none: from one lane's to the whole batch of the run)
    seconds    : about how long, with a third more for what cannot be shortened (TAKES)
    noise_kimg : how far the networks are trained before their gradients' noise is taken, if the time is enough (0: not)
    again      : whether to measure what was measured before
    """

    batches: tuple[Positive, ...] = ()
    seconds: Annotated[float, Field(ge=1, le=1e5)] = 30.0
    noise_kimg: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    again: bool = False


def local_batches(run: Run, asked: Sequence[int] = ()) -> list[int]:
    """Batches of whole lanes, in rising order. Unusable where one that is asked for is none."""
    lane = run.batch // run.lanes
    for batch in asked:
        if batch % lane:
            down = max(lane, batch - batch % lane)
            raise Unusable(
                f"--batches {batch} is no multiple of a lane's {lane} images (--batch {run.batch} over --lanes "
                f"{run.lanes}): try {down} or {down + lane}, or other --lanes"
            )
    if asked:
        return sorted(set(asked))
    doubled = [lane * 2**i for i in range(run.lanes.bit_length())]
    return sorted({*(batch for batch in doubled if batch < run.batch), run.batch})


def profile_of(
    run: Run,
    images: Images,
    pair: Callable[[], Pair],
    device: torch.device,
    asked: Asked,
    structure: str = "",
    say: Callable[[str], object] = unsaid,
) -> tuple[Profile, Path]:
    """The profile of a run that is resolved, and where it is kept: found there, if that was measured for as long, or
    measured and kept.

    pair: its networks anew, on the device; structure: what they are made of, if they are the user's own; say: is told
    which of both, before it takes time.
    """
    if run.per_label:
        raise Unusable(
            f"--strategy {run.strategy.name} plays a game for every label: profile one of them, with --strategy sync "
            "--data.only=0"
        )
    batches = local_batches(run, asked.batches)
    of_data = {"data": run.data.told, "hold": run.data.hold, "from": run.init_from}
    else_asked = {"batches": batches, "noise_kimg": asked.noise_kimg}
    network = network_digest(run, structure)
    file = kept_file(network, described(device, run.device.precision), else_asked | of_data)
    profile = None if asked.again else found(file)
    if profile and profile.seconds >= asked.seconds:
        say(f"one worker was measured before, for {profile.seconds:g} s")
    else:
        say(f"one worker is measured: about {TAKES * asked.seconds:.0f} s")
        profile = dataclasses.replace(measured(run, images, pair, device, asked, batches), network=network)
        profile = profile_from(written_profile(profile), str(file))  # to the digit what is found again
        keep(file, profile)
    return profile, file


def measured(
    run: Run, images: Images, pair: Callable[[], Pair], device: torch.device, asked: Asked, batches: Sequence[int]
) -> Profile:
    """Play it, with such batches on this worker."""
    run = dataclasses.replace(run, strategy=Sync(), ramp=())  # how ranks agree is no part of what one of them computes
    resident = Resident(device)  # before there are networks

    def bench() -> Bench:
        return Bench(assemble(run, World.solo(device), images, pair()), images, asked.seconds)

    peaks = [peak_flops(device, run.device.precision)]
    timed = bench().timed(batches, resident)
    noise = bench().noise(asked.noise_kimg) if asked.noise_kimg else {}  # of networks that start anew
    peaks.append(peak_flops(device, run.device.precision))  # something else may have been busy then or now
    return Profile(
        recipe=run.recipe,
        network="",
        device=dataclasses.replace(described(device, run.device.precision), peak_flops=max(peaks)),
        d_steps=run.d_steps,
        seconds=asked.seconds,
        noise=noise,
        **timed,
    )


class Bench:
    """One game, played with some of its lanes or more, on a clock that goes on."""

    def __init__(self, session: Session, images: Images, seconds: float):
        self.session, self.images, self.seconds = session, images, seconds
        self.device = session.world.device

    @contextlib.contextmanager
    def seated(self, run: Run) -> Iterator[Session]:
        """The same players before these lanes."""
        session = seat(run, self.session.world, self.images, self.session.game, self.session.clock)
        with contextlib.closing(session.lanes):
            yield session

    def of(self, batch: int) -> Run:
        run = self.session.run
        return on_lanes(run, batch * run.lanes // run.batch)

    def timed(self, batches: Sequence[int], resident: Resident) -> dict[str, Any]:
        """Fields of a profile: all that does not ask how well networks learn."""
        game, memory = self.session.game, self.memory(batches, resident)
        rounds = self.rounds([one.batch for one in memory])
        kinds, flops = self.kinds(rounds[-1])
        return {
            "layers": tuple(tuple(size for _, size in player.flat.slices if size) for player in game.players),
            "moments": tuple(player.moments.numel() for player in game.players),
            "params": tuple(sum(p.numel() for p in player.flat.parameters) for player in game.players),
            "flops": flops / memory[-1].batch,
            "g": tuple(found.g for found in rounds),
            "d": tuple(found.d for found in rounds),
            "ratio": game.ratio,
            "kinds": kinds,
            "handling": handling(device=self.device),
            "memory": memory,
            "data": rounds[-1].wait,
        }

    def memory(self, batches: Sequence[int], resident: Resident) -> tuple[Memory, ...]:
        """Of every batch in rising order, as far as they fit."""
        found, there = list[Memory](), described(self.device, "").memory
        for batch in batches:
            if _foretold(found, batch) > FULL * there:
                break
            resident.reset()
            with self.seated(self.of(batch)) as session:
                play_round(session)  # from now on optimizers remember
                peaks = [count_round(session, kind.step).peak for kind in kinds_of(session.run.objective)]
            kind_of(self.device).synchronize(self.device)
            found.append(Memory(batch, max(peaks), resident.rise()))
        return tuple(found)

    def rounds(self, batches: Sequence[int]) -> list[Rounds]:
        """One batch after the other, and all of them several times: what else the machine does meets them alike."""
        samples = [Samples(batch, kinds_of(self.session.run.objective)) for batch in batches]
        for _ in range(VISITS):
            for one in samples:
                with self.seated(self.of(one.batch)) as session:
                    time_rounds(session, TURNS * self.seconds / len(samples) / VISITS, one)
        return [one.medians() for one in samples]

    def kinds(self, rounds: Rounds) -> tuple[dict[str, float], float]:
        """Shares of a round by kind of operation, and its operations: over all kinds of steps."""
        found, flops, kinds = list[dict[str, float]](), list[float](), kinds_of(self.session.run.objective)
        with self.seated(self.of(rounds.d.batch)) as session:
            for kind in kinds:
                flops.append(count_round(session, kind.step).flops)
                session.clock.step = kind.step
                found.append(time_by_kind(lambda: play_round(session), self.device))
        of_steps = [kind.share for kind in kinds]
        seconds = {name: weighted([one[name] for one in found], of_steps) for name in found[0]}
        whole = self.session.run.d_steps * rounds.d.whole + rounds.g.whole + rounds.wait
        return shares(seconds, whole), weighted(flops, of_steps)

    def noise(self, kimg: float) -> dict[Literal["G", "D"], Noise]:
        """Train for so long, or as long as there is time, then compare lanes."""
        run, clock = self.session.run, self.session.clock
        with self.seated(run) as session:
            ends = time.perf_counter() + TRAINING * self.seconds
            while clock.images < 1000 * kimg and time.perf_counter() < ends:
                play_round(session)
        run, trained = run if run.lanes > 1 else on_lanes(run, LANES), clock.kimg
        lengths: dict[str, list[Lengths]] = {"G": [], "D": []}
        with self.seated(dataclasses.replace(run, device=dataclasses.replace(run.device, merge=1))) as session:
            ends = time.perf_counter() + NOISE * self.seconds
            while len(lengths["G"]) < STEPS and (len(lengths["G"]) < FEWEST or time.perf_counter() < ends):
                for name, some in gradient_lengths(session).items():
                    lengths[name].extend(some)
        return _scales(lengths, self.session.game, run.lanes, trained)


def _foretold(known: Sequence[Memory], batch: int) -> float:
    """What a batch takes, as the two before it say."""
    if len(known) < 2:
        return 0.0
    a, b = known[-2:]
    return b.foreseen + max(0.0, (b.foreseen - a.foreseen) / (b.batch - a.batch)) * (batch - b.batch)


def _scales(lengths: dict[str, list[Lengths]], game: Game, lanes: int, kimg: float) -> dict[Literal["G", "D"], Noise]:
    scales = dict[Literal["G", "D"], Noise]()
    if of_g := noise_scale(lengths["G"], game.g_lane, game.g_lane * lanes, kimg):
        scales["G"] = of_g
    if of_d := noise_scale(lengths["D"], game.d_lane, game.d_lane * lanes, kimg):
        scales["D"] = of_d
    return scales


def count_round(session: Session, step: int) -> Footprint:
    """Play a round; what tensors took at most, with those that stay between rounds, and its operations."""
    session.clock.step = step
    with Footprint(standing(session.game)) as counted:
        play_round(session)
    return counted


def standing(game: Game) -> list[torch.Tensor]:
    """What stays between rounds: vectors, averages, what optimizers remember, buffers."""
    found = list[torch.Tensor]()
    for player in game.players:
        found += [player.flat.params, player.flat.grads, *player.net.buffers()]
        found += [player.average.params] if player.average else []
        state = [value for memory in player.optimizer.state.values() for value in memory.values()]
        found += [value for value in state if isinstance(value, torch.Tensor)]
    return found
