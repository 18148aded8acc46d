"""A queue of jobs for processes that share nothing but a folder.

queue/0003.2.json     job 0003, leased for the second time: {"state": "held", "worker": "gpu07 process 4711", ...}

A job is acquired by creating its next file, by hard link, which only one process can do. Only a job's last file counts,
and none is ever removed, so no number is used twice and the files are a log. The owner touches its file every few
seconds. No clock is compared with that of another host: a lease is dead if its file has not changed for `lease_s`
seconds of the watcher's own clock or, on the same machine, if its process is gone. An owner that lost its lease sees
the next file.
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
from paragan.core.jsonl import is_number

ENTRY_FILE_PATTERN = re.compile(r"(.+)\.(\d+)\.json")
FINAL_STATES = ("free", "done", "failed")
NUMERIC_FIELDS = ("images", "seconds", "from", "attempts")  # of the metadata
HEARTBEATS_PER_LEASE = 6
FINALIZE_JOB = "all"  # the last job: what belongs to all labels together


@dataclass(frozen=True)
class LeaseEntry:
    """The contents of the last file of a job.

    state        : held, free (given back), done or failed
    metadata     : whatever else its owner wrote
    heartbeat_ns : modification time of the file: changes as long as the owner lives
    """

    job: str
    lease_number: int
    state: str
    worker: str
    metadata: Mapping[str, Any]
    heartbeat_ns: int

    @property
    def filename(self) -> str:
        """The name of its file."""
        return f"{self.job}.{self.lease_number}.json"


class LeaseQueue:
    """The jobs in a folder, as one process sees them."""

    def __init__(self, folder: Path, lease_s: float):
        self.folder = folder
        self.lease_s = lease_s
        self._final_entries: dict[str, LeaseEntry] = {}  # by file; these do not change any more
        self._last_heartbeats: dict[str, tuple[int, float]] = {}  # by file: heartbeat, and when it was first seen

    def entries(self) -> dict[str, LeaseEntry]:
        """Return the last entry of every job that was ever leased."""
        if not self.folder.is_dir():
            return {}
        last: dict[str, int] = {}
        for path in self.folder.iterdir():
            match = ENTRY_FILE_PATTERN.fullmatch(path.name)
            if match:
                last[match[1]] = max(last.get(match[1], 0), int(match[2]))
        return {job: self._read(job, number) for job, number in last.items()}

    def entry(self, job: str) -> LeaseEntry | None:
        """Return the last entry of a job; None if it was never leased."""
        number = 0
        while (self.folder / f"{job}.{number + 1}.json").exists():
            number += 1
        return self._read(job, number) if number else None

    def _read(self, job: str, lease_number: int) -> LeaseEntry:
        file = f"{job}.{lease_number}.json"
        if file in self._final_entries:
            return self._final_entries[file]
        with (self.folder / file).open("rb") as f:  # opening makes a network file system look for changes
            heartbeat_ns = os.fstat(f.fileno()).st_mtime_ns
            try:
                metadata = json.loads(f.read())
                state = str(metadata.pop("state"))
                worker = str(metadata.pop("worker"))
                if state not in ("held", *FINAL_STATES):
                    raise ValueError(state)
                if not all(is_number(metadata.get(key, 0)) for key in NUMERIC_FIELDS):
                    raise ValueError(metadata)
            except (ValueError, KeyError, TypeError, AttributeError):
                state = "held"
                worker = "an unknown worker (its file is damaged)"
                metadata = {}
        entry = LeaseEntry(job, lease_number, state, worker, metadata, heartbeat_ns)
        if entry.state in FINAL_STATES:
            self._final_entries[file] = entry
        return entry

    def is_dead(self, entry: LeaseEntry) -> bool:
        """Return True if the owner of a held lease is gone. Call it repeatedly: it watches the heartbeat."""
        if is_process_gone(entry.metadata.get("process")):
            return True
        heartbeat_ns, since_s = self._last_heartbeats.get(entry.filename, (None, 0.0))
        if heartbeat_ns != entry.heartbeat_ns:
            self._last_heartbeats[entry.filename] = (entry.heartbeat_ns, time.monotonic())
            return False
        return time.monotonic() - since_s > self.lease_s

    def is_alive(self, entry: LeaseEntry) -> bool:
        """Return True if the owner of a held lease is known to live: on this machine, or by a new heartbeat."""
        identity = entry.metadata.get("process")
        if isinstance(identity, list) and _read_process_identity(identity[2]) == identity:
            return True
        return self._last_heartbeats.get(entry.filename, (entry.heartbeat_ns, 0.0))[0] != entry.heartbeat_ns

    def is_busy(self, entry: LeaseEntry) -> bool:
        """Return True if a process works on a job. Watches for up to `lease_s` seconds where that is not known."""
        while entry.state == "held" and not self.is_dead(entry):
            if self.is_alive(entry):
                return True
            time.sleep(min(1.0, self.lease_s / HEARTBEATS_PER_LEASE))
            entry = self._read(entry.job, entry.lease_number)
        return False

    def acquire(self, job: str, after_number: int, metadata: Mapping[str, Any]) -> Lease | None:
        """Lease a job whose last file has this number (0: it has none). Returns None if another process was faster."""
        self.folder.mkdir(exist_ok=True)
        contents = {"state": "held", "worker": describe_worker(), "process": process_identity(), **metadata}
        path = self.folder / f"{job}.{after_number + 1}.json"
        if not create_exclusive(path, json.dumps(contents).encode(), fsync=False):
            return None
        return Lease(path, contents, self.lease_s)


@dataclass
class Lease:
    """A job that this process works on. Inside the context a thread sends heartbeats; `release` ends the lease."""

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
        """How often the job was leased, this time included."""
        return int(self.path.name.rsplit(".", 2)[1])

    @property
    def successor_path(self) -> Path:
        """The file by which another process takes the job over."""
        return self.path.with_name(f"{self.path.name.rsplit('.', 2)[0]}.{self.lease_number + 1}.json")

    def is_owned(self) -> bool:
        """Return True if no other process has taken the job over."""
        self.is_lost = self.is_lost or self.successor_path.exists()
        return not self.is_lost

    def release(self, state: str, **metadata: Any) -> None:
        """Write how the job ended. Has no effect if another process has taken it over."""
        self.contents |= {"state": state, **metadata}
        atomic_write_bytes(self.path, json.dumps(self.contents).encode())

    def _heartbeat(self) -> None:
        last_renewal_s = time.monotonic()
        while not self._stopped.wait(self.lease_s / HEARTBEATS_PER_LEASE):
            try:
                os.utime(self.path)
                last_renewal_s = time.monotonic()
            except OSError:  # the others do not see the heartbeat
                self.is_lost = self.is_lost or time.monotonic() - last_renewal_s > self.lease_s / 2
            with contextlib.suppress(OSError):
                self.is_owned()


def describe_worker() -> str:
    """Name this process, for messages."""
    return f"{socket.gethostname()} process {os.getpid()}"


def process_identity() -> list[str] | None:
    """Identify this process uniquely on this machine; None if /proc does not say."""
    return _read_process_identity(os.getpid())


def is_process_gone(identity: object) -> bool:
    """Return True if a process was on this machine and has ended; False if that is not known."""
    current = process_identity()
    if not current or not isinstance(identity, list) or len(identity) != len(current) or identity[:2] != current[:2]:
        return False
    return _read_process_identity(identity[2]) != identity


def _read_process_identity(pid: Any) -> list[str] | None:
    """Return [boot id, pid namespace, pid, start time], or None if there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, start_ticks = _read_proc_stat(int(pid))
        if state in "ZX":  # a zombie, or dead
            return None
        return [boot, str(Path("/proc/self/ns/pid").readlink()), str(pid), start_ticks]
    except (OSError, ValueError, IndexError):
        return None


def _read_proc_stat(pid: int) -> tuple[str, str]:
    """Return (state, start time in ticks after boot), fields 3 and 22 of /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
