"""A run's layout on this worker: which switches there are, what they are worth, and what was found before."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.run import Run, to_saved_dict, with_lanes
from paragan.config.user_code import is_user_defined
from paragan.config.validate import validate
from paragan.core.devices import backend_of, find_cpp_compiler, has_huge_pages, set_huge_pages, tune_malloc
from paragan.core.errors import RunError, UsageError
from paragan.core.schema import from_dict, get_field, replace_fields, to_dict
from paragan.data.dataset import Dataset
from paragan.eval import result_cache
from paragan.plan.tune.greedy_search import Option, Overrides, TrialTimes, TuneResult, tune_greedily
from paragan.plan.tune.op_profile import tile_for
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session

NUM_TIMED_ROUNDS = 7  # that are timed of every contestant
BLOCK_S = 0.1  # a round is repeated until it takes so long
MAX_ROUND_KINDS = 2  # of rounds, at most, that a lazy penalty makes: each is built
MAX_ROUND_S = 1.0  # what a round may take: of a longer one, fewer lanes are played
IGNORED_RUN_FIELDS = (
    "recipe",
    "kimg",
    "seed",
    "init_from",
    "evaluation",
    "output",
    "health",
    "on_divergence",
    "timeout_s",
    "distill_from",
)
MAX_CACHE_BYTES = 10**6  # of all layouts that are kept
MIN_RUN_FOR_BUILD_S = 120.0  # a run that is shorter does not pay for compiling, nor for trying it
NUM_RANDOM_IMAGES = 64  # images to play with


def options_for(run: Run, device: torch.device) -> list[Option]:
    """What can be decided for a resolved run on this device, first what stands in it."""
    cuda, cpu = device.type == "cuda", device.type == "cpu"
    tile, nets = (
        tile_for(device, run.device.precision),
        to_dict(run.nets) if not is_user_defined(run.nets, run.objective) else {},
    )
    cores, records = len(os.sched_getaffinity(0)) if cpu else 1, (cuda or cpu) and _can_capture(run)
    fused = {f"{side}.optimizer.fused" for side in ("g", "d") if hasattr(getattr(run, side).optimizer, "fused")}
    lanes = sorted({0, *(n for n in (1, run.lanes // 4, run.lanes // 2) if 0 < n < run.lanes)})
    possible: list[tuple[str, bool, Sequence[Overrides]]] = [
        ("channels_last", True, _field_choices("device.channels_last", True, "G", "D", False)),
        ("precision", backend_of(device).supports_bf16(), _field_choices("device.precision", "float32", "bf16")),
        ("threads", cores > 1, _field_choices("device.threads", 0, 1)),
        ("huge_pages", cpu and has_huge_pages(), _field_choices("device.huge_pages", True, False)),
        ("fused_resampling", "fused_resampling" in nets, _field_choices("nets.fused_resampling", True, False)),
        ("concat_real_fake", bool(nets), _field_choices("device.concat_real_fake", False, True)),
        ("fused", bool(fused), [dict.fromkeys(fused, value) for value in (True, False)]),
        ("lanes_per_pass", len(lanes) > 1, _field_choices("device.lanes_per_pass", *lanes)),
        ("pad_channels", True, _field_choices("device.pad_channels", 0, tile.columns)),
        ("capture_passes", records, _field_choices("device.capture_passes", False, True)),
        ("compile", bool(find_cpp_compiler()) and not (cpu and records), _field_choices("device.compile", False, True)),
    ]
    built = {"compile", "capture_passes"} if cpu else {"compile"}
    return [Option(name, _current_first(run, choices), name in built) for name, there, choices in possible if there]


def _field_choices(field: str, *values: Any) -> list[Overrides]:
    return [{field: value} for value in values]


def _current_first(run: Run, choices: Sequence[Overrides]) -> tuple[Overrides, ...]:
    """These choices, first what stands in the run."""
    here = {field: get_field(run, field) for field in choices[0]}
    return here, *(choice for choice in choices if choice != here)


def _can_capture(run: Run) -> bool:
    try:
        validate(replace_fields(run, {"device.capture_passes": True}))
    except UsageError:
        return False
    return True


# trying ----------------------------------------------------------------------------------------------------------


class TrialWorker:
    """Plays one rank's part of a run, in as many layouts as are asked for, on drawn images. Of a long round, fewer
    lanes."""

    def __init__(
        self, run: Run, images: Dataset, world: World, rounds: int = NUM_TIMED_ROUNDS, max_round_s: float = MAX_ROUND_S
    ):
        self.images, self.world, self.rounds = make_random_dataset(images), World.solo(world.device), rounds
        self.run, self.threads = dataclasses.replace(run, kimg=1e9, distill_from=""), torch.get_num_threads()
        self.cores = max(1, len(os.sched_getaffinity(0)) // world.launch_info.local_size)
        if world.size > 1:
            self.run = with_lanes(self.run, max(1, self.run.lanes // world.size))
        whole = self.run.lanes
        while self.run.lanes > 1 and self._round_s() > max_round_s:
            self.run = with_lanes(self.run, self.run.lanes // 2)
        self.estimated_run_s = run.total_images / run.round_images * self._round_s() * whole / self.run.lanes  # about

    def _round_s(self) -> float:
        play = self.make_trial({})
        play()
        return self._time_rounds(play)

    def make_trial(self, overrides: Overrides) -> TrialSession:
        return TrialSession(replace_fields(self.run, overrides), self.images, self.world, self.cores)

    def __call__(self, candidates: Sequence[Overrides]) -> list[TrialTimes]:
        players, starts = dict[int, TrialSession](), [0.0] * len(candidates)
        for i, layout in enumerate(candidates):
            if layout.get("device.compile"):
                torch.compiler.reset()
            start = time.perf_counter()
            try:
                player = self.make_trial(layout)
                starts[i] = self._time_rounds(player, start, MAX_ROUND_KINDS)
                players[i] = player
            except (RuntimeError, RunError):  # what cannot be compiled here, or does not fit, takes forever
                if not i:  # what stands has to be played
                    raise
        warm = [min(self._time_rounds(play) for _ in range(2)) for play in players.values()]
        steps = max(1, round(BLOCK_S / min(warm)))
        seconds = [list[float]() if i in players else [math.inf] * self.rounds for i in range(len(candidates))]
        there = list(players)
        for r in range(self.rounds):
            first = r % len(there)
            for i in there[first:] + there[:first]:
                seconds[i].append(self._time_rounds(players[i], steps=steps))
        del players
        gc.collect()
        torch.set_num_threads(self.threads)
        set_huge_pages(True)
        return [TrialTimes(own, max(0.0, start - own[0]) * MAX_ROUND_KINDS) for own, start in zip(seconds, starts)]

    def _time_rounds(self, play: TrialSession, start: float = 0.0, steps: int = 1) -> float:
        start = start or time.perf_counter()
        for _ in range(steps):
            play()
        backend_of(self.world.device).synchronize(self.world.device)
        return (time.perf_counter() - start) / steps


class TrialSession:
    """One layout: a call is a round."""

    def __init__(self, run: Run, images: Dataset, world: World, cores: int):
        self.run, self.threads = run, run.device.threads or cores
        tune_malloc()
        self._apply_process_settings()
        self.session: Session = build_session(
            run, world, images, build_networks(run, make_spec(run, images), world.device)
        )

    def __call__(self) -> None:
        self._apply_process_settings()
        play_round(self.session)

    def _apply_process_settings(self) -> None:
        """What is of the whole process."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        set_huge_pages(self.run.device.huge_pages)


def make_random_dataset(images: Dataset) -> Dataset:
    """Random images of the same shape and classes, in memory: none has to be read."""
    rng, shape = np.random.default_rng(0), (NUM_RANDOM_IMAGES, *images.images.shape[1:])
    numbers = images.images.dtype == np.float32
    made = rng.standard_normal(shape, np.float32) if numbers else rng.integers(0, 256, shape, np.uint8)
    labels = None if images.labels is None else rng.integers(0, len(images.classes), NUM_RANDOM_IMAGES)
    return dataclasses.replace(images, images=made, labels=labels)


# deciding --------------------------------------------------------------------------------------------------------


def tune_run(run: Run, images: Dataset, world: World, remeasure: bool = False) -> TuneResult:
    """What is fastest for a resolved run on this worker: found before, or now by trying."""
    file = result_cache.cache_dir() / "tune" / f"{_cache_key(run, images, world)}.json"
    found = None if remeasure else _read_cached(file, run, world.device)
    if found is None:
        worker = TrialWorker(run, images, world)
        tried = [
            s
            for s in options_for(run, world.device)
            if not s.needs_build or worker.estimated_run_s > MIN_RUN_FOR_BUILD_S
        ]
        found = tune_greedily(tried, worker, run.total_images / run.round_images)
        text = json.dumps(dataclasses.asdict(found))
        result_cache.store(file, lambda aside: aside.write_text(text, "utf-8"), MAX_CACHE_BYTES)
    return found


def _read_cached(file: Any, run: Run, device: torch.device) -> TuneResult | None:
    """What is kept there; what cannot be read, or is of other fields than are decided, is nothing."""
    try:
        found = from_dict(TuneResult, json.loads(file.read_text("utf-8")))
        if not found.overrides.keys() <= {field for switch in options_for(run, device) for field in switch.choices[0]}:
            return None
        replace_fields(run, found.overrides)  # a value that is none is refused
    except (OSError, ValueError, RecursionError, UsageError):
        return None
    result_cache.touch(file)
    return found


def _cache_key(run: Run, images: Dataset, world: World) -> str:
    """Of the network, the device and the versions."""
    about: Mapping[str, Any] = {
        name: part for name, part in to_saved_dict(run).items() if name not in IGNORED_RUN_FIELDS
    }
    name, cores = (
        backend_of(world.device).device_name(world.device),
        len(os.sched_getaffinity(0)) // world.launch_info.local_size,
    )
    here = name, cores, world.size, torch.__version__, version("paragan")
    shape = images.images.shape[1:], len(images.classes)
    text = json.dumps([about, here, shape, run.total_images // run.round_images // 1000], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layout_changes(run: Any, result: Any) -> dict[str, Any]:
    from paragan.core.schema import get_field

    return {field: value for field, value in result.overrides.items() if get_field(run, field) != value}


def format_setting(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def decide_layout(run: Any, dataset: Any, world: Any, request: Any, console: Any) -> Any:
    """The run that is trained where `device.tune` is measured: rank 0 decides, as the run in its folder was decided
    where it goes on, and tells all."""
    from paragan.core.schema import replace_fields
    from paragan.train.prepare import LOAD_TIMEOUT_S
    from paragan.train.rank_agreement import on_all_ranks
    from paragan.train.run_dir import previous_layout

    plainly = dataclasses.replace(run, device=dataclasses.replace(run.device, tune="rules"))

    def decide_on_rank0() -> str:
        if not world.is_main:
            return "{}"
        begun, layout = previous_layout(request, plainly)
        if begun:
            console.print(f"the layout stays as {begun} was begun with; --resume never lets another be found")
            return json.dumps(layout)
        console.print("trying layouts, unless they are known: a minute or so of small networks, more of large ones")
        best = tune_run(plainly, dataset, world)
        changes = _describe_changes(plainly, best)
        console.print(f"layout: {best.speedup:.2f} times faster; {changes}" if changes else "layout: nothing is faster")
        return json.dumps(dict(best.overrides))

    told = world.all_gather_str(on_all_ranks(world, decide_on_rank0, LOAD_TIMEOUT_S))[0]
    return replace_fields(plainly, json.loads(told))


def _describe_changes(run: Any, result: Any) -> str:
    return ", ".join(f"{name}={format_setting(value)}" for name, value in layout_changes(run, result).items())
