"""Ranks of a gossip run die, freeze and come back: the others go on, and whoever comes back is let in."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from processes import (
    LAUNCH_VARIABLES,
    free_port,
    list_checkpoints,
    logged_steps,
    train_args,
    usage_error,
    wait_for_step,
    wait_until,
)

pytestmark = [pytest.mark.kill, pytest.mark.timeout(240)]

GOSSIP = ("--strategy=gossip", "--lanes=4", "--strategy.peer_timeout_s=1.5", "--kimg=4.8")  # 300 steps
LAST = 300


class Team:
    """Four ranks, started one by one as on four hosts, that can be started again."""

    def __init__(self, run: Path, processes: Any, *more: str, size: int = 4):
        self.run, self.processes, self.size = run, processes, size
        self.command, self.port = train_args(run, *GOSSIP, *more), str(free_port())
        self.ranks = [self.start(rank) for rank in range(size)]

    def start(self, rank: int, *more: str) -> Any:
        place = dict(
            zip(LAUNCH_VARIABLES, (str(rank), str(self.size), str(rank), str(self.size), "127.0.0.1", self.port))
        )
        return self.processes.start_forked(*self.command, *more, **place)

    def restart(self, rank: int) -> None:
        self.ranks[rank] = self.start(rank)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send_signal(number)

    def news(self) -> list[dict[str, Any]]:
        path = self.run / "members.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def members(self) -> list[int]:
        return self.news()[-1]["members"] if self.news() else list(range(self.size))

    def returns(self, rank: int) -> int:
        """How often a rank came back."""
        return sum(rank in row["joined"] for row in self.news())

    def heard(self, wanted: Any, timeout_s: float = 60) -> dict[str, Any]:
        """The first news of this kind."""
        return wait_until(lambda: next(filter(wanted, self.news()), None), timeout_s, f"there is news ({self.news()})")

    def finished(self, *ranks: int) -> None:
        assert [self.ranks[rank].wait(120) for rank in ranks] == [0] * len(ranks), [self.ranks[r].err for r in ranks]
        assert logged_steps(self.run)[-1] == LAST
        assert list_checkpoints(self.run)[-1].name == f"{LAST:08d}"
        assert (self.run / "metrics.jsonl").read_text().count("\n") == 1
        assert (self.run / "report.html").exists()


def longest_pause(run: Path, timeout_s: float) -> float:
    """Seconds for which no step was written, while this looks."""
    end, last, seen, longest = time.monotonic() + timeout_s, time.monotonic(), logged_steps(run)[-1], 0.0
    while time.monotonic() < end:
        now = logged_steps(run)[-1]
        if now != seen:
            longest, last, seen = max(longest, time.monotonic() - last), time.monotonic(), now
        time.sleep(0.01)
    return max(longest, time.monotonic() - last) if seen < LAST else longest


@pytest.mark.parametrize(
    ("victim", "strategy"),
    [
        (0, "gossip"),
        (2, "gossip"),
        # twice in a dozen runs the four did not end, at the last checkpoint: see docs/gossip.md
        pytest.param(2, "async-gossip", marks=pytest.mark.skipif("PARAGAN_SOAK" not in os.environ, reason="soak")),
        (0, "DPOSG"),
    ],
)
def test_three_go_on_without_one_who_was_killed_and_take_it_back(victim, strategy, tmp_path, processes):
    team = Team(tmp_path / "run", processes, f"--strategy={strategy}")
    wait_for_step(team.run, 40)
    team.send(signal.SIGKILL, victim)
    assert longest_pause(team.run, 2) < 2
    others = [rank for rank in range(4) if rank != victim]
    lost = team.heard(lambda row: row["lost"] == [victim])
    assert lost["members"] == others
    team.restart(victim)
    back = team.heard(lambda row: row["joined"] == [victim])
    assert back["members"] == [0, 1, 2, 3]
    assert back["step"] > lost["step"]
    team.finished(0, 1, 2, 3)
    assert logged_steps(team.run) == sorted(set(logged_steps(team.run)))


def test_a_frozen_rank_is_left_out_and_comes_back_when_it_wakes(tmp_path, processes):
    team = Team(tmp_path / "run", processes)
    wait_for_step(team.run, 40)
    team.send(signal.SIGSTOP, 0)
    assert longest_pause(team.run, 5) < 3 * 1.5
    team.heard(lambda row: row["lost"] == [0])
    team.send(signal.SIGCONT, 0)
    team.heard(lambda row: row["joined"] == [0])
    team.finished(0, 1, 2, 3)


def test_two_who_die_at_once_leave_two(tmp_path, processes):
    team = Team(tmp_path / "run", processes)
    wait_for_step(team.run, 40)
    team.send(signal.SIGKILL, 0, 1)
    team.heard(lambda row: row["members"] == [2, 3])
    team.finished(2, 3)


@pytest.mark.parametrize("second", [0, 2])
def test_one_dies_while_another_is_away(second, tmp_path, processes):
    """With somebody away the others ask each other at every line of stats who knocked."""
    team = Team(tmp_path / "run", processes, "--output.tick_kimg=0.016")
    wait_for_step(team.run, 40)
    team.send(signal.SIGKILL, 3)
    team.heard(lambda row: row["lost"] == [3])
    wait_for_step(team.run, logged_steps(team.run)[-1] + 20)
    team.send(signal.SIGKILL, second)
    others = [rank for rank in range(3) if rank != second]
    team.heard(lambda row: row["members"] == others, 20)
    team.finished(*others)


def test_two_who_were_frozen_together_come_back(tmp_path, processes):
    """Neither may wait for the other, who is no member either."""
    team = Team(tmp_path / "run", processes, "--lanes=8", "--kimg=9.6", size=5)
    wait_for_step(team.run, 40)
    team.send(signal.SIGSTOP, 0, 1)
    team.heard(lambda row: row["members"] == [2, 3, 4])
    team.send(signal.SIGCONT, 0, 1)
    wait_until(lambda: team.members() == [0, 1, 2, 3, 4], 60, "all are there")
    team.send(signal.SIGTERM, 1)
    assert [rank.wait() for rank in team.ranks] == [3] * 5


def test_a_part_without_a_majority_stops_with_its_checkpoint(tmp_path, processes):
    """Two of four are silent: those who look cannot know whether they go on somewhere."""
    team = Team(tmp_path / "run", processes)
    wait_for_step(team.run, 40)
    members = (team.run / "members.json").read_bytes()
    team.send(signal.SIGSTOP, 2, 3)
    assert [team.ranks[rank].wait() for rank in (0, 1)] == [3, 3]
    assert (team.run / "members.json").read_bytes() == members  # where others may be asked to be let in
    assert "rank 2, 3 cannot be reached, and rank 0, 1 are no majority" in team.ranks[0].err
    (private,) = (team.run / "checkpoints").glob("*-ranks-0-1")
    assert json.loads((private / "checkpoint.json").read_text())["ranks"] == 2
    assert not list_checkpoints(team.run)  # nothing that others would find


def test_who_was_frozen_goes_on_where_the_others_stopped(tmp_path, processes):
    team = Team(tmp_path / "run", processes)
    wait_for_step(team.run, 40)
    team.send(signal.SIGSTOP, 2, 3)
    assert [team.ranks[rank].wait() for rank in (0, 1)] == [3, 3]
    team.send(signal.SIGCONT, 2, 3)  # now those two are gone, and these are all there is
    team.finished(2, 3)


def test_the_last_one_stops_with_a_checkpoint_that_all_go_on_from(tmp_path, processes):
    team = Team(tmp_path / "run", processes)
    wait_for_step(team.run, 40)
    team.send(signal.SIGKILL, 0, 1, 3)
    assert team.ranks[2].wait() == 3
    assert "rank 0, 1, 3 have ended: no other rank remains" in team.ranks[2].err
    assert len(list_checkpoints(team.run)) == 1
    team.port = str(free_port())
    for rank in range(4):
        team.restart(rank)
    team.finished(0, 1, 2, 3)


def test_kills(tmp_path, processes):
    team = Team(tmp_path / "run", processes, "--kimg=64")
    wait_for_step(team.run, 20)
    draw = random.Random(0)
    for kill in range(20 if "PARAGAN_SOAK" in os.environ else 6):
        victim = draw.randrange(4)
        team.send(signal.SIGKILL, victim)
        time.sleep(draw.random())
        before = team.returns(victim)
        team.restart(victim)
        wait_until(lambda v=victim, n=before: team.returns(v) > n, 60, f"rank {victim} is back after kill {kill}")
    at = logged_steps(team.run)[-1]
    wait_for_step(team.run, at + 20)
    team.send(signal.SIGTERM, 1)
    assert [rank.wait() for rank in team.ranks] == [3] * 4
    assert list_checkpoints(team.run)


@pytest.mark.skipif("PARAGAN_SOAK" not in os.environ, reason="soak")
def test_ten_freezes(tmp_path, processes):
    """Some shorter than the silence that makes a rank lost, some longer, on any rank."""
    team = Team(tmp_path / "run", processes, "--kimg=64")
    wait_for_step(team.run, 20)
    draw = random.Random(1)
    for freeze in range(10):
        victim, frozen_s = draw.randrange(4), 4 * draw.random()
        team.send(signal.SIGSTOP, victim)
        time.sleep(frozen_s)
        team.send(signal.SIGCONT, victim)
        wait_until(
            lambda: team.members() == [0, 1, 2, 3], 60, f"all are there after freeze {freeze} of {frozen_s:.1f} s"
        )
        wait_for_step(team.run, logged_steps(team.run)[-1] + 20)
    team.send(signal.SIGTERM, 1)
    assert [rank.wait() for rank in team.ranks] == [3] * 4
    assert list_checkpoints(team.run)


def test_who_comes_back_with_another_recipe_is_refused(tmp_path, processes):
    team = Team(tmp_path / "run", processes)
    wait_for_step(team.run, 40)
    team.send(signal.SIGKILL, 3)
    team.heard(lambda row: row["lost"] == [3])
    other = team.start(3, "--g.optimizer.lr=0.5")
    assert other.wait() == 2
    assert "g.optimizer.lr was 0.001, is 0.5" in other.err
    team.finished(0, 1, 2)


def test_silence_shorter_than_a_second_is_refused():
    assert "strategy.peer_timeout_s=0.5" in usage_error(
        "train", "digits", "--strategy=gossip", "--strategy.peer_timeout_s=0.5", "-n"
    )
