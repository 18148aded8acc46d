"""Gossip runs continue when ranks are killed or frozen, and admit ranks that come back."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_ranks import PACED_ROUNDS, RankProcesses, longest_pause
from processes import free_port, list_checkpoints, logged_steps, usage_error, wait_for_step, wait_until

pytestmark = pytest.mark.kill

PEER_TIMEOUT_S = 3
GOSSIP = ("--strategy=gossip", "--lanes=4", f"--strategy.peer_timeout_s={PEER_TIMEOUT_S}", "--kimg=1.28")  # 80 steps
LAST_STEP = 80
DEATH_TIMEOUT_S = 20  # peer_timeout_s where a rank is killed: nobody waits for it, since a closed port is noticed
SHORT, SHORT_LAST_STEP = "--kimg=0.96", 60  # where no rank comes back to a run that goes on
FIRST_STEP = 10  # the first loss is after this one


class GossipRanks(RankProcesses):
    """The ranks of a gossip run of `LAST_STEP` steps, unless `more` says otherwise.

    A round takes a tenth of a second at least: a rank that comes back must not find the run at its end.
    """

    def __init__(self, run: Path, processes: Any, *more: str, size: int = 4, patch: str = ""):
        super().__init__(run, processes, *GOSSIP, *more, size=size, patch=PACED_ROUNDS + patch)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("victim", "strategy"), [(0, "gossip"), (2, "async-gossip"), (2, "DPOSG")])
def test_killed_rank_rejoins(victim, strategy, tmp_path, processes):
    timeout = f"--strategy.peer_timeout_s={DEATH_TIMEOUT_S}"
    ranks = GossipRanks(tmp_path / "run", processes, f"--strategy={strategy}", timeout)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGKILL, victim)
    lost = ranks.wait_for_event(lambda row: row["lost"] == [victim], DEATH_TIMEOUT_S)
    assert lost["members"] == [rank for rank in range(4) if rank != victim]
    ranks.restart(victim)
    back = ranks.wait_for_event(lambda row: row["joined"] == [victim])
    assert back["members"] == [0, 1, 2, 3]
    assert back["step"] > lost["step"]
    ranks.assert_finished(0, 1, 2, 3, last_step=LAST_STEP)
    assert logged_steps(ranks.run) == sorted(set(logged_steps(ranks.run)))


@pytest.mark.slow
def test_a_rank_of_an_accelerator_is_killed_and_rejoins(tmp_path, processes):
    patch = "import standin; standin.replace_cuda()"
    ranks = GossipRanks(tmp_path / "run", processes, "--device.kind=cuda", "--kimg=0.64", size=3, patch=patch)
    wait_for_step(ranks.run, 3)
    ranks.send_signal(signal.SIGKILL, 2)
    ranks.wait_for_event(lambda row: row["lost"] == [2])
    ranks.restart(2)
    ranks.wait_for_event(lambda row: row["joined"] == [2])
    ranks.assert_finished(0, 1, 2, last_step=40)


@pytest.mark.slow
def test_frozen_rank_is_left_out_until_it_wakes(tmp_path, processes):
    ranks = GossipRanks(tmp_path / "run", processes, "--kimg=1.92")
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGSTOP, 0)
    assert longest_pause(ranks.run, 3 * PEER_TIMEOUT_S, 120) < 3 * PEER_TIMEOUT_S
    ranks.wait_for_event(lambda row: row["lost"] == [0])
    ranks.send_signal(signal.SIGCONT, 0)
    ranks.wait_for_event(lambda row: row["joined"] == [0])
    ranks.assert_finished(0, 1, 2, 3, last_step=120)


LOGGER_OF_A_RANK = """
import socket, threading, time
from pathlib import Path
from paragan.comm.elastic import elastic_world
new_gloo_group = elastic_world.new_gloo_group
server = socket.create_server(("127.0.0.1", 0))

def with_a_connection_of_a_logger(*arguments):
    connection = socket.create_connection(server.getsockname())
    threading.Thread(target=write_when_closed, args=[connection], daemon=True).start()
    return new_gloo_group(*arguments)

def write_when_closed(connection):
    connection.recv(1)
    Path("CLOSED").touch()

elastic_world.new_gloo_group = with_a_connection_of_a_logger
"""


@pytest.mark.slow
def test_connections_of_other_threads_outlive_a_group(tmp_path, processes):
    patch = LOGGER_OF_A_RANK.replace("CLOSED", str(tmp_path / "closed"))
    ranks = GossipRanks(tmp_path / "run", processes, SHORT, patch=patch)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGKILL, 3)
    ranks.wait_for_event(lambda row: row["lost"] == [3])
    assert not (tmp_path / "closed").exists()
    ranks.assert_finished(0, 1, 2, last_step=SHORT_LAST_STEP)


@pytest.mark.slow
def test_two_ranks_killed_at_once(tmp_path, processes):
    ranks = GossipRanks(tmp_path / "run", processes, SHORT)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGKILL, 0, 1)
    ranks.wait_for_event(lambda row: row["members"] == [2, 3])
    ranks.assert_finished(2, 3, last_step=SHORT_LAST_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("second", [0, 2])
def test_second_rank_killed_while_one_is_missing(second, tmp_path, processes):
    """While a rank is missing, the others exchange requests to join at every tick."""
    ranks = GossipRanks(tmp_path / "run", processes, SHORT, "--output.tick_kimg=0.016")
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGKILL, 3)
    ranks.wait_for_event(lambda row: row["lost"] == [3])
    wait_for_step(ranks.run, logged_steps(ranks.run)[-1] + 10)
    ranks.send_signal(signal.SIGKILL, second)
    others = [rank for rank in range(3) if rank != second]
    ranks.wait_for_event(lambda row: row["members"] == others, 20)
    ranks.assert_finished(*others, last_step=SHORT_LAST_STEP)


@pytest.mark.slow
def test_two_frozen_ranks_come_back(tmp_path, processes):
    """Neither frozen rank may wait for the other, which is no member either."""
    ranks = GossipRanks(tmp_path / "run", processes, "--lanes=8", "--kimg=9.6", size=5)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGSTOP, 0, 1)
    ranks.wait_for_event(lambda row: row["members"] == [2, 3, 4])
    ranks.send_signal(signal.SIGCONT, 0, 1)
    wait_until(lambda: ranks.members() == [0, 1, 2, 3, 4], 60, "all ranks are members")
    ranks.send_signal(signal.SIGTERM, 1)
    assert [rank.wait() for rank in ranks.started] == [3] * 5


@pytest.mark.slow
def test_part_without_a_majority_stops_with_its_checkpoint(tmp_path, processes):
    """With two of four ranks silent, the other two cannot know whether those continue."""
    ranks = GossipRanks(tmp_path / "run", processes)
    wait_for_step(ranks.run, FIRST_STEP)
    members = (ranks.run / "members.json").read_bytes()
    ranks.send_signal(signal.SIGSTOP, 2, 3)
    assert [ranks.started[rank].wait() for rank in (0, 1)] == [3, 3]
    assert (ranks.run / "members.json").read_bytes() == members  # lists the ranks to ask
    assert "rank 2, 3 cannot be reached, and rank 0, 1 are no majority" in ranks.started[0].err
    (folder,) = (ranks.run / "checkpoints").glob("*-ranks-0-1")
    assert json.loads((folder / "checkpoint.json").read_text())["ranks"] == 2
    assert not list_checkpoints(ranks.run)  # none that a resuming run would load


@pytest.mark.slow
def test_frozen_ranks_continue_where_the_others_stopped(tmp_path, processes):
    ranks = GossipRanks(tmp_path / "run", processes, SHORT)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGSTOP, 2, 3)
    assert [ranks.started[rank].wait() for rank in (0, 1)] == [3, 3]
    ranks.send_signal(signal.SIGCONT, 2, 3)  # the other two have ended, so these are all that remain
    ranks.assert_finished(2, 3, last_step=SHORT_LAST_STEP)


@pytest.mark.slow
def test_last_rank_stops_with_a_checkpoint_for_all(tmp_path, processes):
    ranks = GossipRanks(tmp_path / "run", processes, SHORT)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGKILL, 0, 1, 3)
    assert ranks.started[2].wait() == 3
    assert "rank 0, 1, 3 have ended: no other rank remains" in ranks.started[2].err
    assert (ranks.events()[-1]["members"], ranks.events()[-1]["lost"]) == ([2], [0, 1, 3])
    assert len(list_checkpoints(ranks.run)) == 1
    ranks.port = str(free_port())
    for rank in range(4):
        ranks.restart(rank)
    ranks.assert_finished(0, 1, 2, 3, last_step=SHORT_LAST_STEP)


DIES_WHILE_IT_WRITES = """
import os, signal
from paragan.comm import checkpoint_files
write_synced = checkpoint_files._write_synced

def write_and_die(path, data):
    if os.environ["RANK"] == "3" and "00000020" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    return write_synced(path, data)

checkpoint_files._write_synced = write_and_die
"""


@pytest.mark.slow
def test_a_checkpoint_that_a_loss_interrupts_is_written_again(tmp_path, processes):
    """And the scores that were to follow it."""
    times = "--output.checkpoint_kimg=0.32", "--evaluation.every_kimg=0.32", "--kimg=0.64"
    ranks = GossipRanks(tmp_path / "run", processes, *times, patch=DIES_WHILE_IT_WRITES)
    assert [ranks.started[rank].wait(120) for rank in range(3)] == [0, 0, 0]
    assert ranks.events()[0]["lost"] == [3]
    assert [path.name for path in list_checkpoints(ranks.run)] == ["00000020", "00000040"]
    assert not list(ranks.run.glob("checkpoints/.writing-*"))
    scores = [json.loads(line)["kimg"] for line in (ranks.run / "metrics.jsonl").read_text().splitlines()]
    assert scores == [0.32, 0.64]


@pytest.mark.slow
def test_repeated_kills(tmp_path, processes):
    ranks = GossipRanks(tmp_path / "run", processes, "--kimg=64")
    wait_for_step(ranks.run, FIRST_STEP)
    rng = random.Random(0)
    for kill in range(20 if "PARAGAN_SOAK" in os.environ else 6):
        victim = rng.randrange(4)
        ranks.send_signal(signal.SIGKILL, victim)
        time.sleep(rng.random())
        before = ranks.num_returns(victim)
        ranks.restart(victim)
        wait_until(lambda v=victim, n=before: ranks.num_returns(v) > n, 60, f"rank {victim} is back after kill {kill}")
    wait_for_step(ranks.run, logged_steps(ranks.run)[-1] + 20)
    ranks.send_signal(signal.SIGTERM, 1)
    assert [rank.wait() for rank in ranks.started] == [3] * 4
    assert list_checkpoints(ranks.run)


@pytest.mark.skipif("PARAGAN_SOAK" not in os.environ, reason="soak")
def test_repeated_freezes(tmp_path, processes):
    """Freeze random ranks, for less and for more than the peer timeout."""
    ranks = GossipRanks(tmp_path / "run", processes, "--kimg=64")
    wait_for_step(ranks.run, FIRST_STEP)
    rng = random.Random(1)
    for freeze in range(10):
        victim = rng.randrange(4)
        frozen_s = 4 * rng.random()
        ranks.send_signal(signal.SIGSTOP, victim)
        time.sleep(frozen_s)
        ranks.send_signal(signal.SIGCONT, victim)
        wait_until(
            lambda: ranks.members() == [0, 1, 2, 3],
            60,
            f"all ranks are members after freeze {freeze} of {frozen_s:.1f} s",
        )
        wait_for_step(ranks.run, logged_steps(ranks.run)[-1] + 20)
    ranks.send_signal(signal.SIGTERM, 1)
    assert [rank.wait() for rank in ranks.started] == [3] * 4
    assert list_checkpoints(ranks.run)


@pytest.mark.slow
def test_rank_with_another_config_is_rejected(tmp_path, processes):
    ranks = GossipRanks(tmp_path / "run", processes)
    wait_for_step(ranks.run, FIRST_STEP)
    ranks.send_signal(signal.SIGKILL, 3)
    ranks.wait_for_event(lambda row: row["lost"] == [3])
    other = ranks.start(3, "--g.optimizer.lr=0.5")
    assert other.wait() == 2
    assert "g.optimizer.lr was 0.001, is 0.5" in other.err
    other = ranks.start(3, "--output.tick_kimg=0.004")
    assert other.wait() == 2
    assert "output.tick_kimg is 0.016, not 0.004. Use the command that started them" in other.err
    ranks.assert_finished(0, 1, 2, last_step=LAST_STEP)


def test_too_short_peer_timeout_is_rejected():
    assert "strategy.peer_timeout_s=0.5" in usage_error(
        "train", "digits", "--strategy=gossip", "--strategy.peer_timeout_s=0.5", "-n"
    )
