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

from paragan.core.errors import RunError
from paragan.data.decode import decode_into
from paragan.data.formats.read_span import read_span
from paragan.data.loader.shared_memory import AttachedArena, MemoryBlock, SharedArena
from paragan.data.source import DecodeError, Record
from paragan.data.storage.filesystem import ByteRange, format_error
from paragan.data.storage.local import LocalFileSystem

EncodedSample = Record | ByteRange | DecodeError  # what there is of an image before it is decoded
START_TIMEOUT_S, REPLY_TIMEOUT_S, EXIT_TIMEOUT_S = 120.0, 60.0, 5.0  # and another second for each image
RETRY_DELAYS_S = (0.1, 0.3, 1.0, 3.0)  # after it was killed
KILL_STATUSES = (-signal.SIGKILL, -signal.SIGTERM)
USE_THREADS_HINT = "--data.prefetch.worker_type=threads does without"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h; counts for the thread that started it, which is its owner
_WORKER_CODE = "from paragan.data.loader.decode_worker import serve; serve{}"


@dataclass
class DecodeCost:
    """What images took. cpu_s : of the processor, all together;  read_s : of each that was read"""

    cpu_s: float = 0.0
    read_s: list[float] = field(default_factory=list)


DecodeResult = tuple[list[str | None], DecodeCost]  # why each image could not be decoded, or None; and what they took


class WorkerCrashed(Exception):
    """The process died, of what it decodes."""


class DecodeWorker:
    """One such process, started when it is first needed.

    shared : where pixels go;  folder : where spots are
    """

    def __init__(self, arena: SharedArena, folder: Path | None = None):
        self._arena, self._folder = arena, folder
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DecodeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            self._stop(self._child)

    def decode(
        self, samples: Sequence[EncodedSample], mirrored: Sequence[bool], block: MemoryBlock, start_row: int
    ) -> DecodeResult:
        """As `decoded`, in the process, to the rows of `piece` from `row` on. `Failed` where there cannot be one."""
        size, shape = block.array[0].nbytes, block.array.shape[1:]
        at = block.offset + start_row * size
        try:
            return self._request(samples, mirrored, at, shape)
        except WorkerCrashed:
            ones = zip(samples, mirrored, itertools.count(at, size))
            return [self._decode_single(*one, shape) for one in ones], DecodeCost()

    def _decode_single(self, sample: EncodedSample, flip: bool, offset: int, shape: tuple[int, ...]) -> str | None:
        try:
            return self._request([sample], [flip], offset, shape)[0][0]
        except WorkerCrashed as death:
            return f"whatever decodes it dies ({death})"

    def _request(
        self, samples: Sequence[EncodedSample], mirrored: Sequence[bool], offset: int, shape: tuple[int, ...]
    ) -> DecodeResult:
        """Again, and after a pause, where somebody else killed it: no image is to blame for that."""
        for pause_s in RETRY_DELAYS_S:
            child = self._child = self._child or self._start_worker()
            with suppress(EOFError, OSError):
                self._pipe.send((samples, mirrored, offset, shape))
                if self._pipe.poll(REPLY_TIMEOUT_S + len(samples)):
                    answer: DecodeResult | str = self._pipe.recv()
                    if isinstance(answer, str):
                        raise RunError(answer)
                    return answer
            status = self._stop(child)
            if status not in KILL_STATUSES:
                raise WorkerCrashed(_describe_exit(status))
            time.sleep(pause_s)
        remedy = "is memory short? Fewer --data.prefetch.workers, or --data.prefetch.worker_type=threads"
        raise RunError(f"data: a process that decodes was killed {len(RETRY_DELAYS_S)} times: {remedy}")

    def _start_worker(self) -> subprocess.Popen[bytes]:
        """The process, once it is ready."""
        try:
            child = self._spawn()
        except (OSError, ValueError) as error:
            raise RunError(
                f"data: a process that decodes cannot be started ({format_error(error)}): {USE_THREADS_HINT}"
            ) from None
        with suppress(EOFError, OSError):
            if self._pipe.poll(START_TIMEOUT_S):
                self._pipe.recv()
                return child
        how = _describe_exit(self._stop(child))
        raise RunError(f"data: a process that decodes ends before it begins ({how}): {USE_THREADS_HINT}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        self._pipe, file = Connection(ours.detach()), self._arena.fd
        folder = str(self._folder.absolute()) if self._folder else "/"
        with theirs:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER_CODE.format((theirs.fileno(), file, folder))],
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
            return child.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def serve(pipe_fd: int, memory_fd: int, folder: str) -> None:
    """The process: decode what comes until the owner is gone."""
    _exit_with_parent()
    owner, seen, here = Connection(pipe_fd), AttachedArena(memory_fd), LocalFileSystem(Path(folder))
    with suppress(EOFError, OSError):
        owner.send("ready")
        while True:
            gots, mirrored, at, shape = owner.recv()
            try:
                owner.send(decode_batch(gots, mirrored, seen.view(at, (len(gots), *shape)), here))
            except RunError as error:
                owner.send(str(error))


def _exit_with_parent() -> None:
    """Even while it is stopped, or hangs: where the system can do that (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def decode_batch(
    samples: Sequence[EncodedSample], mirrored: Sequence[bool], out: np.ndarray, fs: LocalFileSystem | None = None
) -> DecodeResult:
    """Decode images to `out` [n, R, R, C] uint8, some mirrored: why each could not be, or None. here : of spots"""
    reasons: list[str | None] = []
    spent, began = DecodeCost(), time.thread_time()
    for got, flip, one in zip(samples, mirrored, out):
        try:
            if isinstance(got, tuple) and fs:
                start = time.perf_counter()
                got = read_span(fs, *got)
                spent.read_s.append(time.perf_counter() - start)
            if isinstance(got, DecodeError):
                raise got
            assert not isinstance(got, tuple)
            decode_into(got, one)
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


def _describe_exit(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
