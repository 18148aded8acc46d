"""How a run of several ranks starts: waits end, answer signals, and name those who are missing or lost."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import LONG_RUN_ARG, CliProcess, free_port, train_args, wait_until

pytestmark = pytest.mark.kill

ENDS_WITHIN_S = 150  # far below the 300 s for which ranks wait for each other by default


class MuteServer:
    """A program that accepts connections and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(200)
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []

    def wait_for_request(self) -> None:
        """Return when a client has sent something. Clients may first look whether the port is open."""
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(200)
            self._connections.append(connection)
            if connection.recv(1, socket.MSG_PEEK):
                return

    def close(self) -> None:
        for connection in (self._listener, *self._connections):
            connection.close()


@pytest.fixture
def mute_server() -> Iterator[MuteServer]:
    server = MuteServer()
    yield server
    server.close()


def rank_1_of_2(port: int) -> dict[str, str]:
    return {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("strategy", ["sync", "gossip"])
def test_a_port_of_another_program_is_named_after_the_timeout(strategy, tmp_path, processes, mute_server):
    arguments = train_args(tmp_path / "run", f"--strategy={strategy}", "--timeout_s=2")
    rank = processes.start_forked(*arguments, **rank_1_of_2(mute_server.port))
    assert rank.wait(ENDS_WITHIN_S) == 1
    assert f"a process listens at 127.0.0.1:{mute_server.port}" in rank.err
    assert "Use another MASTER_PORT" in rank.err
    assert not (tmp_path / "run").exists()


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "train": lambda finished, out: train_args(out / "run"),
    "train --strategy gossip": lambda finished, out: train_args(out / "run", "--strategy=gossip"),
    "train --strategy per-label": lambda finished, out: train_args(out / "run", "--strategy=per-label"),
    "train --strategy auto": lambda finished, out: train_args(out / "run", "--strategy=auto"),
    "eval": lambda finished, out: ["eval", str(finished)],
    "bench links": lambda finished, out: ["bench", "links"],
    "bench strategies": lambda finished, out: ["bench", "strategies"],
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_signals_at_a_mute_port(command, number, finished, tmp_path, processes, mute_server):
    rank = processes.start_forked(*COMMANDS[command](finished, tmp_path), **rank_1_of_2(mute_server.port))
    mute_server.wait_for_request()
    rank.send_signal(number)
    assert rank.wait(ENDS_WITHIN_S) in (3, -number)


def test_a_second_process_of_one_rank_is_refused(tmp_path, processes):
    port = free_port()
    arguments = train_args(tmp_path / "run", "--lanes=4")
    others = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    waiting = [processes.start_forked(*arguments, RANK=rank, **others) for rank in "01"]
    wait_until(lambda: connections_to(port) >= 2, description="ranks 0 and 1 are connected")
    second = processes.start_forked(*arguments, RANK="1", **others)
    assert second.wait(ENDS_WITHIN_S) == 1
    assert f"rank 1 is at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT) already" in second.err
    of_four = processes.start_forked(*arguments, RANK="2", **(others | {"WORLD_SIZE": "4"}))
    assert of_four.wait(ENDS_WITHIN_S) == 1
    assert "belongs to a run of 3 ranks, and this is rank 2 of 4" in of_four.err
    assert [rank.status() for rank in waiting] == [None, None]


def connections_to(port: int) -> int:
    """Return how many established TCP connections of this host lead to a port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(line[2].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


def test_a_rank_says_for_whom_it_waits(tmp_path, processes):
    patch = "from paragan.comm import rendezvous\nrendezvous.WAIT_NOTICE_S = 0.1"
    env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = processes.start_forked(*train_args(tmp_path / "run", "--lanes=4", "--timeout_s=2"), patch=patch, **env)
    assert rank.wait(ENDS_WITHIN_S) == 1
    notice, error = rank.err.splitlines()
    assert notice == "paragan: rank 0 of 3 (RANK=0, WORLD_SIZE=3) waits for rank 1, 2"
    assert error == "paragan: rank 1, 2 did not arrive within 2 s (RANK=0, WORLD_SIZE=3)"


def start_alone(processes, folder: Path, *arguments: str, **env: str) -> CliProcess:
    """Start rank 1 of 2, which says after 0.1 s what it waits for."""
    patch = "from paragan.comm import rendezvous\nrendezvous.WAIT_NOTICE_S = 0.1"
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | env
    return processes.start_forked(*train_args(folder, *arguments), patch=patch, **env)


class MailServer(socketserver.BaseRequestHandler):
    """Speaks before it is asked."""

    def handle(self) -> None:
        self.request.sendall(b"220 mail.example ESMTP\r\n")


@pytest.mark.parametrize("handler", [http.server.SimpleHTTPRequestHandler, MailServer])
def test_a_rank_that_waits_for_another_program_says_so(handler, tmp_path, processes):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        rank = start_alone(processes, tmp_path / "run", "--timeout_s=3", MASTER_PORT=str(port))
        status = rank.wait(ENDS_WITHIN_S)
        server.shutdown()
    where = f"a process listens at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT), but does not answer as rank 0 does"
    assert (status, rank.err.splitlines()) == (
        1,
        [
            f"paragan: rank 1 of 2 waits: {where}. Use another MASTER_PORT",
            f"paragan: {where}, says rank 1. Use another MASTER_PORT",
        ],
    )


def test_a_rank_waits_for_a_name_without_naming_the_variables_that_count_it(tmp_path, processes):
    env = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "1"}
    rank = start_alone(processes, tmp_path / "run", "--timeout_s=2", **env)
    assert rank.wait(ENDS_WITHIN_S) == 1
    assert rank.err.splitlines()[0] == "paragan: rank 1 of 2 waits for no-such-host.invalid (MASTER_ADDR) to resolve"


def test_a_signal_to_a_rank_that_waits_alone_is_one_line_of_this_rank(tmp_path, processes):
    rank = start_alone(processes, tmp_path / "run", MASTER_PORT=str(port := free_port()))
    wait_until(lambda: rank.err, ENDS_WITHIN_S, "it waits")
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(ENDS_WITHIN_S) == 3
    assert rank.err.splitlines() == [
        f"paragan: rank 1 of 2 (RANK=1, WORLD_SIZE=2) waits for rank 0 at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)",
        "paragan: SIGTERM while nothing was being trained",
    ]


# kills while a run starts ------------------------------------------------------------------------------------------


def process_exists(pid: int, run: Path) -> bool:
    return True


def torch_is_loaded(pid: int, run: Path) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def has_a_socket(pid: int, run: Path) -> bool:
    return any(str(file.readlink()).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())


def folder_is_chosen(pid: int, run: Path) -> bool:
    return (run / "run.yaml").exists()


MOMENTS = (process_exists, torch_is_loaded, has_a_socket, folder_is_chosen)
START_KILLS = [
    ("sync", has_a_socket),
    ("gossip", folder_is_chosen),
    *(("sync", moment) for moment in MOMENTS if moment is not has_a_socket),
    *((strategy, has_a_socket) for strategy in ("gossip", "quantized", "async", "async-gossip", "per-label")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "moment"), START_KILLS)
def test_a_rank_killed_while_ranks_start_does_not_hang_the_others(strategy, moment, tmp_path, processes):
    run = tmp_path / "run"
    arguments = train_args(run, "--ranks=3", f"--strategy={strategy}", "--lanes=4", LONG_RUN_ARG)
    launcher = processes.start_forked(*arguments)
    pid = wait_until(lambda: rank_pid(launcher, 1), description="rank 1 is started")

    def reached() -> bool:
        try:
            return moment(pid, run)
        except OSError:  # of /proc, while the process changes
            return False

    wait_until(reached, description=moment.__name__)
    os.kill(pid, signal.SIGKILL)
    status = launcher.wait(ENDS_WITHIN_S)
    if status != 0:  # a strategy that goes on without a lost rank may do so once all have met
        assert status == 1
        assert re.search(r"\brank 1\b", launcher.err)  # alone, or with a rank that could not connect to it


def rank_pid(launcher: CliProcess, rank: int) -> Any:
    """Return the process of a rank, or None if the launcher has not started it yet."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return int(children[rank]) if len(children) > rank else None
