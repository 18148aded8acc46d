"""Upload a run folder to an object store while the run trains, so that what is there is complete or absent.

A checkpoint is there if its checkpoint.json is: this is uploaded after all files that it names, and deleted before
them. The lines of statistics up to it are there first. config.json of a model, which has the checksums of its weights,
follows these. Ranks that do not see the folder of rank 0 upload the files that they wrote of a checkpoint; rank 0 waits
for them before it uploads checkpoint.json.

Before every write and delete it is checked that this session still owns the folder: it may have been frozen meanwhile.

Training never waits for an upload. After a failure it is tried again with growing pauses.
"""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paragan.core.errors import RunError, UsageError
from paragan.data.storage.object_folder import ObjectFolder
from paragan.data.storage.object_store import ConflictError
from paragan.train.console import RunConsole
from paragan.train.remote_run.ownership import OWNER_FILE, RENEW_S, Ownership, OwnershipLost

SCAN_S = 2.0  # between looks at the folder
ENDING_SCAN_S = 0.2
LOG_PERIOD_S = 30.0  # between uploads of a file that grows or is replaced
MAX_PAUSE_S = 30.0
MANIFEST = "checkpoint.json"
NOT_UPLOADED = ("members.json", OWNER_FILE)  # the former has secrets
LAST_FILES = (f"/{MANIFEST}", "/config.json")

FileState = tuple[int, int]  # time of modification in ns, size


class Uploader:
    """Uploads the files of a folder from a thread of its own.

    Args:
        folder: where to.
        local: the run folder on this machine.
        ownership: is renewed; uploads end if it is lost.
        is_main: whether this rank writes the run folder at the moment.
        part_name: name of the file that this rank writes of each checkpoint, if it does not see the folder of rank 0.
    """

    def __init__(
        self,
        folder: ObjectFolder,
        local: Path,
        ownership: Ownership,
        is_main: Callable[[], bool],
        part_name: str,
        console: RunConsole,
    ):
        self._folder, self._local, self._ownership = folder, local, ownership
        self._is_main, self._part_name, self._console = is_main, part_name, console
        self._uploaded: dict[str, FileState] = {}
        self._uploaded_at: dict[str, float] = {}
        self._error = ""
        self._lost = ""
        self._is_ending = threading.Event()
        self._is_complete = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._renewing = threading.Thread(target=self._renew, name="renew", daemon=True)

    def start(self, known: Iterable[str] = ()) -> None:
        """Begin. `known` are files that are there as they are here."""
        known = set(known)
        self._uploaded.update((name, state) for name, state in self._scan().items() if name in known)
        self._thread.start()
        self._renewing.start()

    def finish(self, patience_s: float) -> str:
        """Upload what is left. Returns what is missing after `patience_s`, and why; "" if nothing is."""
        self._is_ending.set()
        deadline = time.monotonic() + patience_s
        while self._thread.is_alive() and not self._is_complete.is_set() and time.monotonic() < deadline:
            self._is_complete.wait(0.2)  # short: the main thread answers signals
        if self._lost:
            return self._lost
        if self._is_complete.is_set():
            return ""
        missing = sorted(self._changed(every=True))
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return f"{self._folder.address} lacks {shown or OWNER_FILE} ({self._error or 'no time was left'})"

    # In the threads ---------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Say that this session is alive, however long an upload takes."""
        while not self._is_complete.wait(RENEW_S) and not self._lost:
            try:
                if self._is_main():
                    self._ownership.renew()
            except OwnershipLost as error:
                self._stop(error)
            except (UsageError, RunError):
                continue  # uploads fail too, and say why

    def _run(self) -> None:
        failures = 0
        while not self._lost:
            is_ending = self._is_ending.is_set()
            try:
                is_complete = self._upload_all(is_ending)
                if self._error:
                    self._console.print(f"{self._folder.address}: uploads again")
                self._error = ""
                failures = 0
            except OwnershipLost as error:
                self._stop(error)
                return
            except (UsageError, RunError, ConflictError, OSError) as error:
                if not self._error:
                    self._console.print(f"{error}; training goes on, and the upload is tried again")
                self._error = str(error)
                failures += 1
                is_complete = False
            if is_complete and is_ending:
                self._is_complete.set()
                return
            pause_s = min((ENDING_SCAN_S if is_ending else SCAN_S) * 2**failures, MAX_PAUSE_S)
            if is_ending:
                time.sleep(pause_s)
            else:
                self._is_ending.wait(pause_s)

    def _stop(self, error: OwnershipLost) -> None:
        if not self._lost:
            self._lost = str(error)
            self._console.print(self._lost)

    def _upload_all(self, is_ending: bool) -> bool:
        """Upload what has changed. Returns whether everything is there."""
        self._delete_undone_checkpoints()
        pending = self._changed(every=is_ending)
        if any(name.endswith(f"/{MANIFEST}") for name in pending):
            pending = self._changed(every=True)
        has_new_checkpoint = False
        is_complete = True
        failures: dict[str, UsageError | OSError] = {}  # files that cannot be uploaded do not keep others from it
        for name in sorted(pending, key=_upload_order):
            if name.endswith(f"/{MANIFEST}") and not self._has_all_parts(name):
                is_complete = False
                continue
            if any(_follows(name, other) for other in failures):
                continue
            try:
                exists = self._upload(name, pending[name])
            except (UsageError, OSError) as error:
                failures[name] = error
                continue
            has_new_checkpoint |= exists and name.endswith(f"/{MANIFEST}")
        if has_new_checkpoint:
            self._delete_old_checkpoints()
        for error in failures.values():
            raise error
        if is_complete and is_ending and self._is_main():
            self._ownership.release()
        return is_complete

    def _upload(self, name: str, state: FileState) -> bool:
        """Upload a file as it is now. Returns whether it exists."""
        path = self._local / name
        is_growing = path.suffix == ".jsonl"
        self._ownership.confirm()
        manifest = f"{name.rpartition('/')[0]}/{MANIFEST}"
        if name != manifest and self._uploaded.pop(manifest, None):  # of an undone checkpoint of the same step
            self._folder.delete([manifest])
        try:
            self._folder.write(name, path.read_bytes() if is_growing else path)
        except FileNotFoundError:  # an old checkpoint was removed meanwhile
            return False
        self._uploaded[name] = state
        self._uploaded_at[name] = time.monotonic()
        return True

    def _has_all_parts(self, name: str) -> bool:
        """Return whether all files that a checkpoint.json names are in the object store, in their sizes."""
        checkpoint = name.removesuffix(f"/{MANIFEST}")
        try:
            files = json.loads((self._local / name).read_bytes())["files"]
        except (OSError, ValueError, KeyError):
            return False
        if all(f"{checkpoint}/{file}" in self._uploaded for file in files):
            return True
        there = self._folder.list_all(checkpoint)
        sizes = {file: there[path].size if (path := f"{checkpoint}/{file}") in there else None for file in files}
        return all(sizes[file] == files[file]["bytes"] for file in files)

    def _delete_undone_checkpoints(self) -> None:
        """Delete the checkpoint.json of checkpoints that the run went back before: it is not to be resumed from."""
        undone = {path.name.rpartition("-")[2] for path in self._local.glob("checkpoints/undone*-*")}
        manifests = [name for step in undone if (name := f"checkpoints/{step}/{MANIFEST}") in self._uploaded]
        manifests = [name for name in manifests if not (self._local / name).exists()]
        if manifests:
            self._ownership.confirm()
            self._folder.delete(manifests)
        for name in manifests:
            del self._uploaded[name]

    def _delete_old_checkpoints(self) -> None:
        """Delete the checkpoints that are no longer here: older ones, and those that were undone."""
        kept = {path.name for path in (self._local / "checkpoints").iterdir()}
        there = self._folder.list_all("checkpoints")
        old = [name for name in there if (parts := name.split("/"))[2:] and parts[1] not in kept]
        self._ownership.confirm()
        self._folder.delete([name for name in old if name.endswith(MANIFEST)])
        self._folder.delete([name for name in old if not name.endswith(MANIFEST)])
        for name in old:
            self._uploaded.pop(name, None)

    # The local folder -------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, FileState]:
        """Return the files that belong into the object store."""
        files: dict[str, FileState] = {}
        for path in self._local.rglob("*"):
            name = path.relative_to(self._local).as_posix()
            if not is_part_of_run(name):
                continue
            if not self._is_main() and not (self._part_name and path.name == self._part_name):
                continue
            try:
                status = path.stat()
            except OSError:  # removed meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                files[name] = (status.st_mtime_ns, status.st_size)
        return files

    def _changed(self, every: bool) -> dict[str, FileState]:
        """Return the files that have to be uploaded.

        Args:
            every: also those that were uploaded less than LOG_PERIOD_S ago.
        """
        now = time.monotonic()
        return {
            name: state
            for name, state in self._scan().items()
            if self._uploaded.get(name) != state
            and (every or now - self._uploaded_at.get(name, -LOG_PERIOD_S) >= LOG_PERIOD_S)
        }


def is_part_of_run(name: str) -> bool:
    """Return whether a file of a run folder belongs into an object store: no hidden, damaged or undone ones."""
    if name in NOT_UPLOADED or any(part.startswith(".") for part in name.split("/")):
        return False
    return not name.startswith(("checkpoints/damaged-", "checkpoints/undone"))


def _follows(name: str, other: str) -> bool:
    """Return whether a file says that another one is complete."""
    same_folder = name.rpartition("/")[0] == other.rpartition("/")[0]
    return name.endswith(LAST_FILES) and (same_folder or other.endswith(".jsonl"))


def _upload_order(name: str) -> tuple[bool, bool, str]:
    """Weights first, what says that they are complete last."""
    return name.endswith(LAST_FILES), not name.endswith(".safetensors"), name
