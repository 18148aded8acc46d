"""Checkpoints for exact resume: the state of players and exchanges in the files of comm/checkpoint_files.py.

A checkpoint is named by the round it follows. It holds players (parameters, EMA, optimizer, buffers), the state of
exchanges (such as error feedback), replayed images, and the clock. Random numbers and the position in the data are
functions of the clock, so nothing else has to be saved.

Names of tensors: `G/params`, `G/ema`, `G/optimizer/...`, `G/buffer/...`, `G/exchange_state/...`, `replay_state/...`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paragan.comm.checkpoint_files import CheckpointFolder, StateDict, read_files, select_prefix
from paragan.comm.checkpoint_metadata import CorruptCheckpoint
from paragan.game.player import Player
from paragan.optim import state_io as optimizer_state
from paragan.strategies.base import Role

# State of a player -------------------------------------------------------------------------------------


def player_state(player: Player, is_receiver: bool = True) -> StateDict:
    """Return the state of a player that its replicas share, by name.

    Args:
        player: the player. All ranks that have a part of its state call this.
        is_receiver: whether this rank wants the parts of the others; one that does not gets an incomplete state.
    """
    state = {"params": player.flat.params}
    average = player.ema.full_vector(is_receiver) if player.ema else None
    if average is not None:
        state["ema"] = average
    of_optimizer = optimizer_state.to_tensors(player.optimizer)
    if player.sharded:
        of_optimizer = player.sharded.gather_state(of_optimizer, is_receiver)
    state |= {f"optimizer/{name}": value for name, value in of_optimizer.items()}
    state |= {f"buffer/{name}": buffer for name, buffer in untrained_tensors(player).items()}
    return {f"{player.name}/{name}": value for name, value in state.items()}


def network_shapes(player: Player) -> dict[str, list[int]]:
    """Return the names and shapes of a player's parameters and buffers, by which another network is recognised."""
    return {name: list(value.shape) for name, value in player.net.state_dict().items()}


def check_same_network(player: Player, metadata: Mapping[str, Any]) -> None:
    """Raise CorruptCheckpoint if a checkpoint holds another network for this player, and name what differs."""
    saved = metadata["networks"][player.name]
    current = network_shapes(player)
    if saved == current:
        return
    names = dict.fromkeys((*current, *saved))
    differences = [
        f"{name} {saved.get(name, 'absent')}, now {current.get(name, 'absent')}"
        for name in names
        if current.get(name) != saved.get(name)
    ]
    raise CorruptCheckpoint(f"it holds another network for {player.name}: {'; '.join(differences[:3])}")


def player_exchange_state(player: Player) -> StateDict:
    """Return what this rank's exchanges keep of a player, such as error feedback. Every rank has its own."""
    return {f"{player.name}/exchange_state/{name}": value for name, value in player.flat.states().items()}


def untrained_tensors(player: Player) -> StateDict:
    """Return the tensors of a network that are not trained, each once: saved buffers (running statistics, vectors of
    spectral norm) and frozen parameters."""
    visited_ids = {id(parameter) for parameter in player.flat.parameters}
    tensors: StateDict = {}
    for name, value in player.net.state_dict(keep_vars=True).items():
        if id(value) not in visited_ids:
            tensors[name] = value.detach()
            visited_ids.add(id(value))
    return tensors


def replay_state(role: Role) -> StateDict:
    """Return what this rank keeps of earlier rounds (replayed images, stale players)."""
    return {f"replay_state/{name}": t for state in role.replay_state for name, t in state.state().items()}


def restore_replay_state(role: Role, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Put `replay_state` back, on the device that uses it."""
    on_device = {name: t.to(device) for name, t in select_prefix("replay_state/", tensors).items()}
    for state in role.replay_state:
        state.load(on_device)


@torch.no_grad()
def restore_player(player: Player, tensors: Mapping[str, Tensor]) -> None:
    """Put `player_state` and `player_exchange_state` back, into a player that is not sharded yet."""
    assert not player.sharded
    state = select_prefix(player.name + "/", tensors)
    if "params" not in state or state["params"].shape != player.flat.params.shape:
        raise CorruptCheckpoint(f"it holds another network for {player.name}")
    player.flat.params.copy_(state["params"])
    if player.ema:
        player.ema.params.copy_(state["ema"])
    for name, buffer in untrained_tensors(player).items():
        if f"buffer/{name}" not in state:
            raise CorruptCheckpoint(f"it lacks {name} of {player.name}")
        buffer.copy_(state[f"buffer/{name}"])
    optimizer_state.from_tensors(player.optimizer, select_prefix("optimizer/", state))
    player.flat.load_states(select_prefix("exchange_state/", state))


# Writing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoints(CheckpointFolder):
    """The checkpoints of a run folder."""

    def save(
        self,
        players: Iterable[Player],
        clock: Mapping[str, float],
        extra_metadata: Mapping[str, Any],
        role: Role,
        suffix: str = "",
    ) -> Path:
        """Write a complete checkpoint, or none: if any rank fails, all do. Every rank calls this.

        Args:
            clock: step, images and seconds.
            extra_metadata: further entries of checkpoint.json.
            suffix: appended to the name; a checkpoint with one is not found on resume.

        Raises:
            RunError: it could not be written. Older checkpoints are untouched.
        """
        players = tuple(players)
        networks = {player.name: network_shapes(player) for player in players}
        metadata = {"clock": dict(clock), "networks": networks, **extra_metadata}
        return self.write(f"{clock['step']:08d}{suffix}", self._local_state(players, role), metadata)

    def _local_state(self, players: Iterable[Player], role: Role) -> StateDict:
        """Return what this rank writes."""
        tensors = replay_state(role)
        for player in players:
            is_trained = player in role.trained_players
            if is_trained:
                tensors |= player_exchange_state(player)
            if self.world.rank == role.owner_rank(player) or (is_trained and not role.replicated):
                tensors |= player_state(player)
            elif player.sharded:
                player_state(player, is_receiver=False)
        return tensors


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


def read_checkpoint(path: Path, rank: int, ranks: int) -> CheckpointView:
    """Read a checkpoint for one rank: shared state and its own, or the mean of all where the world's size changed.

    Raises:
        CorruptCheckpoint: a file is missing, or has another size or checksum.
        UsageError: another version of paragan wrote it.
    """
    metadata, tensors = read_files(path, rank, ranks)
    try:
        step = int(metadata["clock"]["step"])
        images = int(metadata["clock"]["images"])
        seconds = float(metadata["clock"]["seconds"])
        if step < 0 or images < 0 or not 0 <= seconds < math.inf:
            raise ValueError("the clock is negative")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptCheckpoint(f"checkpoint.json: {error!r}") from error
    return CheckpointView(path, step, images, seconds, metadata, tensors)
