"""Files of a checkpoint that all ranks write together: complete or absent, safetensors and JSON, no code in them.

checkpoints/00001234/
    rank0000.safetensors       one file for every rank that has state of its own
    checkpoint.json            written last: format, ranks, metadata, and size and checksum of every file

A folder is written under a temporary name, synced and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paragan.comm.checkpoint_metadata import (
    FORMAT_VERSION,
    CorruptCheckpoint,
    list_checkpoints,
    metadata_checksum,
    read_metadata,
)
from paragan.comm.world import World
from paragan.core.errors import RunError

CHANNELS_LAST_SUFFIX = "~"
StateDict = dict[str, Tensor]
T = TypeVar("T")


# Writing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints in a folder. The newest `max_checkpoints` are kept.

    shares_folder : whether this rank sees the folder of rank 0. One that does not keeps its own part in its own folder,
                    from where it can be uploaded
    """

    folder: Path
    world: World
    max_checkpoints: int = 2
    shares_folder: bool = True

    def clear_unfinished(self) -> None:
        """Remove what an interrupted save left behind, while nobody else writes."""
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)

    def write(self, name: str, tensors: StateDict, metadata: Mapping[str, Any]) -> Path:
        """Write a complete checkpoint, or none: if any rank fails, all do. Every rank calls this.

        Args:
            name: of its folder: digits, which rise from one checkpoint to the next. Others are not found on resume.
            tensors: of this rank; it writes no file if there are none.
            metadata: entries of checkpoint.json; those of rank 0 count.

        Raises:
            RunError: it could not be written. Older checkpoints are untouched.
        """
        target = self.folder / name
        staging = self.folder / f".writing-{name}-{self.world.membership_epoch}"
        error: OSError | None = None
        size_bytes = crc32 = 0
        try:
            staging.mkdir(parents=True, exist_ok=True)
            if tensors:
                size_bytes, crc32 = _write_synced(staging / rank_filename(self.world.rank), to_bytes(tensors))
        except OSError as problem:
            error = problem
        rows = self._all_gather_row([error is not None, size_bytes, crc32])
        if not any(failed for failed, _, _ in rows):
            error = self._commit(staging, target, rows, metadata) if self.world.is_main else None
            if tensors and not self.shares_folder:
                error = self._rename_part(staging, target)
            rows = self._all_gather_row([error is not None])
        failed_ranks = [rank for rank, row in enumerate(rows) if row[0]]
        if failed_ranks:
            shutil.rmtree(staging, ignore_errors=True)
            reason = error or f"rank {failed_ranks[0]} could not write its part"
            raise RunError(f"checkpoint {target} was not written: {reason}; {self.latest_message()}")
        return target

    def _all_gather_row(self, row: list[int]) -> list[list[int]]:
        """Return the rows of all ranks, in rank order."""
        rows, work = self.world.all_ranks.all_gather(torch.tensor(row))
        work.wait()
        return rows.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _commit(
        self,
        staging: Path,
        target: Path,
        rows: list[list[int]],
        extra_metadata: Mapping[str, Any],
    ) -> OSError | None:
        """Write checkpoint.json, rename the folder, and remove old checkpoints. Returns the error, if there is one."""
        files = {
            rank_filename(rank): {"bytes": size_bytes, "crc32": crc32}
            for rank, (_, size_bytes, crc32) in enumerate(rows)
            if size_bytes
        }
        metadata = {
            "format": FORMAT_VERSION,
            "ranks": self.world.size,
            "files": files,
            **extra_metadata,
        }
        text = json.dumps({"crc32": metadata_checksum(metadata), **metadata}, indent=1)
        try:
            _write_synced(staging / "checkpoint.json", text.encode())
            _fsync_dir(staging)
            if target.exists():
                shutil.rmtree(target)
            staging.rename(target)
            _fsync_dir(self.folder)
        except OSError as problem:
            return problem
        self._remove_old(target)
        self._remove_abandoned()
        return None

    def _remove_abandoned(self) -> None:
        """Remove unfinished saves of earlier memberships, which a lost rank interrupted."""
        for path in self.folder.glob(".writing-*"):
            match = re.fullmatch(r"\.writing-\d+-(\d+)", path.name)
            if match and int(match[1]) < self.world.membership_epoch:
                shutil.rmtree(path, ignore_errors=True)

    def _rename_part(self, staging: Path, target: Path) -> OSError | None:
        """Give the part of this rank its name where rank 0 does not see it. Returns the error, if there is one."""
        name = rank_filename(self.world.rank)
        try:
            target.mkdir(exist_ok=True)
            (staging / name).replace(target / name)
        except OSError as problem:
            return problem
        with contextlib.suppress(OSError):  # other ranks of this host may still have a part in it
            staging.rmdir()
        self._remove_old(target)
        return None

    def _remove_old(self, target: Path) -> None:
        """Remove the checkpoints before `target` but the newest ones."""
        # a damaged checkpoint may be ahead of this one: it does not count
        until_this_one = [path for path in list_checkpoints(self.folder) if path.name <= target.name]
        for old in until_this_one[self.max_checkpoints :]:
            shutil.rmtree(old, ignore_errors=True)

    def latest_message(self) -> str:
        """Say, for messages, which checkpoint the run can be resumed from."""
        paths = list_checkpoints(self.folder)
        return f"the last good checkpoint is {paths[0]}" if paths else "there is no checkpoint yet"


def rank_filename(rank: int) -> str:
    """Return the name of the file that a rank writes of a checkpoint."""
    return f"rank{rank:04d}.safetensors"


def to_bytes(tensors: StateDict) -> bytes:
    """Serialize as safetensors. These know no memory format, so names of channels-last tensors end with "~"."""
    stored: StateDict = {}
    for name, tensor in tensors.items():
        is_channels_last = tensor.dim() == 4 and not tensor.is_contiguous()
        stored_name = name + CHANNELS_LAST_SUFFIX if is_channels_last else name
        stored[stored_name] = tensor.detach().cpu().contiguous()
    return safetensors.torch.save(stored)


def from_bytes(data: bytes) -> StateDict:
    """Read what `to_bytes` returned."""
    tensors: StateDict = {}
    for name, tensor in safetensors.torch.load(data).items():
        is_channels_last = name.endswith(CHANNELS_LAST_SUFFIX)
        memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        tensors[name.removesuffix(CHANNELS_LAST_SUFFIX)] = tensor.contiguous(memory_format=memory_format)
    return tensors


def _write_synced(path: Path, data: bytes) -> tuple[int, int]:
    """Write and sync a file. Returns its size in bytes and its crc32."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return len(data), zlib.crc32(data)


def _fsync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading ----------------------------------------------------------------------------------------------


def read_files(path: Path, rank: int, ranks: int) -> tuple[dict[str, Any], StateDict]:
    """Read a checkpoint for one rank: shared state and its own, or the mean of all where the world's size changed.

    Returns:
        The contents of checkpoint.json, and the tensors.

    Raises:
        CorruptCheckpoint: a file is missing, or has another size or checksum.
        UsageError: another version of paragan wrote it.
    """
    metadata = read_metadata(path)
    states: dict[str, StateDict] = {}
    try:
        for name, facts in metadata["files"].items():
            if name not in map(rank_filename, range(metadata["ranks"])):
                raise ValueError(f"{name!r} is no file of a rank")
            states[name] = _read_file(path / name, facts["bytes"], facts["crc32"])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise CorruptCheckpoint(f"checkpoint.json: {error!r}") from error
    local_state = states.get(rank_filename(rank), {}) if ranks == metadata["ranks"] else {}
    return metadata, merge_ranks(states.values()) | local_state


def read_newest(paths: Iterable[Path], read: Callable[[Path], T]) -> tuple[T | None, list[tuple[Path, str]]]:
    """Return the first of `paths` that `read` can read, and those before it that it cannot, with the reason."""
    damaged: list[tuple[Path, str]] = []
    for path in paths:
        try:
            return read(path), damaged
        except CorruptCheckpoint as error:
            damaged.append((path, str(error)))
    return None, damaged


def merge_ranks(states: Iterable[StateDict]) -> StateDict:
    """Merge the states of all ranks for a world of another size: a tensor that several ranks have becomes their mean.

    Replayed images have a name per rank, or are the same on all.
    """
    values_by_name: dict[str, list[Tensor]] = {}
    for state in states:
        for name, value in state.items():
            values_by_name.setdefault(name, []).append(value)
    merged: StateDict = {}
    for name, values in values_by_name.items():
        first = values[0]
        if all(torch.equal(first, value) for value in values[1:]):
            merged[name] = first
        else:
            wide = torch.promote_types(first.dtype, torch.float64)  # complex128 for complex numbers
            merged[name] = torch.stack([value.to(wide) for value in values]).mean(0).to(first.dtype)
    return merged


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> StateDict:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _read_file(path: Path, size_bytes: int, crc32: int) -> StateDict:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            raise CorruptCheckpoint(f"{path.name} has {status.st_size} bytes, not {size_bytes}: it was cut off")
        data = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpoint(f"{path.name}: {error.strerror}") from error
    if zlib.crc32(data) != crc32:
        raise CorruptCheckpoint(f"{path.name} does not match its checksum")
    try:
        return from_bytes(data)
    except safetensors.SafetensorError as error:
        raise CorruptCheckpoint(f"{path.name}: {error}") from error
