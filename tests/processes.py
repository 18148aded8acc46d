"""Command lines in processes of their own: real signals, real files, real ranks.

`Processes.warm` forks them from a server that has imported everything (0.1 s instead of 3 s);
`Processes.cold` starts `python -m paragan` as a user does. Whatever still runs when a test ends is killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing as mp
import os
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
    "matplotlib.backends.backend_svg",
    "torch._dynamo",  # by every optimizer
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
LONG_RUN_ARG = "--kimg=1.6"  # 100 steps: long enough to be caught in the middle
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def reduce_bn_recalibration() -> None:
    """Measure the statistics of a model, of which a test writes many, on fewer images: it takes half of a tiny run."""
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
    """A command that ended."""

    status: int
    out: str
    err: str


def run_cli(*arguments: str | Path) -> CommandResult:
    """A command line in this process."""
    from paragan.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return CommandResult(status, out.getvalue(), err.getvalue())


def usage_error(*arguments: str | Path) -> str:
    """The one line with which a command line is refused."""
    ended = run_cli(*arguments)
    assert ended.status == 2, ended
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("paragan: ")
    return ended.err


def train_args(folder: Path, *more: str) -> list[str]:
    """The command line of a tiny run."""
    return ["train", *TINY_RUN_ARGS, f"--run-dir={folder}", *more]


def train_tiny(folder: Path, *more: str) -> Path:
    """A tiny run, to its end, in this process."""
    ended = run_cli(*train_args(folder, *more))
    assert ended.status == 0, ended
    return folder


@contextlib.contextmanager
def on_step(step: int, action: Callable[[Any], object]) -> Iterator[None]:
    """Inside, runs of this process do something as they play a round (counted from 0)."""
    from paragan.train import loop

    original = loop.play_round

    def play_round(session: Any) -> None:
        if session.clock.step == step:
            action(session)
        original(session)

    with mock.patch.object(loop, "play_round", play_round):
        yield


def train_interrupted(folder: Path, step: int, *more: str, number: signal.Signals = signal.SIGTERM) -> Path:
    """A tiny run that got a signal while it played round `step`."""
    with on_step(step, lambda session: signal.raise_signal(number)):
        ended = run_cli(*train_args(folder, *more))
    assert ended.status == 3, ended
    return folder


class CliProcess:
    """A command that was started; its output goes to LOG.out and LOG.err."""

    def __init__(self, process: Any, log: Path):
        self._process, self._log, self.pid = process, log, process.pid

    def status(self) -> int | None:
        """The exit status; minus the signal that ended it; None while it runs."""
        cold = isinstance(self._process, subprocess.Popen)
        return self._process.poll() if cold else self._process.exitcode

    def wait(self, timeout_s: float = 60) -> int:
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
        """Nothing before the process, which opens its files itself, has begun."""
        path = self._log.with_name(f"{self._log.name}.{stream}")
        return path.read_text() if path.exists() else ""


class CliProcesses:
    """Starts commands, and ends those that are left."""

    def __init__(self, folder: Path):
        self.folder, self._started = folder, list[Any]()
        self._server = mp.get_context("forkserver")
        self._server.set_forkserver_preload(PRELOADED_MODULES)

    def start_forked(self, *arguments: str, patch: str = "", **env: str) -> CliProcess:
        """`patch` is run first: code that breaks something in there."""
        log = self._log()
        process = self._server.Process(target=_run_cli_in_child, args=(list(arguments), str(log), env, patch))
        process.start()
        self._started.append(process)
        return CliProcess(process, log)

    def start_fresh(self, *arguments: str, **env: str) -> CliProcess:
        log = self._log()
        with Path(f"{log}.out").open("wb") as out, Path(f"{log}.err").open("wb") as err:
            command = [sys.executable, "-m", "paragan", *arguments]
            process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | env, start_new_session=True)
        self._started.append(process)
        return CliProcess(process, log)

    def start_ranks(
        self, size: int, *arguments: str, start: Callable[..., CliProcess] | None = None
    ) -> list[CliProcess]:
        """As a launcher would start them: independent processes that know their place."""
        port = str(free_port())
        places = [(str(r), str(size), str(r), str(size), "127.0.0.1", port) for r in range(size)]
        return [
            (start or self.start_forked)(*arguments, **dict(zip(LAUNCH_VARIABLES, place, strict=True)))
            for place in places
        ]

    def close(self) -> None:
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait() if isinstance(process, subprocess.Popen) else process.join()

    def _log(self) -> Path:
        return self.folder / f"process{len(self._started)}"


def wait_until(condition: Callable[[], Any], timeout_s: float = 60, description: str = "it happens") -> Any:
    """Poll; returns what the condition returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s until {description}"
        time.sleep(0.005)
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def logged_steps(folder: Path) -> list[int]:
    """The steps in stats.jsonl, but for a line that is being written."""
    try:
        lines = (folder / "stats.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:  # not yet; or the folder of a label has just got its name
        return []
    return [int(json.loads(line)["Progress/step"]) for line in lines if line.endswith("\n")]


def wait_for_step(folder: Path, step: int = 5) -> None:
    """Return when a run has come as far as this step."""
    wait_until(lambda: (logged_steps(folder) or [0])[-1] >= step, description=f"step {step}")


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    inside = folder / "checkpoints"
    return sorted(p for p in inside.iterdir() if p.name.isdigit()) if inside.exists() else []


def final_tensors(folder: Path) -> dict[str, bytes]:
    """What a run has learnt, to the last bit: the model and the tensors of its newest checkpoint."""
    last = list_checkpoints(folder)[-1]
    files = [*(folder / "model").glob("*.safetensors"), *last.glob("*.safetensors")]
    found = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    assert len(found) >= 3
    return found
