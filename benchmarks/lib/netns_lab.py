"""Emulate slow networks: N hosts on one machine, each with its own address and link.

    python -m benchmarks.lib.netns_lab --hosts 4 --rate 200mbit [--latency 20ms] [--rates 200mbit,20mbit] -- COMMAND

Runs COMMAND on every host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME set, as
`paragan bench strategies` and `paragan train` read them. A host is a network namespace; its link is limited in both
directions. Without latency, a veth pair into a bridge has `tc tbf` at both ends. With --latency (one-way), `tc netem`
is added if the kernel has it. Otherwise TAP devices and a relay in user space (tcp_relay.py) do both, and `tc tbf` on
each host queues what waits for its own link, where its TCP sees the queue. Output is printed with the host's number,
and kept in --logs. Namespaces and devices are removed at the end; after a SIGKILL, by the next lab. Needs root, `ip`
and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

RELAY = Path(__file__).with_name("tcp_relay.py")
PORT = "29500"
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 30.0  # how long the other hosts get to end when one has failed
QUEUE_BYTES = 512 << 10  # queue of a slow link, as in the port of a switch
BURST_BYTES = 128 << 10  # of tbf: two of the largest packets
TCP_CONGESTION = "cubic"  # as on most hosts, whatever this machine uses
RELAY_MTU = 60_000  # the largest packets of a relay
PACKET_S = 1e-3  # how long one may take on a link


@dataclass(frozen=True)
class Link:
    """The link of a host. rate: bit/s in each direction (0: unlimited); latency: s one-way."""

    rate: float
    latency: float


@dataclass
class Report:
    """The network of a lab, and how its command ended."""

    hosts: int
    rates_mbit: list[float]
    latency_ms: float
    mtu: int
    shaped_by: str
    tcp: str
    command: list[str]
    status: list[int]
    seconds: float
    sent_bytes: list[int]  # by every host's interface, as the kernel counts


def run_command(command: str) -> str:
    """Run a command line of ip or tc and return its output; exit with its error if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"lab: `{command}` failed: {done.stderr.strip()}")
    return done.stdout


# The network ------------------------------------------------------------------------------------------------


def host_namespace(i: int) -> str:
    return f"paragan-lab{os.getpid()}-h{i}"


def switch_namespace() -> str:
    return f"paragan-lab{os.getpid()}-sw"


def host_address(i: int) -> str:
    return f"10.77.{i // 250}.{i % 250 + 1}"


@contextlib.contextmanager
def namespace(name: str, exists: bool = False) -> Iterator[None]:
    """Own a network namespace. Its devices and processes end with it. exists: it is only to be removed."""
    if not exists:
        run_command(f"ip netns add {name}")
    try:
        run_command(f"ip -n {name} link set lo up")
        yield
    finally:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the cleanup must not be interrupted
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def remove_leftovers() -> None:
    """Remove the namespaces of labs that were killed."""
    for name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split():
        match = re.match(r"paragan-lab(\d+)-", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with namespace(name, exists=True):
                pass


@contextlib.contextmanager
def run_network(links: list[Link]) -> Iterator[tuple[int, str]]:
    """Set up all hosts and links.

    Yields:
        The MTU, and the tool that limits the links.
    """
    with contextlib.ExitStack() as stack:
        for i in range(len(links)):
            stack.enter_context(namespace(host_namespace(i)))
        if all(link.latency == 0 for link in links) or has_netem():
            yield bridge_hosts(stack, links)
        else:
            yield relay_hosts(stack, links)


def bridge_hosts(stack: contextlib.ExitStack, links: list[Link]) -> tuple[int, str]:
    stack.enter_context(namespace(switch_namespace()))
    run_command(f"ip -n {switch_namespace()} link add br0 type bridge")
    run_command(f"ip -n {switch_namespace()} link set br0 up")
    for i, link in enumerate(links):
        run_command(f"ip -n {switch_namespace()} link add p{i} type veth peer name eth0 netns {host_namespace(i)}")
        run_command(f"ip -n {switch_namespace()} link set p{i} master br0 up")
        raise_interface(i)
        for where, device in ((host_namespace(i), "eth0"), (switch_namespace(), f"p{i}")):
            shape_link(where, device, link)
    mtu = int(re.search(r"mtu (\d+)", run_command(f"ip -n {host_namespace(0)} link show eth0"))[1])
    return mtu, "tbf and netem" if any(link.latency for link in links) else "tbf"


def unplug(i: int) -> None:
    """Take the link of a host down."""
    run_command(f"ip -n {switch_namespace()} link set p{i} down")


def replug(i: int) -> None:
    """Bring the link of a host up again."""
    run_command(f"ip -n {switch_namespace()} link set p{i} up")


def shape_link(where: str, device: str, link: Link) -> None:
    parent = "root"
    if link.latency:
        delay = f"{link.latency / 2 * 1e6:.0f}us"
        run_command(f"tc -n {where} qdisc add dev {device} root handle 1: netem delay {delay} limit 100000")
        parent = "parent 1:"
    if link.rate:
        bucket = f"tbf rate {link.rate:.0f}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"
        run_command(f"tc -n {where} qdisc add dev {device} {parent} {bucket}")


def has_netem() -> bool:
    with contextlib.ExitStack() as stack:
        name = f"paragan-lab{os.getpid()}-try"
        stack.enter_context(namespace(name))
        command = f"tc -n {name} qdisc add dev lo root netem delay 1ms"
        return subprocess.run(command.split(), capture_output=True).returncode == 0


def relay_hosts(stack: contextlib.ExitStack, links: list[Link]) -> tuple[int, str]:
    mtu = relay_mtu(links)
    taps = [f"pl{os.getpid() % 10**7}t{i}" for i in range(len(links))]
    arguments = [f"{tap},{link.rate},{link.latency}" for tap, link in zip(taps, links)]
    relay = subprocess.Popen([sys.executable, str(RELAY), *arguments], stdout=subprocess.PIPE, text=True)
    stack.callback(relay.wait)
    stack.callback(relay.kill)
    if relay.stdout is None or relay.stdout.readline().strip() != "ready":
        sys.exit("lab: the relay did not start (it needs /dev/net/tun)")
    for i, tap in enumerate(taps):
        run_command(f"ip link set {tap} netns {host_namespace(i)} name eth0")
        run_command(f"ip -n {host_namespace(i)} link set eth0 mtu {mtu}")
        raise_interface(i)
        if links[i].rate:  # packets queue on the host: its TCP sees the queue, and keeps it short
            bucket = f"tbf rate {links[i].rate:.0f}bit burst {2 * mtu} limit {QUEUE_BYTES}"
            run_command(f"tc -n {host_namespace(i)} qdisc add dev eth0 root {bucket}")
    return mtu, "a relay in user space"


def relay_mtu(links: list[Link]) -> int:
    """Return the MTU: large, so that the relay has few packets to handle, but small on slow links."""
    rates = [link.rate for link in links if link.rate]
    if not rates:
        return RELAY_MTU
    return round(min(RELAY_MTU, max(1500, PACKET_S * min(rates) / 8)))


def raise_interface(i: int) -> None:
    run_command(f"ip -n {host_namespace(i)} address add {host_address(i)}/16 dev eth0")
    run_command(f"ip -n {host_namespace(i)} link set eth0 up")
    for route in json.loads(run_command(f"ip -n {host_namespace(i)} -j route show dev eth0")):
        target = f"{route['dst']} dev eth0 src {host_address(i)} congctl {TCP_CONGESTION}"
        run_command(f"ip -n {host_namespace(i)} route change {target}")


def sent_bytes(i: int) -> int:
    return json.loads(run_command(f"ip -n {host_namespace(i)} -s -j link show eth0"))[0]["stats64"]["tx"]["bytes"]


# The hosts --------------------------------------------------------------------------------------------------


def start_host(i: int, hosts: int, command: list[str], log: Path) -> tuple[subprocess.Popen[str], threading.Thread]:
    launch_env = {
        "RANK": i,
        "WORLD_SIZE": hosts,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": 1,
    }
    env = os.environ | {name: str(value) for name, value in launch_env.items()}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"  # sudo sets another PATH
    process = subprocess.Popen(
        ["ip", "netns", "exec", host_namespace(i), *command],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=stream_output, args=(i, process, log), daemon=True)
    reader.start()
    return process, reader


def stream_output(i: int, process: subprocess.Popen[str], log: Path) -> None:
    assert process.stdout is not None
    with log.open("w") as f:
        for line in process.stdout:
            f.write(line)
            f.flush()
            with contextlib.suppress(BrokenPipeError):  # it is in the log
                print(f"[{i}] {line}", end="", flush=True)


def wait_for_hosts(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[int]:
    """Wait for all hosts; return their exit statuses. When one fails, the others are killed after GRACE_S."""
    deadline = time.monotonic() + timeout_s
    while any(p.poll() is None for p in processes):
        if any(p.poll() not in (None, 0) for p in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for p in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
        time.sleep(0.05)
    return [p.returncode for p in processes]


def parse_rate(text: str) -> float:
    """Parse 200mbit, 1gbit, 56kbit, or bit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?(bit)?", text.lower())
    if not match or (float(match[1]) and float(match[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] < 8e3):
        raise argparse.ArgumentTypeError(f"{text} is not a rate of 8kbit or more: 200mbit, 1gbit")
    return float(match[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def parse_rates(text: str) -> list[float]:
    return [parse_rate(rate) for rate in text.split(",")]


def parse_duration(text: str) -> float:
    """Parse 20ms, 50us, 1s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is not a time: 20ms, 50us")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True, metavar="N")
    parser.add_argument(
        "--rate", type=parse_rate, default=0.0, help="of every link, each way: 200mbit (default: unlimited)"
    )
    parser.add_argument(
        "--rates",
        type=parse_rates,
        help="of each host's link: 200mbit,20mbit,... (the last is repeated)",
    )
    parser.add_argument("--latency", type=parse_duration, default=0.0, help="one-way: 20ms (default: none added)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--logs", metavar="DIR", help="keep every host's output here")
    parser.add_argument("--json", metavar="F", help="write the report of the lab to this file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    rates = options.rates or [options.rate]
    if not command or options.hosts < 1 or len(rates) > options.hosts:
        parser.error("give -- COMMAND, at least one host, and at most as many rates")
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo")
    if not options.timeout > 0:
        parser.error(f"--timeout {options.timeout} must be above 0")
    if options.json and not os.access(Path(options.json).absolute().parent, os.W_OK):
        parser.error(f"--json {options.json}: its folder does not exist, or cannot be written")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        parser.error(f"{' and '.join(missing)} must be installed (iproute2)")
    rates += rates[-1:] * (options.hosts - len(rates))
    remove_leftovers()
    for number in END_SIGNALS:
        signal.signal(number, lambda n, frame: sys.exit(128 + n))
    logs = Path(options.logs or tempfile.mkdtemp(prefix="paragan-lab-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs {logs} cannot be created: {error.strerror}")
    with run_network([Link(rate, options.latency) for rate in rates]) as (mtu, shaped_by):
        start = time.monotonic()
        started = [start_host(i, options.hosts, command, logs / f"host{i}.log") for i in range(options.hosts)]
        status = wait_for_hosts([process for process, _ in started], options.timeout)
        for _, reader in started:
            reader.join(GRACE_S)
        seconds = time.monotonic() - start
        report = Report(
            hosts=options.hosts,
            rates_mbit=[rate / 1e6 for rate in rates],
            latency_ms=1e3 * options.latency,
            mtu=mtu,
            shaped_by=shaped_by,
            tcp=TCP_CONGESTION,
            command=command,
            status=status,
            seconds=round(seconds, 3),
            sent_bytes=[sent_bytes(i) for i in range(options.hosts)],
        )
    network = f"{options.hosts} hosts, MTU {mtu}, shaped by {shaped_by}"
    print(f"lab: {network}; status {status}, {seconds:.1f} s; logs in {logs}")
    if options.json:
        Path(options.json).write_text(json.dumps(asdict(report), indent=1) + "\n")
    return max(abs(s) for s in status)


if __name__ == "__main__":
    sys.exit(main())
