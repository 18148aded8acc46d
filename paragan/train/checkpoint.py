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
from paragan.core.errors import RunError, UsageError
from paragan.game.player import Player
from paragan.optim import state_io as optimizer_state
from paragan.strategies.base import Role

FORMAT_VERSION = 1
CHANNELS_LAST_SUFFIX = "~"
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last)
StateDict = dict[str, Tensor]


class CorruptCheckpoint(Exception):
    """A checkpoint that cannot be read, and why."""


# What a player is -------------------------------------------------------------------------------------


def player_state(player: Player) -> StateDict:
    """Everything of a player that its replicas share, by name."""
    state = {"params": player.flat.params}
    if player.ema:
        state["average"] = player.ema.params
    state |= {f"optimizer/{name}": value for name, value in optimizer_state.to_tensors(player.optimizer).items()}
    state |= {f"buffer/{name}": buffer for name, buffer in untrained_tensors(player).items()}
    return {f"{player.name}/{name}": value for name, value in state.items()}


def network_shapes(player: Player) -> dict[str, list[int]]:
    """The names and shapes of what a player's network holds, so that another one is told from it."""
    return {name: list(value.shape) for name, value in player.net.state_dict().items()}


def check_same_network(player: Player, metadata: Mapping[str, Any]) -> None:
    """Damaged names the first that differ, where a checkpoint says what it holds (an older one does not)."""
    theirs, mine = metadata.get("networks", {}).get(player.name), network_shapes(player)
    if theirs is None or theirs == mine:
        return
    apart = [name for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)]
    told = [f"{name} {theirs.get(name, 'absent')}, now {mine.get(name, 'absent')}" for name in dict.fromkeys(apart)]
    raise CorruptCheckpoint(
        f"it holds another network for {player.name}: {'; '.join(told[:3] or ['other order of layers'])}"
    )


def player_exchange_state(player: Player) -> StateDict:
    """What a rank's exchanges keep of a player: its own, on every rank."""
    return {f"{player.name}/memory/{name}": value for name, value in player.flat.states().items()}


def untrained_tensors(player: Player) -> StateDict:
    """What the network holds beside what is trained, each tensor once: its saved buffers (running statistics,
    spectral-norm vectors), and parameters that are frozen."""
    seen = {id(parameter) for parameter in player.flat.parameters}
    found: StateDict = {}
    for name, value in player.net.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            found[name] = value.detach()
            seen.add(id(value))
    return found


def replay_state(role: Role) -> StateDict:
    """What a rank keeps of former rounds."""
    return {f"past/{name}": t for kept in role.replay_state for name, t in kept.state().items()}


def restore_replay_state(role: Role, tensors: Mapping[str, Tensor]) -> None:
    for kept in role.replay_state:
        kept.load(_select_prefix("past/", tensors))


@torch.no_grad()
def restore_player(player: Player, tensors: Mapping[str, Tensor]) -> None:
    """Put `player_state` and `player_memories` back."""
    own = _select_prefix(player.name + "/", tensors)
    if "params" not in own or own["params"].shape != player.flat.params.shape:
        raise CorruptCheckpoint(f"it holds another network for {player.name}")
    player.flat.params.copy_(own["params"])
    if player.ema:
        player.ema.params.copy_(own["average"])
    for name, buffer in untrained_tensors(player).items():
        if f"buffer/{name}" not in own:
            raise CorruptCheckpoint(f"it lacks {name} of {player.name}")
        buffer.copy_(own[f"buffer/{name}"])
    optimizer_state.from_tensors(player.optimizer, _select_prefix("optimizer/", own))
    player.flat.load_states(_select_prefix("memory/", own))


def _select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> StateDict:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def merge_ranks(states: Iterable[StateDict]) -> StateDict:
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
    max_checkpoints: int = 2

    def clear_unfinished(self) -> None:
        """Remove what an interrupted save left aside (rank 0, holding the folder's lock)."""
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        players: Iterable[Player],
        clock: Mapping[str, float],
        extra_metadata: Mapping[str, Any],
        role: Role,
        suffix: str = "",
    ) -> Path:
        """Write a complete checkpoint, or none: if any rank fails, all do, and nothing else is touched."""
        name = f"{clock['step']:08d}{suffix}"
        aside, target = self.folder / f".writing-{name}-{self.world.membership_epoch}", self.folder / name
        tensors = self._local_state(players, role)
        error, size, crc = None, 0, 0
        try:
            aside.mkdir(parents=True, exist_ok=True)
            if tensors:
                size, crc = _write_synced(aside / _rank_filename(self.world.rank), to_bytes(tensors))
        except OSError as problem:
            error = problem
        rows = self._all_gather_row([error is not None, size, crc])
        if not any(failed for failed, _, _ in rows):
            error = self._commit(aside, target, rows, clock, extra_metadata) if self.world.is_main else None
            rows = self._all_gather_row([error is not None])
        bad = [rank for rank, row in enumerate(rows) if row[0]]
        if bad:
            shutil.rmtree(aside, ignore_errors=True)
            reason = error or f"rank {bad[0]} could not write its part"
            raise RunError(f"checkpoint {target} was not written: {reason}; {self.latest_message()}")
        return target

    def _local_state(self, players: Iterable[Player], role: Role) -> StateDict:
        """What this rank has to say."""
        tensors = replay_state(role)
        for player in players:
            moves = player in role.trained_players
            if moves:
                tensors |= player_exchange_state(player)
            if self.world.rank == role.owner_rank(player) or (moves and not role.replicated):
                tensors |= player_state(player)
        return tensors

    def _all_gather_row(self, row: list[int]) -> list[list[int]]:
        """Everyone's row, in rank order."""
        rows, work = self.world.all_ranks.all_gather(torch.tensor(row))
        work.wait()
        return rows.tolist()

    def _commit(
        self,
        staging: Path,
        target: Path,
        rows: list[list[int]],
        clock: Mapping[str, float],
        extra_metadata: Mapping[str, Any],
    ) -> OSError | None:
        files = {
            _rank_filename(rank): {"bytes": size, "crc32": crc} for rank, (_, size, crc) in enumerate(rows) if size
        }
        about = {
            "format": FORMAT_VERSION,
            "clock": dict(clock),
            "ranks": self.world.size,
            "files": files,
            **extra_metadata,
        }
        try:
            _write_synced(
                staging / "checkpoint.json", json.dumps({"crc32": _checksum(about), **about}, indent=1).encode()
            )
            _fsync_dir(staging)
            if target.exists():
                shutil.rmtree(target)
            staging.rename(target)
            _fsync_dir(self.folder)
        except OSError as problem:
            return problem
        before = [
            path for path in list_checkpoints(self.folder) if path.name <= target.name
        ]  # a damaged one may be ahead
        for old in before[self.max_checkpoints :]:
            shutil.rmtree(old, ignore_errors=True)
        return None

    def latest_message(self) -> str:
        """For messages: which checkpoint one may go on from."""
        there = list_checkpoints(self.folder)
        return f"the last good checkpoint is {there[0]}" if there else "there is no checkpoint yet"


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdigit() and p.is_dir()), reverse=True)


def _rank_filename(rank: int) -> str:
    return f"rank{rank:04d}.safetensors"


def to_bytes(tensors: StateDict) -> bytes:
    """As safetensors, which know no layout: the name of what lies channels last in memory ends with "~"."""
    spread = {name: t.dim() == 4 and not t.is_contiguous() for name, t in tensors.items()}
    return safetensors.torch.save(
        {name + CHANNELS_LAST_SUFFIX * spread[name]: t.detach().cpu().contiguous() for name, t in tensors.items()}
    )


def from_bytes(data: bytes) -> StateDict:
    """The other way."""
    found: StateDict = {}
    for name, tensor in safetensors.torch.load(data).items():
        spread = name.endswith(CHANNELS_LAST_SUFFIX)
        found[name.removesuffix(CHANNELS_LAST_SUFFIX)] = tensor.contiguous(memory_format=MEMORY_FORMATS[spread])
    return found


def _write_synced(path: Path, data: bytes) -> tuple[int, int]:
    """Write and sync; (bytes, crc32)."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return len(data), zlib.crc32(data)


def _checksum(metadata: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())


def _fsync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint as read for one rank."""

    path: Path
    step: int
    images: int
    seconds: float
    metadata: dict[str, Any]
    tensors: StateDict


def read_metadata(path: Path) -> dict[str, Any]:
    """A checkpoint's checkpoint.json. Damaged if it is absent or broken; Unusable if a newer paragan wrote it."""
    try:
        about = json.loads((path / "checkpoint.json").read_text())
        written, checksum = int(about["format"]), about.pop("crc32", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"checkpoint.json: {error}") from error
    if written > FORMAT_VERSION:
        raise UsageError(
            f"{path} has checkpoint format {written}, this paragan reads up to {FORMAT_VERSION}: use a newer paragan"
        )
    if checksum != _checksum(about):
        raise CorruptCheckpoint("checkpoint.json does not match its checksum")
    return about


def read_checkpoint(path: Path, rank: int, ranks: int) -> CheckpointView:
    """One rank's view of a checkpoint: shared state, and its own memories, or their mean in a changed world.

    Damaged names what is wrong: a missing file, another size or checksum.
    """
    about = read_metadata(path)
    states: dict[str, StateDict] = {}
    try:
        for name, facts in about["files"].items():
            if name not in map(_rank_filename, range(about["ranks"])):
                raise ValueError(f"{name!r} is no file of a rank")
            states[name] = _read_file(path / name, facts["bytes"], facts["crc32"])
        step, images = int(about["clock"]["step"]), int(about["clock"]["images"])
        seconds = float(about["clock"].get("seconds", 0.0))  # an older paragan did not count them
        if step < 0 or images < 0 or not 0 <= seconds < math.inf:
            raise ValueError("the clock is negative")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise CorruptCheckpoint(f"checkpoint.json: {error!r}") from error
    own = states.get(_rank_filename(rank), {}) if ranks == about["ranks"] else {}
    return CheckpointView(path, step, images, seconds, about, merge_ranks(states.values()) | own)


def read_newest(paths: Iterable[Path], rank: int, ranks: int) -> tuple[CheckpointView | None, list[tuple[Path, str]]]:
    """The first of `paths` that can be read, and those before it that cannot, with the reason."""
    damaged: list[tuple[Path, str]] = []
    for path in paths:
        try:
            return read_checkpoint(path, rank, ranks), damaged
        except CorruptCheckpoint as error:
            damaged.append((path, str(error)))
    return None, damaged


def _read_file(path: Path, size_bytes: int, crc32: int) -> StateDict:
    try:
        there = path.stat()
        if not stat.S_ISREG(there.st_mode) or there.st_size != size_bytes:
            raise CorruptCheckpoint(f"{path.name} has {there.st_size} bytes, not {size_bytes}: it was cut off")
        data = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpoint(f"{path.name}: {error.strerror}") from error
    if zlib.crc32(data) != crc32:
        raise CorruptCheckpoint(f"{path.name} does not match its checksum")
    try:
        return from_bytes(data)
    except safetensors.SafetensorError as error:
        raise CorruptCheckpoint(f"{path.name}: {error}") from error
