"""Checkpoints: complete or absent, safetensors and json, no code in them.

checkpoints/00001234/          named by the round it follows
    rank0000.safetensors       one file for every rank that has something of its own to say
    checkpoint.json            written last: format, clock, ranks, and size and checksum of every file

A folder is written aside, synced and renamed. Randomness and data are functions of position, so the clock
stands for both.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paragan.comm.world import World
from paragan.core.errors import Failed, Unusable
from paragan.game.player import Player
from paragan.optim import state_io as optimizer_state
from paragan.strategies.base import Role

FORMAT = 1
CHANNELS_LAST = "~"
LAYOUTS = (torch.contiguous_format, torch.channels_last)
Tensors = dict[str, Tensor]


class Damaged(Exception):
    """A checkpoint that cannot be read, and why."""


# What a player is -------------------------------------------------------------------------------------


def player_state(player: Player) -> Tensors:
    """Everything of a player that its replicas share, by name."""
    state = {"params": player.flat.params}
    if player.average:
        state["average"] = player.average.params
    state |= {f"optimizer/{name}": value for name, value in optimizer_state.to_tensors(player.optimizer).items()}
    state |= {f"buffer/{name}": buffer for name, buffer in buffers(player).items()}
    return {f"{player.name}/{name}": value for name, value in state.items()}


def network(player: Player) -> dict[str, list[int]]:
    """The names and shapes of what a player's network holds, so that another one is told from it."""
    return {name: list(value.shape) for name, value in player.net.state_dict().items()}


def refuse_other_network(player: Player, about: Mapping[str, Any]) -> None:
    """Damaged names the first that differ, where a checkpoint says what it holds (an older one does not)."""
    theirs, mine = about.get("networks", {}).get(player.name), network(player)
    if theirs is None or theirs == mine:
        return
    apart = [name for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)]
    told = [f"{name} {theirs.get(name, 'absent')}, now {mine.get(name, 'absent')}" for name in dict.fromkeys(apart)]
    raise Damaged(f"it holds another network for {player.name}: {'; '.join(told[:3] or ['other order of layers'])}")


def player_memories(player: Player) -> Tensors:
    """What a rank's exchanges keep of a player: its own, on every rank."""
    return {f"{player.name}/memory/{name}": value for name, value in player.flat.memories().items()}


def buffers(player: Player) -> Tensors:
    """What the network holds beside what is trained, each tensor once: its saved buffers (running statistics,
    spectral-norm vectors), and parameters that are frozen."""
    seen = {id(parameter) for parameter in player.flat.parameters}
    found: Tensors = {}
    for name, value in player.net.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            found[name] = value.detach()
            seen.add(id(value))
    return found


def past(role: Role) -> Tensors:
    """What a rank keeps of former rounds."""
    return {f"past/{name}": t for kept in role.past for name, t in kept.state().items()}


def restore_past(role: Role, tensors: Mapping[str, Tensor]) -> None:
    for kept in role.past:
        kept.load(_under("past/", tensors))


@torch.no_grad()
def restore(player: Player, tensors: Mapping[str, Tensor]) -> None:
    """Put `player_state` and `player_memories` back."""
    own = _under(player.name + "/", tensors)
    if "params" not in own or own["params"].shape != player.flat.params.shape:
        raise Damaged(f"it holds another network for {player.name}")
    player.flat.params.copy_(own["params"])
    if player.average:
        player.average.params.copy_(own["average"])
    for name, buffer in buffers(player).items():
        if f"buffer/{name}" not in own:
            raise Damaged(f"it lacks {name} of {player.name}")
        buffer.copy_(own[f"buffer/{name}"])
    optimizer_state.from_tensors(player.optimizer, _under("optimizer/", own))
    player.flat.load_memories(_under("memory/", own))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def mean(states: Iterable[Tensors]) -> Tensors:
    """The rule for a changed world: every per-rank vector becomes the mean over the old ranks that had it. (What they
    keep of former rounds has names of its own, or is the same.)"""
    found: dict[str, list[Tensor]] = {}
    for state in states:
        for name, value in state.items():
            found.setdefault(name, []).append(value)
    return {
        name: torch.stack([v.double() for v in values]).mean(0).to(values[0].dtype) if len(values) > 1 else values[0]
        for name, values in found.items()
    }


# Writing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run folder; the newest `keep` stay."""

    folder: Path
    world: World
    keep: int = 2

    def clear_unfinished(self) -> None:
        """Remove what an interrupted save left aside (rank 0, holding the folder's lock)."""
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        players: Iterable[Player],
        clock: Mapping[str, float],
        record: Mapping[str, Any],
        role: Role,
        suffix: str = "",
    ) -> Path:
        """Write a complete checkpoint, or none: if any rank fails, all do, and nothing else is touched."""
        name = f"{clock['step']:08d}{suffix}"
        aside, target = self.folder / f".writing-{name}-{self.world.epoch}", self.folder / name
        tensors = self._own(players, role)
        error, size, crc = None, 0, 0
        try:
            aside.mkdir(parents=True, exist_ok=True)
            if tensors:
                size, crc = _write(aside / _file(self.world.rank), packed(tensors))
        except OSError as problem:
            error = problem
        rows = self._together([error is not None, size, crc])
        if not any(failed for failed, _, _ in rows):
            error = self._finish(aside, target, rows, clock, record) if self.world.first else None
            rows = self._together([error is not None])
        bad = [rank for rank, row in enumerate(rows) if row[0]]
        if bad:
            shutil.rmtree(aside, ignore_errors=True)
            reason = error or f"rank {bad[0]} could not write its part"
            raise Failed(f"checkpoint {target} was not written: {reason}; {self.standing()}")
        return target

    def _own(self, players: Iterable[Player], role: Role) -> Tensors:
        """What this rank has to say."""
        tensors = past(role)
        for player in players:
            moves = player in role.moves
            if moves:
                tensors |= player_memories(player)
            if self.world.rank == role.speaker(player) or (moves and not role.replicated):
                tensors |= player_state(player)
        return tensors

    def _together(self, row: list[int]) -> list[list[int]]:
        """Everyone's row, in rank order."""
        rows, work = self.world.everyone.gather(torch.tensor(row))
        work.wait()
        return rows.tolist()

    def _finish(
        self,
        aside: Path,
        target: Path,
        rows: list[list[int]],
        clock: Mapping[str, float],
        record: Mapping[str, Any],
    ) -> OSError | None:
        files = {_file(rank): {"bytes": size, "crc32": crc} for rank, (_, size, crc) in enumerate(rows) if size}
        about = {"format": FORMAT, "clock": dict(clock), "ranks": self.world.size, "files": files, **record}
        try:
            _write(aside / "checkpoint.json", json.dumps({"crc32": _checksum(about), **about}, indent=1).encode())
            _sync_folder(aside)
            if target.exists():
                shutil.rmtree(target)
            aside.rename(target)
            _sync_folder(self.folder)
        except OSError as problem:
            return problem
        before = [path for path in complete(self.folder) if path.name <= target.name]  # a damaged one may be ahead
        for old in before[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return None

    def standing(self) -> str:
        """For messages: which checkpoint one may go on from."""
        there = complete(self.folder)
        return f"the last good checkpoint is {there[0]}" if there else "there is no checkpoint yet"


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdigit() and p.is_dir()), reverse=True)


def _file(rank: int) -> str:
    return f"rank{rank:04d}.safetensors"


def packed(tensors: Tensors) -> bytes:
    """As safetensors, which know no layout: the name of what lies channels last in memory ends with "~"."""
    spread = {name: t.dim() == 4 and not t.is_contiguous() for name, t in tensors.items()}
    return safetensors.torch.save(
        {name + CHANNELS_LAST * spread[name]: t.detach().cpu().contiguous() for name, t in tensors.items()}
    )


def unpacked(data: bytes) -> Tensors:
    """The other way."""
    found: Tensors = {}
    for name, tensor in safetensors.torch.load(data).items():
        spread = name.endswith(CHANNELS_LAST)
        found[name.removesuffix(CHANNELS_LAST)] = tensor.contiguous(memory_format=LAYOUTS[spread])
    return found


def _write(path: Path, data: bytes) -> tuple[int, int]:
    """Write and sync; (bytes, crc32)."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return len(data), zlib.crc32(data)


def _checksum(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as read for one rank."""

    path: Path
    step: int
    images: int
    seconds: float
    about: dict[str, Any]
    tensors: Tensors


def read_about(path: Path) -> dict[str, Any]:
    """A checkpoint's checkpoint.json. Damaged if it is absent or broken; Unusable if a newer paragan wrote it."""
    try:
        about = json.loads((path / "checkpoint.json").read_text())
        written, checksum = int(about["format"]), about.pop("crc32", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"checkpoint.json: {error}") from error
    if written > FORMAT:
        raise Unusable(
            f"{path} has checkpoint format {written}, this paragan reads up to {FORMAT}: use a newer paragan"
        )
    if checksum != _checksum(about):
        raise Damaged("checkpoint.json does not match its checksum")
    return about


def read(path: Path, rank: int, ranks: int) -> Loaded:
    """One rank's view of a checkpoint: shared state, and its own memories, or their mean in a changed world.

    Damaged names what is wrong: a missing file, another size or checksum.
    """
    about = read_about(path)
    states: dict[str, Tensors] = {}
    try:
        for name, facts in about["files"].items():
            if name not in map(_file, range(about["ranks"])):
                raise ValueError(f"{name!r} is no file of a rank")
            states[name] = _read_file(path / name, facts["bytes"], facts["crc32"])
        step, images = int(about["clock"]["step"]), int(about["clock"]["images"])
        seconds = float(about["clock"].get("seconds", 0.0))  # an older paragan did not count them
        if step < 0 or images < 0 or not 0 <= seconds < math.inf:
            raise ValueError("the clock is negative")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise Damaged(f"checkpoint.json: {error!r}") from error
    own = states.get(_file(rank), {}) if ranks == about["ranks"] else {}
    return Loaded(path, step, images, seconds, about, mean(states.values()) | own)


def newest(paths: Iterable[Path], rank: int, ranks: int) -> tuple[Loaded | None, list[tuple[Path, str]]]:
    """The first of `paths` that can be read, and those before it that cannot, with the reason."""
    damaged: list[tuple[Path, str]] = []
    for path in paths:
        try:
            return read(path, rank, ranks), damaged
        except Damaged as error:
            damaged.append((path, str(error)))
    return None, damaged


def _read_file(path: Path, size: int, crc: int) -> Tensors:
    try:
        there = path.stat()
        if not stat.S_ISREG(there.st_mode) or there.st_size != size:
            raise Damaged(f"{path.name} has {there.st_size} bytes, not {size}: it was cut off")
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from error
    if zlib.crc32(data) != crc:
        raise Damaged(f"{path.name} does not match its checksum")
    try:
        return unpacked(data)
    except safetensors.SafetensorError as error:
        raise Damaged(f"{path.name}: {error}") from error
