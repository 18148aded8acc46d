"""The runs of benchmarks/comm/clock.py: games, strategies and links, and the expected cost of each run."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.netns_lab import Link, relay_mtu
from benchmarks.quality.quality import RECIPES, drop_rates
from paragan.cli.bench_step import measure_run_profile
from paragan.cli.main import build_parser
from paragan.cli.train import resolve_run
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.config.sections import DataOptions
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, to_dict
from paragan.data.dataset import Dataset
from paragan.optim.policies import POLICIES
from paragan.plan.links import Links, parse_links
from paragan.plan.predict.predict import predict
from paragan.plan.predict.simulation import with_balanced_split
from paragan.plan.profile.profile import Profile, TurnProfile
from paragan.plan.profile.profiler import ProfileOptions
from paragan.plan.select.candidates import default_candidates
from paragan.plan.select.compare import Goal, Plan, compare_strategies
from paragan.train.prepare import prepare

LINKS = ("20 Mbit/s, 50 ms", "100 Mbit/s, 20 ms", "1 Gbit/s, 1 ms")  # of every host; latency one way
PACES_MS = {"digits": 100.0, "fashion": 250.0}  # of a round of `sync`, without waiting for others
KIMG = {"digits": 160.0, "fashion": 120.0}
PROFILE_S = 10.0
TCP_INITIAL_PACKETS, TCP_HEADER_BYTES = 10, 52
OUTPUT = (
    *("--evaluation.metrics=fd", "--output.best_metric=none"),
    *("--output.checkpoint_kimg=1e9", "--output.fakes_kimg=1e9"),
)
PERIODS = ("evaluation.every_kimg", "output.tick_kimg")
START_S, SCORE_S = 20.0, 3.0  # about, of a run: start and end; a score on links without latency
SCORE_COLLECTIVES, MEAN_COLLECTIVES = 30, 30  # about, of a score; and where ranks hold players of their own


@dataclass(frozen=True)
class Way:
    """The settings of one way to train a game.

    strategy : options that say how hosts cooperate
    game     : options that change what a host computes; ways with the same have the same pace
    """

    strategy: tuple[str, ...] = ()
    game: tuple[str, ...] = ()


def wire(name: str) -> str:
    return f"--strategy.wire={name}"


def period(rounds: int, *more: str) -> Way:
    return Way((f"--strategy.sync_period={rounds}", *more))


NO_ELASTIC = "--strategy.peer_timeout_s=0"  # a lost host ends the run: seconds are counted in the ordinary loop
GRADIENT_STEPS = ("--policy=dqgan", "--batch=64")  # the policy dposg has the same values
EXTRA_ADAM = (
    *("--objective.loss=wasserstein", "--objective.gp=10", "--nets.spectral=false"),
    *("--g.optimizer_wrapper=extragradient", "--d.optimizer_wrapper=extragradient"),
)
SIMULTANEOUS = "--strategy.order=simultaneous"
DILOCO = ("--strategy.outer=nesterov",)  # lr 0.7, momentum 0.9, as for language models
NESTEROV = (*DILOCO, "--strategy.outer.momentum=0.5")
FRAGMENTS = ("--strategy.fragments=4",)
DELAY = "--strategy.delay=8"
TOPK = (wire("topk"), "--strategy.wire.bits=2")
WAYS: dict[str, Way] = {
    "sync": Way(),
    "sync, int8": Way((wire("int8"),)),
    "sync, int4": Way((wire("int4"),)),
    "DQGAN": Way(("--strategy=DQGAN",), GRADIENT_STEPS),
    "DQGAN, exact wire": Way(("--strategy=DQGAN", wire("exact")), GRADIENT_STEPS),
    "CPOAdam": Way(("--strategy=CPOAdam",)),
    "CPOAdam-GQ": Way(("--strategy=CPOAdam-GQ",)),
    "quantized, int8": Way(("--strategy=quantized",)),
    "gossip": Way(("--strategy=gossip", NO_ELASTIC)),
    "DPOSG": Way(("--strategy=DPOSG", NO_ELASTIC), GRADIENT_STEPS),
    "CP-OAdam": Way(("--strategy=CP-OAdam",)),
    "DP-OAdam": Way(("--strategy=DP-OAdam", NO_ELASTIC)),
    "Rand-DP-OAdam": Way(("--strategy=Rand-DP-OAdam", NO_ELASTIC)),
    "async": Way(("--strategy=async",)),
    "async-gossip": Way(("--strategy=async-gossip", NO_ELASTIC)),
    "period 8": period(8),
    "period 32": period(32),
    "period 128": period(128),
    "period 32, int4": period(32, wire("int4")),
    "period 32, topk 2 bits": period(32, *TOPK),
    "period 32, 4 fragments": period(32, *FRAGMENTS),
    "period 32, 4 fragments, delay 8": period(32, *FRAGMENTS, DELAY),
    "period 32, 4 fragments, delay 8, int4": period(32, *FRAGMENTS, DELAY, wire("int4")),
    "period 32, 4 fragments, delay 8, topk 2 bits": period(32, *FRAGMENTS, DELAY, *TOPK),
    "period 8, Nesterov": period(8, *NESTEROV),
    "period 32, Nesterov": period(32, *NESTEROV),
    "period 128, Nesterov": period(128, *NESTEROV),
    "period 8, DiLoCo": period(8, *DILOCO),
    "period 32, DiLoCo": period(32, *DILOCO),
    "ExtraAdam, exact": Way((SIMULTANEOUS,), EXTRA_ADAM),
    "ExtraAdam, int8": Way((SIMULTANEOUS, wire("int8")), EXTRA_ADAM),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "grid": (
        *("sync", "sync, int8", "sync, int4", "DQGAN", "gossip", "DPOSG", "async", "async-gossip"),
        *(name for name in WAYS if name.startswith("period")),
    ),
    # Liu et al. 2020: decentralized against centralized, at low bandwidth and at high latency
    "dposg": ("CP-OAdam", "DP-OAdam", "Rand-DP-OAdam", "gossip", "DPOSG"),
    # Chen et al. 2020: quantized against exact
    "dqgan": ("CPOAdam", "CPOAdam-GQ", "quantized, int8", "DQGAN, exact wire", "DQGAN"),
    # Q-GenX: WGAN-GP by ExtraAdam, exact and with 8 bits, on three nodes
    "qgenx": ("ExtraAdam, exact", "ExtraAdam, int8"),
}


@dataclass(frozen=True)
class Job:
    """A run of the grid.

    images_per_host : of a step; 0: the batch of the way, whatever the number of hosts
    """

    game: str
    hosts: int
    link: str
    way: str
    seed: int
    kimg: float
    pace_ms: float
    images_per_host: int = 0

    @property
    def key(self) -> dict[str, Any]:
        """The fields of a row that name the job."""
        return dataclasses.asdict(self)

    @property
    def folder(self) -> str:
        words = (self.game, self.hosts, self.link, self.way, f"{self.kimg:g}", f"{self.pace_ms:g}")
        more = (f"each-{self.images_per_host}",) if self.images_per_host else ()
        return re.sub(r"[^\w.]+", "-", " ".join(map(str, (*words, *more, self.seed))))

    @property
    def links(self) -> Links:
        """The links of the laboratory, with the slow start of its TCP: a connection that was idle begins anew."""
        links = parse_links(f"{self.hosts} hosts, {self.link}")
        mtu = relay_mtu([self._lab_link])
        return dataclasses.replace(links, initial_window_bytes=TCP_INITIAL_PACKETS * (mtu - TCP_HEADER_BYTES))

    @property
    def _lab_link(self) -> Link:
        between = parse_links(f"2 hosts, {self.link}").link_between(0, 1)
        return Link(8 * between.bandwidth, between.latency)

    @property
    def lab_options(self) -> tuple[str, ...]:
        """The options of benchmarks/lib/netns_lab.py."""
        link = self._lab_link
        return (f"--hosts={self.hosts}", f"--rate={1e-3 * link.rate:.0f}kbit", f"--latency={1e3 * link.latency:g}ms")


class Grid:
    """The runs that jobs stand for.

    data     : of the games that need a path
    profiles : what a host takes, by what it computes, as measured; kept with the results, so that a run which goes on
               has the same pace
    """

    def __init__(self, data: str | None, every_kimg: float, profiles: dict[str, Any]):
        self.data = data
        self.every_kimg = every_kimg
        self.profiles = profiles

    def settings(self, job: Job) -> tuple[str, ...]:
        """Return the arguments of `paragan train`, but for the seed and the folder.

        Raises:
            UsageError: a strategy cannot run it.
        """
        way = WAYS[job.way]
        settings = (*self.game_settings(job.game, way.game), *way.strategy)
        if job.images_per_host:
            settings = (*settings, f"--batch={job.images_per_host * job.hosts}")
        settings = (*settings, f"--kimg={job.kimg:g}")
        run = self.resolve(settings, job.hosts)
        if job.hosts > 1 and run.strategy.has_auto_split:
            split = with_balanced_split(run, self.profile(job), job.hosts).strategy.split
            settings = (*settings, f"--strategy.split={split}")
        return settings

    def game_settings(self, game: str, changes: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the recipe of a game with the changes of a way, and the settings of every run."""
        policy = next((c.partition("=")[2] for c in changes if c.startswith("--policy=")), "")
        recipe = drop_rates(RECIPES[game], policy if policy in POLICIES else "")
        data = (f"--data={self.data}",) if self.data and game != "digits" else ()
        return (*recipe, *data, *changes, *OUTPUT, *(f"--{name}={self.every_kimg:g}" for name in PERIODS))

    def resolve(self, settings: Sequence[str], hosts: int) -> Run:
        """Return the run of a command line on so many hosts, with all fields resolved."""
        options, rest = build_parser().parse_known_args(["train", *settings])
        run, _, _ = resolve_run(options, rest)
        validate(run, hosts)
        return prepare(run, hosts, load_data_once(run.data)).run

    def profile(self, job: Job) -> Profile:
        """Return what a host takes for the game of a job at its pace: the measured profile, all times in proportion."""
        own = self._measured(job.game, WAYS[job.way].game)
        base = self.resolve(self.game_settings(job.game), 1)
        images = job.images_per_host or base.batch / job.hosts
        return scale_profile(own, job.pace_ms / 1000 / self._measured(job.game, ()).round_s(images))

    def _measured(self, game: str, changes: tuple[str, ...]) -> Profile:
        key = " ".join((game, *changes))
        if key not in self.profiles:
            run = self.resolve(self.game_settings(game, changes), 1)
            profile, _ = measure_run_profile(run, ProfileOptions(seconds=PROFILE_S, noise_kimg=0))
            self.profiles[key] = to_dict(profile)
        return from_dict(Profile, self.profiles[key])

    def cost(self, job: Job) -> Cost:
        """Return what a run is expected to take. Raises UsageError if a strategy cannot run it."""
        run = self.resolve(self.settings(job), job.hosts)
        prediction = predict(run, self.profile(job), job.links)
        scores = run.kimg / self.every_kimg if self.every_kimg else 1
        has_own_players = run.strategy.replicas_drift or run.strategy.splits_ranks
        collectives = SCORE_COLLECTIVES + MEAN_COLLECTIVES * has_own_players
        hops_s = 2 * (job.hosts - 1) * (job.links.latency or 0.0)  # of an all-reduce
        wall_s = prediction.step_s * run.total_rounds + START_S + scores * (SCORE_S + collectives * hops_s)
        return Cost(run.total_rounds, prediction.step_s, prediction.sent_bytes, wall_s)

    def plan(self, job: Job) -> Plan:
        """Return what `paragan plan` says of the game and the links of a job, at the pace of its hosts."""
        run = self.resolve((*self.settings(job), "--strategy=sync"), 1)
        profile = self.profile(job)
        candidates = default_candidates(job.hosts, profile, run.batch)
        return compare_strategies(run, candidates, profile, job.links, job.hosts, Goal(job.kimg))


@dataclass(frozen=True)
class Cost:
    """The expected cost of a run.

    round_s    : seconds of a round
    sent_bytes : by the busiest host in a round
    wall_s     : of the run, with start and scores
    """

    rounds: int
    round_s: float
    sent_bytes: int
    wall_s: float


@functools.cache
def load_data_once(options: DataOptions) -> Dataset:
    return load_dataset(options)


def scale_profile(profile: Profile, factor: float) -> Profile:
    """Return the profile of a device that takes `factor` times as long; coding takes the time of this machine."""

    def scale(turn: TurnProfile) -> TurnProfile:
        times = {name: factor * getattr(turn, name) for name in ("backward_s", "total_s", "g_forward_s")}
        return dataclasses.replace(turn, grads_ready_s=tuple(factor * s for s in turn.grads_ready_s), **times)

    return dataclasses.replace(profile, g=tuple(map(scale, profile.g)), d=tuple(map(scale, profile.d)))


def make_jobs(
    games: Sequence[str],
    hosts: Sequence[int],
    links: Sequence[str],
    ways: Sequence[str],
    seeds: Sequence[int],
    kimg: Mapping[str, float],
    paces_ms: Mapping[str, float],
    images_per_host: int = 0,
) -> list[Job]:
    """Return all combinations: every way with the first seed, then with the next."""
    return [
        Job(game, count, link, way, seed, kimg[game], paces_ms[game], images_per_host)
        for seed in seeds
        for game in games
        for count in hosts
        for link in links
        for way in ways
    ]


def parse_ways(text: str) -> list[str]:
    """Parse names of ways and of groups, separated by ";".

    Raises:
        UsageError: there is no such way.
    """
    ways: list[str] = []
    for name in map(str.strip, text.split(";")):
        if name not in WAYS and name not in GROUPS:
            raise UsageError(f"--ways: there is no {name}. Use {'; '.join((*GROUPS, *WAYS))}")
        ways += GROUPS.get(name, (name,))
    return list(dict.fromkeys(ways))
