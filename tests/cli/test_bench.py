"""`paragan bench links` and `strategies`, and the laboratory they may run in."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from advice import Case, advises, case_id
from paragan.plan.links import read_links
from processes import run_cli, usage_error

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAB = BENCHMARKS / "lib" / "netns_lab.py"
KEYS = {"strategy", "wire", "topology", "ranks", "params", "step_ms", "sent_bytes", "predicted_bytes"}


def rows(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_two_ranks_send_what_was_predicted(tmp_path, processes):
    file = tmp_path / "rows.json"
    strategies = "--strategies=sync,sync+int4,quantized,CPOAdam-GQ+sign"
    settings = ("--params=100k", "--rounds=2", "--compute-ms=5", f"--json={file}")
    for rank in processes.start_ranks(2, "bench", "strategies", strategies, *settings):
        assert rank.wait() == 0, rank.err
    results = rows(file)
    assert [(row["strategy"], row["wire"]) for row in results] == [
        ("sync", "exact"),
        ("sync", "int4"),
        ("quantized", "int8"),
        ("CPOAdam-GQ", "sign"),
    ]
    for row in results:
        assert row.keys() >= KEYS
        assert row["sent_bytes"] == row["predicted_bytes"] > 0
        assert row["step_ms"] >= 5
        assert 0 <= row["overlap"] <= 1
    assert results[1]["sent_bytes"] < results[0]["sent_bytes"] / 7


@pytest.mark.slow
def test_fields_of_a_strategy_and_what_the_busiest_rank_sends(tmp_path, processes):
    file = tmp_path / "rows.json"
    delayed = "async+split=1:1+snapshot_every=4+max_lead_rounds=3"
    strategies = f"--strategies=async+split=1:1,{delayed},async+split=1:1+snapshot_wire=int8"
    for rank in processes.start_ranks(
        2, "bench", "strategies", strategies, "--params=100k", "--rounds=2", f"--json={file}"
    ):
        assert rank.wait() == 0, rank.err
    results = rows(file)
    assert [row["strategy"] for row in results][1] == delayed
    for row, numbers in zip(results, (4, 1, 1)):
        assert abs(row["sent_bytes"] - row["predicted_bytes"]) <= 1  # a fourth of a byte is no byte
        assert 0 <= row["sent_bytes"] / (50_000 * numbers) - 1 < 0.05


def test_one_rank_sends_zero_bytes_and_the_recipe_sets_the_size(tmp_path):
    assert run_cli("bench", "strategies", "--recipe=digits", "--rounds=1", "--json", tmp_path / "a.json").status == 0
    (sync, quantized) = rows(tmp_path / "a.json")
    assert sync["sent_bytes"] == quantized["sent_bytes"] == 0
    assert sync["params"] == 144_930


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--strategies=sink", "there is no sink; did you mean sync?"),
        ("--strategies=sync+int5", "did you mean int"),
    ],
)
def test_invalid_benchmarks_raise(argument, message):
    assert message in usage_error("bench", "strategies", argument)


CASES = [
    Case("--params=many", "Use 8M, 500k or 8000000", ("--params=8M", "--params=500k", "--params=8000000")),
    Case("--params=1", "--params 1: both players need a parameter. Use 2 or more", ("--params=2",)),
    Case(
        "--rounds=0 --compute-ms=-1 --compute-share=2",
        "--rounds, --compute-ms, --compute-share: out of range. "
        "Use --rounds 1 or more, --compute-ms from 0 to 1e6, --compute-share from 0 to 1",
        ("--rounds=1 --compute-ms=0 --compute-share=0", "--rounds=2 --compute-ms=1 --compute-share=1"),
    ),
    Case(
        "--strategies=per-label",
        "--strategies per-label: its games send nothing to each other. Use the strategy of one game",
        ("--strategies=sync",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_advice_on_a_benchmark_of_strategies_works(case, check_advice):
    check_advice(case, ["bench", "strategies", "--strategies=sync", "--rounds=1", "--params=100"])


@pytest.mark.slow
def test_ranks_of_one_host_have_one_link(tmp_path, processes):
    with advises(f"Use `paragan bench links --out {tmp_path}/links.yaml`"):
        read_links(tmp_path / "links.yaml")
    for rank in processes.start_ranks(3, "bench", "links", f"--out={tmp_path}/links.yaml"):
        assert rank.wait() == 0, rank.err
    links = read_links(tmp_path / "links.yaml")
    assert (links.hosts, links.ranks) == (1, 3)
    assert links.intra_host.bandwidth > 1e7
    assert 0 < links.intra_host.latency < 0.1


def test_invalid_link_arguments_raise_usage_errors():
    assert "one rank has no links. Start several: with a launcher, or with --ranks 2" in usage_error("bench", "links")
    assert "--ranks 0: it must be 1 or more" in usage_error("bench", "links", "--ranks=0")
    assert "the folder does not exist" in usage_error("bench", "links", "--ranks=2", "--out=/proc/nope/links.yaml")


# the laboratory


def load_lab():
    spec = importlib.util.spec_from_file_location("lab", LAB)
    lab = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = lab
    spec.loader.exec_module(lab)
    return lab


def test_rates_and_times():
    lab = load_lab()
    assert [lab.parse_rate(text) for text in ("200mbit", "1gbit", "56k", "9000")] == [200e6, 1e9, 56e3, 9000]
    assert [lab.parse_duration(text) for text in ("20ms", "50us", "1s")] == pytest.approx([0.02, 5e-5, 1])


def can_build():
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))) or not Path("/dev/net/tun").exists():
        return False
    command = ["unshare", "--net", "ip", "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1"]
    namespaces = subprocess.run(command, capture_output=True)
    return namespaces.returncode == 0 and os.access("/run", os.W_OK)


in_the_lab = pytest.mark.skipif(not can_build(), reason="network namespaces need root, iproute2 and /dev/net/tun")
SCRIPT = """
import os, socket, time
rank, first = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
print("interface", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
if rank == 0:
    server = socket.create_server((first, 29500))
    other, _ = server.accept()
    start, got = time.monotonic(), 0
    while chunk := other.recv(1 << 20):
        got += len(chunk)
    print("seconds", time.monotonic() - start, got, flush=True)
else:
    for _ in range(100):
        try:
            link = socket.create_connection((first, 29500))
            break
        except OSError:
            time.sleep(0.05)
    link.sendall(bytes(2_000_000))
    link.close()
"""


@in_the_lab
@pytest.mark.parametrize("latency", [(), ("--latency=20ms",)], ids=["tbf", "latency"])
def test_an_emulated_link_has_its_rate_and_is_removed_after_use(tmp_path, latency):
    command = [
        sys.executable,
        LAB,
        "--hosts=2",
        "--rate=20mbit",
        *latency,
        f"--logs={tmp_path}",
        f"--json={tmp_path}/l",
    ]
    lab = subprocess.Popen([*command, "--", sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    output, _ = lab.communicate(timeout=250)
    assert lab.returncode == 0, output
    words = (tmp_path / "host0.log").read_text().split()
    assert words[:3] == ["interface", "eth0", "seconds"]
    assert words[4] == "2000000"
    assert 0.6 < float(words[3]) < 15  # 2 MB at 20 Mbit/s are 0.8 s; a busy machine may take longer
    report = json.loads((tmp_path / "l").read_text())
    assert report["status"] == [0, 0]
    assert report["sent_bytes"][1] > 2_000_000
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"paragan-lab{lab.pid}-" not in left  # other laboratories may be at work


@pytest.mark.slow
@in_the_lab
def test_measured_links_match_the_emulated_ones(tmp_path):
    command = [sys.executable, LAB, "--hosts=3", "--rates=40mbit,40mbit,10mbit", "--latency=5ms", f"--logs={tmp_path}"]
    bench = [sys.executable, "-m", "paragan", "bench", "links", f"--out={tmp_path}/links.yaml"]
    expected = {(0, 1): 40, (0, 2): 10, (1, 2): 10}  # Mbit/s
    found: list[tuple[int, int]] = []
    for _ in range(4):  # a busy machine may be slower, but is never faster
        done = subprocess.run([*command, "--", *bench], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout
        links = read_links(tmp_path / "links.yaml")
        assert (links.hosts, links.ranks, links.initial_window_bytes) == (3, 3, 10 * 1448)
        for pair, mbit in expected.items():
            link = links.link_between(*pair)
            assert 8e-6 * link.bandwidth < 1.1 * mbit
            assert link.latency >= 0.005
            if 8e-6 * link.bandwidth > mbit / 3 and link.latency < 0.05:
                found.append(pair)
        if set(found) == set(expected):
            return
    pytest.fail(f"only {found} are as fast as they should be")


@in_the_lab
def test_a_host_that_fails_ends_the_laboratory(tmp_path):
    fails = "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    command = [sys.executable, LAB, "--hosts=2", f"--logs={tmp_path}", "--", sys.executable, "-c", fails]
    assert subprocess.run(command, capture_output=True, timeout=250).returncode == 3


@in_the_lab
def test_what_a_killed_laboratory_left_the_next_one_removes(tmp_path):
    command = [sys.executable, LAB, "--hosts=2", f"--logs={tmp_path}", "--"]
    killed = subprocess.Popen([*command, "sh", "-c", "echo began; sleep 600"], stdout=subprocess.PIPE, text=True)
    assert "began" in killed.stdout.readline()
    killed.kill()
    killed.wait()
    killed.stdout.close()

    def left():
        namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        return [line for line in namespaces.splitlines() if f"paragan-lab{killed.pid}-" in line]

    assert left()
    assert subprocess.run([*command, "true"], capture_output=True, timeout=250).returncode == 0
    assert not left()


@in_the_lab
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--rates=abc", "abc is not a rate of 8kbit or more"),
        ("--rate=1bit", "1bit is not a rate"),
        ("--timeout=0", "must be above 0"),
        ("--json=/proc/nope/x", "cannot be written"),
        ("--logs=/proc/nope", "cannot be created"),
    ],
)
def test_what_the_laboratory_refuses(argument, message):
    done = subprocess.run(
        [sys.executable, LAB, "--hosts=2", argument, "--", "true"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_data_throughput(tmp_path):
    file = tmp_path / "speed.json"
    ended = run_cli("bench", "data", "--data=digits", "--seconds=1", "--batch=32", f"--json={file}")
    assert ended.status == 0, ended
    results = rows(file)
    assert results["images_per_s"] > 0
    assert results["decode_images_per_s"] > 0
    assert "of the" in ended.out
    assert "images/s" in ended.out


@pytest.mark.parametrize("wrong", ["--batch=0", "--seconds=0", "--resolution=-1"])
def test_a_measurement_that_cannot_be(wrong):
    assert wrong.split("=")[0].strip("-") in usage_error("bench", "data", "--data=digits", wrong)
