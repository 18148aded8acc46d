"""Processes that decode records, such as images.

    with DecodeWorker(arena, root) as worker:
        reasons, cost = worker.decode(samples, variations, block, 0)     # block: of the arena, [N, H, W, C] uint8

A process has an interpreter of its own, so neither the training loop nor other workers wait for its lock. Encoded
images, or the byte ranges where they lie, go to it through a socket; pixels come back through shared memory. It is
started with `python -c`, never forked, and does not import torch. It ends with its owner.

If it crashes, each image of the request is tried alone; one that crashes it again is damaged. If the system or a user
kills it, no image is to blame.
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
from paragan.data.decode import ImageDecoder, pixels_limit, set_pixels_limit
from paragan.data.formats.read_span import read_span
from paragan.data.loader.shared_memory import AttachedArena, MemoryBlock, SharedArena
from paragan.data.source import DecodeError, FieldRecord, RowDecoder, Variation
from paragan.data.storage.filesystem import ByteRange, format_error
from paragan.data.storage.local import LocalFileSystem

EncodedSample = FieldRecord | ByteRange | DecodeError  # an image before it is decoded, or why it cannot be read
START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 60.0  # and another second for each image
EXIT_TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.1, 0.3, 1.0, 3.0)  # after it was killed
KILL_STATUSES = (-signal.SIGKILL, -signal.SIGTERM)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # of NumPy's matrix products
USE_THREADS_HINT = "--data.prefetch.worker_type=threads needs no processes"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h; about the thread that started the process, which is its owner
_WORKER_CODE = "from paragan.data.loader.decode_worker import serve; serve{}"


@dataclass
class DecodeCost:
    """Time spent on images.

    cpu_s  : CPU time of all of them
    read_s : time of each read
    """

    cpu_s: float = 0.0
    read_s: list[float] = field(default_factory=list)


DecodeResult = tuple[list[str | None], DecodeCost]  # why each image could not be decoded, or None


class WorkerCrashed(Exception):
    """The process crashed on what it decodes. The message is its exit status."""


class DecodeWorker:
    """One decode process, started when it is first needed.

    Args:
        arena: where pixels go.
        folder: of the files that byte ranges refer to.
        decoder: decodes a record.
    """

    def __init__(self, arena: SharedArena, folder: Path | None = None, decoder: RowDecoder | None = None):
        self._arena = arena
        self._folder = folder
        self._decoder = decoder or ImageDecoder()
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DecodeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:
            self._stop(self._child)

    def decode(
        self, samples: Sequence[EncodedSample], variations: Sequence[Variation], block: MemoryBlock, start_row: int
    ) -> DecodeResult:
        """Decode images in the process, into the rows of `block` from `start_row` on.

        Args:
            samples: [n] images.
            variations: [n] how each is varied.
            block: [N, ...] uint8, of the arena.
            start_row: first row that is written.

        Returns:
            Why each image could not be decoded, or None; and the time spent.

        Raises:
            RunError: the process cannot be started, is killed again and again, or the machine is in trouble.
        """
        image_bytes = block.array[0].nbytes
        shape = block.array.shape[1:]
        offset = block.offset + start_row * image_bytes
        try:
            return self._request(samples, variations, offset, shape)
        except WorkerCrashed:
            offsets = itertools.count(offset, image_bytes)
            reasons = [self._decode_single(*image, shape) for image in zip(samples, variations, offsets)]
            return reasons, DecodeCost()

    def _decode_single(
        self, sample: EncodedSample, variation: Variation, offset: int, shape: tuple[int, ...]
    ) -> str | None:
        try:
            reasons, _ = self._request([sample], [variation], offset, shape)
            return reasons[0]
        except WorkerCrashed as crash:
            return f"decoder crashed on this image ({crash})"

    def _request(
        self, samples: Sequence[EncodedSample], variations: Sequence[Variation], offset: int, shape: tuple[int, ...]
    ) -> DecodeResult:
        """Send a request; repeat it after a pause if the process was killed from outside."""
        for delay_s in RETRY_DELAYS_S:
            child = self._child = self._child or self._start_worker()
            with suppress(EOFError, OSError):
                self._pipe.send((samples, variations, offset, shape, self._decoder))
                if self._pipe.poll(REPLY_TIMEOUT_S + len(samples)):
                    reply: DecodeResult | str = self._pipe.recv()
                    if isinstance(reply, str):
                        raise RunError(reply)
                    return reply
            status = self._stop(child)
            if status not in KILL_STATUSES:
                raise WorkerCrashed(_describe_exit(status))
            time.sleep(delay_s)
        raise RunError(
            f"data: a decode process was killed {len(RETRY_DELAYS_S)} times: is memory short? "
            "Use fewer --data.prefetch.workers, or --data.prefetch.worker_type=threads"
        )

    def _start_worker(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it is ready."""
        try:
            child = self._spawn()
        except (OSError, ValueError) as error:
            raise RunError(
                f"data: a decode process cannot be started ({format_error(error)}): {USE_THREADS_HINT}"
            ) from None
        with suppress(EOFError, OSError):
            if self._pipe.poll(START_TIMEOUT_S):
                self._pipe.recv()
                return child
        status = _describe_exit(self._stop(child))
        raise RunError(f"data: a decode process ended before it was ready ({status}): {USE_THREADS_HINT}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        owner_socket, worker_socket = socket.socketpair()
        self._pipe = Connection(owner_socket.detach())
        arena_fd = self._arena.fd
        folder = str(self._folder.absolute()) if self._folder else "/"
        with worker_socket:
            pipe_fd = worker_socket.fileno()
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER_CODE.format((pipe_fd, arena_fd, folder, pixels_limit()))],
                pass_fds=(pipe_fd, arena_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ
                | dict.fromkeys(THREAD_VARIABLES, "1")
                | {"PYTHONPATH": os.pathsep.join(str(path) for path in sys.path if path)},
                start_new_session=True,  # signals of the terminal go to its owner only
            )

    def _stop(self, child: subprocess.Popen[bytes]) -> int:
        """Close the socket, wait for the process to end, or kill it. Returns its exit status."""
        self._child = None
        self._pipe.close()
        try:
            return child.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def serve(pipe_fd: int, memory_fd: int, folder: str, max_pixels: int | None) -> None:
    """Run the process: decode requests until the owner closes the socket.

    Args:
        pipe_fd: file descriptor of the socket.
        memory_fd: file descriptor of the arena.
        folder: of the files that byte ranges refer to.
        max_pixels: of an image, as in the owner.
    """
    set_pixels_limit(max_pixels)
    _exit_with_parent()
    owner = Connection(pipe_fd)
    arena = AttachedArena(memory_fd)
    fs = LocalFileSystem(Path(folder))
    with suppress(EOFError, OSError):
        owner.send("ready")
        while True:
            samples, variations, offset, shape, decoder = owner.recv()
            out = arena.view(offset, (len(samples), *shape))
            try:
                owner.send(decode_batch(samples, variations, out, decoder, fs))
            except RunError as error:
                owner.send(str(error))


def _exit_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, also while it is stopped or hangs (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def decode_batch(
    samples: Sequence[EncodedSample],
    variations: Sequence[Variation],
    out: np.ndarray,
    decoder: RowDecoder,
    fs: LocalFileSystem | None = None,
) -> DecodeResult:
    """Decode records into `out`.

    Args:
        samples: [n] images.
        variations: [n] how each is varied.
        out: [n, ...] uint8.
        decoder: decodes one.
        fs: folder of the files that byte ranges refer to.

    Returns:
        Why each image could not be decoded, or None; and the time spent.
    """
    reasons: list[str | None] = []
    cost = DecodeCost()
    start_cpu_s = time.thread_time()
    for sample, variation, row in zip(samples, variations, out):
        try:
            if isinstance(sample, tuple) and fs:
                start_s = time.perf_counter()
                sample = read_span(fs, *sample)
                cost.read_s.append(time.perf_counter() - start_s)
            if isinstance(sample, DecodeError):
                raise sample
            assert not isinstance(sample, tuple)
            decoder.decode(sample, row, variation)
            reasons.append(None)
        except DecodeError as error:
            reasons.append(str(error))
    cost.cpu_s = time.thread_time() - start_cpu_s
    return reasons, cost


def _describe_exit(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
