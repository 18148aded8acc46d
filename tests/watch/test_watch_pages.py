"""The pages of `paragan watch`: what they show, when they are rendered again, and what is refused."""

import html
import json
import multiprocessing as mp
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image
from werkzeug.test import Client

from advice import advises
from browser import Browser
from paragan.core.errors import UsageError
from paragan.core.folder_lock import FolderLock
from paragan.core.web_server import trusted_hosts
from paragan.report.run_data import read_run_data
from paragan.watch import pages as watch_pages
from paragan.watch.application import create_watch_app
from paragan.watch.pages import LivePages
from paragan.watch.run_state import read_state
from processes import call_command, usage_error
from servers import run_app

FORK = mp.get_context("fork")
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(autouse=True)
def _priority(monkeypatch):
    """Commands that run in the process of the tests must not lower its priority for all later tests."""
    monkeypatch.setattr("os.nice", lambda increment: 0)


def append_tick(folder, kimg, **more):
    row = {
        "Progress/kimg": kimg,
        "Progress/step": 10 * kimg,
        "Loss/G/loss": 1.0 + kimg % 3,
        "Loss/D/loss": 1.5,
        "Timing/sec_per_kimg": 0.5,
        "Timing/img_per_sec": 2000,
        "Timing/total_s": kimg / 2,
        **more,
    }
    with (folder / "stats.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_grid(folder, kimg):
    pixels = np.random.default_rng(kimg).integers(0, 256, (40, 40), np.uint8)
    Image.fromarray(pixels).save(folder / f"fakes{kimg:06d}.png")


def make_run(folder, kimg=40, ticks=3):
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(f"recipe: digits\nkimg: {kimg}\nstrategy: {{name: gossip}}\nbatch: 64\n")
    for tick in range(1, ticks + 1):
        append_tick(folder, tick)
    write_grid(folder, 0)
    return folder


@pytest.fixture
def always_fresh(monkeypatch):
    monkeypatch.setattr(watch_pages, "IDLE_PER_RENDERING", 0.0)


@pytest.fixture
def held():
    """Return a function that lets another process lock a folder until the test ends."""
    ends = []

    def hold(folder):
        here, there = FORK.Pipe()
        end = FORK.Event()

        def run():
            lock = FolderLock(folder)
            there.send(lock.acquire())
            end.wait(120)

        process = FORK.Process(target=run)
        process.start()
        assert here.recv()
        ends.append((process, end))
        return process

    yield hold
    for process, end in ends:
        end.set()
        process.join()


def client(*folders):
    return Client(create_watch_app(LivePages(folders), ["localhost"]))


def text_of(response):
    body = re.sub(r"<(script|style)>.*?</\1>", " ", response.text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_state_of_a_run(tmp_path, held):
    folder = make_run(tmp_path / "run")
    assert read_state(read_run_data(folder)).to_line() == "stopped"
    process = held(folder)
    line = read_state(read_run_data(folder)).to_line()
    assert re.fullmatch(rf"training by process {process.pid} on \S+, 2,000 images/s, 18.5 s left", line)
    append_tick(folder, 40)
    assert read_state(read_run_data(folder)).remaining_s == 0
    assert read_state(read_run_data(make_run(tmp_path / "done", kimg=3))).word == "finished"
    assert read_state(read_run_data(make_run(tmp_path / "new", ticks=0))).word == "no ticks yet"


def test_the_time_left_is_that_of_the_last_ticks(tmp_path, held):
    folder = make_run(tmp_path / "run", ticks=0)
    held(folder)
    assert read_state(read_run_data(folder)).remaining_s is None
    for tick in range(1, 31):
        append_tick(folder, tick, **{"Timing/sec_per_kimg": 9.0 if tick <= 20 else 2.0})
    state = read_state(read_run_data(folder))
    assert (state.img_per_s, state.remaining_s) == (500, 20)


def test_the_workers_of_labels_train(tmp_path):
    folder = make_run(tmp_path / "run", ticks=0)
    (folder / "run.yaml").write_text("recipe: digits\nkimg: 40\nstrategy: {name: per-label, lease_s: 60}\n")
    make_run(folder / "labels" / "0003.1")
    (folder / "queue").mkdir()
    entry = {"state": "held", "worker": "gpu07 process 4711", "metadata": {}}
    (folder / "queue" / "0003.1.json").write_text(json.dumps(entry))
    assert read_state(read_run_data(folder)).owner == "gpu07 process 4711"
    response = client(folder).get("/runs/run/")
    assert "labels/0003.1/" in re.findall(r'href="([^"]+)"', response.text)
    assert client(folder).get("/runs/run/labels/0003.1/").status_code == 200
    assert client(folder).get("/runs/run/labels/0004/").status_code == 404


def test_one_run(tmp_path, always_fresh):
    folder = make_run(tmp_path / "my run")
    browser = client(folder)
    redirect = browser.get("/")
    assert (redirect.status_code, redirect.headers["Location"]) == (302, "/runs/my%20run/")
    first = browser.get("/runs/my%20run/")
    assert "stopped" in text_of(first)
    assert "Loss" in text_of(first)
    assert "connect-src 'self'" in first.text
    assert "all runs" not in text_of(first)
    tag = first.headers["ETag"]
    assert f"var tag = '{tag}'" in first.text
    unchanged = browser.get("/runs/my%20run/", headers={"If-None-Match": tag})
    assert (unchanged.status_code, unchanged.data) == (304, b"")
    append_tick(folder, 4)
    changed = browser.get("/runs/my%20run/", headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["ETag"] != tag
    assert browser.head("/runs/my%20run/").data == b""


@pytest.mark.parametrize("change", ["grid", "finding", "score", "owner", "lost rank"])
def test_a_page_changes_with_its_run(tmp_path, always_fresh, held, change):
    folder = make_run(tmp_path / "run")
    browser = client(folder)
    tag = browser.get("/runs/run/").headers["ETag"]
    if change == "grid":
        write_grid(folder, 3)
        words = "at 3 kimg"
    elif change == "finding":
        row = {"kimg": 2, "kind": "collapse", "message": "all samples are equal", "action": "warned"}
        (folder / "health.jsonl").write_text(json.dumps(row) + "\n")
        words = "all samples are equal"
    elif change == "score":
        row = {"name": "fd_pixels", "value": 7.5, "kimg": 3, "protocol": {}, "fingerprint": "a"}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        words = "7.5 at 3 kimg"
    elif change == "lost rank":
        row = {"kimg": 2, "step": 20, "members": [0, 1, 3], "lost": [2], "joined": []}
        (folder / "members.jsonl").write_text(json.dumps(row) + "\n")
        words = "Ranks that were lost and that joined kimg lost joined members since then 2 2 0, 1, 3"
    else:
        words = f"training by process {held(folder).pid}"
    response = browser.get("/runs/run/", headers={"If-None-Match": tag})
    assert response.status_code == 200
    assert words in text_of(response)


def test_a_worker_that_dies_is_noticed(tmp_path, monkeypatch, always_fresh):
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    folder = make_run(tmp_path / "run", ticks=0)
    (folder / "run.yaml").write_text("recipe: digits\nkimg: 40\nstrategy: {name: per-label, lease_s: 30}\n")
    make_run(folder / "labels" / "0003.1")
    (folder / "queue").mkdir()
    file = folder / "queue" / "0003.1.json"
    file.write_text(json.dumps({"state": "held", "worker": "gpu07 process 4711", "metadata": {}}))
    os.utime(file, (1000, 1000))
    browser = client(folder)
    assert "training by gpu07 process 4711" in text_of(browser.get("/runs/run/"))
    now[0] += 70
    assert "training by" not in text_of(browser.get("/runs/run/"))


def test_all_open_pages_are_rendered_in_turn(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch_pages.time, "monotonic", lambda: now[0])
    original = watch_pages.render_run
    renderings: list[str] = []

    def render_in_half_a_second(run_data, *arguments):
        now[0] += 0.5
        renderings.append(run_data.name)
        return original(run_data, *arguments)

    monkeypatch.setattr(watch_pages, "render_run", render_in_half_a_second)
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    pages = LivePages([tmp_path])
    for step in range(120):
        for folder in folders:
            append_tick(folder, 4 + step)
            pages.get(f"/runs/{folder.name}/")
        now[0] += 5
    counts = [renderings.count(name) for name in ("a", "b")]
    assert min(counts) > 20
    assert 0.5 * len(renderings) < 0.06 * now[0]


BAD_FILES = {
    "stats.jsonl": ["folder", '{"Progress/kimg": 1, "Timing/sec_per_kimg": Infinity}\n', "[1]\n{}\n"],
    "run.yaml": ["folder", 'recipe: "\\ud800"', "a: 1", "kimg: [", b"\xff"],
    "health.jsonl": ['{"kimg": 1, "kind": "\\ud800", "message": "x", "action": "y"}\n', '{"a": 1}\n'],
    "members.jsonl": ['{"kimg": 1, "members": {}, "lost": 3, "joined": null}\n'],
    "metrics.jsonl": ['{"name": "\\ud800", "value": 1, "kimg": 1}\n', '{"name": 3, "value": "x"}\n'],
    "fakes000009.png": ["folder", b"x"],
    ".lock": ["folder", b"\xff\xfe"],
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, several in BAD_FILES.items() for one in several])
def test_a_damaged_run_hides_no_other(tmp_path, always_fresh, held, name, content):
    make_run(tmp_path / "good")
    bad = make_run(tmp_path / "bad")
    held(bad)
    (bad / name).unlink(missing_ok=True)
    if content == "folder":
        (bad / name).mkdir()
    else:
        (bad / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    browser = client(tmp_path)
    text = browser.get("/").text
    assert "/runs/good/" in re.findall(r'class="run"><a href="([^"]+)"', text)
    assert 'href="/runs/bad/"' in text
    assert browser.get("/runs/bad/").status_code in (200, 404, 503)


def test_a_name_that_is_no_text_hides_no_other_run(tmp_path):
    make_run(tmp_path / os.fsdecode(b"bad\xff"))
    make_run(tmp_path / "good")
    assert "/runs/good/" in client(tmp_path).get("/").text


@pytest.mark.parametrize("name", ["a b", "ä", "100%", "<b>", "a'\""])
def test_names_of_folders(tmp_path, name):
    make_run(tmp_path / name)
    browser = client(tmp_path)
    (address,) = re.findall(r'class="run"><a href="([^"]+)"', browser.get("/").text)
    assert browser.get(html.unescape(address)).status_code == 200
    assert "<b>" not in browser.get("/").text.partition("<td")[2]


def test_pages_are_not_rendered_more_often_than_training_can_bear(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch_pages.time, "monotonic", lambda: now[0])
    original = watch_pages.render_run

    def render_in_two_seconds(*arguments):
        now[0] += 2.0
        return original(*arguments)

    monkeypatch.setattr(watch_pages, "render_run", render_in_two_seconds)
    folder = make_run(tmp_path / "run")
    pages = LivePages([folder])
    first = pages.get("/runs/run/")
    append_tick(folder, 4)
    now[0] += 37
    assert pages.get("/runs/run/") is first
    now[0] += 2
    assert pages.get("/runs/run/").tag != first.tag


def test_a_folder_of_runs(tmp_path, always_fresh, held):
    browser = client(tmp_path)
    assert "No runs yet" in text_of(browser.get("/"))
    make_run(tmp_path / "a")
    b = make_run(tmp_path / "group" / "b", kimg=3)
    row = {"name": "fd_pixels", "value": 7.5, "kimg": 3, "protocol": {}, "fingerprint": "a"}
    (b / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    response = browser.get("/")
    assert re.findall(r'class="run"><a href="([^"]+)"', response.text) == ["/runs/group/b/", "/runs/a/"]
    assert "fd_pixels 7.5" in text_of(response)
    assert "2 runs, 0 of them training" in text_of(response)
    assert "finished" in text_of(response)
    assert "all runs" in text_of(browser.get("/runs/group/b/"))
    held(tmp_path / "a")
    assert "2 runs, 1 of them training" in text_of(browser.get("/"))
    assert "18.5 s" in text_of(browser.get("/"))


def test_scores_that_are_not_comparable_are_marked(tmp_path, always_fresh):
    browser = client(tmp_path)
    for name, data, value, seconds in (("a", "digits", 1.5, 3), ("b", "digits", 2.5, 2), ("c", "letters", 3.5, 1)):
        run = make_run(tmp_path / name)
        os.utime(run / "run.yaml", (seconds, seconds))
        row = {"name": "fd_pixels", "value": value, "kimg": 3, "protocol": {"data": data}, "fingerprint": data}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    text = text_of(browser.get("/"))
    assert re.findall(r"fd_pixels (\S+(?: \*)?)", text) == ["1.5", "2.5", "3.5 *"]
    assert "* Not comparable with this score of the newest run that has it" in text
    shutil.rmtree(tmp_path / "c")
    assert "Not comparable" not in text_of(browser.get("/"))


def test_folders_of_one_name_are_told_apart(tmp_path):
    first, second = make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run")
    runs = LivePages([first, second, second]).find_runs()
    assert set(runs.values()) == {first, second}
    assert set(runs) == {"run", str(second)[1:]}


def test_a_run_that_cannot_be_read(tmp_path, always_fresh):
    make_run(tmp_path / "good")
    bad = make_run(tmp_path / "bad")
    (bad / "stats.jsonl").write_text("[1]\n{}\n")
    browser = client(tmp_path)
    assert re.findall(r'class="run"><a href="([^"]+)"', browser.get("/").text) == ["/runs/good/"]
    response = browser.get("/runs/bad/")
    assert (response.status_code, "stats.jsonl" in response.text) == (503, True)
    (bad / "stats.jsonl").unlink()
    assert browser.get("/runs/bad/").status_code == 200


@pytest.mark.parametrize("path", ["/runs/", "/runs/../run/", "/runs/%2e%2e/run/", "/etc/passwd", "/runs/no/", "/x"])
def test_other_paths_are_no_pages(tmp_path, path):
    make_run(tmp_path / "runs" / "run")
    response = client(tmp_path / "runs").get(path)
    assert response.status_code == 404
    assert "the runs are at /" in response.text


def test_an_address_without_its_slash_is_completed(tmp_path):
    make_run(tmp_path / "my run")
    response = client(tmp_path).get("/runs/my%20run")
    assert (response.status_code, response.headers["Location"]) == (302, "/runs/my%20run/")


@pytest.mark.parametrize("host", ["127.0.0.2", "LOCALHOST", "127.1", "::1"])
def test_every_loopback_address_answers_to_loopback_names_alone(tmp_path, host):
    hosts = trusted_hosts(host)
    assert hosts is not None
    browser = Client(create_watch_app(LivePages([make_run(tmp_path / "run")]), hosts))
    assert browser.get("/", base_url="http://elsewhere.example").status_code == 400
    assert browser.get("/", base_url="http://localhost:6007").status_code == 302
    assert trusted_hosts("0.0.0.0") is None


def test_only_requests_to_this_server_are_answered(tmp_path):
    browser = client(make_run(tmp_path / "run"))
    assert browser.get("/", base_url="http://elsewhere.example").status_code == 400
    assert browser.post("/").status_code == 405
    assert Client(create_watch_app(LivePages([tmp_path]))).get("/", base_url="http://gpu07:6007").status_code == 200


def test_the_command_serves_until_interrupted(tmp_path):
    make_run(tmp_path / "run")
    line = [sys.executable, "-m", "paragan", "watch", str(tmp_path), "--port=0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[0]
            with urllib.request.urlopen(address, timeout=250) as response:
                assert b"/runs/run/" in response.read()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}/runs/no/", timeout=250)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


BAD = {
    "nowhere": ["FOLDER nowhere: does not exist", "`paragan train`"],
    "{file}": ["is a file, not a folder"],
    "{folder} --port 99999": ["--port 99999: out of range", "0 to 65535"],
    "{folder} --port=0 --host 192.0.2.1": ["--host 192.0.2.1: is no address of this machine"],
    "{folder} --port=0 --host=": ["--host: is empty. Use 127.0.0.1"],
    "{folder} --interval 3": ["--interval"],
    "": ["FOLDER"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(tmp_path, line):
    (tmp_path / "file").touch()
    message = usage_error("watch", *line.format(file=tmp_path / "file", folder=tmp_path).split())
    assert all(words in message for words in BAD[line]), message


def test_a_folder_that_does_not_exist_is_replaced_as_advised(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("werkzeug.serving.BaseWSGIServer.serve_forever", lambda server: None)
    run = make_run(tmp_path / "run")
    missing = tmp_path / "no"
    with advises(
        f"FOLDER {missing}: does not exist. Use a run folder, or the folder that `paragan train` makes them in"
    ):
        call_command("watch", missing, "--port=0")
    for folder in (run, tmp_path):
        assert call_command("watch", folder, "--port=0") == 0
        assert f"shows {folder}" in capsys.readouterr().out


def test_a_host_is_chosen_as_advised(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("werkzeug.serving.BaseWSGIServer.serve_forever", lambda server: None)
    run = make_run(tmp_path / "run")
    with advises("--host: is empty. Use 127.0.0.1, or 0.0.0.0 for all"):
        call_command("watch", run, "--port=0", "--host=")
    for host in ("127.0.0.1", "0.0.0.0"):
        assert call_command("watch", run, "--port=0", f"--host={host}") == 0
        assert f"http://{host}:" in capsys.readouterr().out


def test_runs_in_an_object_store_are_reported_as_advised(tmp_path, monkeypatch):
    address = "s3://bucket/runs/a"
    with advises(f"FOLDER {address}: is in an object store. Use `paragan report {address}`, which copies it"):
        call_command("watch", address)
    run = make_run(tmp_path / "copy")
    monkeypatch.setattr("paragan.cli.report.local_folder", lambda location: str(run))
    assert call_command("report", address, "--as-is") == 0
    assert (run / "report.html").is_file()


def test_the_pages_are_made_without_torch(tmp_path):
    make_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from paragan.watch.pages import LivePages; import paragan.cli.main; "
        "pages = LivePages([Path(sys.argv[1])]); assert pages.get('/') and pages.get('/runs/run/'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


def test_unreadable_runs_raise_usage_errors(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "run.yaml").write_text("a: 1\n")
    with pytest.raises(UsageError, match="recipe is missing"):
        LivePages([folder]).get("/runs/run/")


@pytest.fixture
def served(tmp_path, monkeypatch, always_fresh):
    """The address of a server of the runs in a folder, whose pages are refreshed at once."""
    monkeypatch.setattr(watch_pages, "INTERVAL_S", 0.05)
    with run_app(create_watch_app(LivePages([tmp_path]), ["127.0.0.1"])) as address:
        yield address


@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
def test_a_page_refreshes_itself(tmp_path, served, size):
    address = served
    folder = make_run(tmp_path / "run")
    for kimg in (1, 2):
        write_grid(folder, kimg)
    with Browser() as browser:
        tab = browser.open(f"{address}/runs/run/", *SIZES[size], site=address)
        assert tab.evaluate("document.querySelector('dl.key dd').innerText.startsWith('3')")
        tab.evaluate("[...document.querySelectorAll('details')].at(-1).open = true")  # run.yaml
        tab.evaluate("document.getElementById('when').value = 1")
        tab.evaluate("document.getElementById('when').dispatchEvent(new Event('input'))")
        row = {"name": "fd_pixels", "value": 7.5, "kimg": 3, "protocol": {}, "fingerprint": "a"}  # more to unfold
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        append_tick(folder, 7)
        write_grid(folder, 7)
        tab.wait_until("document.querySelector('dl.key dd').innerText.startsWith('7')")
        opened = "[...document.querySelectorAll('details')].filter(one => one.open).map(one => one.innerText)"
        assert len(tab.evaluate(opened)) == 1
        assert tab.evaluate(opened)[0].startswith("run.yaml")
        assert tab.evaluate("document.getElementById('when').value") == "1"
        assert tab.evaluate("document.getElementById('when').max") == "3"
        assert tab.evaluate("document.querySelector('#fakes .on').innerText.includes('at 1 kimg')")
        assert tab.evaluate("document.getElementById('connection').innerText") == "live"
        assert tab.evaluate("Math.max(document.documentElement.scrollWidth, innerWidth)") == tab.width
        assert tab.console_messages == []
        assert tab.requests == []


@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES)
def test_the_page_of_all_runs_refreshes_itself(tmp_path, served, size):
    address = served
    with Browser() as browser:
        tab = browser.open(f"{address}/", *SIZES[size], site=address)
        assert tab.evaluate("document.body.innerText.includes('No runs yet')")
        make_run(tmp_path / "run")
        tab.wait_until("!!document.querySelector('td.run a')")
        assert tab.evaluate("Math.max(document.documentElement.scrollWidth, innerWidth)") == tab.width
        assert tab.console_messages == []
        assert tab.requests == []
