"""Train as `paragan train` does, on a host whose device is emulated: every turn takes the time of a profile.

    python -m benchmarks.lib.paced_host --profile F -- digits --strategy=sync --run-dir=DIR ...

benchmarks/comm/clock.py runs this on every host of a laboratory. Hosts that share a few cores compute the real
training, and then wait: a forward pass ends, a parameter gets its gradient, backward ends and the optimizer has stepped
when the profile says, not when the processor is done. So messages leave while the emulated device still computes, and
seconds are those of hosts with a device of their own. What is not paced: encoding and decoding, batch moments, and the
update of the average.

A round is late if the processor ended its turns later than the profile says, and the round took longer for it by more
than LATE_SHARE. RUN_DIR/clock.jsonl has a line after every round after which `paragan train` calls its callbacks
(`SecondsCallback`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paragan.cli.main import main as paragan_main
from paragan.game.player import Player
from paragan.plan.predict.simulated_game import Pace, TurnTimes, turn_times
from paragan.plan.profile.profile import Profile, read_profile
from paragan.train import build, trainer
from paragan.train.loop import run_training_loop
from paragan.train.session import Callback, Session, callbacks_due

LATE_SHARE = 0.05  # of the time of a round
FORWARD_SHARE = 1 / 3  # of the passes of a turn, at most: backward takes about twice as long
CLOCK_FILE = "clock.jsonl"


class DeviceClock:
    """The time of an emulated device, in seconds of `time.perf_counter`.

    busy_until : when the device has done what it was asked for
    late_s     : by how much the processor was later, in the turns since `pop_late_s`
    ended      : when the last turn ended
    """

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.late_s = 0.0
        self.ended = 0.0

    def start(self) -> None:
        """Begin a piece of work: the device was idle."""
        self.busy_until = time.perf_counter()

    def skip_idle(self) -> None:
        """Continue after waiting for a message."""
        self.busy_until = max(self.busy_until, time.perf_counter())

    def compute(self, seconds: float) -> None:
        """Return when the device has computed for so many seconds more."""
        self.busy_until += seconds
        left_s = self.busy_until - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def end(self) -> None:
        """End a piece of work."""
        self.ended = time.perf_counter()
        self.late_s += max(0.0, self.ended - self.busy_until)

    def pop_late_s(self) -> float:
        """Return `late_s`, and count from 0."""
        late_s = self.late_s
        self.late_s = 0.0
        return late_s


class DevicePlayer(Player):
    """A player whose turns take the time of an emulated device, from the moment on at which `pace` knows its times."""

    def __init__(self, *args: Any, device_clock: DeviceClock, pace: Pace, **options: Any):
        super().__init__(*args, **options)
        self.device_clock = device_clock
        self.pace = pace
        self.waits_in_turn = False
        self.net.register_forward_pre_hook(self._on_forward_start)
        self.net.register_forward_hook(self._on_forward_end)
        with super().requiring_grad():  # a hook on a frozen tensor is refused
            for number, p in enumerate(self.flat.parameters):  # before the hooks that send a bucket
                p.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, number))

    def _on_forward_start(self, *_: Any) -> None:
        if self.waits_in_turn and self.name == "D" and self.pace.player:
            self.device_clock.skip_idle()

    def _on_forward_end(self, *_: Any) -> None:
        self.pace.on_forward(self.name)

    def _on_gradient(self, number: int, p: Tensor) -> None:
        self.pace.on_gradient(self.name, number)

    @contextmanager
    def requiring_grad(self) -> Generator[None]:
        if not self.pace.times:
            with super().requiring_grad():
                yield
            return
        self.device_clock.start()
        times = self.pace.begin(self.name)
        with super().requiring_grad():
            yield
        self.pace.compute_until(times.backward_s)
        self.pace.player = ""
        self.device_clock.end()

    def _update(self) -> None:
        self.device_clock.start()
        super()._update()
        if self.pace.times:
            times = self.pace.times[self.name]
            self.device_clock.compute(times.total_s - times.backward_s)
        self.device_clock.end()


class SecondsCallback:
    """Counts the seconds and bytes of training, without the callbacks of the run, the same on all ranks.

    All ranks train from the end of one pause to the next. A pause begins after a round that callbacks are due after; a
    segment of training lasts from the first rank that started it to the last that ended it. (The hosts of a laboratory
    have the same clock.) Scores, lines of stats and model files are made within the pause.

    The file gets lines of: kimg, seconds, bytes sent by the busiest rank and by all as exchanges count them, and by the
    busiest as the kernel does, rounds, and late rounds and seconds of the rank that has most of them.
    """

    def __init__(self, device_clock: DeviceClock, file: Path):
        self.device_clock = device_clock
        self.file = file
        self.seconds = 0.0
        self.rounds = 0
        self.late_rounds = 0
        self.late_s = 0.0
        self.kernel_bytes = 0
        self._started = 0.0
        self._round_started = 0.0
        self._kernel_before = 0

    def pause(self, session: Session) -> None:
        """Count a round; end a segment of training if callbacks are due."""
        late_s = self.device_clock.pop_late_s()
        round_s = self.device_clock.ended - self._round_started
        self._round_started = self.device_clock.ended
        self.rounds += 1
        self.late_s += late_s
        self.late_rounds += late_s > LATE_SHARE * round_s
        if not callbacks_due(session):
            return
        self.kernel_bytes += count_kernel_bytes() - self._kernel_before
        sent = sum(player.meter.sent_bytes for player in session.game.players)
        counts = (sent, self.kernel_bytes, self.rounds, self.late_rounds, self.late_s)
        rows = gather(session, self._started, self.device_clock.ended, *counts)
        self.seconds += float(rows[:, 1].max() - rows[:, 0].min())
        if session.world.is_main:
            line = {
                "kimg": session.clock.kimg,
                "seconds": self.seconds,
                "sent_bytes": round(float(rows[:, 2].max())),
                "sent_bytes_all": round(float(rows[:, 2].sum())),
                "kernel_bytes": round(float(rows[:, 3].max())),
                "rounds": round(float(rows[:, 4].max())),
                "late_rounds": round(float(rows[:, 5].max())),
                "late_s": float(rows[:, 6].max()),
            }
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def resume(self, session: Session) -> None:
        """Start a segment of training, when all ranks are done with the callbacks."""
        if self.rounds and not callbacks_due(session):
            return
        gather(session)
        self._kernel_before = count_kernel_bytes()
        self._started = time.perf_counter()
        self._round_started = self._started


def gather(session: Session, *numbers: float) -> Tensor:
    """Return the numbers of all ranks, [ranks, numbers]; wait for all ranks."""
    rows, work = session.world.all_ranks.all_gather(torch.tensor([0.0, *numbers], dtype=torch.float64))
    work.wait()
    return rows[:, 1:]


def count_kernel_bytes() -> int:
    """Return the bytes that the kernel has sent on the interface of the laboratory; 0 outside of one."""
    counter = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "-") / "statistics/tx_bytes"
    return int(counter.read_text()) if counter.exists() else 0


def with_early_forward(times: TurnTimes, makes_fakes: bool) -> TurnTimes:
    """Return the times with forward passes that end early enough for the processor to compute backward in time.

    Args:
        makes_fakes: the turn begins with the images of its own player, G; in D's turn they take time in addition.
    """
    forward_s = min(times.forward_s, FORWARD_SHARE * times.backward_s)
    fakes_s = min(times.fakes_s, forward_s) if makes_fakes else times.fakes_s
    return dataclasses.replace(times, forward_s=forward_s, fakes_s=fakes_s)


def train_paced(profile: Profile, arguments: list[str]) -> int:
    """Run `paragan train` with these arguments at the pace of a profile. Returns its exit status."""
    device_clock = DeviceClock()
    pace = Pace(device_clock)  # pyright: ignore[reportArgumentType] it only computes
    run_dir = next(Path(a.partition("=")[2]) for a in arguments if a.startswith("--run-dir="))
    seconds = SecondsCallback(device_clock, run_dir / CLOCK_FILE)

    def run_paced_loop(session: Session, callbacks: list[Callback], on_stop: Callable[[Session], object]) -> str:
        share = session.run.batch * len(session.role.share.lanes) / session.run.lanes
        for player in session.game.players:
            assert isinstance(player, DevicePlayer)
            numels = [numel for _, numel in player.flat.slices]
            times = turn_times(profile, player.name, share, numels)
            pace.times[player.name] = with_early_forward(times, makes_fakes=player.name == "G")
            player.waits_in_turn = session.role.is_split
        seconds.resume(session)
        return run_training_loop(session, [seconds.pause, *callbacks, seconds.resume], on_stop)

    make_player = functools.partial(DevicePlayer, device_clock=device_clock, pace=pace)
    with patch.object(build, "Player", make_player), patch.object(trainer, "run_training_loop", run_paced_loop):
        return paragan_main(["train", *arguments])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, metavar="F")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- RECIPE --field=value ...")
    options = parser.parse_args()
    return train_paced(read_profile(Path(options.profile)), options.command[1:])


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of links that were left may still wait
