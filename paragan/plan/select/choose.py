"""Choose the strategy for `--strategy auto` on the present ranks.

One worker is profiled, the links are measured, all strategies are predicted, and those that are about equally fast are
timed (plan/select/playoff.py). All ranks call `choose_strategy` together and get the same run. On one rank the choice
is between sync and async, which is faster if D is trained on G's images.
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
from paragan.train.build import Networks, build_networks
from paragan.train.console import RunConsole
from paragan.train.loop import play_round
from paragan.train.rank_agreement import on_all_ranks
from paragan.train.run_dir_selection import RunDirRequest, check_run_dir, previous_auto_run
from paragan.train.session import Session, build_session, init_from_model

EXTRA_TIMEOUT_S = 600.0  # that rank 0 may take beyond strategy.measure_s
MIN_CONTENDED_ROUNDS = 3  # timed while all ranks compute, and
MIN_CONTENDED_S = 1.0  # for at least as long
REASON_PREFIX = "strategy: "  # of the reasons in run.yaml that are about the choice
MAX_REJECTIONS = 3  # reasons against other strategies in run.yaml


def is_strategy_open(run: Run, ranks: int) -> bool:
    """Return whether a strategy is to be chosen: it was requested, and no choice was made for this number of ranks."""
    return run.strategy.auto_request is not None or run.auto_choice.ranks not in (0, ranks)


def choose_strategy(run: Run, images: Dataset, world: World, request: RunDirRequest, console: RunConsole) -> Run:
    """Return the run with a chosen strategy. A run that is resumed on as many ranks keeps its strategy.

    Raises:
        UsageError: no strategy can be chosen.
        CommunicationError: a rank was lost meanwhile.
    """
    if not is_strategy_open(run, world.size):
        return run
    auto = run.strategy.auto_request or run.auto_choice.request
    for name in auto.strategies:
        parse_strategy(name)  # raises for an unknown strategy
    fields = on_all_ranks(world, lambda: _previous_fields(run, request, world))
    fields = json.loads(world.all_gather_str(json.dumps(fields))[0])
    previous = _with_saved_strategy(run, fields) if fields else None
    if previous and not is_strategy_open(previous, world.size):
        console.print(f"{REASON_PREFIX}{previous.strategy.name}, with which this run was started")
        return previous
    resumed = previous or (None if run.strategy.auto_request else run)
    return choose_new_strategy(resumed or run, auto, resumed, images, world, console)


def choose_new_strategy(
    run: Run, auto: Auto, resumed: Run | None, images: Dataset, world: World, console: RunConsole
) -> Run:
    """Return the run with a strategy that is chosen by measurements, and print the reasons.

    Args:
        run: whose strategy is chosen.
        auto: the request.
        resumed: the run whose checkpoint is continued, if any.
        images: of the run.
        world: of all ranks.
        console: for progress.

    Raises:
        UsageError: no strategy can be chosen.
        CommunicationError: a rank was lost meanwhile.
    """
    try:
        chosen = _choose(run, auto, resumed, images, world, console)
    except CommunicationError as error:
        raise CommunicationError(f"while a strategy was chosen, {error}") from error
    for line in chosen.reasons:
        if line.startswith(REASON_PREFIX):
            console.print(line)
    return chosen


def _previous_fields(run: Run, request: RunDirRequest, world: World) -> dict[str, Any]:
    """Read, on rank 0, the choice of the run that is resumed; empty if there is none."""
    if not world.is_main:
        return {}
    check_run_dir(request, run)
    previous = previous_auto_run(request, run)
    if not previous:
        return {}
    return {name: to_dict(getattr(previous, name)) for name in ("strategy", "auto_choice", "reasons")}


def _with_saved_strategy(run: Run, saved: dict[str, Any]) -> Run:
    fields = from_dict(Run, {**saved, "recipe": run.recipe})
    return fill_strategy_defaults(
        replace(run, strategy=fields.strategy, auto_choice=fields.auto_choice, reasons=fields.reasons)
    )


def _choose(run: Run, auto: Auto, resumed: Run | None, images: Dataset, world: World, console: RunConsole) -> Run:
    """Measure, predict and time: see `choose_new_strategy`."""
    if world.size == 1 and resumed:
        strategy = resumed.strategy.on_one_rank()
        return _with_strategy(run, strategy, AutoChoice(1, auto), [f"{strategy.name}: there is one rank"])
    profile = _share_profile(run, auto, images, world, console)
    profile = scale_profile(profile, _contended_round_s(run, images, world) / profile.round_s(run.batch / world.size))
    links = Links(hosts=1, up=1.0, latency=0.0)
    if world.size > 1:
        console.print(f"{REASON_PREFIX}measuring the links")
        links = measure_links(world, quick=True)

    plans = list[Plan]()  # of rank 0

    def compare() -> str:
        if not world.is_main:
            return ""
        candidates = [
            replace(candidate, strategy=candidate.strategy.without_rank_loss())
            for candidate in comparable_candidates(auto, resumed, profile, run, world.size)
        ]
        memory = profile.device.memory_bytes // (world.launch_info.local_size if world.device.type == "cpu" else 1)
        goal = Goal(run.kimg, memory_bytes=memory, margin=auto.margin)
        plans.append(compare_strategies(run, candidates, profile, links, world.size, goal))
        return json.dumps([row.name for row in playoff.shortlist(plans[0], auto.measure_s)])

    names = json.loads(world.all_gather_str(on_all_ranks(world, compare, EXTRA_TIMEOUT_S))[0])
    seconds = _run_playoff(run, names, images, world, console) if len(names) > 1 else {}

    def choose_best() -> str:
        if not world.is_main:
            return ""
        reasons = _describe_choice(plans[0], seconds)
        if resumed:
            reasons.append(f"resumed from {resumed.strategy.name}: only strategies that can use its checkpoint")
        if world.size > 1:
            reasons.append(f"links: {links.describe()}")
        best = playoff.select_winner(plans[0], seconds) if seconds else plans[0].best
        return json.dumps({"name": best.name, "reasons": reasons})

    choice = json.loads(world.all_gather_str(on_all_ranks(world, choose_best, EXTRA_TIMEOUT_S))[0])
    strategy = parse_strategy(choice["name"]).without_rank_loss()
    return _with_strategy(run, strategy, AutoChoice(world.size, auto), choice["reasons"])


def _run_playoff(
    run: Run, names: Sequence[str], images: Dataset, world: World, console: RunConsole
) -> dict[str, float]:
    """Return the measured seconds of a round of each strategy."""
    console.print(f"{REASON_PREFIX}{', '.join(names)} are about equally fast: timing some rounds of each")

    def make_session(name: str) -> Session:
        strategy = parse_strategy(name).without_rank_loss()
        contestant = fill_strategy_defaults(replace(run, strategy=strategy, auto_choice=AutoChoice()))
        return build_session(contestant, world, images, _make_networks(run, images, world))

    return playoff.time_contestants(names, make_session, world)


def _with_strategy(run: Run, strategy: Any, choice: AutoChoice, reasons: Sequence[str]) -> Run:
    lines = [line for line in run.reasons if not line.startswith(REASON_PREFIX)]  # drops those of a former choice
    lines += [f"{REASON_PREFIX}{line}" for line in reasons]
    chosen = fill_strategy_defaults(replace(run, strategy=strategy, auto_choice=choice, reasons=tuple(lines)))
    validate(chosen, choice.ranks)
    return chosen


def comparable_candidates(auto: Auto, resumed: Run | None, profile: Profile, run: Run, ranks: int) -> list[Candidate]:
    """Return the strategies to choose from; for a resumed run, those that can use its checkpoint.

    Raises:
        UsageError: there is none.
    """
    if auto.strategies:
        candidates = [Candidate(name, parse_strategy(name)) for name in auto.strategies]
    else:
        candidates = default_candidates(ranks, profile, run.batch)
    candidates = [
        candidate
        for candidate in candidates
        if candidate.semantics != "per-label models" and _is_applicable(candidate, resumed or run)
    ]
    if resumed:
        candidates = [one for one in candidates if one.strategy.can_resume_from(resumed.strategy)]
    if not candidates:
        condition = f" can resume from {resumed.strategy.name}" if resumed else " can be used"
        raise UsageError(f"strategy.strategies={','.join(auto.strategies)}: none of them{condition}. Name others")
    return candidates


def _is_applicable(candidate: Candidate, run: Run) -> bool:
    """Return whether the optimizers of the run work with the strategy."""
    try:
        fill_strategy_defaults(replace(run, strategy=candidate.strategy))
    except UsageError:
        return False
    return True


def _describe_choice(plan: Plan, seconds: Mapping[str, float]) -> list[str]:
    """Say what was chosen and why, and why not the next ones."""
    lines = playoff.describe_result(plan, seconds) if seconds else [f"{plan.best.name}: {plan.best.reason}"]
    others = [row for row in plan.rows[1:] if row.semantics != plan.best.semantics or row.name == "sync"]
    lines += [f"not {row.name}: {row.reason}" for row in others if row.name not in seconds][:MAX_REJECTIONS]
    return [*lines, *plan.best.limits, *plan.warnings]


# Measurements ------------------------------------------------------------------------------------------


def _share_profile(run: Run, auto: Auto, images: Dataset, world: World, console: RunConsole) -> Profile:
    """Profile one worker on rank 0, and send the profile to all."""

    def profile_on_main() -> str:
        return profile_to_yaml(_read_or_measure_profile(run, auto, images, world, console)) if world.is_main else ""

    text = on_all_ranks(world, profile_on_main, EXTRA_TIMEOUT_S + 10 * auto.measure_s)
    return parse_profile(world.all_gather_str(text)[0], "profile")


def _read_or_measure_profile(run: Run, auto: Auto, images: Dataset, world: World, console: RunConsole) -> Profile:
    sync_run = fill_strategy_defaults(replace(run, strategy=Sync(), auto_choice=AutoChoice()))
    structure = ""
    if is_user_defined(run.nets, run.objective):
        nets = _make_networks(run, images, world)
        structure = structure_digest(nets.g, nets.d)
    if auto.profile:
        profile = read_profile(Path(auto.profile))
        device = describe_device(world.device, run.device.precision)
        remake_command = f"paragan bench step {run.recipe} --out {auto.profile}"
        check_profile_matches(profile, network_digest(sync_run, structure), device, remake_command)
        return profile
    options = ProfileOptions(seconds=auto.measure_s)

    def log(text: str) -> None:
        console.print(f"{REASON_PREFIX}{text}")

    profile, _ = profile_run(
        sync_run, images, lambda: _make_networks(run, images, world), world.device, options, structure, log
    )
    return profile


def _make_networks(run: Run, images: Dataset, world: World) -> Networks:
    networks = build_networks(run, make_spec(run.data, images), world.device)
    return init_from_model(networks, Path(run.init_from)) if run.init_from else networks


def _contended_round_s(run: Run, images: Dataset, world: World) -> float:
    """Return the seconds of a round that each rank plays by itself while all others do the same.

    They may share cores, caches or a device, which the profile of one worker does not show.
    """
    lanes = max(1, run.lanes // world.size)
    solo_run = replace(with_lanes(run, lanes), strategy=Sync(), auto_choice=AutoChoice())
    session = build_session(solo_run, World.solo(world.device), images, _make_networks(run, images, world))
    times = list[float]()
    try:
        play_round(session)
        backend_of(world.device).synchronize(world.device)
        world.all_gather_str("ready")
        deadline = time.perf_counter() + MIN_CONTENDED_S
        while len(times) < MIN_CONTENDED_ROUNDS or time.perf_counter() < deadline:
            start = time.perf_counter()
            play_round(session)
            backend_of(world.device).synchronize(world.device)
            times.append(time.perf_counter() - start)
    finally:
        session.lanes.close()
    round_s = statistics.median(times) * run.batch / world.size / solo_run.batch
    return statistics.fmean(map(float, world.all_gather_str(repr(round_s))))


def scale_profile(profile: Profile, factor: float) -> Profile:
    """Return the profile of a worker that takes `factor` times as long."""

    def scale_turns(turns: Sequence[TurnProfile]) -> tuple[TurnProfile, ...]:
        return tuple(
            TurnProfile(
                turn.batch,
                tuple(factor * seconds for seconds in turn.grads_ready_s),
                factor * turn.backward_s,
                factor * turn.total_s,
                factor * turn.g_forward_s,
            )
            for turn in turns
        )

    codec_cost = {op: factor * seconds for op, seconds in profile.codec_cost.items()}
    return replace(profile, g=scale_turns(profile.g), d=scale_turns(profile.d), codec_cost=codec_cost)
