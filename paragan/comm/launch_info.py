"""Where a launcher put a process: read from the variables of torchrun, srun, mpirun or `paragan --ranks`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paragan.core.errors import UsageError

SECRET_ENV = "PARAGAN_SECRET"  # begins the keys of a run in the store; `--ranks` sets it


class LauncherVariables(NamedTuple):
    """Names of the environment variables of a launcher.

    job : those that tell its jobs apart, and have the same value on all ranks of a job; empty where they are not set
    """

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


TORCHRUN = LauncherVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = LauncherVariables(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
OPEN_MPI = LauncherVariables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
MVAPICH = LauncherVariables(
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    ("MPIRUN_ID",),
)
HYDRA = LauncherVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("I_MPI_HYDRA_UUID",))
MPIRUN = (OPEN_MPI, MVAPICH, HYDRA)  # Hydra is the mpirun of MPICH and Intel MPI

# variables of launchers that are not read: (rank, number of ranks)
UNREAD_LAUNCHERS = (
    ("PALS_RANKID", "PALS_SIZE"),  # HPE Cray
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun, which sets those of Open MPI, too
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),  # Flux, which sets those of PMI, too
)
UNREAD_RANK = "PMIX_RANK"  # of a launcher that speaks PMIx, such as prun; the number of ranks is in no variable


@dataclass(frozen=True)
class LaunchInfo:
    """The rank of this process among all processes of the run, and among those of its host.

    variables : the environment variables that say so, for messages
    job       : what tells the processes that a launcher started together from others; "" if nothing does
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    variables: str = field(default="", compare=False)
    job: str = field(default="", compare=False)

    @property
    def ends_at_first_failure(self) -> bool:
        """Whether the launcher kills all ranks as soon as one fails, as mpirun of Open MPI and of MVAPICH does."""
        return self.variables.startswith((OPEN_MPI.rank, MVAPICH.rank))

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> LaunchInfo:
        """Read torchrun's variables, else those of srun's tasks, else mpirun's; without any it is a single process.

        Raises:
            UsageError: the variables are incomplete or contradict each other, or another launcher started several
                processes, each of which would train the same run.
        """
        launcher = _find_launcher(env)
        if launcher is None:
            _require_known_launcher(env, LaunchInfo())
            return LaunchInfo()
        rank = _read_int(env, launcher.rank)
        size = _read_int(env, launcher.size)
        local_rank = _read_int(env, launcher.local_rank, 0)
        local_size = _read_int(env, launcher.local_size, 1)
        if not 0 <= rank < size:
            raise UsageError(
                f"{launcher.rank}={rank}: must be from 0 to {size - 1}, since {launcher.size}={size}",
                same_on_all_ranks=False,
            )
        variables = f"{launcher.rank}={rank}, {launcher.size}={size}"
        job = _job_name(env, launcher)
        info = LaunchInfo(rank, size, local_rank, max(local_size, local_rank + 1), variables, job)
        if launcher is not TORCHRUN:
            _require_known_launcher(env, info)  # mpirun starts its daemons with srun
        return info


def _find_launcher(env: Mapping[str, str]) -> LauncherVariables | None:
    """Return the variables that count this process among others, if those of a launcher that is read do.

    Raises:
        UsageError: one of torchrun's variables is missing, or contradicts another launcher.
    """
    if TORCHRUN.rank in env and TORCHRUN.size in env:
        _check_user_set_size(env)
        return TORCHRUN
    if SRUN.rank in env and SRUN.size in env:
        return SRUN
    if TORCHRUN.rank in env or TORCHRUN.size in env:
        raise UsageError(
            "RANK, WORLD_SIZE: only one of them is set. Set both, as torchrun does, or neither",
            same_on_all_ranks=False,
        )
    if any(_counts_several(env, size_name) for _, size_name in UNREAD_LAUNCHERS):
        return None
    complete = (names for names in MPIRUN if all(name in env for name in names[:4]))
    return next((names for names in complete if env[names.size] != "1"), None)


def _check_user_set_size(env: Mapping[str, str]) -> None:
    """Raise UsageError if a WORLD_SIZE that was set by hand is the number of ranks of no launcher that counts several.

    That of a program differs rightly: torchrun under srun, or another that sets LOCAL_RANK, starts several ranks.
    """
    if "LOCAL_RANK" in env or "TORCHELASTIC_RUN_ID" in env or not _counts_several(env, TORCHRUN.size):
        return
    launchers = [(names.rank, names.size) for names in (SRUN, *MPIRUN)] + list(UNREAD_LAUNCHERS)
    sizes = [size for rank, size in launchers if rank in env and _counts_several(env, size)]
    if sizes and all(env[size] != env[TORCHRUN.size] for size in sizes):
        variables = f"{TORCHRUN.rank}={env[TORCHRUN.rank]}, {TORCHRUN.size}={env[TORCHRUN.size]}"
        raise UsageError(
            f"{variables}: contradicts {sizes[0]}={env[sizes[0]]}. Unset RANK and WORLD_SIZE to be one of the ranks "
            f"of that launcher, or unset {sizes[0]}",
            same_on_all_ranks=False,
        )


def _counts_several(env: Mapping[str, str], size_name: str) -> bool:
    size = env.get(size_name, "")
    return size.isdigit() and int(size) > 1


def _require_known_launcher(env: Mapping[str, str], info: LaunchInfo) -> None:
    """Raise UsageError if another launcher than that of `info` counts other ranks."""
    counts = [(*names, info.rank, info.size) for names in UNREAD_LAUNCHERS]
    counts += [(names.rank, names.size, info.rank, info.size) for names in MPIRUN]
    counts.append((HYDRA.local_rank, HYDRA.local_size, info.local_rank, info.local_size))
    for rank_name, size_name, known_rank, known_size in counts:
        numbers = (env.get(rank_name), env.get(size_name))
        if _counts_several(env, size_name) and numbers != (str(known_rank), str(known_size)):
            raise _unread_launcher_error(
                info, f"{size_name}={env[size_name]}", f"each of the {env[size_name]} processes"
            )
    rank = env.get(UNREAD_RANK, "")
    has_size = any(env.get(size_name) for _, size_name, _, _ in counts[:-1]) or info.variables
    if rank.isdigit() and (rank != str(info.rank) or not has_size):
        raise _unread_launcher_error(info, f"{UNREAD_RANK}={rank}", "each of its processes")


def _unread_launcher_error(info: LaunchInfo, variable: str, processes: str) -> UsageError:
    if info.variables:
        return UsageError(
            f"{variable}: contradicts {info.variables}, since one launcher started the other. Start with one of them "
            "alone, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            same_on_all_ranks=False,
        )
    return UsageError(
        f"{variable}: its launcher is not read, and {processes} would train the same run. Set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT from it, or start with torchrun, srun, mpirun or `--ranks N` of paragan",
        same_on_all_ranks=False,
    )


def _read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a number from the environment; without a default it has to be there."""
    text = env.get(name, "" if default is None else str(default))
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2): 4 tasks on each of 2 nodes
    if not digits.isdigit():
        raise UsageError(f"{name}={text!r}: must be a number, as its launcher sets it", same_on_all_ranks=False)
    return int(digits)


def master_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the key-value store of all ranks, which rank 0 serves.

    Raises:
        UsageError: there is no MASTER_ADDR, or MASTER_PORT is no port.
    """
    launcher = _find_launcher(env)
    address = env.get("MASTER_ADDR") or _default_address(env, launcher)
    if not address and launcher in MPIRUN:
        raise UsageError(
            "MASTER_ADDR: is not set, and mpirun started ranks on several hosts. Use `mpirun -x MASTER_ADDR=HOST` of "
            "Open MPI or `mpirun -genv MASTER_ADDR HOST` of MPICH and Intel MPI, with the host of rank 0",
            same_on_all_ranks=False,
        )
    if not address:
        raise UsageError(
            "MASTER_ADDR: is not set. Start with torchrun, srun, mpirun or `--ranks N` of paragan",
            same_on_all_ranks=False,
        )
    port = _read_int(env, "MASTER_PORT", _default_port(env, launcher))
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port}: must be between 1 and 65535", same_on_all_ranks=False)
    return address, port


def _default_address(env: Mapping[str, str], launcher: LauncherVariables | None) -> str:
    """Return the host of rank 0, as far as the launcher tells all ranks; empty if it does not."""
    if launcher is not None and launcher in MPIRUN:
        return "127.0.0.1" if _is_one_host(env, launcher) else ""
    return _first_host(env.get("SLURM_STEP_NODELIST", ""))


def _default_port(env: Mapping[str, str], launcher: LauncherVariables | None) -> int:
    """Return torchrun's port, or for other launchers one below it and below those of outgoing connections.

    It differs between jobs, as far as all ranks know what tells them apart.
    """
    if launcher is None or launcher is TORCHRUN:
        return 29500
    job = _job_name(env, launcher)
    return 20000 + zlib.crc32((job or env.get("SLURM_JOB_ID", "")).encode()) % 9500


def _job_name(env: Mapping[str, str], launcher: LauncherVariables) -> str:
    """Return what tells a job of a launcher from others, the same on all its ranks; empty if they do not know it."""
    values = [env.get(name, "") for name in launcher.job]
    if launcher is SRUN:  # a job has several steps, and starts again when it is requeued
        return ".".join(filter(None, values))
    job = next(filter(None, values), "")
    return job or (_parent_of_process_group() if launcher in MPIRUN and _is_one_host(env, launcher) else "")


def _is_one_host(env: Mapping[str, str], launcher: LauncherVariables) -> bool:
    return env[launcher.local_size] == env[launcher.size]


def _parent_of_process_group() -> str:
    """Return the id of the process that started this one's process group; empty if the system does not tell.

    MPICH has no variable for its jobs, but starts each rank as the leader of a group, all on a host by one daemon.
    """
    try:
        leader = Path(f"/proc/{os.getpgrp()}/stat").read_text()
    except OSError:
        return ""
    return leader.rpartition(")")[2].split()[1]


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
