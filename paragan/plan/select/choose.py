"""What `--strategy auto` becomes on the ranks there are: one worker profiled, links measured, strategies predicted, and
those that are about as fast tried.

Every rank calls `decided`, and learns the same. On one rank it is sync, or async where D is faster on G's images.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paragan.comm.process_group import Lost
from paragan.comm.world import World
from paragan.config.resolve import settled, spec_of
from paragan.config.run import Run, on_lanes
from paragan.config.user_code import is_own
from paragan.config.validate import validate
from paragan.core.devices import kind_of
from paragan.core.errors import Unusable
from paragan.core.schema import build, plain
from paragan.data.dataset import Images
from paragan.plan.links import Links
from paragan.plan.measure_links import measure_links
from paragan.plan.profile.hardware import described
from paragan.plan.profile.profile import Profile, Turn, profile_from, read_profile, written_profile
from paragan.plan.profile.profile_cache import network_digest, refuse_other, structure_of
from paragan.plan.profile.profiler import Asked, profile_of
from paragan.plan.select import playoff
from paragan.plan.select.candidates import Candidate, candidates, strategy_of
from paragan.plan.select.compare import Goal, Plan, search
from paragan.strategies.async_paragan import Async
from paragan.strategies.auto import Auto, Chosen
from paragan.strategies.sync import Sync
from paragan.train.build import build_nets
from paragan.train.console import Screen
from paragan.train.loop import play_round
from paragan.train.rank_agreement import together
from paragan.train.run_dir import Wanted, begun_as, refuse_given
from paragan.train.session import Session, assemble, initialise

WAIT_S = 600.0  # for rank 0, beyond what it was asked to take
ROUNDS, SECONDS = 3, 1.0  # that all play at once: at least so many, at least so long
WORD = "strategy: "  # what is said of it begins so
SAID = 3  # reasons against others that are written down


def is_open(run: Run, ranks: int) -> bool:
    """Whether a strategy is to be chosen: it was asked for, and not for so many ranks yet."""
    return isinstance(run.strategy, Auto) or run.chosen.ranks not in (0, ranks)


def decided(run: Run, images: Images, world: World, wanted: Wanted, screen: Screen) -> Run:
    """The run that is played. What its folder was begun with stands, so long as there are as many ranks."""
    if not is_open(run, world.size):
        return run
    asked = run.strategy if isinstance(run.strategy, Auto) else run.chosen.asked
    for name in asked.strategies:
        strategy_of(name)  # refuses what there is not
    former = together(world, lambda: _former(run, wanted, world))
    told = json.loads(world.agree(json.dumps(former))[0])
    before = _as(run, told) if told else None
    if before and not is_open(before, world.size):
        screen.say(f"strategy: {before.strategy.name}, as this run was begun")
        return before
    kin = before or (None if isinstance(run.strategy, Auto) else run)
    try:
        found = _chosen(kin or run, asked, kin, images, world, screen)
    except Lost as error:
        raise Lost(f"while a strategy was chosen, {error}") from error
    for line in found.about:
        if line.startswith(WORD):
            screen.say(line)
    return found


def _former(run: Run, wanted: Wanted, world: World) -> dict[str, Any]:
    """What the folder that this run goes on in was begun with; nothing where there is none. Rank 0 looks."""
    if not world.first:
        return {}
    refuse_given(wanted, run)
    begun = begun_as(wanted, run)
    return {name: plain(getattr(begun, name)) for name in ("strategy", "chosen", "about")} if begun else {}


def _as(run: Run, told: dict[str, Any]) -> Run:
    fields = build(Run, {**told, "recipe": run.recipe})
    return settled(replace(run, strategy=fields.strategy, chosen=fields.chosen, about=fields.about))


def _chosen(run: Run, asked: Auto, kin: Run | None, images: Images, world: World, screen: Screen) -> Run:
    """kin: the run as it was begun, whose checkpoint has to be followed."""
    if world.size == 1 and kin:
        strategy = kin.strategy if kin.strategy.name != "sync" else Sync()
        if ":" in getattr(strategy, "split", ""):
            strategy = replace(strategy, split="auto")  # pyright: ignore[reportCallIssue]
        return _with(run, strategy, Chosen(1, asked), [f"{strategy.name}: one rank has nobody to agree with"])
    profile = _profile(run, asked, images, world, screen)
    profile = slowed(profile, _beside(run, images, world) / profile.round_s(run.batch / world.size))
    links = Links(hosts=1, up=1.0, latency=0.0)
    if world.size > 1:
        screen.say("strategy: the links are measured")
        links = measure_links(world, quick=True)

    plans = list[Plan]()  # of rank 0

    def compare() -> str:
        if not world.first:
            return ""
        options = [replace(one, strategy=fixed(one.strategy)) for one in compared(asked, kin, profile, run, world.size)]
        memory = profile.device.memory // (world.place.local_size if world.device.type == "cpu" else 1)
        goal = Goal(run.kimg, memory=memory, margin=asked.margin)
        plans.append(search(run, options, profile, links, world.size, goal))
        return json.dumps([row.name for row in playoff.finalists(plans[0], asked.seconds)])

    names = json.loads(world.agree(together(world, compare, WAIT_S))[0])
    seconds = _final(run, names, images, world, screen) if len(names) > 1 else {}

    def choose() -> str:
        if not world.first:
            return ""
        why = [*_told(plans[0], seconds), *_bound(kin), *([f"links: {links.told()}"] if world.size > 1 else [])]
        first = playoff.winner(plans[0], seconds) if seconds else plans[0].first
        return json.dumps({"name": first.name, "why": why})

    told = json.loads(world.agree(together(world, choose, WAIT_S))[0])
    return _with(run, fixed(strategy_of(told["name"])), Chosen(world.size, asked), told["why"])


def _final(run: Run, names: Sequence[str], images: Images, world: World, screen: Screen) -> dict[str, float]:
    """Seconds of a round of each, played."""
    screen.say(f"strategy: {', '.join(names)} are about as fast: each plays some rounds")

    def begun(name: str) -> Session:
        played = settled(replace(run, strategy=fixed(strategy_of(name)), chosen=Chosen()))
        return assemble(played, world, images, _pair(run, images, world))

    return playoff.played(names, begun, world)


def _with(run: Run, strategy: Any, chosen: Chosen, why: Sequence[str]) -> Run:
    about = [line for line in run.about if not line.startswith(WORD)]  # what was said for other ranks
    about += [f"{WORD}{line}" for line in why]
    found = settled(replace(run, strategy=strategy, chosen=chosen, about=tuple(about)))
    validate(found, chosen.ranks)
    return found


def fixed(strategy: Any) -> Any:
    """As ranks play it that have met already: the run ends with the first one lost."""
    return replace(strategy, lost_after_s=0.0) if hasattr(strategy, "topology") else strategy


def compared(asked: Auto, kin: Run | None, profile: Profile, run: Run, ranks: int) -> list[Candidate]:
    """What may be chosen; of a run that was begun, what follows it."""
    if asked.strategies:
        found = [Candidate(name, strategy_of(name)) for name in asked.strategies]
    else:
        found = candidates(ranks, profile, run.batch)
    found = [one for one in found if one.promise != "a game per label" and _fits(one, kin or run)]
    if kin:
        found = [one for one in found if follows(one.strategy, kin.strategy)]
    if not found:
        went_on = f" that goes on from {kin.strategy.name}" if kin else ""
        raise Unusable(f"--strategy auto: none of strategy.strategies={','.join(asked.strategies)} is one{went_on}")
    return found


def _fits(option: Candidate, run: Run) -> bool:
    """Whether players can learn by it as the run says."""
    try:
        settled(replace(run, strategy=option.strategy))
    except Unusable:
        return False
    return True


def follows(strategy: Any, before: Any) -> bool:
    """Whether a checkpoint of the one before is one of this: the same players and optimizers, and the same past."""
    if isinstance(before, Async) and isinstance(strategy, Async):
        teams = (before.split != "none") == (strategy.split != "none")
        return teams and replace(strategy, split=before.split) == before
    return strategy.name == before.name


def _told(plan: Plan, seconds: Mapping[str, float]) -> list[str]:
    """The choice, and what speaks against the next ones."""
    rows = playoff.told(plan, seconds) if seconds else [f"{plan.first.name}: {plan.first.why}"]
    others = [row for row in plan.rows[1:] if row.promise != plan.first.promise or row.name == "sync"]
    rows += [f"not {row.name}: {row.why}" for row in others if row.name not in seconds][:SAID]
    return [*rows, *plan.first.limits, *plan.warnings]


def _bound(kin: Run | None) -> list[str]:
    return (
        [f"the run was begun as {kin.strategy.name}: only other forms of it go on from its checkpoint"] if kin else []
    )


# what is measured ---------------------------------------------------------------------------------------


def _profile(run: Run, asked: Auto, images: Images, world: World, screen: Screen) -> Profile:
    """Of rank 0, known to all."""

    def measure() -> str:
        return written_profile(_of_first(run, asked, images, world, screen)) if world.first else ""

    told = together(world, measure, WAIT_S + 10 * asked.seconds)
    return profile_from(world.agree(told)[0], "profile")


def _of_first(run: Run, asked: Auto, images: Images, world: World, screen: Screen) -> Profile:
    plainly = settled(replace(run, strategy=Sync(), chosen=Chosen()))
    structure = ""
    if is_own(run.nets, run.objective):
        nets = _pair(run, images, world)
        structure = structure_of(nets.g, nets.d)
    if not asked.profile:
        wanted = Asked(seconds=asked.seconds)

        def say(text: str) -> None:
            screen.say(f"strategy: {text}")

        return profile_of(plainly, images, lambda: _pair(run, images, world), world.device, wanted, structure, say)[0]
    profile = read_profile(Path(asked.profile))
    here = described(world.device, run.device.precision)
    remake = f"paragan bench step {run.recipe} --out {asked.profile}"
    refuse_other(profile, network_digest(plainly, structure), here, remake)
    return profile


def _pair(run: Run, images: Images, world: World) -> Any:
    pair = build_nets(run, spec_of(run, images), world.device)
    return initialise(pair, Path(run.init_from)) if run.init_from else pair


def _beside(run: Run, images: Images, world: World) -> float:
    """Seconds of a round that every rank plays alone while all others do: they may share cores, caches, a device."""
    lanes = max(1, run.lanes // world.size)
    alone = replace(on_lanes(run, lanes), strategy=Sync(), chosen=Chosen())
    session = assemble(alone, World.solo(world.device), images, _pair(run, images, world))
    times = list[float]()
    try:
        play_round(session)
        kind_of(world.device).synchronize(world.device)
        world.agree("beside")
        ends = time.perf_counter() + SECONDS
        while len(times) < ROUNDS or time.perf_counter() < ends:
            start = time.perf_counter()
            play_round(session)
            kind_of(world.device).synchronize(world.device)
            times.append(time.perf_counter() - start)
    finally:
        session.lanes.close()
    mine = statistics.median(times) * run.batch / world.size / alone.batch
    return statistics.fmean(map(float, world.agree(repr(mine))))


def slowed(profile: Profile, factor: float) -> Profile:
    """A worker who takes so many times as long."""

    def of(turns: Sequence[Turn]) -> tuple[Turn, ...]:
        return tuple(
            Turn(t.batch, tuple(factor * x for x in t.ready), *(factor * x for x in (t.backward, t.whole, t.made)))
            for t in turns
        )

    handling = {name: factor * seconds for name, seconds in profile.handling.items()}
    return replace(profile, g=of(profile.g), d=of(profile.d), handling=handling)


def decide_strategy(run: Any, images: Any, world: Any, wanted: Any, screen: Any) -> Any:
    """The run that is trained, where its strategy was left open."""
    if run.strategy.name != "auto" and not run.chosen.ranks:
        return run

    return decided(run, images, world, wanted, screen)
