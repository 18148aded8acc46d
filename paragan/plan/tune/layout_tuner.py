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
from paragan.config.resolve import spec_of
from paragan.config.run import Run, on_lanes, written
from paragan.config.user_code import is_own
from paragan.config.validate import validate
from paragan.core.devices import compiler, has_huge_pages, huge_pages, keep_memory, kind_of
from paragan.core.errors import Failed, Unusable
from paragan.core.schema import build, field_of, plain, with_fields
from paragan.data.dataset import Images
from paragan.eval import result_cache
from paragan.plan.tune.greedy_search import Decided, Layout, Switch, Timed, decide
from paragan.plan.tune.op_profile import tile_of
from paragan.train.build import build_nets
from paragan.train.loop import play_round
from paragan.train.session import Session, assemble

ROUNDS = 7  # that are timed of every contestant
BLOCK_S = 0.1  # a round is repeated until it takes so long
KINDS = 2  # of rounds, at most, that a lazy penalty makes: each is built
MOST_S = 1.0  # what a round may take: of a longer one, fewer lanes are played
APART = ("recipe", "kimg", "seed", "init_from", "evaluation", "output", "health", "guard", "timeout_s", "teacher")
MOST_BYTES = 10**6  # of all layouts that are kept
BUILD_S = 120.0  # a run that is shorter does not pay for compiling, nor for trying it
DRAWN = 64  # images to play with


def switches_of(run: Run, device: torch.device) -> list[Switch]:
    """What can be decided for a resolved run on this device, first what stands in it."""
    cuda, cpu = device.type == "cuda", device.type == "cpu"
    tile, nets = tile_of(device, run.device.precision), plain(run.nets) if not is_own(run.nets, run.objective) else {}
    cores, records = len(os.sched_getaffinity(0)) if cpu else 1, (cuda or cpu) and _records(run)
    fused = {f"{side}.optimizer.fused" for side in ("g", "d") if hasattr(getattr(run, side).optimizer, "fused")}
    lanes = sorted({0, *(n for n in (1, run.lanes // 4, run.lanes // 2) if 0 < n < run.lanes)})
    possible: list[tuple[str, bool, Sequence[Layout]]] = [
        ("channels_last", True, _each("device.channels_last", True, "G", "D", False)),
        ("precision", kind_of(device).bf16(), _each("device.precision", "float32", "bf16")),
        ("threads", cores > 1, _each("device.threads", 0, 1)),
        ("huge_pages", cpu and has_huge_pages(), _each("device.huge_pages", True, False)),
        ("rewritten", "rewritten" in nets, _each("nets.rewritten", True, False)),
        ("one_call", bool(nets), _each("device.one_call", False, True)),
        ("fused", bool(fused), [dict.fromkeys(fused, value) for value in (True, False)]),
        ("merge", len(lanes) > 1, _each("device.merge", *lanes)),
        ("pad_channels", True, _each("device.pad_channels", 0, tile.columns)),
        ("graph", records, _each("device.graph", False, True)),
        ("compile", bool(compiler()) and not (cpu and records), _each("device.compile", False, True)),
    ]
    built = {"compile", "graph"} if cpu else {"compile"}
    return [Switch(name, _from(run, choices), name in built) for name, there, choices in possible if there]


def _each(field: str, *values: Any) -> list[Layout]:
    return [{field: value} for value in values]


def _from(run: Run, choices: Sequence[Layout]) -> tuple[Layout, ...]:
    """These choices, first what stands in the run."""
    here = {field: field_of(run, field) for field in choices[0]}
    return here, *(choice for choice in choices if choice != here)


def _records(run: Run) -> bool:
    try:
        validate(with_fields(run, {"device.graph": True}))
    except Unusable:
        return False
    return True


# trying ----------------------------------------------------------------------------------------------------------


class Worker:
    """Plays one rank's part of a run, in as many layouts as are asked for, on drawn images. Of a long round, fewer
    lanes."""

    def __init__(self, run: Run, images: Images, world: World, rounds: int = ROUNDS, most_s: float = MOST_S):
        self.images, self.world, self.rounds = drawn(images), World.solo(world.device), rounds
        self.run, self.threads = dataclasses.replace(run, kimg=1e9, teacher=""), torch.get_num_threads()
        self.cores = max(1, len(os.sched_getaffinity(0)) // world.place.local_size)
        if world.size > 1:
            self.run = on_lanes(self.run, max(1, self.run.lanes // world.size))
        whole = self.run.lanes
        while self.run.lanes > 1 and self._round_s() > most_s:
            self.run = on_lanes(self.run, self.run.lanes // 2)
        self.run_s = run.images / run.round * self._round_s() * whole / self.run.lanes  # about

    def _round_s(self) -> float:
        play = self.player({})
        play()
        return self._timed(play)

    def player(self, layout: Layout) -> Play:
        return Play(with_fields(self.run, layout), self.images, self.world, self.cores)

    def __call__(self, layouts: Sequence[Layout]) -> list[Timed]:
        players, starts = dict[int, Play](), [0.0] * len(layouts)
        for i, layout in enumerate(layouts):
            if layout.get("device.compile"):
                torch.compiler.reset()
            start = time.perf_counter()
            try:
                player = self.player(layout)
                starts[i] = self._timed(player, start, KINDS)
                players[i] = player
            except (RuntimeError, Failed):  # what cannot be compiled here, or does not fit, takes forever
                if not i:  # what stands has to be played
                    raise
        warm = [min(self._timed(play) for _ in range(2)) for play in players.values()]
        steps = max(1, round(BLOCK_S / min(warm)))
        seconds = [list[float]() if i in players else [math.inf] * self.rounds for i in range(len(layouts))]
        there = list(players)
        for r in range(self.rounds):
            first = r % len(there)
            for i in there[first:] + there[:first]:
                seconds[i].append(self._timed(players[i], steps=steps))
        del players
        gc.collect()
        torch.set_num_threads(self.threads)
        huge_pages(True)
        return [Timed(own, max(0.0, start - own[0]) * KINDS) for own, start in zip(seconds, starts)]

    def _timed(self, play: Play, start: float = 0.0, steps: int = 1) -> float:
        start = start or time.perf_counter()
        for _ in range(steps):
            play()
        kind_of(self.world.device).synchronize(self.world.device)
        return (time.perf_counter() - start) / steps


class Play:
    """One layout: a call is a round."""

    def __init__(self, run: Run, images: Images, world: World, cores: int):
        self.run, self.threads = run, run.device.threads or cores
        keep_memory()
        self._settle()
        self.session: Session = assemble(run, world, images, build_nets(run, spec_of(run, images), world.device))

    def __call__(self) -> None:
        self._settle()
        play_round(self.session)

    def _settle(self) -> None:
        """What is of the whole process."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        huge_pages(self.run.device.huge_pages)


def drawn(images: Images) -> Images:
    """Random images of the same shape and classes, in memory: none has to be read."""
    rng, shape = np.random.default_rng(0), (DRAWN, *images.images.shape[1:])
    numbers = images.images.dtype == np.float32
    made = rng.standard_normal(shape, np.float32) if numbers else rng.integers(0, 256, shape, np.uint8)
    labels = None if images.labels is None else rng.integers(0, len(images.classes), DRAWN)
    return dataclasses.replace(images, images=made, labels=labels)


# deciding --------------------------------------------------------------------------------------------------------


def decided(run: Run, images: Images, world: World, again: bool = False) -> Decided:
    """What is fastest for a resolved run on this worker: found before, or now by trying."""
    file = result_cache.folder() / "layouts" / f"{_digest(run, images, world)}.json"
    found = None if again else _read(file, run, world.device)
    if found is None:
        worker = Worker(run, images, world)
        tried = [s for s in switches_of(run, world.device) if not s.built or worker.run_s > BUILD_S]
        found = decide(tried, worker, run.images / run.round)
        text = json.dumps(dataclasses.asdict(found))
        result_cache.put(file, lambda aside: aside.write_text(text, "utf-8"), MOST_BYTES)
    return found


def _read(file: Any, run: Run, device: torch.device) -> Decided | None:
    """What is kept there; what cannot be read, or is of other fields than are decided, is nothing."""
    try:
        found = build(Decided, json.loads(file.read_text("utf-8")))
        if not found.layout.keys() <= {field for switch in switches_of(run, device) for field in switch.choices[0]}:
            return None
        with_fields(run, found.layout)  # a value that is none is refused
    except (OSError, ValueError, RecursionError, Unusable):
        return None
    result_cache.used(file)
    return found


def _digest(run: Run, images: Images, world: World) -> str:
    """Of the network, the device and the versions."""
    about: Mapping[str, Any] = {name: part for name, part in written(run).items() if name not in APART}
    name, cores = kind_of(world.device).name(world.device), len(os.sched_getaffinity(0)) // world.place.local_size
    here = name, cores, world.size, torch.__version__, version("paragan")
    shape = images.images.shape[1:], len(images.classes)
    text = json.dumps([about, here, shape, run.images // run.round // 1000], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changes(run: Any, found: Any) -> dict[str, Any]:
    from paragan.core.schema import field_of

    return {field: value for field, value in found.layout.items() if field_of(run, field) != value}


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def decide_layout(run: Any, images: Any, world: Any, wanted: Any, screen: Any) -> Any:
    """The run that is trained where `device.layout` is measured: rank 0 decides, as the run in its folder was decided
    where it goes on, and tells all."""
    from paragan.core.schema import with_fields
    from paragan.train.rank_agreement import together
    from paragan.train.run_dir import layout_before
    from paragan.train.trainer import LOAD_TIMEOUT_S

    plainly = dataclasses.replace(run, device=dataclasses.replace(run.device, layout="rules"))

    def found() -> str:
        if not world.first:
            return "{}"
        begun, layout = layout_before(wanted, plainly)
        if begun:
            screen.say(f"the layout stays as {begun} was begun with; --resume never lets another be found")
            return json.dumps(layout)
        screen.say("trying layouts, unless they are known: a minute or so of small networks, more of large ones")
        best = decided(plainly, images, world)
        changes = _told(plainly, best)
        screen.say(f"layout: {best.total:.2f} times faster; {changes}" if changes else "layout: nothing is faster")
        return json.dumps(dict(best.layout))

    told = world.agree(together(world, found, LOAD_TIMEOUT_S))[0]
    return with_fields(plainly, json.loads(told))


def _told(run: Any, found: Any) -> str:
    return ", ".join(f"{name}={_word(value)}" for name, value in _changes(run, found).items())
