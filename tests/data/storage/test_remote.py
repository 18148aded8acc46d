"""Files behind addresses: real servers, planted faults, and one clear line where patience ends."""

import asyncio
import io
import os
import random
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
from paragan.core.errors import Failed, Unusable
from paragan.data.dataset import load
from paragan.data.formats import image_folder as folders
from paragan.data.formats.image_folder import folder
from paragan.data.source import DecodeError
from paragan.data.storage import http
from paragan.data.storage import remote as fars
from paragan.data.storage.filesystem import Reach
from paragan.data.storage.http import listed
from paragan.data.storage.open_location import place_of
from paragan.data.storage.remote import Far, far_place
from paragan.data.storage.retry import FIRST_S, LONGEST_S, Again, pause_s
from paragan.data.storage.timeouts import on_loop
from servers import Faulty, Nginx

BYTES = np.random.default_rng(0).bytes(10_000)
QUICK = Reach(cache="", timeout_s=0.5, patience_s=1.5)


@pytest.fixture
def server() -> Iterator[Faulty]:
    with servers.faulty() as server:
        server.files["/set/a.bin"] = BYTES
        yield server


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
    with servers.nginx(served, tmp_path_factory.mktemp("nginx"), locked) as server:
        yield server


def far(address: str, reach: Reach = QUICK) -> Far:
    place, _ = place_of(address, reach)
    assert isinstance(place, Far)
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
def test_a_file_is_told_from_a_folder_by_its_name(where: str, folder: str, name: str):
    place, found = far_place(where, Reach(cache=""))
    assert (place.where, found) == (folder, name)


def test_passwords_and_signatures_are_not_shown():
    place, _ = far_place("https://me:se/cr@et@host/set?X-Amz-Signature=abc".replace("/cr", "cr"), Reach(cache=""))
    assert place.where == "https://***@host/set"
    assert place.at("a.png") == "https://***@host/set/a.png"
    with pytest.raises(Failed) as caught:
        far("http://me:secret@127.0.0.1:1/s?sig=abc", Reach(cache="", timeout_s=0.2, patience_s=0.2)).read("a.bin")
    assert not {"secret", "abc"} & set(line(caught).replace("/", " ").split())
    assert "secret" not in line(caught)


@pytest.mark.parametrize("where", ["nonsense://host/set", "http://", "http:///set"])
def test_addresses_that_are_none_are_refused_at_once(where: str):
    with pytest.raises(Unusable, match=r"^data: .+: (check it|.*use http://, https:// or s3://)$"):
        far_place(where, Reach(cache=""))


@pytest.mark.parametrize("protocol", ["s3", "gs"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str):
    def missing(_: str) -> None:
        raise ImportError("Install it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(Unusable, match=r"pip install 'paragan\[s3\]'$" if protocol == "s3" else "gcsfs"):
        far_place(f"{protocol}://bucket/set", Reach(cache=""))


# Asking again --------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_a_limit_and_differ_by_luck():
    assert [pause_s(n, 1.0) for n in (1, 2, 3)] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pause_s(1, 0.0) == FIRST_S / 2
    assert pause_s(1000, 1.0) == LONGEST_S
    assert all(7.0 < pause_s(1, luck, after_s=7.0) <= 7.0 + FIRST_S for luck in (0.0, 0.5, 1.0))
    assert all(0 < pause_s(n, random.random()) <= LONGEST_S for n in range(1, 100_000, 997))


PASSING = {
    "500s": [servers.fails(500), servers.fails(503), servers.fails(502)],
    "429": [servers.fails(429, Retry_After="1")],
    "reset": [servers.resets, servers.resets],
    "stall": [servers.stalls],
    "stall within": [servers.stalls_within],
    "slow start": [servers.slow(0.3)],
    "half": [servers.half],
    "short": [servers.short],
    "elsewhere": [servers.elsewhere],
    "garbage": [servers.garbage],
    "404 once": [servers.fails(404)],
    "endless": [servers.endless(206)],
    "all": [servers.fails(500), servers.resets, servers.half, servers.fails(404), servers.garbage],
}


@pytest.mark.parametrize("name", PASSING)
def test_faults_that_pass_are_not_noticed(server: Faulty, name: str):
    server.plan = [*PASSING[name], None]
    start = time.monotonic()
    assert far(f"{server.url}/set").read("a.bin", 100, 200) == BYTES[100:300]
    assert time.monotonic() - start < QUICK.patience_s + 1
    assert len(server.asked) == len(PASSING[name]) + (name != "slow start") or name == "reset"
    if name == "429":
        assert time.monotonic() - start >= 1


LASTING = {
    "500": (servers.fails(500), "it answers 500 Internal Server Error"),
    "429": (servers.fails(429, Retry_After="1000"), "it answers 429 Too Many Requests"),
    "reset": (servers.resets, "the connection was closed"),
    "stall": (servers.stalls, "no full answer within "),
    "stall within": (servers.stalls_within, "no full answer within "),
    "half": (servers.half, "the answer broke off"),
    "short": (servers.short, "100 bytes came of the 200 that were asked for"),
    "elsewhere": (servers.elsewhere, "another range came than bytes 100 to 300"),
    "garbage": (servers.garbage, "its answer is no HTTP"),
    "endless": (servers.endless(206), "more came than the 200 bytes that were asked for"),
}


@pytest.mark.parametrize("name", LASTING)
def test_faults_that_last_end_with_patience(server: Faulty, name: str):
    play, reason = LASTING[name]
    server.plan, start = [play], time.monotonic()
    with pytest.raises(Failed) as caught:
        far(f"{server.url}/set").read("a.bin", 100, 200)
    assert time.monotonic() - start < QUICK.patience_s + 1.5
    found = line(caught).removeprefix(f"data: {server.url}/set/a.bin is out of reach: ")
    assert found.startswith((reason, "no full answer within"))  # which on a busy machine may be what came last
    assert found.endswith("times within 1.5 s)")


REFUSED = {
    "401": (servers.fails(401), "it answers 401 Unauthorized: check the user and password"),
    "403": (servers.fails(403), "it answers 403 Forbidden: check the user and password"),
    "400": (servers.fails(400), "it answers 400 Bad Request: check the address"),
    "whole": (servers.whole, "it ignores byte ranges and sends whole files: serve them by nginx"),
    "endless": (servers.endless(200), "it ignores byte ranges and sends whole files: serve them by nginx"),
    "circles": (servers.circles, "it is redirected in circles: check the address"),
    "nowhere": (servers.fails(302, Location="ftp://x/y"), "no address, or redirected to none: check it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_will_never_be_answered_ends_at_once(server: Faulty, name: str):
    play, reason = REFUSED[name]
    server.plan, start = [play], time.monotonic()
    with pytest.raises(Unusable) as caught:
        far(f"{server.url}/set").read("a.bin", 100, 200)
    assert line(caught).startswith(f"data: {server.url}/set/a.bin: {reason}")
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("code", [404, 410])
def test_a_file_that_is_gone_is_a_bad_record(server: Faulty, code: int):
    server.plan = [servers.fails(code)]
    for act in (lambda f: f.read("a.bin", 0, 9), lambda f: f.read("a.bin"), lambda f: f.size("a.bin")):
        with pytest.raises(DecodeError, match=rf"^gone \({code}\)$"):
            act(far(f"{server.url}/set"))
    assert len(server.asked) == 6


def test_nobody_there(tmp_path: Path):
    start = time.monotonic()
    address = f"http://127.0.0.1:{servers.free_port()}/set"
    with pytest.raises(Failed, match=r"is out of reach: .*([Cc]onnect|refused).* times within 0.5 s"):
        far(address, Reach(cache="", timeout_s=0.5, patience_s=0.5)).entries()
    with pytest.raises(Failed, match="its host is not found"):
        far("http://nobody.invalid/set", Reach(cache="", timeout_s=5, patience_s=0.5)).size("a.bin")
    assert time.monotonic() - start < 8


def test_other_answers(server: Faulty):
    place = far(f"{server.url}/set")
    assert place.read("a.bin", 5, 0) == b""
    with pytest.raises(DecodeError, match=r"^ends after 10,000 bytes, 10,001 were expected$"):
        place.read("a.bin", 9_000, 1_001)
    with pytest.raises(DecodeError, match=r"^ends after 10,000 bytes, 20,001 were expected$"):
        place.read("a.bin", 20_000, 1)
    server.files |= {"/set/none.bin": b"", "/set/other.bin": b"other"}
    assert (place.size("none.bin"), place.read("none.bin"), place.size("a.bin")) == (0, b"", 10_000)
    server.plan = [servers.whole]  # whole files are fine where these are wanted
    assert (place.read("a.bin"), place.read("a.bin", 0, 10_000), place.size("other.bin")) == (BYTES, BYTES, 5)
    server.plan = [servers.moved("/set/other.bin")]
    assert far(f"{server.url}/set").read("a.bin", 1, 2) == b"th"


def test_files_larger_than_a_part_come_in_parts(server: Faulty, monkeypatch: pytest.MonkeyPatch):
    for module in (http, sys.modules[Far.__module__]):
        monkeypatch.setattr(module, "PART", 999)
    place = far(f"{server.url}/set")
    assert place.read("a.bin") == BYTES
    assert len(server.asked) == 11
    assert place.read("a.bin", 17) == BYTES[17:]
    assert place.read("a.bin", 17, 5000) == BYTES[17:5017]


def test_signatures_stand_behind_every_address(server: Faulty):
    place, name = place_of(f"{server.url}/set/a.bin.tar?sig=1%2F2", QUICK)
    server.files["/set/a.bin.tar"] = BYTES
    assert place.read(name, 0, 3) == BYTES[:3]
    assert server.asked[0][0] == "/set/a.bin.tar?sig=1%2F2"


def test_an_open_file_is_one_for_libraries(server: Faulty):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x", bytes(3_000_000))
        archive.writestr("y", BYTES)
    server.files["/set/a.zip"] = packed.getvalue()
    server.plan = [None, servers.half, servers.fails(500), None]
    with far(f"{server.url}/set").open("a.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("y") == BYTES
        assert len(archive.read("x")) == 3_000_000
    server.plan = [servers.stalls]
    with pytest.raises(Failed, match="out of reach"):
        far(f"{server.url}/set").open("a.zip")
    server.plan = [servers.fails(404)]
    with pytest.raises(DecodeError, match="gone"):
        far(f"{server.url}/set").open("a.zip")


def test_threads_wait_for_each_other_no_longer_than_for_one(server: Faulty):
    """64 requests that stall stall together, and connections are used again."""
    place = far(f"{server.url}/set", Reach(cache="", timeout_s=1, patience_s=1))
    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(lambda at: place.read("a.bin", at, 9) == BYTES[at : at + 9], range(500))) == {True}
        server.plan, start = [servers.stalls], time.monotonic()
        stalled = [pool.submit(place.read, "a.bin", at, 9) for at in range(64)]
        assert {type(one.exception()) for one in stalled} == {Failed}
    assert time.monotonic() - start < 4


# Caches --------------------------------------------------------------------------------------------------------


def cached(server: Faulty, folder: Path) -> Far:
    return far(f"{server.url}/set", Reach(cache=str(folder), cache_gb=0.1, timeout_s=0.5, patience_s=1.5))


def test_what_came_once_comes_from_disk(server: Faulty, tmp_path: Path):
    first = cached(server, tmp_path)
    assert [first.read("a.bin", 5, 10), first.read("a.bin"), first.read("a.bin", 5, 10)] == [
        BYTES[5:15],
        BYTES,
        BYTES[5:15],
    ]
    assert len(server.asked) == 3  # a look, two ranges
    later = cached(server, tmp_path)
    assert (later.read("a.bin", 5, 10), later.read("a.bin")) == (BYTES[5:15], BYTES)
    assert len(server.asked) == 4
    with pytest.raises(DecodeError, match="ends after 10,000 bytes"):
        later.read("a.bin", 9_999, 2)
    server.plan = [servers.stalls]
    assert later.read("a.bin") == BYTES


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "bare"])
@pytest.mark.parametrize("version", ['"2"', '"1"'], ids=["version", "length"])
def test_a_file_that_is_replaced_is_never_mixed_with_the_old(server: Faulty, tmp_path: Path, cache: bool, version: str):
    def place() -> Far:
        return cached(server, tmp_path) if cache else far(f"{server.url}/set")

    first, new = place(), BYTES[::-1] + b"more" * (version == '"1"')
    server.files["/set/b.bin"] = BYTES
    assert first.read("a.bin", 0, 10) == first.read("b.bin")[:10] == BYTES[:10]
    server.files["/set/a.bin"] = server.files["/set/b.bin"] = new
    server.version = version
    with pytest.raises(Failed, match=r"^data: \S+/set/a.bin was replaced on its server while it was used \(.+\)$"):
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


def test_a_file_that_is_replaced_between_its_parts(server: Faulty, monkeypatch: pytest.MonkeyPatch):
    for module in (http, fars):
        monkeypatch.setattr(module, "PART", 4000)

    def replaced(asked: servers.Asked) -> None:
        asked.server.version = '"2"'
        asked.serve()

    server.plan = [None, replaced, None]
    with pytest.raises(DecodeError, match=r"^was replaced"):
        far(f"{server.url}/set").read("a.bin")


def test_one_that_is_weakly_the_same_is_the_same(server: Faulty):
    place = far(f"{server.url}/set")
    place.read("a.bin", 0, 10)
    server.version = 'W/"1"'
    assert place.read("a.bin", 10, 10) == BYTES[10:20]


def test_damage_on_disk_is_fetched_again(server: Faulty, tmp_path: Path):
    first = cached(server, tmp_path)
    first.read("a.bin")
    assert first.cache is not None
    with (first.cache.path / "data").open("r+b") as file:
        file.seek(5000)
        file.write(b"xx")
    assert first.read("a.bin") == BYTES
    assert cached(server, tmp_path).read("a.bin") == BYTES
    assert first.cache.damaged == 1


# nginx ---------------------------------------------------------------------------------------------------------


def test_ranges_and_listings_of_nginx(nginx: Nginx, served: Path):
    place = far(nginx.url)
    data = (served / "large.bin").read_bytes()
    assert place.read("large.bin") == data
    assert place.read("large.bin", 4_000_000, 1_000_000) == data[4_000_000:]
    assert place.size("large.bin") == len(data)
    found = place.entries()
    assert (found.files, found.folders) == ({"large.bin": None}, ["set"])
    assert far(f"{nginx.url}/set/").entries().folders == ["cat", "dög & co", "emu #1"]
    assert far(f"{nginx.url}/moved").entries().folders == ["cat", "dög & co", "emu #1"]
    assert len(place.entries("set/emu #1").files) == 40
    with pytest.raises(Unusable, match=r"/set/bird is gone \(404\): check the address$"):
        place.entries("set/bird")
    with pytest.raises(Unusable, match="403 Forbidden"):
        place.entries("locked")
    with pytest.raises(Unusable, match=r"large\.bin.*: check|large\.bin is gone"):
        place.entries("large.bin")


def test_links_of_other_pages():
    page = """<a href="?C=N;O=D">Name</a><a href="/">up</a><a href="../">up</a><a href="a%20b.png">x</a><a>y</a>
    <A HREF='./c.png'>c</A><a href="/set/d/">d</a><a href="http://host/set/e.png#x">e</a><a href="http://other/set/f">f</a>
    <a href="mailto:me@host">me</a><a href=".git/">g</a><a href="d/deep.png">h</a><a href="i.png?x=1">i</a>
    <a href="&amp;j.png">j</a><a href="http://[">k</a>"""
    found = listed("http://host/set/", page)
    assert list(found.files) == ["&j.png", "a b.png", "c.png", "e.png"]
    assert found.folders == ["d"]


@pytest.mark.parametrize("cache", [False, True])
def test_a_folder_far_away_equals_the_one_here(nginx: Nginx, served: Path, tmp_path: Path, cache: bool):
    here = load(str(served / "set"), resolution=8)
    reach = Reach(cache=str(tmp_path) if cache else "", timeout_s=5)
    start = time.monotonic()
    for _ in range(2):
        there = load(f"{nginx.url}/set", resolution=8, hold="stream", reach=reach)
        np.testing.assert_array_equal(there.images[:], here.images[:])
    np.testing.assert_array_equal(there.labels, here.labels)
    assert there.classes == here.classes
    assert there.fingerprint == load(str(served / "set"), resolution=8, hold="stream").fingerprint
    assert time.monotonic() - start < 10


def test_of_many_files_some_are_asked_for_their_size(nginx: Nginx, served: Path, monkeypatch: pytest.MonkeyPatch):
    place = far(f"{nginx.url}/set")
    there = folder(place, place.entries())
    monkeypatch.setattr(folders, "ASKED", 10)
    parts = [part.decode() for part in there.identity()]
    assert [part.partition("\0")[0] for part in parts] == there.names
    assert sum(not part.endswith("\0\n") for part in parts) == 10
    assert isinstance(there.place, Far)
    assert len(there.place.facts) == 10


def test_a_file_that_disappears_meanwhile_is_a_bad_record(nginx: Nginx, served: Path):
    path = served / "shard.tar"
    path.write_bytes(BYTES)
    place, name = place_of(f"{nginx.url}/shard.tar", QUICK)
    assert place.read(name, 10, 10) == BYTES[10:20]
    path.unlink()
    with pytest.raises(DecodeError, match=r"^gone \(404\)$"):
        place.read(name, 10, 10)


def test_a_set_that_is_not_there_is_one_line(nginx: Nginx):
    with pytest.raises(Unusable, match=r"^data: http://127\.0\.0\.1:\d+/no/set is gone \(404\): check the address$"):
        load(f"{nginx.url}/no/set", resolution=8)


def test_a_server_that_is_restarted_is_waited_for(served: Path, tmp_path: Path):
    data, over = (served / "large.bin").read_bytes(), threading.Event()
    with servers.nginx(served, tmp_path / "nginx") as server, ThreadPoolExecutor(16) as pool:
        place = far(server.url, Reach(cache="", timeout_s=2, patience_s=20))

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
    place = far("memory://far/set")
    assert place.entries().folders == ["cat", "dög & co", "emu #1"]
    name = "cat/0 100%.png"
    data = (served / "set" / name).read_bytes()
    assert (place.read(name), place.read(name, 3, 9), place.size(name)) == (data, data[3:12], len(data))
    with place.open(name) as file:
        assert file.read() == data
    with pytest.raises(DecodeError, match=r"^ends after"):
        place.read(name, 3, len(data))
    with pytest.raises(DecodeError, match=r"^gone"):
        place.read("cat/none.png")
    with pytest.raises(Unusable, match=r"is gone .*: check the address"):
        place.entries("none")
    here = load(str(served / "set"), resolution=8)
    for cache in ("", str(tmp_path)):
        there = load("memory://far/set", resolution=8, reach=Reach(cache=cache))
        np.testing.assert_array_equal(there.images[:], here.images[:])


# S3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(served: Path) -> Iterator[str]:
    """The set in a bucket of a real server, and the environment that leads there."""
    pytest.importorskip("s3fs")
    with servers.s3() as client, pytest.MonkeyPatch.context() as patch:
        for name, value in client.environment.items():
            patch.setenv(name, value)
        client.put("bucket", served)
        yield client.url


S3_NOISE = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@S3_NOISE
def test_a_bucket_is_a_folder(s3: str, served: Path, tmp_path: Path):
    slow = Reach(cache="", timeout_s=10, patience_s=20)
    place, data = far("s3://bucket", slow), (served / "large.bin").read_bytes()
    found = place.entries()
    assert (found.files, found.folders) == ({"large.bin": len(data)}, ["set"])
    assert place.read("large.bin") == data
    assert place.read("large.bin", 123, 4567) == data[123:4690]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda at: place.read("large.bin", at, 9) == data[at : at + 9], range(64)))
    with pytest.raises(DecodeError, match=r"^ends after 5,000,000 bytes"):
        place.read("large.bin", 6_000_000, 1)
    with pytest.raises(DecodeError, match=r"^gone \(404\)$"):
        place.read("none.bin", 0, 10)
    with pytest.raises(Unusable, match=r"^data: s3://bucket/none is gone \(404\): check the address$"):
        place.entries("none")
    with pytest.raises(Unusable, match="bucket"):
        far("s3://no-such-bucket", slow).entries()
    with place.open("large.bin") as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == data[-5:]
    here = load(str(served / "set" / "cat"), resolution=8)
    there = load("s3://bucket/set/cat", resolution=8, reach=Reach(cache=str(tmp_path), timeout_s=10))
    np.testing.assert_array_equal(there.images[:], here.images)


@S3_NOISE
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "bare"])
def test_an_object_that_is_replaced_is_never_mixed_with_the_old(s3: str, served: Path, tmp_path: Path, cache: bool):
    import boto3

    place = far("s3://bucket", Reach(cache=str(tmp_path) if cache else "", timeout_s=10, patience_s=20))
    data = (served / "large.bin").read_bytes()
    client = boto3.client("s3", endpoint_url=s3)
    client.put_object(Bucket="bucket", Key="twice.bin", Body=data)
    assert place.read("twice.bin", 0, 10) == data[:10]
    client.put_object(Bucket="bucket", Key="twice.bin", Body=data[::-1])
    with pytest.raises(Failed, match=r"^data: s3://bucket/twice.bin was replaced on its server"):
        place.read("twice.bin", 10, 10)
    client.delete_object(Bucket="bucket", Key="twice.bin")
    client.close()


@S3_NOISE
def test_s3_out_of_reach(s3: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{servers.free_port()}")
    start = time.monotonic()
    with pytest.raises(Failed, match=r"^data: s3://bucket/large\.bin is out of reach: .* times within 1 s"):
        far("s3://bucket", Reach(cache="", timeout_s=1, patience_s=1)).read("large.bin", 0, 9)
    assert time.monotonic() - start < 6
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Unusable, match="no credentials: set AWS_ACCESS_KEY_ID"):
        far("s3://bucket", Reach(cache="", timeout_s=5, patience_s=5)).read("large.bin", 0, 9)


@S3_NOISE
def test_nothing_is_said_at_the_end_of_a_process(nginx: Nginx, s3: str):
    package = Path(Far.__init__.__code__.co_filename).parent.parent.parent
    code = f"""
import sys, types
sys.modules["paragan"] = types.ModuleType("paragan")  # without the rest of it, which takes long
sys.modules["paragan"].__path__ = ["{package}"]
from paragan.data.places import Reach, place_of
for where in ("{nginx.url}/", "s3://bucket"):
    print(len(place_of(where, Reach(cache=""))[0].read("large.bin", 0, 9)))
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code]
    done = servers.subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "9\n9\n", "")


def test_a_request_that_is_cancelled_here_is_asked_again_or_given_up():
    """asyncio's word for it is no `Exception`: it would end the thread that asked with a traceback."""

    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(Again, match="closed here"):
        on_loop(cancelled(), 5.0)
