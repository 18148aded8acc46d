"""Find the fastest settings of a run on this worker by timing them: `plan --tune` and `device.tune=measured`.

Options are memory formats, precision, threads, fused optimizers and more. None of them changes what is computed, except
for rounding. Results are cached by network, device and versions. docs/tuning.md explains the options.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.run import Run, with_lanes
from paragan.config.user_code import is_user_defined, user_code_digest
from paragan.config.validate import validate
from paragan.core.devices import backend_of, find_cpp_compiler, has_huge_pages, set_huge_pages, tune_malloc
from paragan.core.errors import RunError, UsageError
from paragan.core.schema import from_dict, get_field, replace_fields, to_dict
from paragan.data.dataset import Dataset
from paragan.eval import result_cache
from paragan.plan.tune.greedy_search import Option, Overrides, TrialTimes, TuneResult, tune_greedily
from paragan.plan.tune.op_profile import tile_for
from paragan.train.build import build_networks
from paragan.train.console import RunConsole
from paragan.train.loop import play_round
from paragan.train.rank_agreement import LOAD_TIMEOUT_S, on_all_ranks
from paragan.train.run_dir_selection import RunDirRequest, previous_layout
from paragan.train.session import Session, build_session

NUM_TIMED_ROUNDS = 7  # of every trial
BLOCK_S = 0.1  # a timed round is repeated until it takes this long
MAX_ROUND_KINDS = 2  # a lazy penalty makes two kinds of rounds, and each is built
MAX_ROUND_S = 1.0  # of a longer round, fewer lanes are timed
IGNORED_RUN_FIELDS = (
    *("recipe", "kimg", "seed", "init_from", "evaluation", "output", "health", "on_divergence", "timeout_s"),
    *("distill_from", "fingerprints"),
)
MAX_CACHE_BYTES = 10**6  # of all results
MIN_RUN_FOR_BUILD_S = 120.0  # a shorter run does not make up for compiling, nor for trying it
NUM_RANDOM_IMAGES = 64


def options_for(run: Run, device: torch.device) -> list[Option]:
    """Return the options of a resolved run on this device. The first choice of each is the current one."""
    is_cpu = device.type == "cpu"
    tile = tile_for(device, run.device.precision)
    nets = {} if is_user_defined(run.nets, run.objective) else to_dict(run.nets)
    cores = len(os.sched_getaffinity(0)) if is_cpu else 1
    can_capture = device.type in ("cuda", "cpu") and _can_capture(run)
    can_compile = bool(find_cpp_compiler()) and not (is_cpu and can_capture)
    fused = {f"{side}.optimizer.fused" for side in ("g", "d") if hasattr(getattr(run, side).optimizer, "fused")}
    lanes = sorted({0, *(n for n in (1, run.lanes // 4, run.lanes // 2) if 0 < n < run.lanes)})
    options: list[tuple[str, bool, Sequence[Overrides]]] = [
        ("channels_last", True, _field_choices("device.channels_last", True, "G", "D", False)),
        ("precision", backend_of(device).supports_bf16(), _field_choices("device.precision", "float32", "bf16")),
        ("threads", cores > 1, _field_choices("device.threads", 0, 1)),
        ("huge_pages", is_cpu and has_huge_pages(), _field_choices("device.huge_pages", True, False)),
        ("fused_resampling", "fused_resampling" in nets, _field_choices("nets.fused_resampling", True, False)),
        ("concat_real_fake", bool(nets), _field_choices("device.concat_real_fake", False, True)),
        ("fused", bool(fused), [dict.fromkeys(fused, value) for value in (True, False)]),
        ("lanes_per_pass", len(lanes) > 1, _field_choices("device.lanes_per_pass", *lanes)),
        ("pad_channels", True, _field_choices("device.pad_channels", 0, tile.columns)),
        ("capture_passes", can_capture, _field_choices("device.capture_passes", False, True)),
        ("compile", can_compile, _field_choices("device.compile", False, True)),
    ]
    built = {"compile", "capture_passes"} if is_cpu else {"compile"}
    available = [(name, choices) for name, is_available, choices in options if is_available]
    return [Option(name, _current_first(run, choices), name in built) for name, choices in available]


def _field_choices(field: str, *values: Any) -> list[Overrides]:
    return [{field: value} for value in values]


def _current_first(run: Run, choices: Sequence[Overrides]) -> tuple[Overrides, ...]:
    """Put the current values of the run first."""
    current = {field: get_field(run, field) for field in choices[0]}
    return current, *(choice for choice in choices if choice != current)


def _can_capture(run: Run) -> bool:
    try:
        validate(replace_fields(run, {"device.capture_passes": True}))
    except UsageError:
        return False
    return True


# Trials ----------------------------------------------------------------------------------------------------------


class TrialWorker:
    """Times rounds of one rank's lanes with different overrides, on random images. Of a long round, fewer lanes."""

    def __init__(
        self, run: Run, images: Dataset, world: World, rounds: int = NUM_TIMED_ROUNDS, max_round_s: float = MAX_ROUND_S
    ):
        self.images = make_random_dataset(images)
        self.world = World.solo(world.device)
        self.rounds = rounds
        self.run = dataclasses.replace(run, kimg=1e9, distill_from="")
        self.threads = torch.get_num_threads()
        self.cores = max(1, len(os.sched_getaffinity(0)) // world.launch_info.local_size)
        if world.size > 1:
            self.run = with_lanes(self.run, max(1, self.run.lanes // world.size))
        lanes = self.run.lanes
        while self.run.lanes > 1 and self._round_s() > max_round_s:
            self.run = with_lanes(self.run, self.run.lanes // 2)
        self.estimated_run_s = run.total_images / run.round_images * self._round_s() * lanes / self.run.lanes

    def _round_s(self) -> float:
        trial = self.make_trial({})
        trial()
        return self._time_rounds(trial)

    def make_trial(self, overrides: Overrides) -> TrialSession:
        """Build a session with these overrides."""
        return TrialSession(replace_fields(self.run, overrides), self.images, self.world, self.cores)

    def __call__(self, candidates: Sequence[Overrides]) -> list[TrialTimes]:
        """Time several sets of overrides in turns, and restore the settings of the process.

        What cannot be compiled, or does not fit into memory, takes infinitely long. The first candidate must work.
        """
        trials = dict[int, TrialSession]()
        first_round_s = [0.0] * len(candidates)
        for i, overrides in enumerate(candidates):
            if overrides.get("device.compile"):
                torch.compiler.reset()
            start = time.perf_counter()
            try:
                trial = self.make_trial(overrides)
                first_round_s[i] = self._time_rounds(trial, start, MAX_ROUND_KINDS)
                trials[i] = trial
            except (RuntimeError, RunError):
                if i == 0:
                    raise
        warm_s = [min(self._time_rounds(trial) for _ in range(2)) for trial in trials.values()]
        steps = max(1, round(BLOCK_S / min(warm_s)))
        round_s = [list[float]() if i in trials else [math.inf] * self.rounds for i in range(len(candidates))]
        order = list(trials)
        for r in range(self.rounds):
            first = r % len(order)
            for i in order[first:] + order[:first]:
                round_s[i].append(self._time_rounds(trials[i], steps=steps))
        del trials
        gc.collect()
        torch.set_num_threads(self.threads)
        set_huge_pages(True)
        return [
            TrialTimes(times, max(0.0, first_s - times[0]) * MAX_ROUND_KINDS)
            for times, first_s in zip(round_s, first_round_s)
        ]

    def _time_rounds(self, trial: TrialSession, start: float = 0.0, steps: int = 1) -> float:
        """Return the seconds of a round, the mean of `steps`; `start` is an earlier begin of the first one."""
        start = start or time.perf_counter()
        for _ in range(steps):
            trial()
        backend_of(self.world.device).synchronize(self.world.device)
        return (time.perf_counter() - start) / steps


class TrialSession:
    """A session with some overrides. A call plays a round."""

    def __init__(self, run: Run, images: Dataset, world: World, cores: int):
        self.run = run
        self.threads = run.device.threads or cores
        tune_malloc()
        self._apply_process_settings()
        self.session: Session = build_session(
            run, world, images, build_networks(run, make_spec(run.data, images), world.device)
        )

    def __call__(self) -> None:
        self._apply_process_settings()
        play_round(self.session)

    def _apply_process_settings(self) -> None:
        """Apply settings that hold for the whole process."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        set_huge_pages(self.run.device.huge_pages)


def make_random_dataset(images: Dataset) -> Dataset:
    """Return random images of the same shape and classes, in memory, so that no image is read."""
    rng = np.random.default_rng(0)
    shape = (NUM_RANDOM_IMAGES, *images.images.shape[1:])
    if images.images.dtype == np.float32:
        pixels = rng.standard_normal(shape, np.float32)
    else:
        pixels = rng.integers(0, 256, shape, np.uint8)
    labels = None if images.labels is None else rng.integers(0, len(images.classes), NUM_RANDOM_IMAGES)
    return dataclasses.replace(images, images=pixels, labels=labels)


# Decisions --------------------------------------------------------------------------------------------------------


def tune_run(run: Run, images: Dataset, world: World, remeasure: bool = False) -> TuneResult:
    """Return the fastest settings of a resolved run on this worker, from the cache or by trials.

    Args:
        run: resolved.
        images: of the run.
        world: this worker plays the lanes of one rank of it.
        remeasure: ignore the cache.
    """
    file = result_cache.cache_dir() / "tune" / f"{_cache_key(run, images, world)}.json"
    result = None if remeasure else _read_cached(file, run, world.device)
    if result is None:
        worker = TrialWorker(run, images, world)
        is_long = worker.estimated_run_s > MIN_RUN_FOR_BUILD_S
        options = [option for option in options_for(run, world.device) if is_long or not option.needs_build]
        result = tune_greedily(options, worker, run.total_images / run.round_images)
        text = json.dumps(dataclasses.asdict(result))
        result_cache.store(file, lambda path: path.write_text(text, "utf-8"), MAX_CACHE_BYTES)
    return result


def _read_cached(file: Path, run: Run, device: torch.device) -> TuneResult | None:
    """Read a cached result; None if it cannot be read, or sets other fields or impossible values."""
    try:
        result = from_dict(TuneResult, json.loads(file.read_text("utf-8")))
        fields = {field for option in options_for(run, device) for field in option.choices[0]}
        if not result.overrides.keys() <= fields:
            return None
        replace_fields(run, result.overrides)  # raises for a value that the field cannot have
    except (OSError, ValueError, RecursionError, UsageError):
        return None
    result_cache.touch(file)
    return result


def _cache_key(run: Run, images: Dataset, world: World) -> str:
    """Return a digest of network, device, versions and length of the run."""
    fields = {name: value for name, value in to_dict(run).items() if name not in IGNORED_RUN_FIELDS}
    fields["data"] = {name: value for name, value in fields["data"].items() if name != "path"}
    device = (
        backend_of(world.device).device_name(world.device),
        len(os.sched_getaffinity(0)) // world.launch_info.local_size,
        world.size,
        torch.__version__,
        version("paragan"),
    )
    data = images.images.shape[1:], len(images.classes)
    length = run.total_images // run.round_images // 1000
    code = user_code_digest(run.nets, run.objective)
    text = json.dumps([fields, device, data, length, code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layout_changes(run: Run, result: TuneResult) -> dict[str, Any]:
    """Return the fields of a run that a result changes, with their new values."""
    return {field: value for field, value in result.overrides.items() if get_field(run, field) != value}


def format_setting(value: Any) -> str:
    """Format the value of a field as on the command line."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def decide_layout(run: Run, dataset: Dataset, world: World, request: RunDirRequest, console: RunConsole) -> Run:
    """Return the run with measured settings (`device.tune=measured`). All ranks call it together.

    Rank 0 decides. A resumed run keeps the settings that it was started with.
    """
    plain_run = dataclasses.replace(run, device=dataclasses.replace(run.device, tune="rules"))

    def decide_on_rank0() -> str:
        if not world.is_main:
            return "{}"
        previous, overrides = previous_layout(request, plain_run)
        if previous:
            console.print(f"layout: as {previous} was started with; --resume never measures anew")
            return json.dumps(overrides)
        return json.dumps(_measure_overrides(plain_run, dataset, world, console))

    text = world.all_gather_str(on_all_ranks(world, decide_on_rank0, LOAD_TIMEOUT_S))[0]
    return replace_fields(plain_run, json.loads(text))


def decide_new_layout(run: Run, dataset: Dataset, world: World, console: RunConsole) -> Run:
    """Return a run that is no resumed one with measured settings. Rank 0 decides; all ranks call it together."""

    def decide_on_rank0() -> str:
        return json.dumps(_measure_overrides(run, dataset, world, console)) if world.is_main else "{}"

    text = world.all_gather_str(on_all_ranks(world, decide_on_rank0, LOAD_TIMEOUT_S))[0]
    return replace_fields(run, json.loads(text))


def _measure_overrides(run: Run, dataset: Dataset, world: World, console: RunConsole) -> Overrides:
    console.print("layout: timing settings, unless they are cached; about a minute, longer for large networks")
    result = tune_run(run, dataset, world)
    changes = [f"{name}={format_setting(value)}" for name, value in layout_changes(run, result).items()]
    if changes:
        console.print(f"layout: {result.speedup:.2f} times faster; {', '.join(changes)}")
    else:
        console.print("layout: nothing is faster")
    return dict(result.overrides)
