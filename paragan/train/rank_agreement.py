"""Checks that all ranks make before a run, and refuse together, with the reasons of all ranks in one line."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from paragan.comm.world import World
from paragan.config.run import Run, to_saved_dict
from paragan.core.errors import UsageError
from paragan.core.schema import diff, to_dict
from paragan.core.version import __version__
from paragan.data.dataset import Dataset
from paragan.train.compare_sets import Comparison
from paragan.train.image_set import ImageSet
from paragan.train.run_dir import RunDir
from paragan.train.run_dir_selection import RunDirRequest, StartCheck, no_check, select_run_dir

T = TypeVar("T")
SHARED_STORAGE_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 1800.0  # ranks may read the data at very different speeds
MAY_DIFFER_BY_HOST = ("data.path", "init_from", "distill_from", "device.kind", "device.threads", "timeout_s", "reasons")


def on_all_ranks(world: World, action: Callable[[], T], timeout_s: float | None = None) -> T:
    """Run `action` on every rank and return its result. If it fails on any rank, all ranks raise UsageError.

    Args:
        timeout_s: how long to wait for the slowest rank; None for that of the world.

    Raises:
        UsageError: with the distinct reasons, and the ranks of each unless all have the same.
    """
    result, reason = None, ""
    try:
        result = action()
    except (UsageError, OSError) as error:
        reason = str(error)
    reasons = world.all_gather_str(reason, timeout_s)
    if any(reasons):
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, text in enumerate(reasons):
            if text:
                ranks_by_reason.setdefault(text, []).append(rank)
        if all(len(ranks) == world.size for ranks in ranks_by_reason.values()):
            raise UsageError("; ".join(ranks_by_reason))
        raise UsageError(
            "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_reason.items())
        )
    assert result is not None
    return result


def check_same_config(run: Run, world: World) -> None:
    """Raise UsageError on all ranks if they were started with different runs, and name the fields that differ."""
    text = json.dumps(to_dict(run), default=_class_name)
    runs = [json.loads(text) for text in world.all_gather_str(text)]
    differences: list[str] = []
    for rank, other in enumerate(runs):
        for name, first, value in diff(runs[0], other):
            is_unreadable = name.startswith("fingerprints.") and not (first and value)  # removed since the run started
            if name not in MAY_DIFFER_BY_HOST and not is_unreadable:
                differences.append(f"{name} is {first!r} on rank 0, {value!r} on rank {rank}")
    if differences:
        raise UsageError(
            f"ranks were started with different runs: {'; '.join(differences[:8])}. Use the same command on all"
        )


def _class_name(value: object) -> str:
    """Name the class of a value that is no configuration: an objective of the user may be any object."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def check_same_versions(world: World) -> None:
    """Raise UsageError on all ranks if they run other versions of paragan or torch than rank 0."""
    versions = world.all_gather_str(f"paragan {__version__}, torch {torch.__version__.partition('+')[0]}")
    others = [f"rank {rank} runs {text}" for rank, text in enumerate(versions) if text != versions[0]]
    if others:
        raise UsageError(f"WORLD_SIZE={world.size}: rank 0 runs {versions[0]}; {'; '.join(others)}. Use one version")


def check_same_data(dataset: Dataset, path: str, world: World) -> None:
    """Raise UsageError on all ranks if they have other images, labels or class names than rank 0.

    Args:
        path: where this rank's data are, for the message; it may differ by host.
    """
    _check_same_content("data", path, dataset.images.shape[0], dataset.classes, dataset.fingerprint, world)


def check_same_sets(comparison: Comparison, world: World) -> None:
    """Raise UsageError on all ranks if they compare other images or statistics than rank 0."""
    for side in (comparison.reals, comparison.fakes):
        count = len(side.images) if isinstance(side, ImageSet) else 0
        _check_same_content(side.side, side.location, count, comparison.classes, side.fingerprint, world)


def _check_same_content(
    name: str, path: str, count: int, classes: Sequence[str], fingerprint: str, world: World
) -> None:
    facts = {
        "path": path,
        "host": socket.gethostname(),
        "images": count,
        "classes": tuple(classes),
        "fingerprint": fingerprint,
    }
    gathered = [json.loads(text) for text in world.all_gather_str(json.dumps(facts))]
    first = gathered[0]
    differences = [
        f"rank {rank} has {_compare_data(first, other)}"
        for rank, other in enumerate(gathered)
        if any(other[name] != first[name] for name in ("images", "classes", "fingerprint"))
    ]
    if differences:
        counted = f"{first['images']:,} images of {len(first['classes'])} classes in {first['path'] or 'memory'}"
        raise UsageError(
            f"{name}: rank 0 has {counted} ({first['host']}); {'; '.join(differences[:4])}. "
            "Use the same data on all ranks"
        )


def _compare_data(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Say what a rank has where another one has `first`."""
    where = f"in {other['path'] or 'memory'} ({other['host']})"
    if other["images"] != first["images"]:
        return f"{other['images']:,} images {where}"
    if len(other["classes"]) != len(first["classes"]):
        return f"{len(other['classes'])} classes {where}"
    if other["classes"] != first["classes"]:
        return f"classes of other names {where}"
    return f"as many, but other images or labels {where}"


@contextlib.contextmanager
def locked_run_dir(
    run: Run, world: World, request: RunDirRequest, start_check: StartCheck = no_check
) -> Iterator[RunDir]:
    """Let rank 0 choose and lock the folder of the run, and yield it on all ranks; released on exit.

    Args:
        start_check: raises UsageError for a run that could not start, before a folder is created.
    """
    owned: RunDir | None = None

    def select() -> str:
        nonlocal owned
        if world.is_main:
            owned = select_run_dir(request, run, world.size, start_check)
            planned_kimg = (owned.read_run_config() or {}).get("kimg", 0.0)
            trained_kimg = min(planned_kimg, owned.trained_images / 1000)  # which a smaller --kimg does not undo
            owned.write_run_config(to_saved_dict(run) | {"kimg": max(run.kimg, trained_kimg)})
            return str(owned.path)
        return "."

    path = Path(world.all_gather_str(on_all_ranks(world, select))[0])
    try:
        if request.address and request.run_dir:  # every host has its own copy
            path = request.run_dir
        else:
            check_shared_storage(path, world)
        yield owned or RunDir(path)
    finally:
        if owned:
            owned.release()


def check_shared_storage(path: Path, world: World) -> None:
    """Raise UsageError if a rank does not see the folder of rank 0: all ranks write parts of a checkpoint."""
    is_seen = sees_folder_of_main(path, world)

    def require_shared() -> bool:
        if not is_seen:
            raise UsageError(f"{path}: host {socket.gethostname()} does not see it. Use storage that all hosts share")
        return True

    on_all_ranks(world, require_shared)


def sees_folder_of_main(path: Path, world: World) -> bool:
    """Return whether `path` of this rank is the folder that rank 0 has there. All ranks call this."""
    # many worlds may check one folder at once, so the name is random
    marker = path / world.all_gather_str(f".shared-{secrets.token_hex(8)}")[0]
    if world.is_main:
        marker.touch()
    world.all_gather_str("marked")
    deadline = time.monotonic() + SHARED_STORAGE_TIMEOUT_S
    while not marker.exists() and time.monotonic() < deadline:  # network file systems may show it late
        time.sleep(0.1)
    is_seen = marker.exists()
    world.all_gather_str("looked")
    if world.is_main:
        marker.unlink(missing_ok=True)
    return is_seen
