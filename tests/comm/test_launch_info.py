"""Rank and world size from the variables of torchrun, of srun, or of none."""

from __future__ import annotations

import socket

import pytest

import tiny_run
from advice import advises
from paragan.comm.launch_info import UNREAD_LAUNCHERS, UNREAD_LOCAL, LaunchInfo, _first_host, master_address
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
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "RANK": "6", "WORLD_SIZE": "8"}
    assert LaunchInfo.from_environment(env).rank == 6


@pytest.mark.parametrize(("rank", "size"), [*UNREAD_LAUNCHERS, UNREAD_LOCAL])
def test_launchers_that_are_not_read_are_refused(rank, size):
    with advises(
        f"{size}=4: its launcher is not read, and each of the 4 processes would train the same run. Set RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT from it, or start with torchrun, srun or `--ranks N` of paragan"
    ) as refusal:
        LaunchInfo.from_environment({rank: "1", size: "4"})
    assert not refusal.value.same_on_all_ranks
    from_it = {rank: "1", size: "4", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
    assert LaunchInfo.from_environment(from_it) == LaunchInfo(1, 4)
    assert master_address(from_it) == ("node1", 4000)
    with pytest.raises(UsageError, match=f"{size}=4"):  # mpirun starts one daemon a host with srun
        LaunchInfo.from_environment({rank: "1", size: "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"})
    assert LaunchInfo.from_environment({rank: "0", size: "1"}) == LaunchInfo()
    as_srun = {rank: "1", size: "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    as_srun |= {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert LaunchInfo.from_environment(as_srun) == LaunchInfo(1, 4, 1, 4)
    assert LaunchInfo.from_environment({rank: "1", size: "4", "RANK": "0", "WORLD_SIZE": "1"}) == LaunchInfo()


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
    ],
    ids=str,
)
def test_invalid_variables_are_rejected_on_every_rank(env):
    with pytest.raises(UsageError) as error:
        LaunchInfo.from_environment(env)
    assert not error.value.same_on_all_ranks  # every rank prints its error
    assert any(name in str(error.value) for name in env)


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


def test_missing_rank_0_is_named_after_the_timeout():
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port := free_port())}  # no server
    with pytest.raises(
        CommunicationError, match=rf"rank 0 is not at 127\.0\.0\.1:{port} \(MASTER_ADDR:MASTER_PORT\), says rank 1: "
    ):
        rendezvous(LaunchInfo(1, 2), env, 0.2)


def test_port_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(CommunicationError, match=rf"rank 0 cannot serve .*:{port} .*Use another MASTER_PORT"):
            rendezvous(LaunchInfo(0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, 1.0)


def test_one_variable_of_two_is_completed_or_removed_as_advised():
    for env in ({"RANK": "0"}, {"WORLD_SIZE": "2"}):
        with advises("RANK, WORLD_SIZE: only one of them is set. Set both, as torchrun does, or neither"):
            LaunchInfo.from_environment(env)
        assert LaunchInfo.from_environment({"RANK": "0", "WORLD_SIZE": "2"} | env) == LaunchInfo(0, 2)
    assert LaunchInfo.from_environment({}) == LaunchInfo()


def test_every_advised_launcher_sets_the_address(monkeypatch):
    with advises("MASTER_ADDR: is not set. Start with torchrun, srun or `--ranks N` of paragan"):
        master_address({"RANK": "0", "WORLD_SIZE": "2"})
    assert master_address({"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}) == ("node1", 4000)  # torchrun
    assert master_address({"SLURM_STEP_NODELIST": "gpu[03-07]", "SLURM_JOB_ID": "10007"}) == ("gpu03", 29507)  # srun
    environments = []
    monkeypatch.setattr(local_launcher.subprocess, "Popen", lambda command, env, **rest: environments.append(env))
    local_launcher._start_rank(1, 2, 4000, ["train"], 0)  # --ranks 2
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
    store, _ = rendezvous(LaunchInfo(0, 2), local_env(port), 10)
    other_store, _ = rendezvous(LaunchInfo(1, 2), local_env(port), 10)
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
