"""Where a launcher put a process: read from the environment variables of torchrun, srun or `paragan --ranks`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from paragan.core.errors import UsageError

# variables of launchers that are not read: (rank, number of ranks)
UNREAD_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI, also on AzureML
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PMI_RANK", "PMI_SIZE"),  # mpiexec of MPICH and Intel MPI
    ("PALS_RANKID", "PALS_SIZE"),  # HPE Cray
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),  # Flux
)
UNREAD_LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # the same among the ranks of a host: Hydra of MPICH
UNREAD_RANK = "PMIX_RANK"  # of a launcher that speaks PMIx, such as prun; the number of ranks is in no variable


@dataclass(frozen=True)
class LaunchInfo:
    """The rank of this process among all processes of the run, and among those of its host.

    variables : the environment variables that say so, for messages
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    variables: str = field(default="", compare=False)

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> LaunchInfo:
        """Read torchrun's variables, else those of srun's tasks; without either it is a single process.

        Raises:
            UsageError: the variables are incomplete or contradict each other, or another launcher started several
                processes, each of which would train the same run.
        """
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        elif "RANK" in env or "WORLD_SIZE" in env:
            raise UsageError(
                "RANK, WORLD_SIZE: only one of them is set. Set both, as torchrun does, or neither",
                same_on_all_ranks=False,
            )
        else:
            _require_known_launcher(env, LaunchInfo())
            return LaunchInfo()
        rank = _read_int(env, names[0])
        size = _read_int(env, names[1])
        local_rank = _read_int(env, names[2], 0)
        local_size = _read_int(env, names[3], 1)
        if not 0 <= rank < size:
            raise UsageError(
                f"{names[0]}={rank}: must be from 0 to {size - 1}, since {names[1]}={size}", same_on_all_ranks=False
            )
        variables = f"{names[0]}={rank}, {names[1]}={size}"
        info = LaunchInfo(rank, size, local_rank, max(local_size, local_rank + 1), variables)
        if names[0] == "SLURM_PROCID":
            _require_known_launcher(env, info)  # mpirun starts its daemons with srun
        return info


def _require_known_launcher(env: Mapping[str, str], info: LaunchInfo) -> None:
    """Raise UsageError if a launcher that is not read counts other ranks than `info`."""
    counts = [(*names, info.rank, info.size) for names in UNREAD_LAUNCHERS]
    counts.append((*UNREAD_LOCAL, info.local_rank, info.local_size))
    for rank_name, size_name, known_rank, known_size in counts:
        size = env.get(size_name, "")
        rank = env.get(rank_name, "")
        if size.isdigit() and int(size) > 1 and (rank, size) != (str(known_rank), str(known_size)):
            raise _unread_launcher_error(f"{size_name}={size}", f"each of the {size} processes")
    rank = env.get(UNREAD_RANK, "")
    has_size = any(env.get(size_name) for _, size_name in UNREAD_LAUNCHERS) or info.variables
    if rank.isdigit() and (rank != str(info.rank) or not has_size):
        raise _unread_launcher_error(f"{UNREAD_RANK}={rank}", "each of its processes")


def _unread_launcher_error(variable: str, processes: str) -> UsageError:
    return UsageError(
        f"{variable}: its launcher is not read, and {processes} would train the same run. Set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT from it, or start with torchrun, srun or `--ranks N` of paragan",
        same_on_all_ranks=False,
    )


def _read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a number from the environment; without a default it has to be there."""
    text = env.get(name, "" if default is None else str(default))
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2): 4 tasks on each of 2 nodes
    if not digits.isdigit():
        raise UsageError(f"{name}={text!r}: must be a number, as torchrun and srun set it", same_on_all_ranks=False)
    return int(digits)


def master_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the key-value store of all ranks, which rank 0 serves.

    Raises:
        UsageError: there is no MASTER_ADDR, or MASTER_PORT is no port.
    """
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise UsageError("MASTER_ADDR: is not set. Start with torchrun, srun or `--ranks N` of paragan")
    job = _read_int(env, "SLURM_JOB_ID", 0)
    port = _read_int(env, "MASTER_PORT", 29500 + job % 10000)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port}: must be between 1 and 65535", same_on_all_ranks=False)
    return address, port


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
