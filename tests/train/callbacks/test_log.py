"""A run whose losses are not finite is stopped, and what its message advises keeps them finite."""

from __future__ import annotations

from pathlib import Path

import tiny_run
from advice import advises
from paragan.core.errors import Diverged
from paragan.train.callbacks.log import LogCallback
from paragan.train.console import RunConsole
from paragan.train.health.monitor import HealthMonitor
from paragan.train.loop import play_round

UNSTABLE = ("lanes=1", "nets.spectral=false", "objective.loss=wasserstein", "d.optimizer=sgd", "g.optimizer=sgd")


def play_to_a_line(folder: Path, *settings: str) -> None:
    """Play 40 rounds, and check their losses as at a line of stats."""
    run = tiny_run.make_run(*UNSTABLE, *settings)
    console = RunConsole(False)
    monitor = HealthMonitor(folder, console, run.health, run.on_divergence)
    session = tiny_run.make_session(run)
    for _ in range(40):
        play_round(session)
    line = session.stats.tick(session.clock.images, session.clock.step)
    LogCallback(folder, console, lambda: "there is no checkpoint yet", monitor).check_finite(line)


def test_a_run_that_diverged_is_stable_as_advised(tmp_path):
    with advises("Start a new run with lower --d.optimizer.lr and --g.optimizer.lr, or with --objective.r1", Diverged):
        play_to_a_line(tmp_path, "d.optimizer.lr=0.1", "g.optimizer.lr=0.01")
    play_to_a_line(tmp_path, "d.optimizer.lr=0.02", "g.optimizer.lr=0.002")
    play_to_a_line(tmp_path, "d.optimizer.lr=0.1", "g.optimizer.lr=0.01", "objective.r1=2")
