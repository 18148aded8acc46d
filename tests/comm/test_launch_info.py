"""Rank and world size from the variables of torchrun, of srun, of mpirun, or of none."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

import tiny_run
from advice import advises
from paragan.comm.launch_info import HYDRA, MPIRUN, UNREAD_LAUNCHERS, LaunchInfo, _first_host, master_address
from paragan.comm.process_group import CommunicationError
from paragan.comm.rendezvous import rendezvous
from paragan.core.errors import UsageError
from paragan.train import local_launcher
from paragan.train.rank_agreement import check_same_config
from processes import free_port


def test_single_process_without_a_launcher():
    assert LaunchInfo.from_environment({}) == LaunchInfo(0, 1, 0, 1)
    sbatch_without_srun = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    assert LaunchInfo.from_environment(sbatch_without_srun) == LaunchInfo()


def test_torchrun_variables():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert LaunchInfo.from_environment(env) == LaunchInfo(5, 8, 1, 4)


def test_manual_launch_needs_only_rank_and_world_size():
    assert LaunchInfo.from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchInfo(1, 2, 0, 1)


@pytest.mark.parametrize(("tasks", "local_size"), [("4(x2)", 4), ("4(x2),3", 4), ("8", 8), ("2,1", 2)])
def test_srun_variables(tasks, local_size):
    env = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert LaunchInfo.from_environment(env) == LaunchInfo(5, 8, 1, local_size)


def test_torchrun_precedes_slurm():
    agent = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}  # one of torchrun on each of two nodes
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        env = agent | {"RANK": "6", "WORLD_SIZE": "8", name: "2"}
        assert LaunchInfo.from_environment(env).rank == 6


@pytest.mark.parametrize(
    ("rank", "size"), [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), *(names[:2] for names in MPIRUN), *UNREAD_LAUNCHERS]
)
def test_a_number_of_ranks_that_contradicts_a_launcher_is_unset_as_advised(rank, size):
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    launcher = {rank: "1", size: "4"}
    with advises(
        f"RANK=0, WORLD_SIZE=2: contradicts {size}=4. Unset RANK and WORLD_SIZE to be one of the ranks of that "
        f"launcher, or unset {size}"
    ) as refusal:
        LaunchInfo.from_environment(by_hand | launcher)
    assert not refusal.value.same_on_all_ranks
    assert LaunchInfo.from_environment(by_hand | {rank: "1"}) == LaunchInfo(0, 2)
    assert LaunchInfo.from_environment(by_hand | launcher | {"WORLD_SIZE": "4"}) == LaunchInfo(0, 4)
    assert LaunchInfo.from_environment(by_hand | launcher | {"WORLD_SIZE": "1"}) == LaunchInfo()
    if rank == "SLURM_PROCID":
        assert LaunchInfo.from_environment(launcher) == LaunchInfo(1, 4)


def mpirun(names, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return the variables that mpirun gives a rank."""
    return dict(zip(names[:4], map(str, (rank, size, local_rank, local_size)), strict=True))


OPEN_MPI_4 = {"PMIX_NAMESPACE": "1242497025", "PMIX_RANK": "5", "OMPI_MCA_ess_base_jobid": "1242497025"}
INTEL_MPI = {"I_MPI_HYDRA_UUID": "b6290000-6814-dbf4-2461-06008bfba475", "PMI_FD": "9"}


@pytest.mark.parametrize("names", MPIRUN, ids=lambda names: names.rank)
def test_mpirun_variables(names):
    env = mpirun(names, 5, 8, 1, 4)
    assert LaunchInfo.from_environment(env) == LaunchInfo(5, 8, 1, 4)
    assert LaunchInfo.from_environment(env).variables == f"{names.rank}=5, {names.size}=8"
    assert LaunchInfo.from_environment(env | OPEN_MPI_4) == LaunchInfo(5, 8, 1, 4)
    assert LaunchInfo.from_environment(env | INTEL_MPI) == LaunchInfo(5, 8, 1, 4)
    assert LaunchInfo.from_environment(env | mpirun(HYDRA, 5, 8, 1, 4)) == LaunchInfo(
        5, 8, 1, 4
    )  # as MVAPICH sets them
    assert LaunchInfo.from_environment(mpirun(names, 0, 1, 0, 1)) == LaunchInfo()


@pytest.mark.parametrize("names", MPIRUN, ids=lambda names: names.rank)
def test_torchrun_precedes_mpirun(names):
    env = mpirun(names, 1, 2, 0, 1) | {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    assert LaunchInfo.from_environment(env) == LaunchInfo(6, 8, 2, 4)
    with advises("MASTER_ADDR: is not set. Start with torchrun, srun, mpirun or `--ranks N` of paragan"):
        master_address(env)
    assert LaunchInfo.from_environment(mpirun(names, 1, 2, 1, 2) | {"RANK": "0", "WORLD_SIZE": "1"}) == LaunchInfo()


@pytest.mark.parametrize("names", MPIRUN, ids=lambda names: names.rank)
def test_mpirun_that_starts_its_daemons_with_srun_is_refused_until_one_launcher_is_left(names):
    env = mpirun(names, 1, 4, 1, 2)
    daemon = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with advises(
        f"{names.size}=4: contradicts SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2, since one launcher started the other. "
        "Start with one of them alone, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    ) as refusal:
        LaunchInfo.from_environment(env | daemon)
    assert not refusal.value.same_on_all_ranks
    assert LaunchInfo.from_environment(env) == LaunchInfo(1, 4, 1, 2)
    assert LaunchInfo.from_environment(daemon) == LaunchInfo(0, 2)
    by_hand = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
    assert LaunchInfo.from_environment(env | daemon | by_hand) == LaunchInfo(1, 4)
    assert master_address(env | daemon | by_hand) == ("node1", 4000)
    as_srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert LaunchInfo.from_environment(env | as_srun) == LaunchInfo(1, 4, 1, 2)


@pytest.mark.parametrize("names", MPIRUN, ids=lambda names: names.rank)
def test_two_kinds_of_mpirun_that_contradict_each_other_are_refused(names):
    other = MPIRUN[MPIRUN.index(names) - 1]
    with pytest.raises(UsageError, match="contradicts"):
        LaunchInfo.from_environment(mpirun(names, 1, 4, 1, 4) | mpirun(other, 1, 2, 1, 2))
    assert LaunchInfo.from_environment(mpirun(names, 1, 4, 1, 4) | mpirun(other, 0, 1, 0, 1)) == LaunchInfo(1, 4, 1, 4)
    with pytest.raises(UsageError, match="PMIX_RANK=0: contradicts"):
        LaunchInfo.from_environment(mpirun(names, 1, 4, 1, 4) | {"PMIX_RANK": "0"})


UNREAD_COUNTS = [
    *UNREAD_LAUNCHERS,
    *((names.rank, names.size) for names in MPIRUN),  # without the ranks of this host, as Flux sets those of PMI
    (HYDRA.local_rank, HYDRA.local_size),  # as mpiexec -pmi-port of MPICH sets them
]


@pytest.mark.parametrize(("rank", "size"), UNREAD_COUNTS)
def test_launchers_that_are_not_read_are_refused(rank, size):
    with advises(
        f"{size}=4: its launcher is not read, and each of the 4 processes would train the same run. Set RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT from it, or start with torchrun, srun, mpirun or `--ranks N` of "
        "paragan"
    ) as refusal:
        LaunchInfo.from_environment({rank: "1", size: "4"})
    assert not refusal.value.same_on_all_ranks
    from_it = {rank: "1", size: "4", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
    assert LaunchInfo.from_environment(from_it) == LaunchInfo(1, 4)
    assert master_address(from_it) == ("node1", 4000)
    with pytest.raises(UsageError, match=f"{size}=4: contradicts SLURM_PROCID=0"):
        LaunchInfo.from_environment({rank: "1", size: "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"})
    assert LaunchInfo.from_environment({rank: "0", size: "1"}) == LaunchInfo()
    as_srun = {rank: "1", size: "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    as_srun |= {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert LaunchInfo.from_environment(as_srun) == LaunchInfo(1, 4, 1, 4)
    assert LaunchInfo.from_environment({rank: "1", size: "4", "RANK": "0", "WORLD_SIZE": "1"}) == LaunchInfo()


@pytest.mark.parametrize(("rank", "size"), UNREAD_LAUNCHERS)
@pytest.mark.parametrize("names", MPIRUN, ids=lambda names: names.rank)
def test_launchers_that_set_variables_of_mpirun_too_are_refused(rank, size, names):
    with pytest.raises(UsageError, match=f"{size}=4: its launcher is not read"):
        LaunchInfo.from_environment(mpirun(names, 1, 4, 1, 4) | {rank: "1", size: "4"})
    in_one_task = {rank: "0", size: "1"}
    assert LaunchInfo.from_environment(mpirun(names, 1, 4, 1, 4) | in_one_task) == LaunchInfo(1, 4, 1, 4)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_of_pmix_among_an_unknown_number_is_refused(rank):
    with pytest.raises(UsageError, match=f"PMIX_RANK={rank}: its launcher is not read") as refusal:
        LaunchInfo.from_environment({"PMIX_RANK": rank})
    assert not refusal.value.same_on_all_ranks
    as_srun = {"PMIX_RANK": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank}
    assert LaunchInfo.from_environment(as_srun).rank == int(rank)
    with pytest.raises(UsageError, match=f"PMIX_RANK={rank}"):
        LaunchInfo.from_environment(as_srun | {"SLURM_PROCID": str(1 - int(rank))})
    assert LaunchInfo.from_environment({"PMIX_RANK": rank, "RANK": "0", "WORLD_SIZE": "1"}) == LaunchInfo()


def test_a_single_process_of_open_mpi_is_a_single_process():
    alone = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MPI_LOCALNRANKS": "1"}
    assert LaunchInfo.from_environment(alone) == LaunchInfo()


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"},
        {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "2"},
        mpirun(MPIRUN[0], 2, 2, 0, 1),
        mpirun(MPIRUN[0], 0, 2, 0, 1) | {"OMPI_COMM_WORLD_SIZE": "two"},
    ],
    ids=str,
)
def test_invalid_variables_are_rejected_on_every_rank(env):
    with pytest.raises(UsageError) as error:
        LaunchInfo.from_environment(env)
    assert not error.value.same_on_all_ranks  # every rank prints its error
    assert any(name in str(error.value) for name in env)


JOBS = {  # variables of two jobs of each mpirun, as it gives them to all ranks
    "PMIX_NAMESPACE": (MPIRUN[0], "1242497025", "1241710593"),  # Open MPI 4
    "PMIX_NAMESPACE of Open MPI 5": (MPIRUN[0], "prterun-vm-11145@1", "prterun-vm-11156@1"),
    "OMPI_MCA_ess_base_jobid": (MPIRUN[0], "1242497025", "1241710593"),  # older ones
    "MPIRUN_ID": (MPIRUN[1], "10255", "10256"),
    "I_MPI_HYDRA_UUID": (
        HYDRA,
        "b6290000-6814-dbf4-2461-06008bfba475",
        "cd290000-bb24-dcf4-2461-0600ad5dda6e",
    ),
}


@pytest.mark.parametrize("variable", JOBS)
def test_ranks_of_mpirun_on_one_host_meet_at_a_port_of_their_job(variable):
    names, *jobs = JOBS[variable]
    ports = []
    for job in jobs:
        variables = {variable.split()[0]: job, "SLURM_JOB_ID": "7"}
        addresses = {master_address(mpirun(names, rank, 2, rank, 2) | variables) for rank in range(2)}
        assert len(addresses) == 1
        address, port = addresses.pop()
        assert address == "127.0.0.1"
        assert 20000 <= port < 29500
        ports.append(port)
        elsewhere = mpirun(names, 1, 2, 0, 1) | variables | {"MASTER_ADDR": "node1"}
        assert master_address(elsewhere) == ("node1", port)
    assert ports[0] != ports[1]
    chosen = mpirun(names, 0, 2, 0, 2) | {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
    assert master_address(chosen) == ("node1", 4000)


def test_every_start_of_a_step_of_slurm_has_a_name_and_a_port():
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    starts = [dict(zip(names, values)) for values in (("7", "0"), ("7", "1"), ("7", "0", "1"), ("8", "0"))]
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"} for rank in (0, 1)]
    jobs = [{LaunchInfo.from_environment(rank | start).job for rank in ranks} for start in starts]
    assert jobs == [{"7.0"}, {"7.1"}, {"7.0.1"}, {"8.0"}]
    addresses = [{master_address(rank | start) for rank in ranks} for start in starts]
    assert [len(of_start) for of_start in addresses] == [1] * 4
    ports = {port for of_start in addresses for _, port in of_start}
    assert len(ports) == 4
    assert all(20000 <= port < 29500 for port in ports)
    assert master_address({"MASTER_ADDR": "n1", "RANK": "0", "WORLD_SIZE": "2"} | starts[0]) == ("n1", 29500)


DAEMON = """
import os, subprocess, sys
code = "import os; from paragan.comm.launch_info import master_address; print(master_address(os.environ)[1])"
for rank in "01":
    variables = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"}
    command = [sys.executable, "-c", code]
    if rank == "1":
        command = ["sh", "-c", '"$@"; true', "wrapper", *command]  # a shell between daemon and rank
    subprocess.run(command, env=os.environ | variables, process_group=0, check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_mpich_meet_at_a_port_of_their_daemon():
    daemons = [
        subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True, process_group=0)
        for _ in range(2)
    ]
    ports = [daemon.communicate()[0].split() for daemon in daemons]
    assert [len(of_job) for of_job in ports] == [2, 2]
    assert ports[0][0] == ports[0][1]
    assert ports[1][0] == ports[1][1]
    assert ports[0] != ports[1]


def test_ranks_of_mpich_on_several_hosts_share_a_port_that_all_know():
    env = mpirun(HYDRA, 1, 4, 1, 2) | {"MASTER_ADDR": "node1"}
    assert master_address(env) == ("node1", 20000)
    assert master_address(env | {"SLURM_JOB_ID": "7"}) == master_address(
        env | mpirun(HYDRA, 3, 4, 0, 2) | {"SLURM_JOB_ID": "7"}
    )
    assert master_address(env | {"SLURM_JOB_ID": "7"}) != master_address(env | {"SLURM_JOB_ID": "8"})


@pytest.mark.parametrize("names", MPIRUN, ids=lambda names: names.rank)
def test_mpirun_on_several_hosts_needs_the_address_of_rank_0(names):
    env = mpirun(names, 1, 4, 1, 2) | {"SLURM_STEP_NODELIST": "gpu[2-3]"}  # hosts of its daemons, not always of rank 0
    with advises(
        "MASTER_ADDR: is not set, and mpirun started ranks on several hosts. Use `mpirun -x MASTER_ADDR=HOST` of "
        "Open MPI or `mpirun -genv MASTER_ADDR HOST` of MPICH and Intel MPI, with the host of rank 0"
    ):
        master_address(env)
    assert master_address(env | {"MASTER_ADDR": "HOST"})[0] == "HOST"


@pytest.mark.parametrize(
    ("nodes", "host"),
    {
        "gpu1": "gpu1",
        "gpu1,gpu2": "gpu1",
        "gpu[03-07,12],cpu1": "gpu03",
        "gpu[12,03-07]": "gpu12",
        "gpu[3]": "gpu3",
        "login,gpu[03-07]": "login",
        "rack2-gpu[001-128]": "rack2-gpu001",
        "": "",
    }.items(),
)
def test_first_host_of_slurms_list(nodes, host):
    assert _first_host(nodes) == host


def test_missing_rank_0_is_found_at_its_address_as_advised():
    port = free_port()  # no server
    with advises(
        f"rank 0 is not at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT), says rank 1: [Errno {errno.ECONNREFUSED}] "
        f"{os.strerror(errno.ECONNREFUSED)}. Use the address and the port of rank 0 on all ranks",
        CommunicationError,
    ):
        rendezvous(LaunchInfo(1, 2), local_env(port), 0.2)
    assert_ranks_meet(port)


def test_a_port_in_use_is_changed_as_advised():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with advises(
            f"rank 0 cannot serve 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT): [Errno {errno.EADDRINUSE}] "
            f"{os.strerror(errno.EADDRINUSE)} (while attempting to bind on address ('127.0.0.1', {port})). "
            "Use another MASTER_PORT",
            CommunicationError,
        ):
            rendezvous(LaunchInfo(0, 2), local_env(port), 1.0)
    assert_ranks_meet(free_port())


def test_one_variable_of_two_is_completed_or_removed_as_advised():
    for env in ({"RANK": "0"}, {"WORLD_SIZE": "2"}):
        with advises("RANK, WORLD_SIZE: only one of them is set. Set both, as torchrun does, or neither"):
            LaunchInfo.from_environment(env)
        assert LaunchInfo.from_environment({"RANK": "0", "WORLD_SIZE": "2"} | env) == LaunchInfo(0, 2)
    assert LaunchInfo.from_environment({}) == LaunchInfo()


def test_every_advised_launcher_sets_the_address(monkeypatch):
    with advises("MASTER_ADDR: is not set. Start with torchrun, srun, mpirun or `--ranks N` of paragan"):
        master_address({"RANK": "0", "WORLD_SIZE": "2"})
    assert master_address({"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}) == ("node1", 4000)  # torchrun
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[03-07]"}
    assert master_address(srun)[0] == "gpu03"
    assert master_address(mpirun(MPIRUN[0], 1, 2, 1, 2))[0] == "127.0.0.1"
    environments = []
    monkeypatch.setattr(local_launcher.subprocess, "Popen", lambda command, env, **rest: environments.append(env))
    local_launcher._start_rank(1, 2, 4000, "secret", ["train"], 0)  # --ranks 2
    assert LaunchInfo.from_environment(environments[0]) == LaunchInfo(1, 2, 1, 2)
    assert master_address(environments[0]) == ("127.0.0.1", 4000)


def local_env(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_port_of_another_program_is_changed_as_advised():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with advises(
            f"a process listens at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT), but does not answer as rank 0 does, "
            "says rank 1. Use another MASTER_PORT",
            CommunicationError,
        ):
            rendezvous(LaunchInfo(1, 2), local_env(port), 0.2)
    assert_ranks_meet(free_port())


def test_a_port_of_another_run_is_changed_as_advised():
    port = free_port()
    of_three = rendezvous(LaunchInfo(0, 3), local_env(port), 10)
    with advises(
        f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT) belongs to a run of 3 ranks, and this is rank 1 of 2. "
        "Use another MASTER_PORT",
        CommunicationError,
    ):
        rendezvous(LaunchInfo(1, 2), local_env(port), 10)
    assert_ranks_meet(free_port())
    del of_three


def assert_ranks_meet(port: int) -> None:
    store, *_ = rendezvous(LaunchInfo(0, 2), local_env(port), 10)
    other_store, *_ = rendezvous(LaunchInfo(1, 2), local_env(port), 10)
    store.set("from", "rank 0")
    assert other_store.get("from") == b"rank 0"


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_invalid_port_is_rejected(port):
    with pytest.raises(UsageError, match="MASTER_PORT"):
        rendezvous(LaunchInfo(0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, 1.0)


def test_ranks_agree_once_they_are_started_as_advised(pool):
    def job(world):
        wire = {0: "int8", 1: "int4", 2: "int8"}[world.rank]
        run = tiny_run.make_run(
            f"strategy.wire={wire}", f"batch={32 if world.rank == 2 else 16}", f"kimg={1 + world.rank}"
        )
        with advises("Use the same command on all") as refusal:
            check_same_config(run, world)
        check_same_config(tiny_run.make_run("strategy.wire=int8"), world)
        return str(refusal.value)

    messages = pool(3, job)
    assert len(set(messages)) == 1
    assert "strategy.wire.name is 'int8' on rank 0, 'int4' on rank 1" in messages[0]
    assert "batch is 16 on rank 0, 32 on rank 2" in messages[0]
    assert "kimg is 1.0 on rank 0, 2.0 on rank 1" in messages[0]
