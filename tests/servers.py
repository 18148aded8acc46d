"""Servers on loopback: nginx, S3, and one that fails as a test demands."""

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
from typing import Any

import pytest

from processes import free_port, wait_until

NGINX_PATH = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
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
    """An nginx that serves `folder`. It keeps its port through `stop` and `start`.

    work         : folder for its files
    extra_config : further lines for its `server` block
    """

    def __init__(self, folder: Path, work: Path, extra_config: str = ""):
        if NGINX_PATH is None and os.environ.get("PARAGAN_ENGINES") != "required":
            pytest.skip("there is no nginx: apt-get install nginx-light")
        assert NGINX_PATH
        work.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.work = work
        user = "user root;" if os.geteuid() == 0 else ""  # its worker must be able to read tmp_path
        conf = _CONF.format(work=work, port=self.port, folder=folder, user=user, more=extra_config)
        (work / "nginx.conf").write_text(conf)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        options = ["-p", self.work, "-c", self.work / "nginx.conf", "-e", self.work / "error.log"]
        self._process = subprocess.Popen([NGINX_PATH, *options], stderr=subprocess.DEVNULL)
        wait_until(lambda: is_listening(self.port), 10, "nginx answers")

    def stop(self) -> None:
        """Stop at once: connections are reset."""
        self._process.terminate()
        self._process.wait(10)


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def run_nginx(folder: Path, work: Path, extra_config: str = "") -> Iterator[Nginx]:
    server = Nginx(folder, work, extra_config)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def run_app(app: Any) -> Iterator[str]:
    """Serve a WSGI application in threads of this process; the address."""
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class S3Server:
    """An S3 server (moto's), and the environment variables by which clients find it."""

    def __init__(self, url: str):
        self.url = url
        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def put(self, bucket: str, folder: Path) -> None:
        """Upload all files of a folder to a new bucket."""
        import boto3

        settings = {"aws_access_key_id": "someone", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=self.url, **settings)
        client.create_bucket(Bucket=bucket)
        for file in (file for file in folder.rglob("*") if file.is_file()):
            client.put_object(Bucket=bucket, Key=file.relative_to(folder).as_posix(), Body=file.read_bytes())
        client.close()


@contextlib.contextmanager
def run_s3() -> Iterator[S3Server]:
    """Run the server in threads of this process."""
    moto = pytest.importorskip("moto.server")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield S3Server(f"http://{host}:{port}")
        finally:
            server.stop()


class FaultyRequest(BaseHTTPRequestHandler):
    """One request to a `FaultyServer`, answered by `serve` or by the server's next response."""

    protocol_version = "HTTP/1.1"
    server: FaultyServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.path, self.headers.get("Range", "")))
            responses = self.server.responses
            respond = responses[0] if responses else None
            if len(responses) > 1:
                responses.pop(0)
        with contextlib.suppress(ConnectionError):
            if respond:
                respond(self)
            else:
                self.serve()

    do_HEAD = do_PUT = do_GET  # noqa: N815

    def requested_range(self) -> tuple[bytes, int, int]:
        """Return the file, and the first and the end of the requested bytes."""
        data = self.server.files[self.path.partition("?")[0]]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        return data, int(first), min(int(last) + 1 if last else len(data), len(data))

    def serve(self) -> None:
        """Answer correctly."""
        if self.path.partition("?")[0] not in self.server.files:
            return self.send_status(404)
        data, first, end = self.requested_range()
        if "Range" not in self.headers:
            return self.send_body(200, data)
        if first >= end:
            return self.send_body(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self.send_body(206, data[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"})

    def send_status(self, code: int, **headers: str) -> None:
        self.send_body(code, b"no", {key.replace("_", "-"): value for key, value in headers.items()})

    def send_body(
        self, code: int, data: bytes, headers: dict[str, str] | None = None, claimed_length: int | None = None
    ) -> None:
        """Send an answer. With `claimed_length` it says that length, and resets the connection after `data`."""
        self.send_response(code)
        default_headers = {
            "Content-Length": str(len(data) if claimed_length is None else claimed_length),
            "ETag": self.server.version,
        }
        for key, value in {**default_headers, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if claimed_length is not None:
            self.reset_connection()

    def reset_connection(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...


class FaultyServer(ThreadingHTTPServer):
    """Serves files over HTTP, with faults.

    files     : contents by path
    responses : what answers the next requests (None: correctly); the last one answers all after it
    requests  : path and Range of every request so far
    version   : the ETag of all files
    closing   : set when the server ends
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FaultyRequest)
        self.files = dict[str, bytes]()
        self.responses = list[Callable[[FaultyRequest], None] | None]()
        self.requests = list[tuple[str, str]]()
        self.lock = threading.Lock()
        self.version = '"1"'
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None: ...


@contextlib.contextmanager
def run_faulty() -> Iterator[FaultyServer]:
    server = FaultyServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


# Faulty responses.


def respond_status(code: int, **headers: str) -> Callable[[FaultyRequest], None]:
    return lambda request: request.send_status(code, **headers)


def reset(request: FaultyRequest) -> None:
    request.reset_connection()


def stall(request: FaultyRequest) -> None:
    request.server.closing.wait(30)
    request.reset_connection()


def stall_midway(request: FaultyRequest) -> None:
    """Stall after half of the requested bytes."""
    data, first, end = request.requested_range()
    request.send_response(206)
    request.send_header("Content-Length", str(end - first))
    request.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
    request.end_headers()
    request.wfile.write(data[first : (first + end) // 2])
    stall(request)


def delay(wait_s: float) -> Callable[[FaultyRequest], None]:
    def respond(request: FaultyRequest) -> None:
        time.sleep(wait_s)
        request.serve()

    return respond


def truncate_body(request: FaultyRequest) -> None:
    """Claim the right length, and close the connection after half of it."""
    data, first, end = request.requested_range()
    headers = {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"}
    request.send_body(206, data[first : (first + end) // 2], headers, claimed_length=end - first)


def serve_half_range(request: FaultyRequest) -> None:
    """Answer correctly, with half of the requested range."""
    data, first, end = request.requested_range()
    end = (first + end) // 2
    request.send_body(206, data[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"})


def serve_wrong_range(request: FaultyRequest) -> None:
    """Answer with another range than was requested."""
    data, first, end = request.requested_range()
    request.send_body(206, data[: end - first], {"Content-Range": f"bytes 0-{end - first - 1}/{len(data)}"})


def ignore_range(request: FaultyRequest) -> None:
    """Answer with the whole file."""
    request.send_body(200, request.requested_range()[0])


def endless_body(code: int) -> Callable[[FaultyRequest], None]:
    """Send a body that never ends."""

    def respond(request: FaultyRequest) -> None:
        _, first, end = request.requested_range()
        request.send_response(code)
        if code == 206:
            request.send_header("Content-Range", f"bytes {first}-{end - 1}/*")
        request.send_header("Connection", "close")
        request.end_headers()
        while not request.server.closing.is_set():
            request.wfile.write(bytes(2**16))

    return respond


def send_garbage(request: FaultyRequest) -> None:
    """Answer with bytes that are not HTTP."""
    request.wfile.write(b"\x00\x01 what?\r\n\r\n")
    request.reset_connection()


def redirect_to_self(request: FaultyRequest) -> None:
    request.send_status(302, Location=request.path)


def redirect_to(location: str) -> Callable[[FaultyRequest], None]:
    def respond(request: FaultyRequest) -> None:
        if request.path == location:
            request.serve()
        else:
            request.send_status(302, Location=location)

    return respond
