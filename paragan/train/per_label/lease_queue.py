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

from paragan.core.atomic_write import create_once, write_whole

NAME = re.compile(r"(.+)\.(\d+)\.json")
SETTLED = ("free", "done", "failed")
NUMBERS = ("images", "seconds", "from", "attempts")  # that `about` may hold
BEATS = 6  # in lease_s


@dataclass(frozen=True)
class Entry:
    """What the last file of a job says.

    state : held, free (given back), done or failed
    about : whatever its owner wrote beside
    mark  : changes whenever the owner shows that it lives
    """

    job: str
    number: int
    state: str
    worker: str
    about: Mapping[str, Any]
    mark: int

    @property
    def file(self) -> str:
        return f"{self.job}.{self.number}.json"


class Leases:
    """The jobs in a folder, as one process sees them."""

    def __init__(self, folder: Path, lease_s: float):
        self.folder, self.lease_s = folder, lease_s
        self._settled: dict[str, Entry] = {}  # by file: these change no more
        self._seen: dict[str, tuple[int, float]] = {}  # by file: mark, and since when

    def entries(self) -> dict[str, Entry]:
        """The last word on every job that was ever taken."""
        last: dict[str, int] = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else []:
            if match := NAME.fullmatch(path.name):
                last[match[1]] = max(last.get(match[1], 0), int(match[2]))
        return {job: self._read(job, number) for job, number in last.items()}

    def entry(self, job: str) -> Entry | None:
        """The last word on one job, None where nobody took it yet."""
        number = 0
        while (self.folder / f"{job}.{number + 1}.json").exists():
            number += 1
        return self._read(job, number) if number else None

    def _read(self, job: str, number: int) -> Entry:
        file = f"{job}.{number}.json"
        if file in self._settled:
            return self._settled[file]
        with (self.folder / file).open("rb") as f:  # opening asks a network file system for what is new
            mark = os.fstat(f.fileno()).st_mtime_ns
            try:
                about = json.loads(f.read())
                entry = Entry(job, number, str(about.pop("state")), str(about.pop("worker")), about, mark)
                if entry.state not in ("held", *SETTLED) or not all(_is_number(about.get(key, 0)) for key in NUMBERS):
                    raise ValueError(entry)
            except (ValueError, KeyError, TypeError, AttributeError):
                entry = Entry(job, number, "held", "nobody knows whom (its file is damaged)", {}, mark)
        if entry.state in SETTLED:
            self._settled[file] = entry
        return entry

    def dead(self, entry: Entry) -> bool:
        """Whether the owner of a held lease is gone: asked again and again, while one waits."""
        if gone(entry.about.get("process")):
            return True
        mark, since = self._seen.get(entry.file, (None, 0.0))
        if mark != entry.mark:
            self._seen[entry.file] = (entry.mark, time.monotonic())
            return False
        return time.monotonic() - since > self.lease_s

    def alive(self, entry: Entry) -> bool:
        """Whether the owner of a held lease is known to live: it is here, or was heard of since we first looked."""
        known = entry.about.get("process")
        if isinstance(known, list) and _known(known[2]) == known:
            return True
        return self._seen.get(entry.file, (entry.mark, 0.0))[0] != entry.mark

    def busy(self, entry: Entry) -> bool:
        """Whether somebody works on a job; where that cannot be said at once, after having watched for `lease_s`."""
        while entry.state == "held" and not self.dead(entry):
            if self.alive(entry):
                return True
            time.sleep(min(1.0, self.lease_s / BEATS))
            entry = self._read(entry.job, entry.number)
        return False

    def take(self, job: str, after: int, about: Mapping[str, Any]) -> Lease | None:
        """Take a job whose last file has the number `after` (0: it has none). None where another was faster."""
        self.folder.mkdir(exist_ok=True)
        told = {"state": "held", "worker": worker(), "process": process(), **about}
        path = self.folder / f"{job}.{after + 1}.json"
        return Lease(path, told, self.lease_s) if create_once(path, json.dumps(told).encode(), sync=False) else None


@dataclass
class Lease:
    """A job that this process works on: a context in which it says so. Outside, nothing is written but by `end`."""

    path: Path
    told: dict[str, Any]
    lease_s: float
    lost: bool = False
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(5)

    @property
    def number(self) -> int:
        """How often the job was taken, this time included."""
        return int(self.path.name.rsplit(".", 2)[1])

    @property
    def next(self) -> Path:
        """The file by which another takes it over."""
        return self.path.with_name(f"{self.path.name.rsplit('.', 2)[0]}.{self.number + 1}.json")

    def look(self) -> bool:
        """Whether it is still ours."""
        self.lost = self.lost or self.next.exists()
        return not self.lost

    def end(self, state: str, **about: Any) -> None:
        """Say how it ended; of no effect where another has taken it over."""
        self.told |= {"state": state, **about}
        write_whole(self.path, json.dumps(self.told).encode())

    def _beat(self) -> None:
        beaten = time.monotonic()
        while not self._over.wait(self.lease_s / BEATS):
            try:
                os.utime(self.path)
                beaten = time.monotonic()
            except OSError:  # the others cannot see that we live
                self.lost = self.lost or time.monotonic() - beaten > self.lease_s / 2
            with contextlib.suppress(OSError):
                self.look()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def worker() -> str:
    """This process, for people."""
    return f"{socket.gethostname()} process {os.getpid()}"


def process() -> list[str] | None:
    """This process, unlike any other that ran on this machine since it was started; None where that is not told."""
    return _known(os.getpid())


def gone(known: object) -> bool:
    """Whether a process was on this machine and is no more. False where that cannot be said from here."""
    mine = process()
    if not mine or not isinstance(known, list) or len(known) != len(mine) or known[:2] != mine[:2]:
        return False
    return _known(known[2]) != known


def _known(pid: Any) -> list[str] | None:
    """[boot, pid namespace, pid, when it began]."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, began = _stat(int(pid))
        return None if state in "ZX" else [boot, str(Path("/proc/self/ns/pid").readlink()), str(pid), began]
    except (OSError, ValueError, IndexError):
        return None


def _stat(pid: int) -> tuple[str, str]:
    """(state, start in ticks after boot), fields 3 and 22 of /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
