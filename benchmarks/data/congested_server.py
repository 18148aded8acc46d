"""A real nginx on loopback whose network is congested now and then: delays and a link ten times worse, in bursts.

Every request waits for `latency_ms`; then its bytes queue, 16 KB at a time, for one link of `mb_s` that all
connections share, as they would share what a busy store or an uplink grants one machine. During a burst both are
`times` worse. More connections therefore hide latency, in a burst as in the calm, but no number of them gets more
than the link carries: what is missing then must have been fetched before. Sockets of the server hold 64 KB: what waits
there has passed the link already, and by default that would be megabytes. nginx's own `limit_rate` would not do: it
holds for each connection, lets the first second's worth go at once, and keeps the rate that a response began with.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

NGINX_MODULES = Path("/usr/lib/nginx/modules")  # of Debian's libnginx-mod-http-lua
ALWAYS, NEVER = ((0.0, 1e9),), ()
Span = tuple[float, float]  # seconds
Bursts = Sequence[Span]  # begin and end, since `restart`


@dataclass(frozen=True)
class CongestedNetwork:
    """What the server does to requests. The defaults: 5 ms and 16 Mbit/s; in a burst 50 ms and 1.6 Mbit/s."""

    latency_ms: float = 5.0
    mb_s: float = 2.0
    burst_slowdown: float = 10.0


NGINX_CONF = """
user root;
worker_processes 1;
daemon off;
pid {prefix}/nginx.pid;
error_log {prefix}/error.log;
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_timeout 600;
    keepalive_requests 1000000000;
    client_body_temp_path {prefix}/body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    init_by_lua_block {{
        network = assert(loadfile("{lua}"))("{folder}", {latency_s}, {rate}, {times})
    }}
    server {{
        listen 127.0.0.1:{port} backlog=1024 sndbuf=65536;
        root {folder};
        access_by_lua_block {{ network.delay() }}
        log_by_lua_block {{ network.done() }}
        location / {{ content_by_lua_block {{ network.file() }} }}
        location ~ /$ {{ autoindex on; }}
    }}
    server {{
        listen 127.0.0.1:{control};
        location = /restart {{ content_by_lua_block {{ network.restart() }} }}
        location = /stats {{ content_by_lua_block {{ network.stats() }} }}
    }}
}}
"""


class CongestedServer:
    """A running one. `url` is the folder; the other port, without any delay, is for the rig."""

    def __init__(self, port: int, control: int):
        self.url = f"http://127.0.0.1:{port}"
        self._control, self._http = f"http://127.0.0.1:{control}", urllib3.PoolManager(maxsize=2)

    def restart(self, bursts: Bursts) -> None:
        """The bursts from now on."""
        body = "".join(f"{begin} {end}\n" for begin, end in bursts)
        self._http.request("POST", f"{self._control}/restart", body=body)

    def stats(self) -> dict[str, Any]:
        """Latency of requests (None without any), how many were under way in the mean, and bytes; since last asked."""
        return json.loads(self._http.request("GET", f"{self._control}/stats").data)


@contextmanager
def run_server(folder: Path, network: CongestedNetwork) -> Iterator[CongestedServer]:
    """nginx with the files of `folder`, for as long as this lasts."""
    if not shutil.which("nginx") or not (NGINX_MODULES / "ngx_http_lua_module.so").exists():
        raise SystemExit("nginx with Lua is missing: apt-get install nginx-light libnginx-mod-http-lua")
    port, control = _free_port(), _free_port()
    with tempfile.TemporaryDirectory() as prefix:
        configuration = NGINX_CONF.format(
            prefix=prefix,
            modules=NGINX_MODULES,
            lua=Path(__file__).with_suffix(".lua").resolve(),
            folder=folder.resolve(),
            latency_s=network.latency_ms / 1000,
            rate=network.mb_s * 1e6,
            times=network.burst_slowdown,
            port=port,
            control=control,
        )
        Path(prefix, "nginx.conf").write_text(configuration)
        command = ["nginx", "-p", prefix, "-c", f"{prefix}/nginx.conf"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            _wait_listening(control, process, Path(prefix, "error.log"))
            yield CongestedServer(port, control)
        finally:
            process.terminate()
            process.wait()


def make_bursts(
    seconds: float, seed: int, *, quiet_s: float, length_s: tuple[float, float], interval_s: tuple[float, float]
) -> Bursts:
    """When the network is congested: never in the first `calm_s`; then for `lasting`, `apart` from each other."""
    chance, result, at = random.Random(seed), [], quiet_s
    while at < seconds:
        end = at + chance.uniform(*length_s)
        result.append((round(at, 3), round(end, 3)))
        at = end + chance.uniform(*interval_s)
    return result


def measure_network(server: CongestedServer, name: str, size: int, read: int) -> dict[str, dict[str, float]]:
    """What the network does, in the calm and in a burst, to ranges of `read` bytes and to a file of `size` bytes."""
    result = {}
    for state, when in (("calm", NEVER), ("congested", ALWAYS)):
        server.restart(when)
        ms = sorted(1000 * elapsed_s for elapsed_s in _time_requests(f"{server.url}/{name}", size, read, 100))
        result[state] = {
            "latency_ms_p50": round(statistics.median(ms), 2),
            "latency_ms_p99": round(ms[98], 2),
            "one_connection_mb_s": round(_mb_s(lambda: _read_bytes_within(f"{server.url}/{name}", 2.0)), 3),
            "two_connections_mb_s": round(_mb_s(*[lambda: _read_bytes_within(f"{server.url}/{name}", 2.0)] * 2), 3),
            "ranges_of_32_connections_a_second": round(_ranges_per_s(server, name, size, read), 1),
        }
    server.restart(NEVER)
    return result


def _time_requests(url: str, size: int, read: int, count: int) -> Iterator[float]:
    """How long each of `count` ranges takes, one after the other on one connection."""
    with urllib3.PoolManager() as http:
        for i in range(count + 1):
            start, begin = i * read % (size - read), time.perf_counter()
            http.request("GET", url, headers={"Range": f"bytes={start}-{start + read - 1}"})
            if i:  # the first connects
                yield time.perf_counter() - begin


def _read_bytes_within(url: str, seconds: float) -> int:
    """How many bytes of the whole file arrive within `seconds`."""
    end, count = time.perf_counter() + seconds, 0
    with urllib3.PoolManager() as http:
        answer = http.request("GET", url, preload_content=False)
        while time.perf_counter() < end and (piece := answer.read1(65536)):
            count += len(piece)
        answer.close()
    return count


def _mb_s(*streams: Callable[[], int]) -> float:
    begin = time.perf_counter()
    counts = _run_parallel(streams)
    return sum(counts) / (time.perf_counter() - begin) / 1e6


def _ranges_per_s(server: CongestedServer, name: str, size: int, read: int) -> float:
    begin, url = time.perf_counter(), f"{server.url}/{name}"
    counts = _run_parallel([lambda: len(list(_time_requests(url, size, read, 20)))] * 32)
    return sum(counts) / (time.perf_counter() - begin)


def _run_parallel(works: Sequence[Callable[[], int]]) -> list[int]:
    counts = [0] * len(works)

    def one(i: int) -> None:
        counts[i] = works[i]()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(200):
        if process.poll() is not None:
            raise SystemExit(f"nginx does not start: {log.read_text() if log.exists() else os.strerror(0)}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit("nginx does not answer")
