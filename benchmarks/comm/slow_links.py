"""Measure strategies on slow links, for docs/measurements/ (quantized, gossip, async).

Run it on an idle machine:

    sudo python -m benchmarks.comm.slow_links wires [--only NAME] [--json F]      about ten minutes
    sudo python -m benchmarks.comm.slow_links gossip [--only NAME] [--json F]
    sudo python -m benchmarks.comm.slow_links async [--json F]
    sudo python -m benchmarks.comm.slow_links ddp [--json F]

Each network lab is one call of benchmarks/lib/netns_lab.py, which runs `paragan bench strategies` or the compression
hooks of DistributedDataParallel (ddp_hooks.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import describe_machine, format_machine, save_json

EVERY_WIRE = "sync,sync+bf16,sync+int8,sync+int4,sync+int2,sync+sign,sync+topk,quantized,CPOAdam"
FOUR_HOSTS, EIGHT_HOSTS = "--hosts=4", "--hosts=8"
COMPUTE_SHARE_ARG = "--compute-share=0.667"  # D's, where a pass of G costs as much as one of D
Labs = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]  # links, command
WIRE_LABS: Labs = {
    "200 Mbit/s": ((FOUR_HOSTS, "--rate=200mbit"), ("strategies", f"--strategies={EVERY_WIRE}", "--rounds=8")),
    "200 Mbit/s, torch": ((FOUR_HOSTS, "--rate=200mbit"), ("hooks", "--rounds=8")),
    "200 Mbit/s, 20 ms": (
        (FOUR_HOSTS, "--rate=200mbit", "--latency=20ms"),
        ("strategies", "--strategies=sync,sync+int8,sync+sign", "--rounds=4"),
    ),
    "one link of 20 Mbit/s": (
        (FOUR_HOSTS, "--rates=20mbit,200mbit"),
        ("strategies", "--strategies=sync,sync+int8,sync+sign", "--rounds=4"),
    ),
    "200 Mbit/s, computing 1 s": (
        (FOUR_HOSTS, "--rate=200mbit"),
        ("strategies", "--strategies=sync,sync+int8,quantized", "--rounds=4", "--compute-ms=1000"),
    ),
}
# CP-OAdam is gossip with all-reduce in the place of the swaps: both players at once, optimistic.
ASYNC_GOSSIP_STRATEGIES = "sync,CP-OAdam,async-gossip"
ASYNC_GOSSIP_ARGS = (
    *("strategies", f"--strategies={ASYNC_GOSSIP_STRATEGIES}"),
    *("--params=500k", "--rounds=20", "--compute-ms=500"),
)
GOSSIP_LABS: Labs = {
    "100 Mbit/s": (
        (EIGHT_HOSTS, "--rate=100mbit"),
        ("strategies", "--strategies=sync,CP-OAdam,gossip,gossip+int8,gossip+int4", "--rounds=4"),
    ),
    "200 Mbit/s, 20 ms, 100k parameters": (
        (EIGHT_HOSTS, "--rate=200mbit", "--latency=20ms"),
        ("strategies", "--strategies=sync,CP-OAdam,gossip,gossip+int8", "--params=100k", "--rounds=10"),
    ),
    "100 Mbit/s, computing 0.5 s, 500k parameters": ((EIGHT_HOSTS, "--rate=100mbit"), ASYNC_GOSSIP_ARGS),
    "one link of 10 Mbit/s, the same": ((EIGHT_HOSTS, "--rates=10mbit,100mbit"), ASYNC_GOSSIP_ARGS),
}
TEAM_LINKS = (EIGHT_HOSTS, "--rate=1gbit")
TEAM_ARGS = ("--params=50M", "--rounds=4", "--compute-ms=1000", COMPUTE_SHARE_ARG)
ASYNC_STRATEGIES = "sync,async+snapshot_every=4,async+snapshot_every=2+snapshot_wire=bf16"
TEAM_LABS: Labs = {
    "1 Gbit/s, 50M parameters, computing 1 s": (
        TEAM_LINKS,
        ("strategies", f"--strategies={ASYNC_STRATEGIES}", *TEAM_ARGS),
    ),
    "the same, sync with the bytes of the teams": (  # apart: all of them need more than 24 GB
        TEAM_LINKS,
        ("strategies", "--strategies=sync,sync+sync_period=2", *TEAM_ARGS),
    ),
}
HOOK_LABS: Labs = {"200 Mbit/s, DDP": ((FOUR_HOSTS, "--rate=200mbit"), ("hooks", "--rounds=8"))}
LABS = {"wires": WIRE_LABS, "gossip": GOSSIP_LABS, "async": TEAM_LABS, "ddp": HOOK_LABS}


def measure(links: tuple[str, ...], command: tuple[str, ...]) -> dict[str, Any]:
    """Run a command in a network lab; return the lab's report and the command's rows."""
    tool, *options = command
    program = ["-m", "paragan", "bench", "strategies"] if tool == "strategies" else ["-m", "benchmarks.comm.ddp_hooks"]
    with tempfile.TemporaryDirectory() as folder:
        lab, rows = Path(folder) / "lab.json", Path(folder) / "rows.json"
        inside = [sys.executable, *program, *options, f"--json={rows}"]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.lib.netns_lab", *links, f"--json={lab}", "--", *inside], check=True
        )
        report = json.loads(lab.read_text())
        network = {name: report[name] for name in ("hosts", "rates_mbit", "latency_ms", "mtu", "shaped_by", "tcp")}
        command_line = f"netns_lab {' '.join(links)} -- {tool} {' '.join(options)}"
        return {"laboratory": network, "command": command_line, "rows": json.loads(rows.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", choices=LABS)
    parser.add_argument("--only", choices=[name for labs in LABS.values() for name in labs], metavar="NAME")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    results: dict[str, Any] = {"machine": machine, "laboratories": {}}
    for name, (links, command) in LABS[options.labs].items():
        if options.only in (None, name):
            print(f"\n{name}", flush=True)
            results["laboratories"][name] = measure(links, command)
            save_json(options.json, results)


if __name__ == "__main__":
    main()
