"""Servers on loopback: nginx, S3, and one that fails in whatever way a test wants."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from processes import free_port, until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
_CONF = """
daemon off;
worker_processes 1;
pid {work}/pid;
error_log {work}/error.log;
{user}
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    types {{ text/html html; }}
    default_type application/octet-stream;
    sendfile on;
    keepalive_requests 1000000;
    server {{
        listen 127.0.0.1:{port};
        root {folder};
        autoindex on;
        {more}
    }}
}}
"""


class Nginx:
    """A real nginx that serves `folder`, on a port of its own, which it keeps through `stop` and `start`.

    more : further lines for its `server` block
    """

    def __init__(self, folder: Path, work: Path, more: str = ""):
        if NGINX is None:
            pytest.skip("no nginx")
        work.mkdir(parents=True, exist_ok=True)
        self.port, self.work = free_port(), work
        user = "user root;" if os.geteuid() == 0 else ""  # a worker must read tmp_path
        conf = _CONF.format(work=work, port=self.port, folder=folder, user=user, more=more)
        (work / "nginx.conf").write_text(conf)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [
            str(NGINX),
            "-p",
            str(self.work),
            "-c",
            str(self.work / "nginx.conf"),
            "-e",
            str(self.work / "error.log"),
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until(lambda: answers(self.port), 10, "nginx answers")

    def stop(self) -> None:
        """At once: connections are reset."""
        self._process.terminate()
        self._process.wait(10)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def nginx(folder: Path, work: Path, more: str = "") -> Iterator[Nginx]:
    server = Nginx(folder, work, more)
    try:
        yield server
    finally:
        server.stop()


class S3:
    """A real S3 server (moto's), and the environment that leads clients to it."""

    def __init__(self, url: str):
        self.url = url
        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def put(self, bucket: str, folder: Path) -> None:
        """All files of a folder into a new bucket."""
        import boto3

        settings = {"aws_access_key_id": "someone", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=self.url, **settings)
        client.create_bucket(Bucket=bucket)
        for file in (file for file in folder.rglob("*") if file.is_file()):
            client.put_object(Bucket=bucket, Key=file.relative_to(folder).as_posix(), Body=file.read_bytes())
        client.close()


@contextlib.contextmanager
def s3() -> Iterator[S3]:
    """In this process, in threads."""
    moto = pytest.importorskip("moto.server")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield S3(f"http://{host}:{port}")
        finally:
            server.stop()


class Asked(BaseHTTPRequestHandler):
    """One request of `Faulty`. Its `play` answers with `serve`, or does something else."""

    protocol_version = "HTTP/1.1"
    server: Faulty  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.asked.append((self.path, self.headers.get("Range", "")))
            plan = self.server.plan
            play = plan.pop(0) if len(plan) > 1 else plan[0] if plan else None
        with contextlib.suppress(ConnectionError):
            play(self) if play else self.serve()

    def body(self) -> tuple[bytes, int, int]:
        """The file; and which bytes of it are wanted."""
        data = self.server.files[self.path.partition("?")[0]]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        return data, int(first), min(int(last) + 1 if last else len(data), len(data))

    def serve(self) -> None:
        """As a good server does."""
        if self.path.partition("?")[0] not in self.server.files:
            return self.status(404)
        data, first, end = self.body()
        if "Range" not in self.headers:
            return self.send(200, data)
        if first >= end:
            return self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self.send(206, data[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"})

    def status(self, code: int, **headers: str) -> None:
        self.send(code, b"no", {key.replace("_", "-"): value for key, value in headers.items()})

    def send(self, code: int, data: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        """`length`: what it says it sends, if not what it does."""
        self.send_response(code)
        said = {"Content-Length": str(len(data) if length is None else length), "ETag": self.server.version}
        for key, value in {**said, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)
        if length is not None:
            self.reset()

    def reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


class Faulty(ThreadingHTTPServer):
    """Serves `files` by their paths. `plan`: what to do with the next requests; its last holds for all after it.

    asked : path and Range of every request
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Asked)
        self.files = dict[str, bytes]()
        self.plan = list[Callable[[Asked], None] | None]()
        self.asked, self.lock, self.version = list[tuple[str, str]](), threading.Lock(), '"1"'
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None: ...


@contextlib.contextmanager
def faulty() -> Iterator[Faulty]:
    server = Faulty()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


# What a server may do instead of serving.


def fails(code: int, **headers: str) -> Callable[[Asked], None]:
    return lambda asked: asked.status(code, **headers)


def resets(asked: Asked) -> None:
    asked.reset()


def stalls(asked: Asked) -> None:
    asked.server.over.wait(30)
    asked.reset()


def stalls_within(asked: Asked) -> None:
    """After half of what was asked for."""
    data, first, end = asked.body()
    asked.send_response(206)
    asked.send_header("Content-Length", str(end - first))
    asked.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
    asked.end_headers()
    asked.wfile.write(data[first : (first + end) // 2])
    stalls(asked)


def slow(wait_s: float) -> Callable[[Asked], None]:
    def play(asked: Asked) -> None:
        time.sleep(wait_s)
        asked.serve()

    return play


def half(asked: Asked) -> None:
    """Says the right length, and closes after half."""
    data, first, end = asked.body()
    said = {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"}
    asked.send(206, data[first : (first + end) // 2], said, length=end - first)


def short(asked: Asked) -> None:
    """An honest answer, of half of the range."""
    data, first, end = asked.body()
    end = (first + end) // 2
    asked.send(206, data[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"})


def elsewhere(asked: Asked) -> None:
    """Another range than was asked for."""
    data, first, end = asked.body()
    asked.send(206, data[: end - first], {"Content-Range": f"bytes 0-{end - first - 1}/{len(data)}"})


def whole(asked: Asked) -> None:
    """Ignores Range."""
    asked.send(200, asked.body()[0])


def endless(code: int) -> Callable[[Asked], None]:
    """A body that never ends."""

    def play(asked: Asked) -> None:
        _, first, end = asked.body()
        asked.send_response(code)
        if code == 206:
            asked.send_header("Content-Range", f"bytes {first}-{end - 1}/*")
        asked.send_header("Connection", "close")
        asked.end_headers()
        while not asked.server.over.is_set():
            asked.wfile.write(bytes(2**16))

    return play


def garbage(asked: Asked) -> None:
    """No HTTP."""
    asked.wfile.write(b"\x00\x01 what?\r\n\r\n")
    asked.reset()


def circles(asked: Asked) -> None:
    asked.status(302, Location=asked.path)


def moved(to: str) -> Callable[[Asked], None]:
    return lambda asked: asked.status(302, Location=to) if asked.path != to else asked.serve()
