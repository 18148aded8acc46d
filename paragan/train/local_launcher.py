"""Start several ranks on this machine without another launcher: `--ranks N`.

Every rank holds one end of a pipe whose other end only the launcher has. Through it the launcher tells which other
ranks have died, which a rank that waits for them would not notice otherwise. The pipe closes when the launcher ends,
in whatever way, and then the rank stops as after SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from paragan.comm.launch_info import SECRET_ENV
from paragan.comm.lost_ranks import report_lost_rank
from paragan.core.errors import RunError

SHUTDOWN_GRACE_S = 30.0  # after one rank failed, for the others to end by themselves
LAUNCHER_PIPE_ENV = "PARAGAN_LAUNCHER"  # file descriptor of a rank's end of the pipe


def launch(ranks: int, arguments: Sequence[str], tolerate_lost_ranks: bool = False) -> int:
    """Run `paragan ARGUMENTS` in `ranks` processes, forward signals to them, and return the exit status of the run.

    Args:
        tolerate_lost_ranks: the others continue without a rank that died; then the run succeeds if one of them does.

    Raises:
        KeyboardInterrupt: a signal ended the ranks before they trained.
        RunError: ranks were killed and none of the others says so.
    """
    port = _find_free_port()
    secret = secrets.token_hex(16)
    processes: list[subprocess.Popen[bytes]] = []
    pipes: list[int] = []  # the launcher's ends, by rank
    forwarded: list[int] = []

    def forward_signal(signum: int, frame: FrameType | None) -> None:
        forwarded.append(signum)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    previous_handlers = {s: signal.signal(s, forward_signal) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        for rank in range(ranks):
            rank_end, launcher_end = os.pipe()
            pipes.append(launcher_end)
            processes.append(_start_rank(rank, ranks, port, secret, arguments, rank_end))
            os.close(rank_end)
        status = _wait_for_ranks(processes, pipes, tolerate_lost_ranks)
        codes = [process.returncode for process in processes]
        if status == 1 and _ended_before_training(codes, forwarded):
            names = ", ".join(signal.Signals(number).name for number in dict.fromkeys(forwarded))
            raise KeyboardInterrupt(f"{names} while nothing was being trained")
        killed = _describe_killed(codes)
        if status == 1 and 1 not in codes and killed:  # no other rank reported it
            raise RunError(killed, same_on_all_ranks=True)
        return status
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        for process in processes:
            process.kill()
        for pipe in pipes:
            os.close(pipe)


def watch_launcher() -> None:
    """Note, from now on, which ranks the launcher reports as lost, and stop this one when the launcher is gone.

    Does nothing without a launcher.
    """
    pipe = os.environ.pop(LAUNCHER_PIPE_ENV, "")
    if pipe:
        threading.Thread(target=_read_launcher_pipe, args=(int(pipe),), daemon=True).start()


def _read_launcher_pipe(pipe: int) -> None:
    with os.fdopen(pipe) as lines:
        for line in lines:
            rank, reason = json.loads(line)
            report_lost_rank(rank, reason)
    os.kill(os.getpid(), signal.SIGTERM)


def _start_rank(
    rank: int, ranks: int, port: int, secret: str, arguments: Sequence[str], pipe: int
) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        SECRET_ENV: secret,
        LAUNCHER_PIPE_ENV: pipe,
    }
    env = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "paragan", *arguments]
    # a process group of its own: a Ctrl-C reaches a rank once, forwarded by the launcher
    return subprocess.Popen(command, env=env, process_group=0, pass_fds=[pipe])


def _wait_for_ranks(processes: list[subprocess.Popen[bytes]], pipes: Sequence[int], tolerate_lost_ranks: bool) -> int:
    """Wait until all ranks have ended; end the others some time after one failed. Returns the status of the run."""
    deadline = None
    reported: set[int] = set()
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if rank not in reported and process.poll() not in (None, 0):
                reported.add(rank)
                _report_loss(rank, process.returncode, pipes)
        has_failed = any(process.poll() not in (None, 0) for process in processes)
        if deadline is None and has_failed and not tolerate_lost_ranks:
            deadline = time.monotonic() + SHUTDOWN_GRACE_S
        if deadline and time.monotonic() > deadline:
            for process in processes:
                if time.monotonic() < deadline + 5:
                    process.terminate()
                else:
                    process.kill()
        time.sleep(0.05)
    codes = {process.returncode for process in processes}
    if tolerate_lost_ranks:
        return next((code for code in (0, 3, 2) if code in codes), 1)
    if codes == {0}:
        return 0
    return next((code for code in (2, 3) if codes <= {0, code}), 1)


def _ended_before_training(exit_codes: Sequence[int], forwarded: Sequence[int]) -> bool:
    """Return whether a forwarded signal came before all ranks had handlers for it, and nothing else ended a rank.

    A rank that had handlers may have noticed the end of another one first, and ends with status 1.
    """
    ended_by_signal = {-number for number in forwarded}
    return not ended_by_signal.isdisjoint(exit_codes) and {*exit_codes} <= {0, 1, 3, *ended_by_signal}


def _report_loss(rank: int, exit_code: int, pipes: Sequence[int]) -> None:
    """Tell the other ranks that this one has died."""
    reason = f"was killed ({signal.Signals(-exit_code).name})" if exit_code < 0 else f"ended with status {exit_code}"
    for other, pipe in enumerate(pipes):
        if other != rank:
            with contextlib.suppress(BrokenPipeError):  # that one has died too
                os.write(pipe, (json.dumps([rank, reason]) + "\n").encode())


def _describe_killed(exit_codes: Sequence[int]) -> str:
    """Name the ranks that were killed before the launcher terminated the others."""
    killed = [(rank, signal.Signals(-code).name) for rank, code in enumerate(exit_codes) if code < 0]
    first = [(rank, name) for rank, name in killed if name != "SIGTERM"] or killed
    return ", ".join(f"rank {rank} was killed ({name})" for rank, name in first)


def _find_free_port() -> int:
    """Return a free port, below those that the system gives to outgoing connections until rank 0 listens at it."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", secrets.choice(range(10000, 20000))))
            return s.getsockname()[1]
    raise RunError("--ranks: no port from 10000 to 19999 is free on 127.0.0.1")
