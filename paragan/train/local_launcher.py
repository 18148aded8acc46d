"""Several ranks on this machine, for those who have no launcher: `--ranks N`.

A rank holds one end of a pipe whose other end is the launcher's alone: it ends with the launcher, however that ended,
and then the rank stops as after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from paragan.core.errors import RunError

SHUTDOWN_GRACE_S = 30.0  # what a broken run's other ranks get to end by themselves
LAUNCHER_PIPE_ENV = "PARAGAN_LAUNCHER"  # the number of a rank's end


def launch(ranks: int, arguments: Sequence[str], tolerate_lost_ranks: bool = False) -> int:
    """Run `paragan ARGUMENTS` on `ranks` processes here; pass signals on; the exit status of the run.

    go_on: the others do without a rank that died; then the run has ended well if one of them did."""
    port = _find_free_port()
    processes: list[subprocess.Popen[bytes]] = []
    theirs, ours = os.pipe()
    passed_on: list[int] = []

    def forward_signal(signum: int, frame: FrameType | None) -> None:
        passed_on.append(signum)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    former = {s: signal.signal(s, forward_signal) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        for rank in range(ranks):
            processes.append(_start_rank(rank, ranks, port, arguments, theirs))
        status = _wait_for_ranks(processes, tolerate_lost_ranks)
        codes = [process.returncode for process in processes]
        if status == 1 and {*codes} <= {0, 3, *(-number for number in passed_on)}:
            names = ", ".join(signal.Signals(number).name for number in dict.fromkeys(passed_on))
            raise KeyboardInterrupt(f"{names} while nothing was being trained")  # before a rank could listen
        if status == 1 and 1 not in codes and (told := _describe_killed(codes)):  # whom no rank missed
            raise RunError(told, same_on_all_ranks=True)
        return status
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for process in processes:
            process.kill()
        os.close(theirs)
        os.close(ours)


def watch_launcher() -> None:
    """A rank calls this: from now on it stops when its launcher is gone."""
    if pipe := os.environ.pop(LAUNCHER_PIPE_ENV, ""):
        threading.Thread(target=_stop_when_closed, args=(int(pipe),), daemon=True).start()


def _stop_when_closed(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written
    os.kill(os.getpid(), signal.SIGTERM)


def _start_rank(rank: int, ranks: int, port: int, arguments: Sequence[str], pipe: int) -> subprocess.Popen[bytes]:
    place = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHER_PIPE_ENV: pipe,
    }
    env = os.environ | {name: str(value) for name, value in place.items()}
    command, own_group = [sys.executable, "-m", "paragan", *arguments], 0  # a Ctrl-C reaches a rank once: through us
    return subprocess.Popen(command, env=env, process_group=own_group, pass_fds=[pipe])


def _wait_for_ranks(processes: list[subprocess.Popen[bytes]], tolerate_lost_ranks: bool) -> int:
    deadline = None
    while any(process.poll() is None for process in processes):
        if (
            deadline is None
            and not tolerate_lost_ranks
            and any(process.poll() not in (None, 0) for process in processes)
        ):
            deadline = time.monotonic() + SHUTDOWN_GRACE_S
        if deadline and time.monotonic() > deadline:
            for process in processes:
                process.terminate() if time.monotonic() < deadline + 5 else process.kill()
        time.sleep(0.05)
    codes = {process.returncode for process in processes}
    if tolerate_lost_ranks:  # some may have been lost on the way
        return next((code for code in (0, 3, 2) if code in codes), 1)
    return next((code for code in (2, 3) if codes <= {0, code} and code in codes), 0 if codes == {0} else 1)


def _describe_killed(exit_codes: Sequence[int]) -> str:
    """Who was killed before the others were ended."""
    killed = [(rank, signal.Signals(-code).name) for rank, code in enumerate(exit_codes) if code < 0]
    first = [(rank, name) for rank, name in killed if name != "SIGTERM"] or killed
    return ", ".join(f"rank {rank} was killed ({name})" for rank, name in first)


def _find_free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
