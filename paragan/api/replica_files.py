"""Save replicas, and load them: complete or absent, safetensors and JSON, no code in them.

folder/00000003/               numbered by saves (comm/checkpoint_files.py)
    rank0000.safetensors       one file for every rank that has state of its own
    checkpoint.json

Names of tensors begin with the number of the replica: `0/module/<name>`, `0/ema/<name>`, `0/optimizer/<number>/...`,
`0/exchange_state/<vector>/<name>`. Where ranks are equal, rank 0 alone writes parameters, average and optimizer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paragan.api.replica import Replica
from paragan.comm.checkpoint_files import CheckpointFolder, StateDict, read_files, read_newest, select_prefix
from paragan.comm.checkpoint_metadata import list_checkpoints
from paragan.core.errors import UsageError
from paragan.core.schema import to_dict
from paragan.optim import state_io

FORMAT = "replicas"


def save(
    folder: str | Path, *replicas: Replica, extra: Mapping[str, Any] | None = None, max_checkpoints: int = 2
) -> Path:
    """Save replicas so that `paragan.load(folder, *replicas)` continues bit for bit.

    All ranks call this, between turns.

    Saved are parameters, buffers, optimizer states with their learning rates, averages, what exchanges have still to
    send, and the number of turns. A save is complete or absent, also if a rank is killed meanwhile.

    Args:
        folder: on storage that all ranks share. Each save gets a numbered folder in it.
        replicas: in the order in which they will be loaded.
        extra: what else the loop has to know: numbers, texts, lists and mappings, such as
            `{"epoch": 3, "scheduler": scheduler.state_dict()}`. That of rank 0 is saved.
        max_checkpoints: how many saves are kept.

    Returns:
        The folder of this save.

    Raises:
        UsageError: there is no replica, a turn is open, or `extra` cannot be JSON.
        RunError: it could not be written; earlier saves are untouched.
    """
    _check_replicas(replicas)
    world = replicas[0].world
    if max_checkpoints < 1:
        raise UsageError(f"max_checkpoints={max_checkpoints}: must be 1 or more. Use 2")
    _check_keys(extra or {})
    try:
        plain_extra = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra: {error}. Use numbers, texts, lists and mappings only") from error
    numbers = [int(path.name) for path in list_checkpoints(Path(folder))]
    metadata = {"kind": FORMAT, "replicas": [_describe(replica) for replica in replicas], "extra": plain_extra}
    with replicas[0].reporting_lost_ranks(f"a save after turn {replicas[0].turns}"):
        for replica in replicas:
            if replica.player_exchange.drain:
                replica.player_exchange.drain()
        tensors = {f"{i}/{name}": t for i, replica in enumerate(replicas) for name, t in _local_state(replica).items()}
        number = int(world.all_gather_str(str(max(numbers, default=0) + 1))[0])
        return CheckpointFolder(Path(folder), world, max_checkpoints).write(f"{number:08d}", tensors, metadata)


def load_replicas(folder: str | Path, *replicas: Replica) -> dict[str, Any] | None:
    """Continue from the newest save in a folder. All ranks call this, before the first turn.

    On another number of ranks, what ranks had of their own becomes its mean.

    Args:
        folder: as given to `save`.
        replicas: as many as were saved, of the same networks, in the same order.

    Returns:
        The `extra` of the save; None if there is none yet.

    Raises:
        UsageError: it holds other networks or exchanges, or every save is damaged.
    """
    _check_replicas(replicas)
    world = replicas[0].world
    paths = list_checkpoints(Path(folder))
    loaded, damaged = read_newest(paths, lambda path: (path, *read_files(path, world.rank, world.size)))
    with replicas[0].reporting_lost_ranks("a load"):
        names = world.all_gather_str(loaded[0].name if loaded else "")
    if len(set(names)) > 1:
        raise UsageError(
            f"folder={folder}: ranks see different saves ({', '.join(names)}). Use storage that all ranks share"
        )
    for path, reason in damaged:
        warnings.warn(f"{path} is damaged ({reason}); the save before it is used", stacklevel=2)
    if loaded is None:
        if damaged:
            raise UsageError(f"{folder}: every save is damaged. Use another folder to start again")
        return None
    path, metadata, tensors = loaded
    if metadata.get("kind") != FORMAT:
        raise UsageError(f"{path}: was not written by paragan.save. Use the folder that was given to paragan.save")
    _check_same(path, metadata["replicas"], replicas)
    for i, (replica, description) in enumerate(zip(replicas, metadata["replicas"])):
        _restore(replica, select_prefix(f"{i}/", tensors))
        replica.turns = int(description["turns"])
    return metadata["extra"]


def _check_keys(extra: Any, where: str = "extra") -> None:
    """Raise UsageError for a key that is no text: JSON would make it one, and whoever loads would not find it."""
    if isinstance(extra, Mapping):
        items: list[tuple[Any, Any]] = list(extra.items())  # pyright: ignore
        for key, value in items:
            if not isinstance(key, str):
                raise UsageError(
                    f"{where}: has the key {key!r}, which JSON would make a text. Use texts as keys, or leave {where} "
                    "out"
                )
            _check_keys(value, f"{where}.{key}")
    elif isinstance(extra, list | tuple):
        for value in extra:  # pyright: ignore
            _check_keys(value, where)


def _check_replicas(replicas: tuple[Replica, ...]) -> None:
    if not replicas:
        raise UsageError("replicas: there is none. Use save(folder, gen, disc) and load(folder, gen, disc)")
    for replica in replicas:
        if not isinstance(replica, Replica):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"replicas: holds a {type(replica).__name__}. Use paragan.Replica")
        if replica.is_in_turn:
            raise UsageError(f"{replica.label}: its turn is open. Save and load between turns")
        replica.check_no_average()


def _describe(replica: Replica) -> dict[str, Any]:
    return {
        "modules": replica.label,
        "turns": replica.turns,
        "tensors": {name: list(tensor.shape) for name, tensor in replica.named_tensors()},
        "has_average": bool(replica.averages),
        "exchange": to_dict(replica.strategy),
        "optimizer": type(replica.optimizer).__name__,
    }


def _check_same(path: Path, saved: list[dict[str, Any]], replicas: tuple[Replica, ...]) -> None:
    """Raise UsageError if a save is of other replicas."""
    if len(saved) != len(replicas):
        names = ", ".join(description["modules"] for description in saved)
        raise UsageError(f"{path}: holds {len(saved)} replicas ({names}), not {len(replicas)}. Give as many, in order")
    for description, replica in zip(saved, replicas):
        current = _describe(replica)
        before, now = description["tensors"], current["tensors"]
        for name in dict.fromkeys((*now, *before)):
            if before.get(name) != now.get(name):
                raise UsageError(
                    f"{path}: holds other networks: {name} was {before.get(name, 'absent')}, now "
                    f"{now.get(name, 'absent')}. Build the networks that were saved"
                )
        if description["exchange"] != current["exchange"]:
            before, now = description["exchange"], current["exchange"]
            name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
            raise UsageError(
                f"{path}: {replica.label} was saved with exchange {name}={before.get(name)}, now {now.get(name)}. Use "
                "the exchange and wire that it was saved with"
            )
        if description["optimizer"] != current["optimizer"]:
            raise UsageError(
                f"{path}: {replica.label} was saved with optimizer {description['optimizer']}, now "
                f"{current['optimizer']}. Use the optimizer that it was saved with"
            )
        if description["has_average"] != current["has_average"]:
            verb = "has" if description["has_average"] else "lacks"
            raise UsageError(f"{path}: {verb} an average of {replica.label}. Use ema as it was when it was saved")


def _local_state(replica: Replica) -> StateDict:
    """Return what this rank writes of a replica."""
    trained = set(replica.trained)
    tensors = {f"module/{name}": t.detach() for name, t in replica.named_tensors() if t not in trained}
    if replica.world.is_main or not replica.shares_steps:
        tensors |= {f"module/{name}": t.detach() for name, t in replica.named_tensors() if t in trained}
        tensors |= {f"ema/{name}": t for name, t in _named_average(replica).items()}
        optimizer_state = state_io.to_tensors(replica.optimizer, with_lr=True)
        tensors |= {f"optimizer/{name}": t for name, t in optimizer_state.items()}
    for i, flat in enumerate(replica.flats):
        tensors |= {f"exchange_state/{i}/{name}": t for name, t in flat.states().items()}
    return tensors


def _named_average(replica: Replica) -> StateDict:
    """Return the average as tensors by the names of parameters; views."""
    tensors: StateDict = {}
    for flat, average in zip(replica.guarded, replica.averages):
        for name, p, (start, _) in zip(flat.names, flat.parameters, flat.slices):
            tensors[name] = average.params.as_strided(p.shape, p.stride(), start)
    return tensors


@torch.no_grad()
def _restore(replica: Replica, tensors: Mapping[str, Tensor]) -> None:
    modules = select_prefix("module/", tensors)
    for name, tensor in replica.named_tensors():
        if name not in modules:
            raise UsageError(f"replicas: the save lacks {name}")
        tensor.copy_(modules[name])
    average = select_prefix("ema/", tensors)
    for name, tensor in _named_average(replica).items():
        tensor.copy_(average[name])
    state_io.from_tensors(replica.optimizer, select_prefix("optimizer/", tensors))
    for i, flat in enumerate(replica.flats):
        flat.load_states(select_prefix(f"exchange_state/{i}/", tensors))
