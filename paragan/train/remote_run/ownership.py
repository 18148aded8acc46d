"""Let only one session at a time write a run folder in an object store, whatever machine it runs on.

The object `owner.json` names the run, and the session that trains it, which rewrites it every RENEW_S. Another session
that finds it watches it for EXPIRE_S by its own clock: if it does not change, the former session is dead (its machine
was taken away) and is replaced. The object is written under the condition that it has not changed, so of two sessions
that try only one succeeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from typing import Any

from paragan.core.errors import RunError, UsageError
from paragan.data.storage.object_folder import ObjectFolder
from paragan.data.storage.object_store import ConflictError
from paragan.data.storage.retry import StoredObject
from paragan.train.console import RunConsole

OWNER_FILE = "owner.json"
RENEW_S = 5.0
EXPIRE_S = 25.0
POLL_S = 1.0


class OwnershipLost(RunError):
    """Another session writes the run folder now."""


class Ownership:
    """The right to write a run folder in an object store, shared by the ranks of one session.

    run_id  : of the run that the folder holds; a copy with another one is of a run that is gone
    session : of this start of the run
    is_new  : whether the folder held no run

    Args:
        run_id, session, is_new: of the rank that holds it already; without them, `acquire` it.
    """

    def __init__(self, folder: ObjectFolder, run_id: str = "", session: str = "", is_new: bool = False):
        self._folder = folder
        self.run_id = run_id
        self.session = session or secrets.token_hex(8)
        self.is_new = is_new
        self._renewals = 0

    def acquire(self, console: RunConsole) -> None:
        """Become the one that writes, after waiting for a former one that may be alive.

        Raises:
            UsageError: another one is alive, or the folder cannot be written.
        """
        previous = self._folder.read(OWNER_FILE)
        content = _parse(previous)
        if content.get("owner"):
            previous = self._await_expiry(previous, content, console)
        self.is_new = not content
        self.run_id = str(content.get("run") or secrets.token_hex(8))
        try:
            self._write(previous)
        except ConflictError:
            raise UsageError(
                f"--run-dir {self._folder.address}: another process starts there now. Use another --run-dir, or wait"
            ) from None

    def confirm(self) -> StoredObject | None:
        """Return owner.json as it is now, which names this session.

        Raises:
            OwnershipLost: another session writes the folder now, or has written it meanwhile.
        """
        current = self._folder.read(OWNER_FILE)
        content = _parse(current)
        if content.get("session", self.session) != self.session:
            owner = content.get("owner", "another process")
            raise OwnershipLost(f"{self._folder.address} is written by {owner} now: nothing more is uploaded from here")
        return current

    def renew(self) -> None:
        """Say that this session is alive, unless it has released the folder.

        Raises:
            OwnershipLost: another session writes the folder now, or has written it meanwhile.
        """
        for _ in range(3):  # another rank of this session may write it too
            previous = self.confirm()
            content = _parse(previous)
            if content and not content.get("owner"):
                break
            with contextlib.suppress(ConflictError):
                self._write(previous)
                break

    def release(self) -> None:
        """Let the next session start without waiting. The name of this one stays, for a former one that wakes up."""
        previous = self._folder.read(OWNER_FILE)
        if _parse(previous).get("session") == self.session:
            content = {"run": self.run_id, "session": self.session}
            self._folder.write_if(OWNER_FILE, json.dumps(content).encode(), previous)

    def _await_expiry(
        self, previous: StoredObject | None, content: dict[str, Any], console: RunConsole
    ) -> StoredObject | None:
        console.print(
            f"{self._folder.address}: waits up to {EXPIRE_S:g} s whether {content['owner']} still trains there"
        )
        end = time.monotonic() + EXPIRE_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            current = self._folder.read(OWNER_FILE)
            if (current.data if current else b"") != (previous.data if previous else b""):
                content = _parse(current)
                if not content.get("owner"):
                    return current
                raise UsageError(
                    f"--run-dir {self._folder.address}: is being written by {content['owner']}. "
                    "Stop that run, or use another --run-dir"
                )
        return previous

    def _write(self, replaces: StoredObject | None) -> None:
        self._renewals += 1
        content = {
            "run": self.run_id,
            "session": self.session,
            "owner": f"process {os.getpid()} on {socket.gethostname()}",
            "renewals": self._renewals,
        }
        data = json.dumps(content).encode()
        try:
            self._folder.write_if(OWNER_FILE, data, replaces)
        except ConflictError:
            current = self._folder.read(OWNER_FILE)
            if current is None or current.data != data:  # else the response to an earlier attempt was lost
                raise


def _parse(previous: StoredObject | None) -> dict[str, Any]:
    """Return the content of owner.json; {} if there is none, or it is damaged."""
    try:
        content = json.loads(previous.data) if previous else {}
        return content if isinstance(content, dict) else {}
    except ValueError:
        return {}
