"""A process that decodes.

    with Decoder(shared, folder) as decoder:
        reasons, spent = decoder.decode(records, mirrored, piece, 0)     # piece: of shared, [N, R, R, C] uint8

It has an interpreter of its own, and so a lock of its own: neither the training loop nor another decoder ever waits for
it. Encoded images, or the spots where they lie, go there through a socket; pixels come back through memory that both
see. It ends when its owner does. A record at which it dies twice, alone the second time, is damaged; where somebody
killed it, nothing is.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from paragan.core.errors import Failed
from paragan.data.decode import place
from paragan.data.formats.read_span import fetch
from paragan.data.loader.shared_memory import Piece, Seen, Shared
from paragan.data.source import DecodeError, Record
from paragan.data.storage.filesystem import Spot, one_line
from paragan.data.storage.local import Here

Got = Record | Spot | DecodeError  # what there is of an image before it is decoded
STARTS_S, ANSWERS_S, LEAVES_S = 120.0, 60.0, 5.0  # and another second for each image
PAUSES_S = (0.1, 0.3, 1.0, 3.0)  # after it was killed
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
WITHOUT = "--data.feed.decoders=threads does without"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h; counts for the thread that started it, which is its owner
_SERVE = "from paragan.data.loader.decode_worker import serve; serve{}"


@dataclass
class Spent:
    """What images took. cpu_s : of the processor, all together;  read_s : of each that was read"""

    cpu_s: float = 0.0
    read_s: list[float] = field(default_factory=list)


Told = tuple[list[str | None], Spent]  # why each image could not be decoded, or None; and what they took


class Died(Exception):
    """The process died, of what it decodes."""


class Decoder:
    """One such process, started when it is first needed.

    shared : where pixels go;  folder : where spots are
    """

    def __init__(self, shared: Shared, folder: Path | None = None):
        self._shared, self._folder = shared, folder
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            self._stop(self._child)

    def decode(self, gots: Sequence[Got], mirrored: Sequence[bool], piece: Piece, row: int) -> Told:
        """As `decoded`, in the process, to the rows of `piece` from `row` on. `Failed` where there cannot be one."""
        size, shape = piece.array[0].nbytes, piece.array.shape[1:]
        at = piece.at + row * size
        try:
            return self._asked(gots, mirrored, at, shape)
        except Died:
            ones = zip(gots, mirrored, itertools.count(at, size))
            return [self._alone(*one, shape) for one in ones], Spent()

    def _alone(self, got: Got, flip: bool, at: int, shape: tuple[int, ...]) -> str | None:
        try:
            return self._asked([got], [flip], at, shape)[0][0]
        except Died as death:
            return f"whatever decodes it dies ({death})"

    def _asked(self, gots: Sequence[Got], mirrored: Sequence[bool], at: int, shape: tuple[int, ...]) -> Told:
        """Again, and after a pause, where somebody else killed it: no image is to blame for that."""
        for pause_s in PAUSES_S:
            child = self._child = self._child or self._started()
            with suppress(EOFError, OSError):
                self._pipe.send((gots, mirrored, at, shape))
                if self._pipe.poll(ANSWERS_S + len(gots)):
                    answer: Told | str = self._pipe.recv()
                    if isinstance(answer, str):
                        raise Failed(answer)
                    return answer
            status = self._stop(child)
            if status not in KILLED:
                raise Died(_death(status))
            time.sleep(pause_s)
        remedy = "is memory short? Fewer --data.feed.workers, or --data.feed.decoders=threads"
        raise Failed(f"data: a process that decodes was killed {len(PAUSES_S)} times: {remedy}")

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, once it is ready."""
        try:
            child = self._start()
        except (OSError, ValueError) as error:
            raise Failed(f"data: a process that decodes cannot be started ({one_line(error)}): {WITHOUT}") from None
        with suppress(EOFError, OSError):
            if self._pipe.poll(STARTS_S):
                self._pipe.recv()
                return child
        how = _death(self._stop(child))
        raise Failed(f"data: a process that decodes ends before it begins ({how}): {WITHOUT}")

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        self._pipe, file = Connection(ours.detach()), self._shared.file
        folder = str(self._folder.absolute()) if self._folder else "/"
        with theirs:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE.format((theirs.fileno(), file, folder))],
                pass_fds=(theirs.fileno(), file),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in sys.path if path)},
                start_new_session=True,  # what a terminal sends to everyone is its owner's to decide
            )

    def _stop(self, child: subprocess.Popen[bytes]) -> int:
        """Let it go; its exit status."""
        self._child = None
        self._pipe.close()
        try:
            return child.wait(LEAVES_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def serve(pipe: int, memory: int, folder: str) -> None:
    """The process: decode what comes until the owner is gone."""
    _die_with_owner()
    owner, seen, here = Connection(pipe), Seen(memory), Here(Path(folder))
    with suppress(EOFError, OSError):
        owner.send("ready")
        while True:
            gots, mirrored, at, shape = owner.recv()
            try:
                owner.send(decoded(gots, mirrored, seen.array(at, (len(gots), *shape)), here))
            except Failed as error:
                owner.send(str(error))


def _die_with_owner() -> None:
    """Even while it is stopped, or hangs: where the system can do that (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def decoded(gots: Sequence[Got], mirrored: Sequence[bool], out: np.ndarray, here: Here | None = None) -> Told:
    """Decode images to `out` [n, R, R, C] uint8, some mirrored: why each could not be, or None. here : of spots"""
    reasons: list[str | None] = []
    spent, began = Spent(), time.thread_time()
    for got, flip, one in zip(gots, mirrored, out):
        try:
            if isinstance(got, tuple) and here:
                start = time.perf_counter()
                got = fetch(here, *got)
                spent.read_s.append(time.perf_counter() - start)
            if isinstance(got, DecodeError):
                raise got
            assert not isinstance(got, tuple)
            place(got, one)
            if flip:
                mirror(one)
            reasons.append(None)
        except DecodeError as error:
            reasons.append(str(error))
    spent.cpu_s = time.thread_time() - began
    return reasons, spent


def mirror(image: np.ndarray) -> None:
    """Left to right, in place: [H, W, C]."""
    image[:] = image[:, ::-1].copy()


def _death(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
