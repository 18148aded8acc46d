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

from paragan.comm.process_group import CommunicationError
from paragan.comm.world import World
from paragan.config.resolve import fill_strategy_defaults, make_spec
from paragan.config.run import Run, with_lanes
from paragan.config.user_code import is_user_defined
from paragan.config.validate import validate
from paragan.core.devices import backend_of
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, to_dict
from paragan.data.dataset import Dataset
from paragan.plan.links import Links
from paragan.plan.measure_links import measure_links
from paragan.plan.profile.hardware import describe_device
from paragan.plan.profile.profile import Profile, TurnProfile, parse_profile, profile_to_yaml, read_profile
from paragan.plan.profile.profile_cache import check_profile_matches, network_digest, structure_digest
from paragan.plan.profile.profiler import ProfileOptions, profile_run
from paragan.plan.select import playoff
from paragan.plan.select.candidates import Candidate, default_candidates, parse_strategy
from paragan.plan.select.compare import Goal, Plan, compare_strategies
from paragan.strategies.auto import Auto, AutoChoice
from paragan.strategies.sync import Sync
from paragan.train.build import build_networks
from paragan.train.console import RunConsole
from paragan.train.loop import play_round
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.run_dir import RunDirRequest, check_run_dir, previous_auto_run
from paragan.train.session import Session, build_session, init_from_model

EXTRA_TIMEOUT_S = 600.0  # for rank 0, beyond what it was asked to take
MIN_CONTENDED_ROUNDS, MIN_CONTENDED_S = 3, 1.0  # that all play at once: at least so many, at least so long
REASON_PREFIX = "strategy: "  # what is said of it begins so
MAX_REJECTIONS = 3  # reasons against others that are written down


def is_strategy_open(run: Run, ranks: int) -> bool:
    """Whether a strategy is to be chosen: it was asked for, and not for so many ranks yet."""
    return run.strategy.auto_request is not None or run.auto_choice.ranks not in (0, ranks)


def choose_strategy(run: Run, images: Dataset, world: World, request: RunDirRequest, console: RunConsole) -> Run:
    """The run that is played. What its folder was begun with stands, so long as there are as many ranks."""
    if not is_strategy_open(run, world.size):
        return run
    asked = run.strategy.auto_request or run.auto_choice.request
    for name in asked.strategies:
        parse_strategy(name)  # refuses what there is not
    former = on_all_ranks(world, lambda: _previous_fields(run, request, world))
    told = json.loads(world.all_gather_str(json.dumps(former))[0])
    before = _with_saved_strategy(run, told) if told else None
    if before and not is_strategy_open(before, world.size):
        console.print(f"strategy: {before.strategy.name}, as this run was begun")
        return before
    kin = before or (None if run.strategy.auto_request else run)
    try:
        found = _choose(kin or run, asked, kin, images, world, console)
    except CommunicationError as error:
        raise CommunicationError(f"while a strategy was chosen, {error}") from error
    for line in found.reasons:
        if line.startswith(REASON_PREFIX):
            console.print(line)
    return found


def _previous_fields(run: Run, request: RunDirRequest, world: World) -> dict[str, Any]:
    """What the folder that this run goes on in was begun with; nothing where there is none. Rank 0 looks."""
    if not world.is_main:
        return {}
    check_run_dir(request, run)
    begun = previous_auto_run(request, run)
    return {name: to_dict(getattr(begun, name)) for name in ("strategy", "auto_choice", "reasons")} if begun else {}


def _with_saved_strategy(run: Run, saved: dict[str, Any]) -> Run:
    fields = from_dict(Run, {**saved, "recipe": run.recipe})
    return fill_strategy_defaults(
        replace(run, strategy=fields.strategy, auto_choice=fields.auto_choice, reasons=fields.reasons)
    )


def _choose(run: Run, auto: Auto, resumed: Run | None, images: Dataset, world: World, console: RunConsole) -> Run:
    """kin: the run as it was begun, whose checkpoint has to be followed."""
    if world.size == 1 and resumed:
        strategy = resumed.strategy.on_one_rank()
        return _with_strategy(
            run, strategy, AutoChoice(1, auto), [f"{strategy.name}: one rank has nobody to agree with"]
        )
    profile = _share_profile(run, auto, images, world, console)
    profile = scale_profile(profile, _contended_round_s(run, images, world) / profile.round_s(run.batch / world.size))
    links = Links(hosts=1, up=1.0, latency=0.0)
    if world.size > 1:
        console.print("strategy: the links are measured")
        links = measure_links(world, quick=True)

    plans = list[Plan]()  # of rank 0

    def compare() -> str:
        if not world.is_main:
            return ""
        options = [
            replace(one, strategy=one.strategy.without_rank_loss())
            for one in comparable_candidates(auto, resumed, profile, run, world.size)
        ]
        memory = profile.device.memory_bytes // (world.launch_info.local_size if world.device.type == "cpu" else 1)
        goal = Goal(run.kimg, memory_bytes=memory, margin=auto.margin)
        plans.append(compare_strategies(run, options, profile, links, world.size, goal))
        return json.dumps([row.name for row in playoff.shortlist(plans[0], auto.measure_s)])

    names = json.loads(world.all_gather_str(on_all_ranks(world, compare, EXTRA_TIMEOUT_S))[0])
    seconds = _run_playoff(run, names, images, world, console) if len(names) > 1 else {}

    def choose_best() -> str:
        if not world.is_main:
            return ""
        why = [
            *_describe_choice(plans[0], seconds),
            *_resume_notes(resumed),
            *([f"links: {links.describe()}"] if world.size > 1 else []),
        ]
        first = playoff.select_winner(plans[0], seconds) if seconds else plans[0].best
        return json.dumps({"name": first.name, "reasons": why})

    told = json.loads(world.all_gather_str(on_all_ranks(world, choose_best, EXTRA_TIMEOUT_S))[0])
    return _with_strategy(
        run, parse_strategy(told["name"]).without_rank_loss(), AutoChoice(world.size, auto), told["reasons"]
    )


def _run_playoff(
    run: Run, names: Sequence[str], images: Dataset, world: World, console: RunConsole
) -> dict[str, float]:
    """Seconds of a round of each, played."""
    console.print(f"strategy: {', '.join(names)} are about as fast: each plays some rounds")

    def make_session(name: str) -> Session:
        played = fill_strategy_defaults(
            replace(run, strategy=parse_strategy(name).without_rank_loss(), auto_choice=AutoChoice())
        )
        return build_session(played, world, images, _make_networks(run, images, world))

    return playoff.time_contestants(names, make_session, world)


def _with_strategy(run: Run, strategy: Any, choice: AutoChoice, reasons: Sequence[str]) -> Run:
    about = [line for line in run.reasons if not line.startswith(REASON_PREFIX)]  # what was said for other ranks
    about += [f"{REASON_PREFIX}{line}" for line in reasons]
    found = fill_strategy_defaults(replace(run, strategy=strategy, auto_choice=choice, reasons=tuple(about)))
    validate(found, choice.ranks)
    return found


def comparable_candidates(auto: Auto, resumed: Run | None, profile: Profile, run: Run, ranks: int) -> list[Candidate]:
    """What may be chosen; of a run that was begun, what follows it."""
    if auto.strategies:
        found = [Candidate(name, parse_strategy(name)) for name in auto.strategies]
    else:
        found = default_candidates(ranks, profile, run.batch)
    found = [one for one in found if one.semantics != "per-label models" and _is_applicable(one, resumed or run)]
    if resumed:
        found = [one for one in found if one.strategy.can_resume_from(resumed.strategy)]
    if not found:
        went_on = f" that goes on from {resumed.strategy.name}" if resumed else ""
        raise UsageError(f"--strategy auto: none of strategy.strategies={','.join(auto.strategies)} is one{went_on}")
    return found


def _is_applicable(option: Candidate, run: Run) -> bool:
    """Whether players can learn by it as the run says."""
    try:
        fill_strategy_defaults(replace(run, strategy=option.strategy))
    except UsageError:
        return False
    return True


def _describe_choice(plan: Plan, seconds: Mapping[str, float]) -> list[str]:
    """The choice, and what speaks against the next ones."""
    rows = playoff.describe_result(plan, seconds) if seconds else [f"{plan.best.name}: {plan.best.reason}"]
    others = [row for row in plan.rows[1:] if row.semantics != plan.best.semantics or row.name == "sync"]
    rows += [f"not {row.name}: {row.reason}" for row in others if row.name not in seconds][:MAX_REJECTIONS]
    return [*rows, *plan.best.limits, *plan.warnings]


def _resume_notes(resumed: Run | None) -> list[str]:
    return (
        [f"the run was begun as {resumed.strategy.name}: only other forms of it go on from its checkpoint"]
        if resumed
        else []
    )


# what is measured ---------------------------------------------------------------------------------------


def _share_profile(run: Run, auto: Auto, images: Dataset, world: World, console: RunConsole) -> Profile:
    """Of rank 0, known to all."""

    def profile_on_main() -> str:
        return profile_to_yaml(_read_or_measure_profile(run, auto, images, world, console)) if world.is_main else ""

    told = on_all_ranks(world, profile_on_main, EXTRA_TIMEOUT_S + 10 * auto.measure_s)
    return parse_profile(world.all_gather_str(told)[0], "profile")


def _read_or_measure_profile(run: Run, auto: Auto, images: Dataset, world: World, console: RunConsole) -> Profile:
    plainly = fill_strategy_defaults(replace(run, strategy=Sync(), auto_choice=AutoChoice()))
    structure = ""
    if is_user_defined(run.nets, run.objective):
        nets = _make_networks(run, images, world)
        structure = structure_digest(nets.g, nets.d)
    if not auto.profile:
        wanted = ProfileOptions(seconds=auto.measure_s)

        def log(text: str) -> None:
            console.print(f"strategy: {text}")

        return profile_run(
            plainly, images, lambda: _make_networks(run, images, world), world.device, wanted, structure, log
        )[0]
    profile = read_profile(Path(auto.profile))
    here = describe_device(world.device, run.device.precision)
    remake = f"paragan bench step {run.recipe} --out {auto.profile}"
    check_profile_matches(profile, network_digest(plainly, structure), here, remake)
    return profile


def _make_networks(run: Run, images: Dataset, world: World) -> Any:
    pair = build_networks(run, make_spec(run, images), world.device)
    return init_from_model(pair, Path(run.init_from)) if run.init_from else pair


def _contended_round_s(run: Run, images: Dataset, world: World) -> float:
    """Seconds of a round that every rank plays alone while all others do: they may share cores, caches, a device."""
    lanes = max(1, run.lanes // world.size)
    alone = replace(with_lanes(run, lanes), strategy=Sync(), auto_choice=AutoChoice())
    session = build_session(alone, World.solo(world.device), images, _make_networks(run, images, world))
    times = list[float]()
    try:
        play_round(session)
        backend_of(world.device).synchronize(world.device)
        world.all_gather_str("beside")
        ends = time.perf_counter() + MIN_CONTENDED_S
        while len(times) < MIN_CONTENDED_ROUNDS or time.perf_counter() < ends:
            start = time.perf_counter()
            play_round(session)
            backend_of(world.device).synchronize(world.device)
            times.append(time.perf_counter() - start)
    finally:
        session.lanes.close()
    mine = statistics.median(times) * run.batch / world.size / alone.batch
    return statistics.fmean(map(float, world.all_gather_str(repr(mine))))


def scale_profile(profile: Profile, factor: float) -> Profile:
    """A worker who takes so many times as long."""

    def scale_turns(turns: Sequence[TurnProfile]) -> tuple[TurnProfile, ...]:
        return tuple(
            TurnProfile(
                t.batch,
                tuple(factor * x for x in t.grads_ready_s),
                *(factor * x for x in (t.backward_s, t.total_s, t.g_forward_s)),
            )
            for t in turns
        )

    handling = {name: factor * seconds for name, seconds in profile.codec_cost.items()}
    return replace(profile, g=scale_turns(profile.g), d=scale_turns(profile.d), codec_cost=handling)


def decide_strategy(run: Any, dataset: Any, world: Any, request: Any, console: Any) -> Any:
    """The run that is trained, where its strategy was left open."""
    if not run.strategy.auto_request and not run.auto_choice.ranks:
        return run

    return choose_strategy(run, dataset, world, request, console)
