"""A cluster of Slurm on this machine: munged, slurmctld and a slurmd for each node, with files in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = 2  # named node0, node1: names that do not resolve
CONFIG = """
ClusterName=tests
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=node[0-{last}] NodeHostname={hostname} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_program() -> str:
    """Return why there can be no cluster on this machine; "" if there can."""
    if os.getuid() != 0:
        return "slurmd needs root"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    return f"there is no {missing[0]}: apt-get install slurm-wlm munge" if missing else ""


class SlurmCluster:
    """Runs commands and jobs of a cluster that `start_cluster` started."""

    def __init__(self, folder: Path, env: Mapping[str, str]):
        self.folder, self.env = folder, dict(env)

    def run(self, *command: str | Path, timeout_s: float = 60.0) -> str:
        """Run a command of Slurm, and return what it prints."""
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *arguments: str | Path) -> str:
        """Submit a job whose output goes to `output_of`. Return its number."""
        return self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", *arguments).strip()

    def output_of(self, job: str) -> str:
        """Return what a job has printed."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def describe(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, timeout_s: float = 400.0) -> dict[str, str]:
        """Wait until a job is in one of the states, and return its fields."""
        deadline = time.monotonic() + timeout_s
        while True:
            fields = self.describe(job)
            if fields["JobState"] in states:
                return fields
            assert time.monotonic() < deadline, (fields["JobState"], self.output_of(job))
            time.sleep(0.2)


@contextlib.contextmanager
def start_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster, whose jobs see 16 processors on each of its two nodes."""
    for name in ("state", *(f"spool-node{number}" for number in range(NODES))):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    hostname = os.uname().nodename
    ports = sorted(free_port() for _ in range(NODES))
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            hostname=hostname, port=free_port(), folder=folder, last=NODES - 1, ports=",".join(map(str, ports))
        )
    )
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", f"node{number}"] for number in range(NODES)),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"SLURM_CONF": str(config)}
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"daemon{number}.out").open("w"))
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
            stack.callback(_stop, daemon)
            if command[0] == "munged":
                _await(lambda: (folder / "munge.socket").exists(), folder)
        cluster = SlurmCluster(folder, env)
        _await(lambda: _count_idle(cluster) == NODES, folder)
        yield cluster
        subprocess.run(["scancel", "--user=root"], env=env, timeout=30)


def _count_idle(cluster: SlurmCluster) -> int:
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=60)
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def _await(condition, folder: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        logs = {path.name: path.read_text(errors="replace")[-2000:] for path in folder.glob("*.[ol][ug]*")}
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
