"""Runs whose ranks agree go on when ranks are killed or frozen, and end with the model of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from elastic_ranks import RankProcesses
from paragan.core.folder_lock import lock_owner
from paragan.core.jsonl import read_jsonl
from processes import list_checkpoints, logged_steps, train_args, wait_for_step, wait_until

pytestmark = pytest.mark.kill

PEER_TIMEOUT_S = 3
ELASTIC = ("--lanes=4", f"--strategy.peer_timeout_s={PEER_TIMEOUT_S}")
ENDLESS = "--kimg=64"  # stopped by the test
IN_FLOAT64 = """
import dataclasses, torch, tiny_run
from paragan.train import trainer
build = trainer.build_networks

def build_networks(*args):
    nets = build(*args)
    g, d = (tiny_run.OfDtype(net, torch.float64) for net in (nets.g, nets.d))
    return dataclasses.replace(nets, g=g, d=d)

trainer.build_networks = build_networks
"""


def last_state(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, of whichever rank wrote them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(list_checkpoints(run)[-1].glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    return tensors


def assert_equal_states(run: Path, reference: Path, tolerance: float) -> None:
    state, expected = last_state(run), last_state(reference)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=name)


def undisturbed(folder: Path, processes: Any, *more: str) -> Path:
    """Train on one rank, which any number of ranks equal."""
    process = processes.start_forked(*train_args(folder, "--lanes=4", *more), patch=IN_FLOAT64)
    assert process.wait() == 0, process.err
    return folder


@pytest.mark.slow
def test_random_kills_leave_the_model_as_it_would_have_been(tmp_path, processes):
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, ENDLESS, patch=IN_FLOAT64)
    wait_for_step(ranks.run, 10)
    for victims in ([0], [1, 2], [3]):
        ranks.send_signal(signal.SIGKILL, *victims)
        wait_until(lambda v=victims: not {*v} & {*ranks.members()}, 20, f"the others go on without {victims}")
        before = {victim: ranks.num_returns(victim) for victim in victims}
        for victim in victims:
            ranks.restart(victim)
        wait_until(lambda b=before: all(ranks.num_returns(v) > n for v, n in b.items()), 60, f"{victims} are back")
    step = ranks.stop(1, 0, 2, 3)
    assert logged_steps(ranks.run) == [*range(1, step + 1)]
    assert_equal_states(ranks.run, undisturbed(tmp_path / "one", processes, f"--kimg={0.016 * step}"), 1e-9)


# In round 20 rank 3 dies when PLAYER is about to step, and rank 1 does not step either.
BREAK_ROUND = """
import os, signal, time
from paragan.game.player import Player
from paragan.train import loop

rank = int(os.environ["RANK"])
play_round, step = loop.play_round, Player.step
session = None

def play_and_remember(current):
    global session
    session = current
    play_round(current)

def break_off(player, *args, **options):
    if session.clock.step == 20 and session.world.size == 4 and player.name == "PLAYER" and rank in (1, 3):
        time.sleep(1)  # what this rank has sent arrives
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            session.world.raise_if_broken()
            time.sleep(0.01)
    step(player, *args, **options)

loop.play_round, Player.step = play_and_remember, break_off
"""


@pytest.mark.slow
@pytest.mark.parametrize("player", ["D", "G"])
def test_a_round_that_ended_on_some_ranks_only(player, tmp_path, processes):
    """Ranks 0 and 2 have stepped D, and G is still to step; or they have ended the round."""
    patch = IN_FLOAT64 + BREAK_ROUND.replace("PLAYER", player)
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, "--kimg=0.64", patch=patch)
    lost = ranks.wait_for_event(lambda row: row["lost"] == [3])
    assert lost["step"] == (20 if player == "D" else 21)
    assert lost["joined"] == []
    ranks.assert_finished(0, 1, 2, last_step=40)
    assert logged_steps(ranks.run) == [*range(1, 41)]
    reference = undisturbed(tmp_path / "one", processes, "--kimg=0.64")
    assert_equal_states(ranks.run, reference, 1e-9)
    lines, expected = (read_jsonl(run / "stats.jsonl") for run in (ranks.run, reference))
    for step, (line, row) in enumerate(zip(lines, expected, strict=True), 1):
        losses = {name: value for name, value in row.items() if name.startswith("Loss/")}
        if (player, step) != ("G", 21):  # else those of ranks 1 and 3 are lost
            assert {name: line[name] for name in losses} == pytest.approx(losses, rel=1e-5), step


def test_quantized_training_takes_a_killed_rank_back(tmp_path, processes):
    ranks = RankProcesses(tmp_path / "run", processes, "--strategy=quantized", *ELASTIC, ENDLESS)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGKILL, 0)
    lost = ranks.wait_for_event(lambda row: row["lost"] == [0])
    assert lost["members"] == [1, 2, 3]
    other = ranks.start(0, "--strategy.wire=int4")
    assert other.wait() == 2
    assert "strategy.wire.name was 'int8', is 'int4'" in other.err
    ranks.restart(0)
    ranks.wait_for_event(lambda row: row["joined"] == [0])
    step = ranks.stop(2, 0, 1, 3)
    assert logged_steps(ranks.run) == [*range(1, step + 1)]
    assert "D/exchange_state/residual" in last_state(ranks.run)


# Rank 0 freezes when it has agreed to admit a rank, and is about to form the group with it.
FREEZE_IN_ADMISSION = """
import os, signal
from paragan.comm.elastic.elastic_world import ElasticWorld

adopt_membership = ElasticWorld._adopt_membership
has_frozen = int(os.environ["RANK"]) != 0

def freeze_once(world, membership):
    global has_frozen
    if not has_frozen and membership.store_prefix.startswith("admit"):
        has_frozen = True
        os.kill(os.getpid(), signal.SIGSTOP)
    adopt_membership(world, membership)

ElasticWorld._adopt_membership = freeze_once
"""


@pytest.mark.slow
def test_a_rank_that_is_dropped_while_it_admits_another_one_comes_back(tmp_path, processes):
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, ENDLESS, patch=FREEZE_IN_ADMISSION)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGKILL, 2)
    ranks.wait_for_event(lambda row: row["lost"] == [2])
    ranks.restart(2)
    ranks.wait_for_event(lambda row: 0 in row["lost"])
    ranks.send_signal(signal.SIGCONT, 0)
    ranks.wait_for_event(lambda row: 0 in row["joined"])
    ranks.wait_for_event(lambda row: row["members"] == [0, 1, 2, 3])
    ranks.stop(1, 0, 2, 3)


# After round 20 the main thread of rank HUNG waits for ever; its heartbeats are answered.
HANG = """
import os, time
from paragan.train import loop

play_round = loop.play_round

def play_or_hang(session):
    if session.clock.step == 20 and session.world.size == 4 and int(os.environ["RANK"]) == HUNG:
        time.sleep(1000)
    play_round(session)

loop.play_round = play_or_hang
"""


@pytest.mark.slow
@pytest.mark.parametrize("hung", [2, 0])
def test_the_others_go_on_without_a_rank_that_hangs(hung, tmp_path, processes):
    patch = HANG.replace("HUNG", str(hung))
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, "--timeout_s=10", ENDLESS, patch=patch)
    ranks.wait_for_event(lambda row: row["lost"] == [hung], 120)
    others = sorted({0, 1, 2, 3} - {hung})
    wait_for_step(ranks.run, 25)
    step = ranks.stop(*others)
    assert logged_steps(ranks.run) == [*range(1, step + 1)]


# A rank that reaches the others, and whose own port they do not reach, as behind a firewall.
UNREACHABLE = """
from paragan.comm.elastic.kv_store import KVServer

init = KVServer.__init__

def init_elsewhere(server, host):
    init(server, host)
    server.address = server.address._replace(port=9)  # where nothing listens

KVServer.__init__ = init_elsewhere
"""


@pytest.mark.slow
def test_training_goes_on_while_a_rank_asks_to_join_that_cannot_be_reached(tmp_path, processes):
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, ENDLESS)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGKILL, 3)
    ranks.wait_for_event(lambda row: row["lost"] == [3])
    ranks.patch = UNREACHABLE
    ranks.restart(3)
    wait_until(
        lambda: "rank 3 asks to join, and rank 0 cannot reach 127.0.0.1:9\n" in ranks.started[0].out, 60, "asked"
    )
    wait_for_step(ranks.run, logged_steps(ranks.run)[-1] + 5)
    assert len(ranks.events()) == 1
    ranks.stop(0, 1, 2)


@pytest.mark.slow
def test_the_main_rank_owns_the_folder_once_a_frozen_one_is_gone(tmp_path, processes):
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, ENDLESS)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGSTOP, 0)
    ranks.wait_for_event(lambda row: row["lost"] == [0])
    ranks.send_signal(signal.SIGKILL, 0)
    owner = f"process {ranks.started[1].pid} "
    wait_until(lambda: lock_owner(ranks.run).startswith(owner), 20, "rank 1 owns the folder")
    ranks.stop(1, 2, 3)


@pytest.mark.slow
def test_local_steps_go_on_without_a_frozen_rank_and_take_it_back(tmp_path, processes):
    ranks = RankProcesses(tmp_path / "run", processes, "--strategy.sync_period=4", *ELASTIC, ENDLESS)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGSTOP, 2)
    ranks.wait_for_event(lambda row: row["lost"] == [2], 3 * PEER_TIMEOUT_S)
    ranks.send_signal(signal.SIGCONT, 2)
    ranks.wait_for_event(lambda row: row["joined"] == [2])
    ranks.stop(2, 0, 1, 3)


@pytest.mark.slow
def test_a_rank_that_comes_back_with_other_data_is_refused(tmp_path, processes):
    data = tmp_path / "images.npz"
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), np.uint8)
    labels = np.arange(64) % 10
    np.savez(data, images=images, labels=labels)
    ranks = RankProcesses(tmp_path / "run", processes, f"--data={data}", *ELASTIC, ENDLESS, size=3)
    wait_for_step(ranks.run, 5)
    ranks.send_signal(signal.SIGKILL, 1)
    ranks.wait_for_event(lambda row: row["lost"] == [1])
    np.savez(data, images=255 - images, labels=labels)
    other = ranks.start(1)
    assert other.wait() == 2
    assert f"--data {data}: not the images that {ranks.run} is trained on" in other.err
    np.savez(data, images=images, labels=labels)
    ranks.restart(1)
    ranks.wait_for_event(lambda row: row["joined"] == [1])
    ranks.stop(0, 1, 2)


@pytest.mark.slow
def test_the_last_rank_goes_on_if_the_others_have_exited(tmp_path, processes):
    more = "--strategy=DQGAN", "--g.optimizer=sgd", "--d.optimizer=sgd", "--strategy.min_ranks=1", ENDLESS
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, *more)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGKILL, 0, 1, 3)
    ranks.wait_for_event(lambda row: row["members"] == [2])
    wait_for_step(ranks.run, logged_steps(ranks.run)[-1] + 5)
    ranks.restart(0)
    ranks.wait_for_event(lambda row: row["joined"] == [0])
    step = ranks.stop(0, 2)
    assert logged_steps(ranks.run) == [*range(1, step + 1)]


def test_a_part_without_a_majority_stops_with_its_checkpoint(tmp_path, processes):
    """Also with min_ranks=1: silent ranks may be training on."""
    ranks = RankProcesses(tmp_path / "run", processes, *ELASTIC, "--strategy.min_ranks=1", ENDLESS)
    wait_for_step(ranks.run, 10)
    ranks.send_signal(signal.SIGSTOP, 2, 3)
    assert [ranks.started[rank].wait() for rank in (0, 1)] == [3, 3]
    assert "rank 2, 3 cannot be reached, and rank 0, 1 are no majority" in ranks.started[0].err
    assert len(list((ranks.run / "checkpoints").glob("*-ranks-0-1"))) == 1
    assert not list_checkpoints(ranks.run)
