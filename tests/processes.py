"""Command lines in processes of their own: real signals, real files, real ranks.

`CliProcesses.start_forked` forks them from a server that has imported everything (0.1 s instead of 3 s).
`CliProcesses.start_fresh` starts `python -m paragan` as a user does. Processes that still run when a test ends are
killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing as mp
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED_MODULES = [
    "scipy.linalg",
    "torch.utils.tensorboard.writer",
    "paragan.cli.main",
    "paragan.eval.evaluate",
    "paragan.recipes",
    "paragan.train.trainer",
]
TINY_RUN_ARGS = [
    *("digits", "--nets.width=4", "--nets.latent=8", "--objective.r1=0"),
    *("--batch=16", "--lanes=2", "--output.tick_kimg=0.016"),  # a line of stats every step
    *("--evaluation.metrics=[fd]", "--evaluation.count=16"),
    *("--device.threads=1", "--device.precision=float32"),
]
LONG_RUN_ARG = "--kimg=1.6"  # 100 steps: long enough to be interrupted
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def reduce_bn_recalibration() -> None:
    """Recalibrate batch norm on fewer images: otherwise it takes half of the time of a tiny run."""
    from paragan.models import bn_recalibration

    bn_recalibration.BN_RECALIBRATION_IMAGES = 64


def _run_cli_in_child(arguments: list[str], log: str, env: dict[str, str], patch: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(env)
    reduce_bn_recalibration()
    exec(patch, {})
    from paragan.cli.main import main

    sys.exit(main(arguments))


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command that has ended."""

    status: int
    out: str
    err: str


def run_cli(*arguments: str | Path) -> CommandResult:
    """Run a command line in this process."""
    from paragan.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return CommandResult(status, out.getvalue(), err.getvalue())


def call_command(*arguments: str | Path) -> int:
    """Run a command line in this process as `run_cli` does, but raise its error, and print."""
    from paragan.cli.main import build_parser

    words = [str(argument) for argument in arguments]
    options, rest = build_parser().parse_known_args(words)
    return options.command(options, rest, words)


def usage_error(*arguments: str | Path) -> str:
    """Run a command line that must be refused, and return its one line of error."""
    result = run_cli(*arguments)
    assert result.status == 2, result
    assert result.err.count("\n") == 1
    assert result.err.startswith("paragan: ")
    return result.err


def train_args(folder: Path, *more: str) -> list[str]:
    """Return the command line of a tiny run."""
    return ["train", *TINY_RUN_ARGS, f"--run-dir={folder}", *more]


def train_tiny(folder: Path, *more: str) -> Path:
    """Train a tiny run to its end in this process."""
    result = run_cli(*train_args(folder, *more))
    assert result.status == 0, result
    return folder


@contextlib.contextmanager
def on_step(step: int, action: Callable[[Any], object]) -> Iterator[None]:
    """In this context, runs of this process call `action` at the start of round `step` (counted from 0)."""
    from paragan.train import loop

    original = loop.play_round

    def play_round(session: Any) -> None:
        if session.clock.step == step:
            action(session)
        original(session)

    with mock.patch.object(loop, "play_round", play_round):
        yield


def train_interrupted(folder: Path, step: int, *more: str, number: signal.Signals = signal.SIGTERM) -> Path:
    """Train a tiny run that gets a signal in round `step`."""
    with on_step(step, lambda session: signal.raise_signal(number)):
        result = run_cli(*train_args(folder, *more))
    assert result.status == 3, result
    return folder


class CliProcess:
    """A command that was started; its output goes to LOG.out and LOG.err, for its path `log`."""

    def __init__(self, process: Any, log: Path):
        self._process, self._log, self.pid = process, log, process.pid

    def status(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        return self._process.exitcode

    def wait(self, timeout_s: float = 200) -> int:
        wait_until(lambda: self.status() is not None, timeout_s, f"{self._log.name} ends")
        status = self.status()
        assert status is not None
        return status

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return self._read_log("out")

    @property
    def err(self) -> str:
        return self._read_log("err")

    def _read_log(self, stream: str) -> str:
        """Empty until the process has started: it opens its files itself."""
        path = self._log.with_name(f"{self._log.name}.{stream}")
        return path.read_text() if path.exists() else ""


class CliProcesses:
    """Starts commands, and kills those that still run at the end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._started: list[Any] = []
        self._server = mp.get_context("forkserver")
        self._server.set_forkserver_preload(PRELOADED_MODULES)

    def start_forked(self, *arguments: str, patch: str = "", **env: str) -> CliProcess:
        """Start a command from the fork server. `patch` is Python code that the process runs first."""
        log = self._log()
        process = self._server.Process(target=_run_cli_in_child, args=(list(arguments), str(log), env, patch))
        process.start()
        self._started.append(process)
        return CliProcess(process, log)

    def start_fresh(self, *arguments: str, **env: str) -> CliProcess:
        """Start a command as a user does."""
        log = self._log()
        with Path(f"{log}.out").open("wb") as out, Path(f"{log}.err").open("wb") as err:
            command = [sys.executable, "-m", "paragan", *arguments]
            process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | env, start_new_session=True)
        self._started.append(process)
        return CliProcess(process, log)

    def start_ranks(
        self, size: int, *arguments: str, start: Callable[..., CliProcess] | None = None
    ) -> list[CliProcess]:
        """Start the ranks of a run as a launcher does: independent processes with the variables of torchrun."""
        start = start or self.start_forked
        port = str(free_port())
        ranks: list[CliProcess] = []
        for rank in range(size):
            values = str(rank), str(size), str(rank), str(size), "127.0.0.1", port
            ranks.append(start(*arguments, **dict(zip(LAUNCH_VARIABLES, values, strict=True))))
        return ranks

    def close(self) -> None:
        """Kill what still runs, and print the errors of all processes: pytest shows them where a test failed."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait() if isinstance(process, subprocess.Popen) else process.join()
        for log in sorted(self.folder.glob("process*.err")):
            sys.stdout.write(f"{log.name}: {log.read_text(errors='replace')[-2000:]}\n")

    def _log(self) -> Path:
        return self.folder / f"process{len(self._started)}"


def wait_until(condition: Callable[[], Any], timeout_s: float = 200, description: str = "it happens") -> Any:
    """Poll until the condition is true, and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s until {description}"
        time.sleep(0.02)
    return value


def free_port() -> int:
    """Return a port that nobody uses, below those that the system gives to outgoing connections meanwhile."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", random.randrange(10000, 20000)))
            return s.getsockname()[1]


def logged_steps(folder: Path) -> list[int]:
    """Return the steps in stats.jsonl, without a line that is being written."""
    try:
        lines = (folder / "stats.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:  # it does not exist yet, or the folder of a label was just renamed
        return []
    return [int(json.loads(line)["Progress/step"]) for line in lines if line.endswith("\n")]


def wait_for_step(folder: Path, step: int = 5) -> None:
    """Return when a run has reached this step."""
    wait_until(lambda: (logged_steps(folder) or [0])[-1] >= step, description=f"step {step}")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, oldest first."""
    parent = folder / "checkpoints"
    return sorted(p for p in parent.iterdir() if p.name.isdigit()) if parent.exists() else []


def final_tensors(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the model and of the tensors of the newest checkpoint, by path."""
    files = (folder / "model").glob("*.safetensors")
    tensors = checkpoint_tensors(folder) | {str(file.relative_to(folder)): file.read_bytes() for file in files}
    assert len(tensors) >= 3
    return tensors


def checkpoint_tensors(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the tensors of the newest checkpoint, by path."""
    files = list_checkpoints(folder)[-1].glob("*.safetensors")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
