"""Files behind addresses: real servers, planted faults, and one clear line where patience ends."""

import asyncio
import io
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import servers
from paragan.core.errors import RunError, UsageError
from paragan.data.dataset import load_data
from paragan.data.formats import image_folder as folders
from paragan.data.formats.image_folder import open_image_folder
from paragan.data.source import DecodeError
from paragan.data.storage import http, http_ranges
from paragan.data.storage import remote as fars
from paragan.data.storage.filesystem import RemoteOptions
from paragan.data.storage.http import parse_listing
from paragan.data.storage.http_ranges import HttpRangeReader
from paragan.data.storage.open_location import open_location
from paragan.data.storage.remote import RemoteFileSystem, open_remote
from paragan.data.storage.retry import FIRST_DELAY_S, MAX_DELAY_S, RetryableError, retry_delay_s
from paragan.data.storage.timeouts import run_on_loop
from servers import FaultyServer, Nginx

BYTES = np.random.default_rng(0).bytes(10_000)
QUICK = RemoteOptions(cache_dir="", timeout_s=0.5, retry_for_s=1.5)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with servers.run_faulty() as server:
        server.files["/set/a.bin"] = BYTES
        yield server


@pytest.fixture(params=["obstore", "aiohttp"])
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Request ranges through obstore first, or through aiohttp only."""
    if request.param == "aiohttp":
        monkeypatch.setattr(HttpRangeReader, "make", staticmethod(lambda *_: None))
    return request.param == "obstore"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 3 classes of 40 images, and a large file."""
    folder = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(0)
    for label in ("cat", "dög & co", "emu #1"):
        (folder / "set" / label).mkdir(parents=True)
        for number in range(40):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(
                folder / "set" / label / f"{number} 100%.png"
            )
    (folder / "set" / ".hidden").write_bytes(b"")
    (folder / "large.bin").write_bytes(rng.bytes(5_000_000))
    return folder


@pytest.fixture(scope="module")
def nginx(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    locked = "location /locked/ { return 403; } location /moved/ { return 302 /set/; }"
    with servers.run_nginx(served, tmp_path_factory.mktemp("nginx"), locked) as server:
        yield server


def remote_fs(address: str, reach: RemoteOptions = QUICK) -> RemoteFileSystem:
    place, _ = open_location(address, reach)
    assert isinstance(place, RemoteFileSystem)
    return place


def line(caught: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What an address names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "folder", "name"),
    [
        ("http://host/set", "http://host/set", ""),
        ("http://host/set.v2/", "http://host/set.v2", ""),
        ("http://host/a/b.tar", "http://host/a", "b.tar"),
        ("http://host/a/b.TAR?key=1", "http://host/a", "b.TAR"),
        ("http://host/a/my%20set.zip", "http://host/a", "my set.zip"),
        ("http://host/a/s-{000..017}.tar", "http://host/a", "s-{000..017}.tar"),
        ("http://host/a/s-*", "http://host/a", "s-*"),
        ("http://host.zip", "http://host.zip", ""),
        ("memory://a/b.npz", "memory://a", "b.npz"),
        ("memory://a/b", "memory://a/b", ""),
    ],
)
def test_files_and_folders_are_distinguished_by_name(where: str, folder: str, name: str):
    place, outcome = open_remote(where, RemoteOptions(cache_dir=""))
    assert (place.location, outcome) == (folder, name)


def test_passwords_and_signatures_are_not_shown():
    place, _ = open_remote(
        "https://me:se/cr@et@host/set?X-Amz-Signature=abc".replace("/cr", "cr"), RemoteOptions(cache_dir="")
    )
    assert place.location == "https://***@host/set"
    assert place.display_path("a.png") == "https://***@host/set/a.png"
    with pytest.raises(RunError) as caught:
        remote_fs(
            "http://me:secret@127.0.0.1:1/s?sig=abc", RemoteOptions(cache_dir="", timeout_s=0.2, retry_for_s=0.2)
        ).read("a.bin")
    assert not {"secret", "abc"} & set(line(caught).replace("/", " ").split())
    assert "secret" not in line(caught)


@pytest.mark.parametrize("where", ["nonsense://host/set", "http://", "http:///set"])
def test_invalid_addresses_are_refused_at_once(where: str):
    with pytest.raises(UsageError, match=r"^data: .+: (check it|.*use http://, https:// or s3://)$"):
        open_remote(where, RemoteOptions(cache_dir=""))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(_: str) -> None:
        raise ImportError("Install it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(UsageError, match="paramiko"):
        open_remote("sftp://host/set", RemoteOptions(cache_dir=""))


def test_profiles_of_aws_need_a_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "other")
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(UsageError, match=r"profiles of AWS need a package: pip install boto3$"):
        open_remote("s3://bucket/set", RemoteOptions(cache_dir=""))


# Asking again --------------------------------------------------------------------------------------------------


def test_retry_pauses_double_up_to_a_limit_with_jitter():
    assert [retry_delay_s(n, 1.0) for n in (1, 2, 3)] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert retry_delay_s(1, 0.0) == FIRST_DELAY_S / 2
    assert retry_delay_s(1000, 1.0) == MAX_DELAY_S
    assert all(7.0 < retry_delay_s(1, luck, retry_after_s=7.0) <= 7.0 + FIRST_DELAY_S for luck in (0.0, 0.5, 1.0))
    assert all(0 < retry_delay_s(n, random.random()) <= MAX_DELAY_S for n in range(1, 100_000, 997))


PASSING = {
    "500s": [servers.respond_status(500), servers.respond_status(503), servers.respond_status(502)],
    "429": [servers.respond_status(429, Retry_After="1")],
    "reset": [servers.reset, servers.reset],
    "stall": [servers.stall],
    "stall within": [servers.stall_midway],
    "slow start": [servers.delay(0.3)],
    "half": [servers.truncate_body],
    "short": [servers.serve_half_range],
    "elsewhere": [servers.serve_wrong_range],
    "garbage": [servers.send_garbage],
    "404 once": [servers.respond_status(404)],
    "endless": [servers.endless_body(206)],
    "all": [
        servers.respond_status(500),
        servers.reset,
        servers.truncate_body,
        servers.respond_status(404),
        servers.send_garbage,
    ],
}


@pytest.mark.parametrize("name", PASSING)
def test_faults_that_pass_are_not_noticed(server: FaultyServer, name: str, is_fast: bool):
    faults = [*PASSING[name][: name != "slow start" and is_fast], *PASSING[name]]  # both ways meet the first one
    server.responses = [*faults, None]
    start = time.monotonic()
    assert remote_fs(f"{server.url}/set").read("a.bin", 100, 200) == BYTES[100:300]
    assert time.monotonic() - start < QUICK.retry_for_s + 1
    assert len(server.requests) == len(faults) + (name != "slow start") or name == "reset"
    if name == "429":
        assert time.monotonic() - start >= 1


LASTING = {
    "500": (servers.respond_status(500), "it answers 500 Internal Server Error"),
    "429": (servers.respond_status(429, Retry_After="1000"), "it answers 429 Too Many Requests"),
    "reset": (servers.reset, "the connection was closed"),
    "stall": (servers.stall, "no full response within "),
    "stall within": (servers.stall_midway, "no full response within "),
    "half": (servers.truncate_body, "the response was cut off"),
    "short": (servers.serve_half_range, "it sent 100 of the requested 200 bytes"),
    "elsewhere": (servers.serve_wrong_range, "it sent another range than bytes 100 to 300"),
    "garbage": (servers.send_garbage, "its response is not HTTP"),
    "endless": (servers.endless_body(206), "it sent more than the requested 200 bytes"),
}


@pytest.mark.parametrize("name", LASTING)
def test_faults_that_last_end_with_patience(server: FaultyServer, name: str, is_fast: bool):
    play, reason = LASTING[name]
    server.responses, start = [play], time.monotonic()
    with pytest.raises(RunError) as caught:
        remote_fs(f"{server.url}/set").read("a.bin", 100, 200)
    assert time.monotonic() - start < QUICK.retry_for_s + 1.5
    outcome = line(caught).removeprefix(f"data: {server.url}/set/a.bin cannot be reached: ")
    assert outcome.startswith((reason, "no full response within"))  # which on a busy machine may be what came last
    assert outcome.endswith("attempts within 1.5 s)")


REFUSED = {
    "401": (servers.respond_status(401), "it answers 401 Unauthorized: check the user and password"),
    "403": (servers.respond_status(403), "it answers 403 Forbidden: check the user and password"),
    "400": (servers.respond_status(400), "it answers 400 Bad Request: check the address"),
    "whole": (servers.ignore_range, "it ignores byte ranges and sends whole files: serve them by nginx"),
    "endless": (servers.endless_body(200), "it ignores byte ranges and sends whole files: serve them by nginx"),
    "circles": (servers.redirect_to_self, "it is redirected in circles: check the address"),
    "nowhere": (servers.respond_status(302, Location="ftp://x/y"), "not an address, or redirected to something"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_will_never_be_answered_ends_at_once(server: FaultyServer, name: str, is_fast: bool):
    play, reason = REFUSED[name]
    server.responses, start = [play], time.monotonic()
    with pytest.raises(UsageError) as caught:
        remote_fs(f"{server.url}/set").read("a.bin", 100, 200)
    assert line(caught).startswith(f"data: {server.url}/set/a.bin: {reason}")
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("code", [404, 410])
def test_a_file_that_is_gone_is_a_bad_record(server: FaultyServer, code: int, is_fast: bool):
    server.responses = [servers.respond_status(code)]
    for act in (lambda f: f.read("a.bin", 0, 9), lambda f: f.read("a.bin"), lambda f: f.size("a.bin")):
        with pytest.raises(DecodeError, match=rf"^not found \({code}\)$"):
            act(remote_fs(f"{server.url}/set"))
    assert len(server.requests) == 6 + is_fast


def test_an_unreachable_server(tmp_path: Path):
    start = time.monotonic()
    address = f"http://127.0.0.1:{servers.free_port()}/set"
    with pytest.raises(RunError, match=r"cannot be reached: .*([Cc]onnect|refused).* attempts within 0.5 s"):
        remote_fs(address, RemoteOptions(cache_dir="", timeout_s=0.5, retry_for_s=0.5)).list_dir()
    with pytest.raises(RunError, match="its host was not found"):
        remote_fs("http://nobody.invalid/set", RemoteOptions(cache_dir="", timeout_s=5, retry_for_s=0.5)).size("a.bin")
    assert time.monotonic() - start < 8


def test_other_answers(server: FaultyServer, is_fast: bool):
    place = remote_fs(f"{server.url}/set")
    assert place.read("a.bin", 5, 0) == b""
    with pytest.raises(DecodeError, match=r"^ends after 10,000 bytes, 10,001 were expected$"):
        place.read("a.bin", 9_000, 1_001)
    with pytest.raises(DecodeError, match=r"^ends after 10,000 bytes, 20,001 were expected$"):
        place.read("a.bin", 20_000, 1)
    server.files |= {"/set/none.bin": b"", "/set/other.bin": b"other"}
    assert (place.size("none.bin"), place.read("none.bin"), place.size("a.bin")) == (0, b"", 10_000)
    server.responses = [servers.ignore_range]  # whole files are fine where these are wanted
    assert (place.read("a.bin"), place.read("a.bin", 0, 10_000), place.size("other.bin")) == (BYTES, BYTES, 5)
    server.responses = [servers.redirect_to("/set/other.bin")]
    assert remote_fs(f"{server.url}/set").read("a.bin", 1, 2) == b"th"


def test_after_failures_the_fast_way_pauses(server: FaultyServer, monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(http_ranges.time, "monotonic", lambda: now)
    reader = HttpRangeReader(f"{server.url}/set", "", 5.0)
    for pause_s in (1.0, 2.0, 4.0):
        server.responses = [servers.respond_status(503), None]
        assert reader.fetch("a.bin", 0, 9) is None
        now += pause_s - 0.01
        assert reader.fetch("a.bin", 0, 9) is None
        now += 0.02
    assert len(server.requests) == 3
    response = reader.fetch("a.bin", 0, 9)
    assert response
    assert (response.data, response.stat.size) == (BYTES[:9], len(BYTES))


def test_no_password_is_left_out(server: FaultyServer):
    address = server.url.replace("://", "://me:secret@")
    assert HttpRangeReader.make(address, "", 5.0) is None
    seen: list[str] = []

    def note(request: servers.FaultyRequest) -> None:
        seen.append(request.headers.get("Authorization", ""))
        request.serve()

    server.responses = [note]
    assert remote_fs(f"{address}/set").read("a.bin", 0, 9) == BYTES[:9]
    assert seen
    assert all(word.startswith("Basic ") for word in seen)


def test_ranges_take_the_proxy_of_the_environment(server: FaultyServer, monkeypatch: pytest.MonkeyPatch):
    server.files["http://nobody.invalid/set/a.bin"] = BYTES  # a proxy gets the whole address
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    response = HttpRangeReader("http://nobody.invalid/set", "", 5.0).fetch("a.bin", 0, 9)
    assert response
    assert response.data == BYTES[:9]
    assert remote_fs("http://nobody.invalid/set").read("a.bin", 3, 9) == BYTES[3:12]
    server.files["/set/a.bin"] = BYTES[::-1]
    response = HttpRangeReader(f"{server.url}/set", "", 5.0).fetch("a.bin", 0, 9)  # without the proxy
    assert response
    assert response.data == BYTES[::-1][:9]


FORKED = """
import os, sys
from paragan.core.errors import UsageError
from paragan.data.storage.filesystem import RemoteOptions
from paragan.data.storage.open_location import open_location
fs = open_location(sys.argv[1], RemoteOptions(cache_dir="", timeout_s=5, retry_for_s=5))[0]
fs.read("large.bin", 0, 9)
if not os.fork():
    try:
        print(len(fs.read("large.bin", 0, 9)), flush=True)
    except UsageError as error:
        print(error, flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_forked_process_reads_or_says_why_not(nginx: Nginx, s3: str, kind: str):
    """Threads of obstore do not survive a fork. HTTP has another way to read; the rest has none."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, nginx.url if kind == "http" else "s3://bucket"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "start it by spawn" in done.stdout if kind == "s3" else done.stdout == "9\n"


def test_files_larger_than_a_part_come_in_parts(server: FaultyServer, monkeypatch: pytest.MonkeyPatch):
    for module in (http, sys.modules[RemoteFileSystem.__module__]):
        monkeypatch.setattr(module, "PART_BYTES", 999)
    place = remote_fs(f"{server.url}/set")
    assert place.read("a.bin") == BYTES
    assert len(server.requests) == 11
    assert place.read("a.bin", 17) == BYTES[17:]
    assert place.read("a.bin", 17, 5000) == BYTES[17:5017]


def test_signatures_are_added_to_every_address(server: FaultyServer):
    place, name = open_location(f"{server.url}/set/a.bin.tar?sig=1%2F2", QUICK)
    server.files["/set/a.bin.tar"] = BYTES
    assert place.read(name, 0, 3) == BYTES[:3]
    assert server.requests[0][0] == "/set/a.bin.tar?sig=1%2F2"


def test_an_open_file_is_one_for_libraries(server: FaultyServer):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x", bytes(3_000_000))
        archive.writestr("y", BYTES)
    server.files["/set/a.zip"] = packed.getvalue()
    server.responses = [None, servers.truncate_body, servers.respond_status(500), None]
    with remote_fs(f"{server.url}/set").open("a.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("y") == BYTES
        assert len(archive.read("x")) == 3_000_000
    server.responses = [servers.stall]
    with pytest.raises(RunError, match="cannot be reached"):
        remote_fs(f"{server.url}/set").open("a.zip")
    server.responses = [servers.respond_status(404)]
    with pytest.raises(DecodeError, match="not found"):
        remote_fs(f"{server.url}/set").open("a.zip")


def test_threads_wait_for_each_other_no_longer_than_for_one(server: FaultyServer):
    """64 requests that stall stall together, and connections are used again."""
    patient = remote_fs(f"{server.url}/set", RemoteOptions(cache_dir="", timeout_s=30, retry_for_s=30))
    place = remote_fs(f"{server.url}/set", RemoteOptions(cache_dir="", timeout_s=1, retry_for_s=1))
    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(lambda at: patient.read("a.bin", at, 9) == BYTES[at : at + 9], range(500))) == {True}
        server.responses = [servers.stall]
        start = time.monotonic()
        stalled = [pool.submit(place.read, "a.bin", at, 9) for at in range(64)]
        assert {type(one.exception()) for one in stalled} == {RunError}
    assert time.monotonic() - start < 32  # one after the other they would take 64 s


# Caches --------------------------------------------------------------------------------------------------------


def cached(server: FaultyServer, folder: Path) -> RemoteFileSystem:
    return remote_fs(
        f"{server.url}/set", RemoteOptions(cache_dir=str(folder), cache_gb=0.1, timeout_s=0.5, retry_for_s=1.5)
    )


def test_a_range_fetched_once_comes_from_disk(server: FaultyServer, tmp_path: Path):
    first = cached(server, tmp_path)
    assert [first.read("a.bin", 5, 10), first.read("a.bin"), first.read("a.bin", 5, 10)] == [
        BYTES[5:15],
        BYTES,
        BYTES[5:15],
    ]
    assert len(server.requests) == 3  # a look, two ranges
    later = cached(server, tmp_path)
    assert (later.read("a.bin", 5, 10), later.read("a.bin")) == (BYTES[5:15], BYTES)
    assert len(server.requests) == 4
    with pytest.raises(DecodeError, match="ends after 10,000 bytes"):
        later.read("a.bin", 9_999, 2)
    server.responses = [servers.stall]
    assert later.read("a.bin") == BYTES


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "bare"])
@pytest.mark.parametrize("version", ['"2"', '"1"'], ids=["version", "length"])
def test_a_file_that_is_replaced_is_never_mixed_with_the_old(
    server: FaultyServer, tmp_path: Path, cache: bool, version: str
):
    def place() -> RemoteFileSystem:
        return cached(server, tmp_path) if cache else remote_fs(f"{server.url}/set")

    first, new = place(), BYTES[::-1] + b"more" * (version == '"1"')
    server.files["/set/b.bin"] = BYTES
    assert first.read("a.bin", 0, 10) == first.read("b.bin")[:10] == BYTES[:10]
    server.files["/set/a.bin"] = server.files["/set/b.bin"] = new
    server.version = version
    with pytest.raises(RunError, match=r"^data: \S+/set/a.bin was replaced on its server while it was used \(.+\)$"):
        first.read("a.bin", 10, 10)
    if cache:  # what it has is what it had
        assert (first.read("a.bin", 0, 10), first.read("b.bin")) == (BYTES[:10], BYTES)
    else:
        with pytest.raises(DecodeError, match=r"^was replaced on its server"):
            first.read("b.bin")
    for _ in range(2):  # whoever comes later has the new one alone
        later = place()
        assert (later.read("a.bin", 0, 10), later.read("a.bin", 10, 10)) == (new[:10], new[10:20])
        assert later.read("b.bin") == new


def test_files_without_a_version_are_not_cached(server: FaultyServer, tmp_path: Path):
    server.version = ""
    assert cached(server, tmp_path).read("a.bin", 0, 10) == BYTES[:10]
    server.files["/set/a.bin"] = BYTES[::-1]
    later = cached(server, tmp_path)
    assert later.version("a.bin") == ""
    assert later.read("a.bin", 0, 10) == BYTES[::-1][:10]


def test_a_file_that_is_replaced_between_its_parts(server: FaultyServer, monkeypatch: pytest.MonkeyPatch):
    for module in (http, fars):
        monkeypatch.setattr(module, "PART_BYTES", 4000)

    def replaced(requested: servers.FaultyRequest) -> None:
        requested.server.version = '"2"'
        requested.serve()

    server.responses = [None, replaced, None]
    with pytest.raises(DecodeError, match=r"^was replaced"):
        remote_fs(f"{server.url}/set").read("a.bin")


def test_one_that_is_weakly_the_same_is_the_same(server: FaultyServer):
    place = remote_fs(f"{server.url}/set")
    place.read("a.bin", 0, 10)
    server.version = 'W/"1"'
    assert place.read("a.bin", 10, 10) == BYTES[10:20]


def test_damaged_cache_entries_are_fetched_again(server: FaultyServer, tmp_path: Path):
    first = cached(server, tmp_path)
    first.read("a.bin")
    assert first.cache is not None
    with (first.cache.path / "data").open("r+b") as file:
        file.seek(5000)
        file.write(b"xx")
    assert first.read("a.bin") == BYTES
    assert cached(server, tmp_path).read("a.bin") == BYTES
    assert first.cache.corrupted == 1


# nginx ---------------------------------------------------------------------------------------------------------


def test_ranges_and_listings_of_nginx(nginx: Nginx, served: Path):
    place = remote_fs(nginx.url)
    data = (served / "large.bin").read_bytes()
    assert place.read("large.bin") == data
    assert place.read("large.bin", 4_000_000, 1_000_000) == data[4_000_000:]
    assert place.size("large.bin") == len(data)
    outcome = place.list_dir()
    assert (outcome.files, outcome.folders) == ({"large.bin": None}, ["set"])
    assert remote_fs(f"{nginx.url}/set/").list_dir().folders == ["cat", "dög & co", "emu #1"]
    assert remote_fs(f"{nginx.url}/moved").list_dir().folders == ["cat", "dög & co", "emu #1"]
    assert len(place.list_dir("set/emu #1").files) == 40
    with pytest.raises(UsageError, match=r"/set/bird is not found \(404\): check the address$"):
        place.list_dir("set/bird")
    with pytest.raises(UsageError, match="403 Forbidden"):
        place.list_dir("locked")
    with pytest.raises(UsageError, match=r"large\.bin.*: check|large\.bin is not found"):
        place.list_dir("large.bin")


def test_links_of_other_pages():
    page = """<a href="?C=N;O=D">Name</a><a href="/">up</a><a href="../">up</a><a href="a%20b.png">x</a><a>y</a>
    <A HREF='./c.png'>c</A><a href="/set/d/">d</a><a href="http://host/set/e.png#x">e</a><a href="http://other/set/f">f</a>
    <a href="mailto:me@host">me</a><a href=".git/">g</a><a href="d/deep.png">h</a><a href="i.png?x=1">i</a>
    <a href="&amp;j.png">j</a><a href="http://[">k</a>"""
    outcome = parse_listing("http://host/set/", page)
    assert list(outcome.files) == ["&j.png", "a b.png", "c.png", "e.png"]
    assert outcome.folders == ["d"]


@pytest.mark.parametrize("cache", [False, True])
def test_a_remote_folder_equals_the_local_one(nginx: Nginx, served: Path, tmp_path: Path, cache: bool):
    local = load_data(str(served / "set"), resolution=8)
    reach = RemoteOptions(cache_dir=str(tmp_path) if cache else "", timeout_s=5)
    start = time.monotonic()
    for _ in range(2):
        remote = load_data(f"{nginx.url}/set", resolution=8, cache="stream", remote=reach)
        np.testing.assert_array_equal(remote.images[:], local.images[:])
    np.testing.assert_array_equal(remote.labels, local.labels)
    assert remote.classes == local.classes
    assert remote.fingerprint == load_data(str(served / "set"), resolution=8, cache="stream").fingerprint
    assert time.monotonic() - start < 10


def test_at_most_a_limit_of_file_sizes_are_requested(nginx: Nginx, served: Path, monkeypatch: pytest.MonkeyPatch):
    place = remote_fs(f"{nginx.url}/set")
    remote = open_image_folder(place, place.list_dir())
    monkeypatch.setattr(folders, "MAX_SIZE_REQUESTS", 10)
    parts = [part.decode() for part in remote.fingerprint_parts()]
    assert [part.partition("\0")[0] for part in parts] == remote.names
    assert sum(not part.endswith("\0\n") for part in parts) == 10
    assert isinstance(remote.fs, RemoteFileSystem)
    assert len(remote.fs.file_stats) == 10


def test_a_file_that_disappears_is_a_bad_record(nginx: Nginx, served: Path):
    path = served / "shard.tar"
    path.write_bytes(BYTES)
    place, name = open_location(f"{nginx.url}/shard.tar", QUICK)
    assert place.read(name, 10, 10) == BYTES[10:20]
    path.unlink()
    with pytest.raises(DecodeError, match=r"^not found \(404\)$"):
        place.read(name, 10, 10)


def test_a_missing_data_set_is_one_line(nginx: Nginx):
    expected = r"^data: http://127\.0\.0\.1:\d+/no/set is not found \(404\): check the address$"
    with pytest.raises(UsageError, match=expected):
        load_data(f"{nginx.url}/no/set", resolution=8)


def test_a_server_that_is_restarted_is_waited_for(served: Path, tmp_path: Path):
    data, over = (served / "large.bin").read_bytes(), threading.Event()
    with servers.run_nginx(served, tmp_path / "nginx") as server, ThreadPoolExecutor(16) as pool:
        place = remote_fs(server.url, RemoteOptions(cache_dir="", timeout_s=2, retry_for_s=20))

        def reads(seed: int) -> int:
            count, rng = 0, random.Random(seed)
            while not over.is_set():
                at = rng.randrange(len(data) - 1000)
                assert place.read("large.bin", at, 1000) == data[at : at + 1000]
                count += 1
            return count

        running = [pool.submit(reads, seed) for seed in range(16)]
        try:
            for _ in range(2):
                time.sleep(0.4)
                server.stop()
                time.sleep(0.4)
                server.start()
            time.sleep(0.5)
        finally:
            over.set()
        assert sum(one.result(20) for one in running) > 50


# Other protocols -----------------------------------------------------------------------------------------------


def test_memory_stands_for_any_other_protocol(served: Path, tmp_path: Path):
    files = fsspec.filesystem("memory")
    files.put(f"{served}/set/", "memory://far/set/", recursive=True)
    place = remote_fs("memory://far/set")
    assert place.list_dir().folders == ["cat", "dög & co", "emu #1"]
    name = "cat/0 100%.png"
    data = (served / "set" / name).read_bytes()
    assert (place.read(name), place.read(name, 3, 9), place.size(name)) == (data, data[3:12], len(data))
    with place.open(name) as file:
        assert file.read() == data
    with pytest.raises(DecodeError, match=r"^ends after"):
        place.read(name, 3, len(data))
    with pytest.raises(DecodeError, match=r"^not found"):
        place.read("cat/none.png")
    with pytest.raises(UsageError, match=r"is not found .*: check the address"):
        place.list_dir("none")
    local = load_data(str(served / "set"), resolution=8)
    for cache in ("", str(tmp_path)):
        remote = load_data("memory://far/set", resolution=8, remote=RemoteOptions(cache_dir=cache))
        np.testing.assert_array_equal(remote.images[:], local.images[:])


# S3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(served: Path) -> Iterator[str]:
    """The set in a bucket of a real server, and the environment that leads there."""
    with servers.run_s3() as client, pytest.MonkeyPatch.context() as patch:
        for name, value in client.environment.items():
            patch.setenv(name, value)
        client.put("bucket", served)
        yield client.url


S3_NOISE = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@S3_NOISE
def test_a_bucket_is_a_folder(s3: str, served: Path, tmp_path: Path):
    slow = RemoteOptions(cache_dir="", timeout_s=10, retry_for_s=20)
    place, data = remote_fs("s3://bucket", slow), (served / "large.bin").read_bytes()
    outcome = place.list_dir()
    assert (outcome.files, outcome.folders) == ({"large.bin": len(data)}, ["set"])
    assert place.read("large.bin") == data
    assert place.read("large.bin", 123, 4567) == data[123:4690]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda at: place.read("large.bin", at, 9) == data[at : at + 9], range(64)))
    with pytest.raises(DecodeError, match=r"^ends after 5,000,000 bytes"):
        place.read("large.bin", 6_000_000, 1)
    with pytest.raises(DecodeError, match=r"^not found \(404\)$"):
        place.read("none.bin", 0, 10)
    with pytest.raises(UsageError, match=r"^data: s3://bucket/none is not found \(404\): check the address$"):
        place.list_dir("none")
    with pytest.raises(UsageError, match="bucket"):
        remote_fs("s3://no-such-bucket", slow).list_dir()
    with place.open("large.bin") as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == data[-5:]
    local = load_data(str(served / "set" / "cat"), resolution=8)
    remote = load_data("s3://bucket/set/cat", resolution=8, remote=RemoteOptions(cache_dir=str(tmp_path), timeout_s=10))
    np.testing.assert_array_equal(remote.images[:], local.images)


@S3_NOISE
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "bare"])
def test_an_object_that_is_replaced_is_never_mixed_with_the_old(s3: str, served: Path, tmp_path: Path, cache: bool):
    import boto3

    place = remote_fs(
        "s3://bucket", RemoteOptions(cache_dir=str(tmp_path) if cache else "", timeout_s=10, retry_for_s=20)
    )
    data = (served / "large.bin").read_bytes()
    client = boto3.client("s3", endpoint_url=s3)
    client.put_object(Bucket="bucket", Key="twice.bin", Body=data)
    assert place.read("twice.bin", 0, 10) == data[:10]
    client.put_object(Bucket="bucket", Key="twice.bin", Body=data[::-1])
    with pytest.raises(RunError, match=r"^data: s3://bucket/twice.bin was replaced on its server"):
        place.read("twice.bin", 10, 10)
    client.delete_object(Bucket="bucket", Key="twice.bin")
    client.close()


@S3_NOISE
def test_s3_out_of_reach(s3: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{servers.free_port()}")
    start = time.monotonic()
    with pytest.raises(RunError, match=r"^data: s3://bucket/large\.bin cannot be reached: .* attempts within 1 s"):
        remote_fs("s3://bucket", RemoteOptions(cache_dir="", timeout_s=1, retry_for_s=1)).read("large.bin", 0, 9)
    assert time.monotonic() - start < 6
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        remote_fs("s3://bucket", RemoteOptions(cache_dir="", timeout_s=5, retry_for_s=5)).read("large.bin", 0, 9)


@S3_NOISE
def test_a_process_ends_without_output(nginx: Nginx, s3: str):
    package = Path(RemoteFileSystem.__init__.__code__.co_filename).parent.parent.parent
    code = f"""
import sys, types
sys.modules["paragan"] = types.ModuleType("paragan")  # without the rest of it, which takes long
sys.modules["paragan"].__path__ = ["{package}"]
from paragan.data.storage.filesystem import RemoteOptions
from paragan.data.storage.open_location import open_location
for where in ("{nginx.url}/", "s3://bucket"):
    print(len(open_location(where, RemoteOptions(cache_dir=""))[0].read("large.bin", 0, 9)))
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "9\n9\n", "")


def test_a_cancelled_request_is_a_retryable_error():
    """asyncio's word for it is no `Exception`: it would end the thread that asked with a traceback."""

    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(RetryableError, match="closed by this program"):
        run_on_loop(cancelled(), 5.0)


@pytest.mark.parametrize("date", ["Wed, 21 Oct 2015 07:28:00 GMT", "yesterday"])
def test_a_server_without_etag_has_one_version_for_both_ways(server: FaultyServer, is_fast: bool, date: str):
    def respond(request: servers.FaultyRequest) -> None:
        data, first, end = request.requested_range()
        content_range = f"bytes {first}-{end - 1}/{len(data)}"
        request.send_body(206, data[first:end], {"Content-Range": content_range, "ETag": "", "Last-Modified": date})

    server.responses = [respond]
    fs = RemoteFileSystem(f"{server.url}/set", QUICK)
    assert fs.size("a.bin") == len(BYTES)
    assert fs.read("a.bin", 10, 100) == BYTES[10:110]
    assert fs.read("a.bin") == BYTES
    assert "2015-10-21T07:28:00+00:00" in fs.version("a.bin") or date == "yesterday"
    date = "Thu, 22 Oct 2015 07:28:00 GMT"
    with pytest.raises(RunError, match="was replaced on its server while it was used"):
        fs.read("a.bin", 10, 100)
