"""Train in a copy of a run folder that lies in an object store: `--run-dir s3://bucket/run`.

Every machine has its own copy, below ~/.cache/paragan/runs. At the start it is brought up to the newest complete
checkpoint of the object store; while the run trains, the copy is uploaded (upload.py).
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paragan.comm.checkpoint_files import rank_filename
from paragan.comm.checkpoint_metadata import list_checkpoints
from paragan.comm.process_group import CommunicationError
from paragan.comm.world import World
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import RunError, UsageError
from paragan.data.storage.object_folder import ObjectFolder, download_changed
from paragan.train.console import RunConsole
from paragan.train.rank_agreement import on_all_ranks, sees_folder_of_main
from paragan.train.remote_run.ownership import Ownership
from paragan.train.remote_run.upload import MANIFEST, Uploader, is_part_of_run
from paragan.train.run_dir import RunDir

RUN_ID_FILE = ".run-id"  # in the copy: of which run it is one
_MANIFEST_PATTERN = re.compile(rf"checkpoints/[0-9]{{8,18}}/{re.escape(MANIFEST)}")
ACQUIRE_TIMEOUT_S = 300.0
DOWNLOAD_TIMEOUT_S = 3600.0
END_TIMEOUT_S = 60.0  # for the slowest rank, after its uploads


@dataclass(frozen=True)
class RemoteRun:
    """A run folder in an object store, and its copy on this machine.

    shares_folder : whether this rank sees the copy of rank 0
    """

    folder: ObjectFolder
    local: Path
    shares_folder: bool


@contextlib.contextmanager
def open_remote_run(address: str, upload_s: float, world: World, console: RunConsole) -> Iterator[RemoteRun | None]:
    """Bring the copy of a run folder up to date, and upload it while the caller trains in it. All ranks call this.

    Args:
        address: in an object store; "" for a folder of this machine, which needs nothing.
        upload_s: how long to wait at the end until everything is uploaded.

    Raises:
        UsageError: the object store cannot be written, or another run writes there.
        RunError: not everything could be uploaded at the end. The copy is complete.
    """
    if not address:
        yield None
        return
    folder = ObjectFolder(address, "--run-dir")
    local = folder.local_copy("runs")
    ownership = _acquire(folder, world, console)
    local.mkdir(mode=0o700, parents=True, exist_ok=True)
    shares_folder = sees_folder_of_main(local, world)
    all_share = all(map(bool, world.all_gather_str("yes" if shares_folder else "")))
    known = _update_copy(folder, local, ownership, world, shares_folder, all_share)
    part_name = "" if shares_folder else rank_filename(world.rank)
    uploader = Uploader(folder, local, ownership, lambda: world.is_main, part_name, console)
    uploader.start(known)
    try:
        yield RemoteRun(folder, local, shares_folder)
    except BaseException:
        if missing := wait_for_uploads(uploader, upload_s, local, console):
            console.print(f"{missing}. What was trained is in {local}")
        raise
    missing = wait_for_uploads(uploader, upload_s, local, console)
    with contextlib.suppress(CommunicationError):  # a rank is lost: each one says what it lacks itself
        missing = next(filter(None, world.all_gather_str(missing, upload_s + END_TIMEOUT_S)), "")
        world.all_gather_str("", END_TIMEOUT_S)  # rank 0, which has the store, waits until all have read it
    if missing:  # on all ranks: where some may be lost, the launcher takes the status of the others
        raise RunError(
            f"{missing}. The run is complete in {local}; the same command uploads the rest", same_on_all_ranks=True
        )
    console.print(f"uploaded to {folder.address}")


def wait_for_uploads(uploader: Uploader, upload_s: float, local: Path, console: RunConsole) -> str:
    """Wait for the uploads; a signal ends the wait. Returns what is missing, "" if nothing is."""
    try:
        return uploader.finish(upload_s)
    except KeyboardInterrupt:
        if missing := uploader.finish(0.0):
            console.print(f"{missing}. What was trained is in {local}")
        raise


def _acquire(folder: ObjectFolder, world: World, console: RunConsole) -> Ownership:
    """Let rank 0 acquire the folder for all ranks."""
    ownership = Ownership(folder)

    def acquire() -> str:
        if world.is_main:
            ownership.acquire(console)
        return json.dumps([ownership.run_id, ownership.session, ownership.is_new])

    text = world.all_gather_str(on_all_ranks(world, acquire, ACQUIRE_TIMEOUT_S))[0]
    run_id, session, is_new = json.loads(text)
    return ownership if world.is_main else Ownership(folder, run_id, session, is_new)


def _update_copy(
    folder: ObjectFolder, local: Path, ownership: Ownership, world: World, shares_folder: bool, all_share: bool
) -> list[str]:
    """Bring the copies up to the newest complete checkpoint: rank 0 its own, and one rank of every other host.

    Returns:
        The files of checkpoints that are the same here and there.
    """

    def update() -> list[str]:
        if world.is_main or (not shares_folder and world.launch_info.local_rank == 0):
            return download_run(folder, local, ownership, has_all_parts=all_share)
        return []

    return on_all_ranks(world, update, DOWNLOAD_TIMEOUT_S)


def download_run(folder: ObjectFolder, local: Path, ownership: Ownership, has_all_parts: bool) -> list[str]:
    """Bring a copy up to the complete checkpoints of the object store. What is ahead of it stays as it is.

    Args:
        has_all_parts: whether this machine has every file of its checkpoints. Otherwise those that were not uploaded
            are removed.

    Returns:
        The files of checkpoints that are the same here and there.
    """
    _rename_copy_of_other_run(folder, local, ownership)
    there = {name: stat for name, stat in folder.list_all().items() if is_part_of_run(name)}
    complete = {name.rpartition("/")[0] for name in there if _is_manifest(name)}
    newest = max((int(checkpoint.rpartition("/")[2]) for checkpoint in complete), default=-1)
    here = list_checkpoints(local / "checkpoints")
    if not has_all_parts:
        for path in here:
            if int(path.name) > newest:
                shutil.rmtree(path)
    is_behind = not (local / "run.yaml").exists() or all(
        int(path.name) < newest for path in here if (path / MANIFEST).exists()
    )
    if is_behind:  # before the checkpoints, by which the next start knows that these are here
        for name in there:
            if not name.startswith("checkpoints/"):
                folder.download(name, local / name)
    # all: a run goes back to an older one if the newest is damaged, or if training diverged before it was written
    of_complete = {name: stat for name, stat in there.items() if name.rpartition("/")[0] in complete}
    download_changed(folder, dict(sorted(of_complete.items(), key=lambda item: _is_manifest(item[0]))), local)
    atomic_write_bytes(local / RUN_ID_FILE, ownership.run_id.encode())
    return list(of_complete)


def _rename_copy_of_other_run(folder: ObjectFolder, local: Path, ownership: Ownership) -> None:
    """Make room for a copy if there is one of another run, which may have more than was uploaded.

    Raises:
        UsageError: the object store has no run any more.
    """
    id_path = local / RUN_ID_FILE
    run_id = id_path.read_text() if id_path.exists() else ""
    if (local / "run.yaml").exists() and run_id != ownership.run_id:
        trained_images = RunDir(local).trained_images
        if ownership.is_new and trained_images:
            raise UsageError(
                f"--run-dir {folder.address}: is empty, but {local} is a copy of it at {trained_images / 1000:g} kimg. "
                "Remove that copy to start again, or continue it with --run-dir and its path"
            )
        local.rename(local.with_name(f"{local.name}-{run_id or 'other'}-{secrets.token_hex(4)}"))
    local.mkdir(mode=0o700, parents=True, exist_ok=True)


def _is_manifest(name: str) -> bool:
    """Return whether an object is the last file of a checkpoint that can be resumed from."""
    return bool(_MANIFEST_PATTERN.fullmatch(name))
