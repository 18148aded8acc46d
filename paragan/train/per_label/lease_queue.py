"""Who works on what, among processes that share nothing but a folder.

queue/0003.2.json     job 0003, taken for the second time: {"state": "held", "worker": "gpu07 process 4711", ...}

A job is taken by creating its next file, which one process alone can do. Only a job's last file counts, and none is
ever removed: no number is used twice, and the files tell who did what. The owner touches its file every few seconds. No
clock is compared with another's: a lease is dead when its file has not changed for `lease_s` seconds of the watcher's
own clock or, on the same machine, when its process is gone. Whoever was taken over finds the next file there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paragan.core.atomic_write import atomic_write_bytes, create_exclusive

ENTRY_FILE_PATTERN = re.compile(r"(.+)\.(\d+)\.json")
FINAL_STATES = ("free", "done", "failed")
NUMERIC_FIELDS = ("images", "seconds", "from", "attempts")  # that `about` may hold
HEARTBEATS_PER_LEASE = 6  # in lease_s


@dataclass(frozen=True)
class LeaseEntry:
    """What the last file of a job says.

    state : held, free (given back), done or failed
    about : whatever its owner wrote beside
    mark  : changes whenever the owner shows that it lives
    """

    job: str
    lease_number: int
    state: str
    worker: str
    metadata: Mapping[str, Any]
    heartbeat_ns: int

    @property
    def filename(self) -> str:
        return f"{self.job}.{self.lease_number}.json"


class LeaseQueue:
    """The jobs in a folder, as one process sees them."""

    def __init__(self, folder: Path, lease_s: float):
        self.folder, self.lease_s = folder, lease_s
        self._final_entries: dict[str, LeaseEntry] = {}  # by file: these change no more
        self._last_heartbeats: dict[str, tuple[int, float]] = {}  # by file: mark, and since when

    def entries(self) -> dict[str, LeaseEntry]:
        """The last word on every job that was ever taken."""
        last: dict[str, int] = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else []:
            if match := ENTRY_FILE_PATTERN.fullmatch(path.name):
                last[match[1]] = max(last.get(match[1], 0), int(match[2]))
        return {job: self._read(job, number) for job, number in last.items()}

    def entry(self, job: str) -> LeaseEntry | None:
        """The last word on one job, None where nobody took it yet."""
        number = 0
        while (self.folder / f"{job}.{number + 1}.json").exists():
            number += 1
        return self._read(job, number) if number else None

    def _read(self, job: str, lease_number: int) -> LeaseEntry:
        file = f"{job}.{lease_number}.json"
        if file in self._final_entries:
            return self._final_entries[file]
        with (self.folder / file).open("rb") as f:  # opening asks a network file system for what is new
            mark = os.fstat(f.fileno()).st_mtime_ns
            try:
                about = json.loads(f.read())
                entry = LeaseEntry(job, lease_number, str(about.pop("state")), str(about.pop("worker")), about, mark)
                if entry.state not in ("held", *FINAL_STATES) or not all(
                    _is_number(about.get(key, 0)) for key in NUMERIC_FIELDS
                ):
                    raise ValueError(entry)
            except (ValueError, KeyError, TypeError, AttributeError):
                entry = LeaseEntry(job, lease_number, "held", "nobody knows whom (its file is damaged)", {}, mark)
        if entry.state in FINAL_STATES:
            self._final_entries[file] = entry
        return entry

    def is_dead(self, entry: LeaseEntry) -> bool:
        """Whether the owner of a held lease is gone: asked again and again, while one waits."""
        if is_process_gone(entry.metadata.get("process")):
            return True
        mark, since = self._last_heartbeats.get(entry.filename, (None, 0.0))
        if mark != entry.heartbeat_ns:
            self._last_heartbeats[entry.filename] = (entry.heartbeat_ns, time.monotonic())
            return False
        return time.monotonic() - since > self.lease_s

    def is_alive(self, entry: LeaseEntry) -> bool:
        """Whether the owner of a held lease is known to live: it is here, or was heard of since we first looked."""
        known = entry.metadata.get("process")
        if isinstance(known, list) and _read_process_identity(known[2]) == known:
            return True
        return self._last_heartbeats.get(entry.filename, (entry.heartbeat_ns, 0.0))[0] != entry.heartbeat_ns

    def is_busy(self, entry: LeaseEntry) -> bool:
        """Whether somebody works on a job; where that cannot be said at once, after having watched for `lease_s`."""
        while entry.state == "held" and not self.is_dead(entry):
            if self.is_alive(entry):
                return True
            time.sleep(min(1.0, self.lease_s / HEARTBEATS_PER_LEASE))
            entry = self._read(entry.job, entry.lease_number)
        return False

    def acquire(self, job: str, after_number: int, metadata: Mapping[str, Any]) -> Lease | None:
        """Take a job whose last file has the number `after` (0: it has none). None where another was faster."""
        self.folder.mkdir(exist_ok=True)
        told = {"state": "held", "worker": describe_worker(), "process": process_identity(), **metadata}
        path = self.folder / f"{job}.{after_number + 1}.json"
        return (
            Lease(path, told, self.lease_s) if create_exclusive(path, json.dumps(told).encode(), fsync=False) else None
        )


@dataclass
class Lease:
    """A job that this process works on: a context in which it says so. Outside, nothing is written but by `end`."""

    path: Path
    contents: dict[str, Any]
    lease_s: float
    is_lost: bool = False
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self._thread = threading.Thread(target=self._heartbeat, daemon=True, name="lease")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join(5)

    @property
    def lease_number(self) -> int:
        """How often the job was taken, this time included."""
        return int(self.path.name.rsplit(".", 2)[1])

    @property
    def successor_path(self) -> Path:
        """The file by which another takes it over."""
        return self.path.with_name(f"{self.path.name.rsplit('.', 2)[0]}.{self.lease_number + 1}.json")

    def is_owned(self) -> bool:
        """Whether it is still ours."""
        self.is_lost = self.is_lost or self.successor_path.exists()
        return not self.is_lost

    def release(self, state: str, **metadata: Any) -> None:
        """Say how it ended; of no effect where another has taken it over."""
        self.contents |= {"state": state, **metadata}
        atomic_write_bytes(self.path, json.dumps(self.contents).encode())

    def _heartbeat(self) -> None:
        beaten = time.monotonic()
        while not self._stopped.wait(self.lease_s / HEARTBEATS_PER_LEASE):
            try:
                os.utime(self.path)
                beaten = time.monotonic()
            except OSError:  # the others cannot see that we live
                self.is_lost = self.is_lost or time.monotonic() - beaten > self.lease_s / 2
            with contextlib.suppress(OSError):
                self.is_owned()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe_worker() -> str:
    """This process, for people."""
    return f"{socket.gethostname()} process {os.getpid()}"


def process_identity() -> list[str] | None:
    """This process, unlike any other that ran on this machine since it was started; None where that is not told."""
    return _read_process_identity(os.getpid())


def is_process_gone(identity: object) -> bool:
    """Whether a process was on this machine and is no more. False where that cannot be said from here."""
    mine = process_identity()
    if not mine or not isinstance(identity, list) or len(identity) != len(mine) or identity[:2] != mine[:2]:
        return False
    return _read_process_identity(identity[2]) != identity


def _read_process_identity(pid: Any) -> list[str] | None:
    """[boot, pid namespace, pid, when it began]."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, began = _read_proc_stat(int(pid))
        return None if state in "ZX" else [boot, str(Path("/proc/self/ns/pid").readlink()), str(pid), began]
    except (OSError, ValueError, IndexError):
        return None


def _read_proc_stat(pid: int) -> tuple[str, str]:
    """(state, start in ticks after boot), fields 3 and 22 of /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
