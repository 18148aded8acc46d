"""A process that decodes.

    with Decoder(images, shared) as decoder:
        reasons, spent = decoder.decode(records, mirrored, piece, 0)     # piece: of shared, [N, R, R, C] uint8

It has an interpreter of its own, and so a lock of its own: neither the training loop nor another decoder ever waits for
it. Encoded images, or the spots where they lie, go there through a socket; pixels come back through memory that both
see. It ends when its owner does. A record at which it dies twice, alone the second time, is damaged.
"""

from __future__ import annotations

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

from paragan.data.decode import DecodeError, place
from paragan.data.places import Here
from paragan.data.shared import Piece, Seen, Shared
from paragan.data.source import Record, Spot
from paragan.data.sources.fetch import fetch
from paragan.errors import Failed

Got = Record | Spot | DecodeError  # what there is of an image before it is decoded
LEAVES_S = 5.0
_SERVE = "from paragan.data.decoder import serve; serve{}"


@dataclass
class Spent:
    """What images took. cpu_s : of the processor, all together;  read_s : of each that was read"""

    cpu_s: float = 0.0
    read_s: list[float] = field(default_factory=list)


Told = tuple[list[str | None], Spent]  # why each image could not be decoded, or None; and what they took


class Died(Exception):
    """The process died; the message is of what."""


class Decoder:
    """One such process, started when it is first needed.

    shared : where pixels go;  folder : where spots are
    """

    def __init__(self, shared: Shared, folder: Path | None = None):
        self._shared, self._folder = shared, str((folder or Path()).absolute())
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            self._stop(self._child)

    def decode(self, gots: Sequence[Got], mirrored: Sequence[bool], piece: Piece, row: int) -> Told:
        """As `decoded`, in the process, to the rows of `piece` from `row` on."""
        shape, at = piece.array.shape[1:], piece.at + row * piece.array[0].nbytes
        try:
            return self._asked(gots, mirrored, at, shape)
        except Died:
            return [
                self._alone(got, flip, at + place * piece.array[0].nbytes, shape)
                for place, (got, flip) in enumerate(zip(gots, mirrored))
            ], Spent()

    def _alone(self, got: Got, flip: bool, at: int, shape: tuple[int, ...]) -> str | None:
        try:
            return self._asked([got], [flip], at, shape)[0][0]
        except Died as death:
            return f"whatever decodes it dies ({death})"

    def _asked(self, gots: Sequence[Got], mirrored: Sequence[bool], at: int, shape: tuple[int, ...]) -> Told:
        child = self._child = self._child or self._started()
        try:
            self._pipe.send((gots, mirrored, at, shape))
            answer: Told | str = self._pipe.recv()
        except (EOFError, OSError):
            raise Died(self._stop(child)) from None
        if isinstance(answer, str):
            raise Failed(answer)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._pipe, file = Connection(ours.detach()), self._shared.file
            return subprocess.Popen(
                [sys.executable, "-c", _SERVE.format((theirs.fileno(), file, self._folder))],
                pass_fds=(theirs.fileno(), file),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # what a terminal sends to everyone is its owner's to decide
            )

    def _stop(self, child: subprocess.Popen[bytes]) -> str:
        """Let it go; what it ended with."""
        self._child = None
        self._pipe.close()
        try:
            status = child.wait(LEAVES_S)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        return signal.Signals(-status).name if status < 0 else f"status {status}"


def serve(pipe: int, memory: int, folder: str) -> None:
    """The process: decode what comes until the owner is gone."""
    owner, seen, here = Connection(pipe), Seen(memory), Here(Path(folder))
    with suppress(EOFError, OSError):
        while True:
            gots, mirrored, at, shape = owner.recv()
            try:
                owner.send(decoded(gots, mirrored, seen.array(at, (len(gots), *shape)), here))
            except Failed as error:
                owner.send(str(error))


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
